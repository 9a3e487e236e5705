/**
 * The promises of flows and batches, checked against the attempts of handlers and the answers to callers. The id of a run says
 * what its jobs are, and what their handlers do.
 */
import { createHash } from "node:crypto"
import { type Anomaly, expirations, isDisturbed, isLost, overlaps, type Run } from "./checks.ts"
import type { Hold } from "./history.ts"
import { groupedBy, mostCrashes, toldOf } from "./queues.ts"
import { forgot } from "./states.ts"

/** Runs of the flow are beside the first queue, and those of the batch beside the second: conductors offer the other half of the jobs. */
export const [flowName, batchName, queueNames] = ["graph", "load", ["left", "right"] as const]

/** For so long, in milliseconds, runs that begin have the same id. */
export const turn = 500

// ---------------------------------------------------------------------------------------------------------------------
// What the id of a run says
// ---------------------------------------------------------------------------------------------------------------------

type Plan = "plain" | "long" | "fails" | "never"
type OnFailure = "fail" | "skip" | "continue"

interface NodePlan {
  /** Its place in `queueNames`. */
  readonly queue: 0 | 1
  readonly plan: Plan
  readonly after: ReadonlyArray<readonly [node: number, onFailure: OnFailure]>
  /** Whether it has a compensation. */
  readonly undo: boolean
  /** That of its job, if it has one. */
  readonly group: string | undefined
}

/** Jobs of groups, of runs and of none, are active so many at a time. */
export const groupsOfQueues = { concurrency: 2 } as const

/** Choices that only depend on the id. */
const chooser = (id: string) => {
  const bytes = createHash("sha512").update(id).digest()
  let at = 0
  return (bound: number): number => bytes[at++ % bytes.length]! % bound
}

const plans: ReadonlyArray<Plan> = ["plain", "plain", "plain", "plain", "long", "fails", "never", "never"]
const policies: ReadonlyArray<OnFailure> = ["fail", "fail", "skip", "continue"]

/** A chain, a fan-out with a fan-in, or any graph. */
export const planOf = (id: string): ReadonlyArray<NodePlan> => {
  const choose = chooser(id)
  const [shape, count] = [choose(3), 2 + choose(5)]
  const beforeOf = (at: number): ReadonlyArray<number> => {
    if (at === 0) return []
    if (shape === 0) return [at - 1]
    if (shape === 1) return at < count - 1 ? [0] : Array.from({ length: at }, (_, from) => from)
    return [...new Set(Array.from({ length: choose(3) }, () => choose(at)))]
  }
  return Array.from({ length: count }, (_, at): NodePlan => ({
    queue: choose(2) as 0 | 1,
    plan: plans[choose(plans.length)]!,
    undo: choose(2) === 0,
    group: choose(3) === 0 ? `nodes ${choose(3)}` : undefined,
    after: beforeOf(at).map((from) => [from, policies[choose(policies.length)]!])
  }))
}

/** The jobs of a batch, and whether it is sealed, or has a size. */
export const filesOf = (id: string): { readonly seals: boolean; readonly plans: ReadonlyArray<Plan> } => {
  const choose = chooser(id)
  const seals = choose(2) === 0
  // Most batches are done.
  const rare = choose(3) === 0
  return {
    seals,
    plans: Array.from({ length: 1 + choose(5) }, () => plans[choose(plans.length - (rare ? 0 : 2))]!)
  }
}

/** A node of a flow and its compensation, a job of a batch, and its callbacks; and a job of neither, beside them. */
export type Kind = "node" | "undo" | "job" | "done" | "failed" | "side"

interface Parts {
  readonly kind: Kind
  readonly run: string
  readonly node: number
  /** Results of the nodes before a node, "" for none; of a node that is undone; or what a callback receives of its batch. */
  readonly inputs: ReadonlyArray<string>
}

/** The payload of a job. */
export const bodyOf = (kind: Kind, run: string, node: number, inputs: ReadonlyArray<string> = []): string =>
  JSON.stringify({ kind, run, node, inputs })

export const partsOf = (body: string): Parts => JSON.parse(body) as Parts

// ---------------------------------------------------------------------------------------------------------------------
// Facts
// ---------------------------------------------------------------------------------------------------------------------

/** One attempt of a handler. */
interface Handling extends Parts {
  readonly hold: Hold
  /** Of its job: when it was stored, in milliseconds of Redis. */
  readonly job: string
  readonly offered: number
  /** What it has come to, and when it said so. */
  readonly result: string | undefined
  readonly done: number
}

/** What a client has received of a run. */
interface Answer {
  readonly hold: Hold
  readonly at: number
  readonly words: ReadonlyArray<string>
}

interface Facts {
  readonly id: string
  readonly run: Run
  readonly holds: ReadonlyArray<Hold>
  /** When a client asked for it first. */
  readonly first: number
  readonly handled: ReadonlyArray<Handling>
  readonly results: ReadonlyArray<Answer>
  readonly states: ReadonlyArray<Answer>
  /** Redis may have forgotten the run, or it may have begun again after it was forgotten. */
  readonly vague: boolean
  /** When processes did something for the last time that were killed. */
  readonly deaths: ReadonlyMap<string, number>
  /** When the other ones left. */
  readonly exits: ReadonlyMap<string, number>
}

const ofKind = (holds: ReadonlyArray<Hold>, verb: string): ReadonlyArray<Hold> =>
  holds.filter(({ kind }) => kind === `flow ${verb}`)

const handlingsOf = (holds: ReadonlyArray<Hold>): ReadonlyArray<Handling> =>
  ofKind(holds, "handle").flatMap((hold) => {
    const told = toldOf(hold, "handles")
    if (told === undefined) return []
    const [, run, node, kind, job, offered, ...inputs] = told.what
    const done = toldOf(hold, "done")
    return [{
      hold,
      run: String(run),
      node: Number(node),
      kind: String(kind) as Kind,
      job: String(job),
      offered: Number(offered),
      inputs: inputs.map(String),
      result: done === undefined ? undefined : String(done.what[1]),
      done: done?.at ?? Number.POSITIVE_INFINITY
    }]
  }).sort((a, b) => a.hold.asked - b.hold.asked)

const answersOf = (holds: ReadonlyArray<Hold>, word: string): ReadonlyArray<Answer> =>
  holds.flatMap((hold) =>
    hold.told.filter(({ what }) => what[0] === word).map(({ at, what: [, , ...rest] }) => ({
      hold,
      at,
      words: rest.map(String)
    }))
  )

// A start that took longer may have begun the run again.
const retention = 1.5

const factsOf = (
  id: string,
  holds: ReadonlyArray<Hold>,
  run: Run,
  deaths: Facts["deaths"],
  exits: Facts["exits"]
): Facts => {
  const first = Math.min(...holds.map(({ asked }) => asked))
  const last = Math.max(...holds.map(({ asked, ended }) => ended ?? asked))
  const starts = [...ofKind(holds, "start"), ...ofKind(holds, "fill")]
  return {
    id,
    run,
    holds,
    first,
    handled: handlingsOf(holds),
    results: answersOf(holds, "result"),
    states: answersOf(holds, "states"),
    vague: forgot(run, first, last) ||
      starts.some(({ ended = Number.POSITIVE_INFINITY }) => ended > first + retention * run.lease) ||
      ofKind(holds, "retry").length > 0,
    deaths,
    exits
  }
}

const nodeOf = ({ kind, node }: Parts): string => `${kind} ${node}`

const of = (handled: ReadonlyArray<Handling>, kind: Kind, node?: number): ReadonlyArray<Handling> =>
  handled.filter((one) => one.kind === kind && (node === undefined || one.node === node))

const holdsOf = (handled: ReadonlyArray<Handling>): ReadonlyArray<Hold> => handled.map(({ hold }) => hold)

/** Whether a handler may have begun after its session had expired, and before its process noticed. */
const isLate = ({ deaths, run }: Facts, { hold }: Handling): boolean =>
  isLost(run, hold.client, hold.asked - run.lease, (hold.ended ?? hold.asked) + run.lease) ||
  hold.outcome === undefined && hold.asked > (deaths.get(hold.client) ?? Number.POSITIVE_INFINITY) - run.lease

// In microseconds: how long the news that a job is cancelled take to a worker that nothing disturbs.
const newsOnTheWay = 200_000

/**
 * Whether a handler may have begun on a job that was cancelled by that time. The news of that come behind the job, and on another
 * connection: a short handler can end before they come.
 */
const isRevoked = ({ run }: Facts, { hold: { asked, client, ended, outcome } }: Handling, by: number): boolean =>
  outcome === "interrupted" ||
  ended !== undefined && (ended < by + newsOnTheWay || isDisturbed(run, client, asked - run.lease, ended))

/** Whether something may have kept Redis from receiving what an attempt came to, before the next one. */
const isUntold = (
  { deaths, exits, run }: Facts,
  { hold: { asked, client, ended, outcome } }: Handling,
  next: Handling
) =>
  outcome === undefined || ended === undefined || isLost(run, client, asked - run.lease, next.hold.asked + run.lease) ||
  ended >= (deaths.get(client) ?? Number.POSITIVE_INFINITY) - run.lease ||
  ended >= (exits.get(client) ?? Number.POSITIVE_INFINITY) - 200_000

/**
 * Whether the job of a node can be a dead letter regardless of what its handlers say, as far as is known by that time: each of its workers
 * was lost before it could say so. If the run has failed because of that job, the outcome that the run tells has to agree.
 */
const isUnseen = ({ first, results, run }: Facts, node: number, at: number): boolean => {
  const failure = results.find(({ words: [tag] }) => tag === "failed")
  const [job, outcome] = failure?.words.slice(-2) ?? []
  return (Number(job) !== node || outcome === "crashed") && expirations(run, first, at) >= mostCrashes
}

// ---------------------------------------------------------------------------------------------------------------------
// Of every job
// ---------------------------------------------------------------------------------------------------------------------

/** Nothing is handled of a run that no client has started. */
const phantoms = ({ handled, holds, id }: Facts): ReadonlyArray<Anomaly> => {
  const started = Math.min(...holds.filter((hold) => toldOf(hold, "starts") !== undefined).map(({ asked }) => asked))
  return handled.filter(({ hold }) => hold.asked < started).map(({ hold, node }) => ({
    check: "phantom",
    detail: `job ${node} of ${id} was handled before the run was started`,
    holds: [hold]
  }))
}

/** A node, a compensation and a callback are one job each, which is not handled again after its success. */
const once = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, id, vague } = facts
  if (vague) return []
  return [...groupedBy(handled, nodeOf)].flatMap(([name, all]): ReadonlyArray<Anomaly> => {
    const [first] = all as [Handling]
    const other = all.find(({ job, offered }) => job !== first.job || offered !== first.offered)
    if (other !== undefined) {
      const detail = `${name} of ${id} was offered as ${first.job} and as ${other.job}`
      return [{ check: "stored", detail, holds: [first.hold, other.hold] }]
    }
    const again = all.slice(1).find((next, at) => {
      const before = all[at]!
      return before.result !== undefined && !isUntold(facts, before, next) && !isLate(facts, next)
    })
    if (again === undefined) return []
    return [{ check: "repeated", detail: `${name} of ${id} was handled again after its success`, holds: holdsOf(all) }]
  })
}

/** Those that await a run observe its end: an await that took too long was interrupted. */
const unheard = ({ holds, id, results, run, vague }: Facts): ReadonlyArray<Anomaly> => {
  const [first] = results.toSorted((a, b) => a.at - b.at)
  if (vague || first === undefined) return []
  return ofKind(holds, "await").filter(({ asked, client, ended, outcome, told }) => {
    if (outcome !== "interrupted" || told.length > 1 || ended! < first.at + run.lease) return false
    return !isLost(run, client, asked, ended!) && !overlaps(run.disturbed.get(client), first.at - run.lease, ended!) &&
      !overlaps(run.disturbed.get(""), first.at - run.lease, ended!)
  }).map((hold) => ({ check: "missed", detail: `the end of ${id} was not heard`, holds: [first.hold, hold] }))
}

const callbacks = ({ handled }: Facts): ReadonlyArray<Handling> => [...of(handled, "done"), ...of(handled, "failed")]

// ---------------------------------------------------------------------------------------------------------------------
// Flows
// ---------------------------------------------------------------------------------------------------------------------

/** A node begins when all nodes before it have ended as their edges want it, and with their results. */
const early = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, id, vague } = facts
  if (vague) return []
  const plan = planOf(id)
  return of(handled, "node").flatMap((one) =>
    plan[one.node]!.after.flatMap(([from, onFailure], at) => {
      const before = of(handled, "node", from)
      const wrong = (what: string, others = before) => [{
        check: "early",
        detail: `node ${one.node} of ${id} began ${what} node ${from}`,
        holds: [one.hold, ...holdsOf(others)]
      }]
      const input = one.inputs[at]
      const given = before.find(({ done, result }) => result === input && done < one.hold.asked)
      if (input !== "" && given === undefined) return wrong("with a result that is not one of")
      if (input === "" && onFailure !== "continue") return wrong("without the success of")
      const later = before.filter((other) => other.hold.asked > one.hold.asked && !isLate(facts, other))
      return later.length > 0 ? wrong("before the last attempt of", later) : []
    })
  )
}

/** When a run is cancelled, no node starts behind one that ends after that. */
const cancelled = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, holds, id, vague } = facts
  const cancel = ofKind(holds, "cancel").find((hold) => toldOf(hold, "cancelled")?.what[1] === 1)
  if (vague || cancel === undefined) return []
  const after = cancel.ended!
  return of(handled, "node").filter(({ hold, node }) =>
    hold.asked > after && planOf(id)[node]!.after.some(([from]) => {
      const ends = of(handled, "node", from)
      return ends.length > 0 && ends.every(({ hold: { asked } }) => asked > after)
    })
  ).map(({ hold, node }) => ({
    check: "cancelled",
    detail: `node ${node} of ${id} was started after the run was cancelled`,
    holds: [cancel, hold]
  }))
}

const verdictOf = (state: string, onFailure: OnFailure): number => {
  if (state === "done" || state === "compensated" || onFailure === "continue") return 0
  return onFailure === "fail" && state !== "skipped" ? 2 : 1
}

const stateOfVerdict = ["", "skipped", "failed"]

/** What is wrong with the states of the nodes of a run that is over; "" for nothing. */
const wrongStates = (facts: Facts, { at: told, words: [state, ...states] }: Answer): string => {
  const { handled, id } = facts
  const plan = planOf(id)
  if (states.length !== plan.length) return `has ${states.length} nodes instead of ${plan.length}`
  const isFatal = (at: number): boolean => {
    const behind = plan.flatMap(({ after }) => after.filter(([from]) => from === at))
    return states[at] === "failed" && (behind.length === 0 || behind.some(([, onFailure]) => onFailure === "fail"))
  }
  const fatal = states.some((_, at) => isFatal(at))
  if (state === "done" && fatal) return "is done, and a node has failed"
  if (state === "failed" && !fatal) return "has failed, and no node has"
  for (const [at, own] of states.entries()) {
    const attempts = of(handled, "node", at)
    const verdict = Math.max(0, ...plan[at]!.after.map(([from, onFailure]) => verdictOf(states[from]!, onFailure)))
    const done = attempts.some(({ result }) => result !== undefined)
    const undone = of(handled, "undo", at).some(({ result }) => result !== undefined)
    // Nodes are only cancelled in a run that stops, and then nothing starts behind them.
    const stopped = plan[at]!.after.some(([from]) => states[from] === "cancelled")
    const wrong = stopped && own !== "cancelled"
      ? true
      : own === "done" || own === "compensated"
      ? verdict > 0 || !done || (own === "done" ? undone && !isUnseen(facts, at, told) : !undone || state === "done")
      : own === "cancelled"
      ? state === "done"
      : own === "skipped" || own === "failed" && verdict > 0
      ? own !== stateOfVerdict[verdict] || attempts.length > 0
      : own === "failed"
      ? attempts.length === 0 && !isUnseen(facts, at, told)
      : true
    if (wrong) return `is ${state}, and its nodes are ${states.join()}: node ${at} cannot be ${own}`
  }
  return ""
}

/** All clients receive the same of a run, and what its handlers have said. */
const results = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, id, results, states, vague } = facts
  if (vague) return []
  const plan = planOf(id)
  const wrong = (check: string, detail: string, holds: ReadonlyArray<Hold>) => [{
    check,
    detail: `${id} ${detail}`,
    holds
  }]
  const [first] = results
  const other = results.find(({ words }) => words.join() !== first!.words.join())
  if (other !== undefined) {
    return wrong("result", `has two results: ${first!.words.join()} and ${other.words.join()}`, [
      first!.hold,
      other.hold
    ])
  }
  const last = plan.flatMap((_, at) => plan.some(({ after }) => after.some(([from]) => from === at)) ? [] : [at])
  const told = results.flatMap(({ at, hold, words: [tag, ...found] }) => {
    if (tag !== "done") return []
    const fits = found.length === last.length &&
      found.every((result, index) =>
        of(handled, "node", last[index]).some((one) => one.result === result && one.done < at)
      )
    return fits ? [] : wrong("result", `has a result that its handlers do not have: ${found.join()}`, [hold])
  })
  const ended = results.flatMap(({ at, hold, words: [tag] }) => {
    const later = handled.filter((one) =>
      one.hold.asked > at && !isLate(facts, one) && (tag === "done" || !isRevoked(facts, one, at))
    )
    return later.length === 0 ? [] : wrong("early", "was over before its last job began", [hold, ...holdsOf(later)])
  })
  const seen = states.flatMap((answer) => {
    const detail = wrongStates(facts, answer)
    return detail === "" ? [] : wrong("states", detail, [answer.hold, ...holdsOf(handled)])
  })
  return [...told, ...ended, ...seen]
}

/** Nodes are undone when all jobs of the run have ended, one by one, and the last one that was done first. */
const undone = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, id, vague } = facts
  if (vague) return []
  const undos = of(handled, "undo")
  const plan = planOf(id)
  return undos.flatMap((one, at) => {
    const wrong = (what: string, others: ReadonlyArray<Handling>) => [{
      check: "order",
      detail: `node ${one.node} of ${id} was undone ${what}`,
      holds: [one.hold, ...holdsOf(others)]
    }]
    if (!of(handled, "node", one.node).some(({ done, result }) => result === one.inputs[0] && done < one.hold.asked)) {
      return wrong("with a result that it did not have", of(handled, "node", one.node))
    }
    const later = of(handled, "node").filter((other) =>
      other.hold.asked > one.hold.asked && !isLate(facts, other) && !isRevoked(facts, other, one.hold.asked)
    )
    if (later.length > 0) return wrong("before the last node began", later)
    const first = undos.slice(at + 1).filter((other) =>
      !isLate(facts, other) && plan[other.node]!.after.some(([from]) => from === one.node)
    )
    return first.length > 0 ? wrong("before a node behind it", first) : []
  })
}

// ---------------------------------------------------------------------------------------------------------------------
// Batches
// ---------------------------------------------------------------------------------------------------------------------

/** A batch is over, for those that await it and for its callback, when all its jobs have ended. */
const whole = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, id, results, vague } = facts
  if (vague) return []
  const { plans } = filesOf(id)
  const ends = [
    ...results.map(({ at, hold, words: [tag, done, jobs] }) => ({ at, hold, tag, told: `${done} of ${jobs}` })),
    ...callbacks(facts).map(({ hold, inputs, kind }) => ({ at: hold.asked, hold, tag: kind, told: inputs[0]! }))
  ]
  return ends.flatMap(({ at, hold, tag, told }) => {
    if (tag === "cancelled") return []
    const wrong = (check: string, detail: string, holds: ReadonlyArray<Hold>) => [{
      check,
      detail: `${id} is ${tag} with ${told}, ${detail}`,
      holds: [hold, ...holds]
    }]
    const jobs = of(handled, "job")
    const late = jobs.filter((one) => one.hold.asked > at && !isLate(facts, one))
    if (late.length > 0) return wrong("early", "and a job began after that", holdsOf(late))
    const ended = [...plans.keys()].filter((node) => of(jobs, "job", node).some(({ done }) => done < at))
    const begun = new Set(jobs.filter((one) => one.hold.asked < at).map(({ node }) => node))
    const [done, all] = told.split(" of ").map(Number) as [number, number]
    const unseen = [...plans.keys()].filter((node) => !begun.has(node))
    if (unseen.length > all - done || unseen.some((node) => !isUnseen(facts, node, at))) {
      return wrong("early", `and only ${begun.size} have begun`, holdsOf(jobs))
    }
    const fits = all === plans.length && done <= ended.length && (tag === "done") === (done === all)
    return fits ? [] : wrong("result", `and ${ended.length} of ${plans.length} are done`, holdsOf(jobs))
  })
}

/**
 * Of a batch that is over one callback is offered: of those that end long before the clients do. Redis may have forgotten it before it
 * began, or it is a dead letter, because each of its workers was lost.
 */
const called = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { exits, id, results, run, vague } = facts
  const [first] = results
  if (vague || first === undefined || first.words[0] === "cancelled") return []
  const found = callbacks(facts)
  const wrong = (check: string, detail: string) => [{
    check,
    detail: `${id} is ${first.words[0]}, and ${detail}`,
    holds: [first.hold, ...holdsOf(found)]
  }]
  const until = Math.min(...exits.values())
  if (found.length === 0) {
    const excused = first.at > until - 2 * run.lease || forgot(run, first.at, first.at + 3 * run.lease) ||
      expirations(run, first.at, until) >= mostCrashes
    return excused ? [] : wrong("undone", "has no callback")
  }
  const other = found.find(({ kind }) => kind !== first.words[0])
  return other === undefined ? [] : wrong("result", `has the callback for ${other.kind}`)
}

// ---------------------------------------------------------------------------------------------------------------------
// All
// ---------------------------------------------------------------------------------------------------------------------

/** A run that was begun is over in the end, and needs no retry, and no cancellation, unless Redis has forgotten something. */
const ending = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => [
  ...ofKind(holds, "settled").filter(({ outcome }) => outcome === "timeout").map((hold) => ({
    check: "lag",
    detail: `not over: ${hold.told.map(({ what }) => what[1]).join(", ")}`,
    holds: [hold]
  })),
  ...[...ofKind(holds, "retry"), ...ofKind(holds, "cancel").filter(({ key }) => key === batchName)].filter((
    { asked }
  ) => !overlaps(run.forgets, 0, asked)).map((hold) => ({
    check: "lag",
    detail: `${hold.told[0]!.what[1]} did not go on by itself`,
    holds: [hold]
  }))
]

const lastOf = (holds: ReadonlyArray<Hold>): number => Math.max(...holds.map(({ asked, ended }) => ended ?? asked))

/** The checks of the flow, or of the batch. The first anomalies of each kind are enough. */
export const conducted = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const exits = new Map(ofKind(holds, "settled").map(({ client, ended, asked }) => [client, ended ?? asked]))
  const deaths = new Map(
    [...groupedBy(holds, ({ client }) => client)].flatMap(([client, all]) =>
      exits.has(client) ? [] : [[client, lastOf(all)] as const]
    )
  )
  const runs = groupedBy(
    holds.filter(({ told: [first] }) => first !== undefined && first.what[0] !== "open"),
    ({ told: [first] }) => String(first!.what[1])
  )
  const facts = [...runs].map(([id, all]) => factsOf(id, all, run, deaths, exits))
  const checks = holds[0]?.key === batchName
    ? [once, phantoms, unheard, whole, called]
    : [once, phantoms, unheard, early, cancelled, results, undone]
  return [...ending(holds, run), ...checks.flatMap((check) => facts.flatMap(check).slice(0, 5))].slice(0, 20)
}
