/**
 * The promises of a queue, checked against the offers, the attempts of workers, and the answers to callers. Values are unique,
 * and say what their handlers do.
 */
import { type Anomaly, exclusive, isDisturbed, isLost, isLostBehind, overlaps, type Run, tokens } from "./checks.ts"
import { type Hold, lastRun, type Told } from "./history.ts"
import { forgot } from "./states.ts"

/** Jobs with everything that a job can have; workers leave now and then. */
export const many = { name: "many {q}:\n", limits: undefined } as const

/** Plain jobs, few at a time. Workers stay. */
export const limited = {
  name: "limited",
  limits: { concurrency: 3, rate: { jobs: 20, interval: 500 } }
} as const

/** Few jobs may wait: offers wait for room, in turn. Handlers keep checkpoints, and workers leave now and then. */
export const bounded = { name: "bounded", limits: { length: 6 } } as const

/** Two shards, and schedules: the times between their ticks, in milliseconds. All clients set the schedules again and again. */
export const spread = {
  name: "spread",
  limits: undefined,
  shards: 2,
  ticks: { interval: 300, calendar: 1000 }
} as const

/** The payload of the jobs of a schedule. */
export const tickOf = (schedule: string): string => `tick/${schedule}`

/** Of all workers. The delay is in milliseconds. */
export const [workerAttempts, retryDelay, mostSize] = [4, 80, 8]

/** Of `letters.crashes`, by default. */
export const mostCrashes = 3

interface Plan {
  /** How many attempts fail. */
  readonly failing: number
  /** Whether each takes a second or more. */
  readonly long: boolean
  /** Whether the handler snoozes or discards the job now and then. */
  readonly decides: boolean
  /** Whether the handler keeps checkpoints: each is a number, larger than the one before it. */
  readonly keeps: boolean
}

/** What a handler does. */
export const planOf = (value: string): Plan => {
  const plan = value.slice(0, value.indexOf("/"))
  const fails = /^fails(\d)$/.exec(plan)
  return {
    failing: plan === "never" ? Number.POSITIVE_INFINITY : plan === "keeps" ? 1 : Number(fails?.[1] ?? 0),
    long: plan === "long" || plan === "slow",
    decides: plan === "snoozes" || plan === "discards",
    keeps: plan === "keeps"
  }
}

/** Of the queue that is `many`: jobs of a group run one by one. */
const groupOf = (value: string): string => value.split("#")[1] ?? ""

/** Has a `timeout` that is shorter than its handler. */
const isSlow = (value: string): boolean => value.startsWith("slow/")

export const resultOf = (value: string): string => `result of ${value}`

interface Offer {
  readonly hold: Hold
  readonly value: string
  /** Given by the producer; "" for none. */
  readonly id: string
  readonly attempts: number
  /** In microseconds; 0 for none. */
  readonly delay: number
  readonly expires: number
  /** The id that the queue has answered: "" if that is not known any more, nothing if the offer was not confirmed. */
  stored: string | undefined
  duplicate: boolean
  /** When its producer was answered. */
  confirmed: number
}

/** One attempt that a worker has begun. Times are in microseconds of the machine's clock. */
export interface Handling {
  readonly hold: Hold
  readonly id: string
  readonly value: string
  readonly attempt: number
  readonly crashes: number
  /** When the job was stored, in milliseconds of Redis: a replay stores it again. */
  readonly offered: number
  /** The same. */
  readonly stored: number
  /** When Redis handed it out. */
  readonly handed: number
  readonly token: number
  /** That of the worker in its process; 0 for a job that was taken. */
  readonly run: number
  /** Counts the replays of a job that was stored several times in one millisecond. */
  readonly life: number
}

interface Letter {
  readonly hold: Hold
  readonly at: number
  readonly letter: string
  readonly value: string
  readonly reason: string
  readonly attempts: number
  readonly crashes: number
}

export interface Facts {
  readonly offers: ReadonlyMap<string, Offer>
  /** By value, in the order of their tokens. */
  readonly handled: ReadonlyMap<string, ReadonlyArray<Handling>>
  readonly letters: ReadonlyMap<string, ReadonlyArray<Letter>>
  readonly holds: ReadonlyArray<Hold>
  readonly run: Run
  /** When workers were asked to stop, and how long their handlers had then. */
  readonly stops: ReadonlyMap<string, { readonly at: number; readonly until: number }>
  /** Pools that ended because of an error. */
  readonly failed: ReadonlySet<string>
  /** When processes did something for the last time that were killed: the others have settled in the end. */
  readonly deaths: ReadonlyMap<string, number>
}

// The name of the workload stands before it.
const kindOf = ({ kind }: Hold): string => kind.slice(kind.indexOf(" ") + 1)

export const ofKind = (holds: ReadonlyArray<Hold>, kind: string): ReadonlyArray<Hold> =>
  holds.filter((hold) => kindOf(hold) === kind)

export const groupedBy = <A>(
  items: ReadonlyArray<A>,
  keyOf: (item: A) => string
): ReadonlyMap<string, ReadonlyArray<A>> => {
  const found = new Map<string, Array<A>>()
  for (const item of items) {
    const key = keyOf(item)
    const known = found.get(key)
    if (known === undefined) found.set(key, [item])
    else known.push(item)
  }
  return found
}

/** Of one job, from its offer or replay to its end. */
const lifeOf = ({ id, life, offered, value }: Handling): string => `${value} ${id} ${offered} ${life}`

export const toldOf = ({ told }: Hold, word: string): Told | undefined => told.find(({ what }) => what[0] === word)

const isDone = ({ hold }: Handling): boolean => toldOf(hold, "done") !== undefined

const wasLimited = ({ key }: Hold): boolean => key === limited.name

const offersOf = (holds: ReadonlyArray<Hold>): ReadonlyMap<string, Offer> => {
  const found = new Map<string, Offer>()
  for (const hold of holds) {
    for (const { at, what: [word, value, id, ...rest] } of hold.told) {
      if (word === "offers") {
        const [attempts, delay, expires] = rest.map(Number) as [number, number, number]
        found.set(String(value), {
          hold,
          value: String(value),
          id: String(id),
          attempts,
          delay: delay * 1000,
          expires: expires * 1000,
          stored: undefined,
          duplicate: false,
          confirmed: Number.POSITIVE_INFINITY
        })
      } else if (word === "stored") {
        const offer = found.get(String(value))!
        offer.stored = String(id)
        offer.duplicate = rest[0] === 1
        offer.confirmed = at
      }
    }
  }
  return found
}

const handlingsOf = (holds: ReadonlyArray<Hold>, jumped: boolean): ReadonlyArray<Handling> =>
  ofKind(holds, "handle").flatMap((hold) => {
    const told = toldOf(hold, "handles")
    if (told === undefined) return []
    const [, id, value, ...numbers] = told.what
    const [attempt, crashes, offered, skew, token, run] = numbers.map(Number) as [
      number,
      number,
      number,
      number,
      number,
      number
    ]
    const [stored, handed] = [offered * 1000 - skew, jumped ? hold.asked : token - skew]
    return [{
      hold,
      id: String(id),
      value: String(value),
      attempt,
      crashes,
      offered,
      stored,
      handed,
      token,
      run,
      life: 0
    }]
  }).sort((a, b) => a.token - b.token)

/**
 * Tells the lives of a job apart. After Redis's clock was set back, the times of a queue stand still: a replay begins with a
 * first attempt.
 */
const livesOf = (handlings: ReadonlyArray<Handling>): ReadonlyArray<Handling> => {
  const latest = new Map<string, Handling>()
  return handlings.map((one) => {
    const job = lifeOf(one)
    const before = latest.get(job)
    const isAnew = before !== undefined && one.attempt === 1 &&
      (before.attempt > 1 || toldOf(before.hold, "refuses") !== undefined ||
        toldOf(before.hold, "decides") !== undefined)
    const numbered = { ...one, life: (before?.life ?? 0) + (isAnew ? 1 : 0) }
    latest.set(job, numbered)
    return numbered
  })
}

const lettersOf = (holds: ReadonlyArray<Hold>): ReadonlyArray<Letter> =>
  holds.flatMap((hold) =>
    hold.told.filter(({ what }) => what[0] === "letter").map(({ at, what: [, letter, , value, reason, ...rest] }) => ({
      hold,
      at,
      letter: String(letter),
      value: String(value),
      reason: String(reason),
      attempts: Number(rest[0]),
      crashes: Number(rest[1])
    }))
  )

/** The last event of each process that was killed: the others have settled in the end. */
export const deathsOf = (holds: ReadonlyArray<Hold>): ReadonlyMap<string, number> => {
  const deaths = new Map<string, number>()
  for (const { asked, client, ended, told } of holds) {
    deaths.set(client, Math.max(deaths.get(client) ?? 0, asked, told.at(-1)?.at ?? asked, ended ?? asked))
  }
  for (const { client } of ofKind(holds, "settled")) deaths.delete(client)
  return deaths
}

export const factsOf = (holds: ReadonlyArray<Hold>, run: Run): Facts => ({
  offers: offersOf(holds),
  handled: groupedBy(
    run.jumped === true ? livesOf(handlingsOf(holds, true)) : handlingsOf(holds, false),
    ({ value }) => value
  ),
  letters: groupedBy(lettersOf(holds), ({ value }) => value),
  holds,
  run,
  stops: new Map(
    ofKind(holds, "run").flatMap((hold) => {
      const told = toldOf(hold, "stops")
      if (told === undefined) return []
      const { at, what: [, run, grace] } = told
      return [[`${hold.client} ${run}`, { at, until: at + Number(grace) * 1000 }]]
    })
  ),
  failed: new Set(
    ofKind(holds, "failed").flatMap((hold) => {
      const told = toldOf(hold, "failed")
      return told === undefined ? [] : [`${hold.client} ${told.what[1]}`]
    })
  ),
  deaths: deathsOf(holds)
})

/** Whether something may have kept Redis from receiving what an attempt came to, before the next one. */
const isUntold = ({ deaths, run, stops }: Facts, first: Handling, next: Handling): boolean => {
  const { client, ended, outcome } = first.hold
  const stop = stops.get(`${client} ${first.run}`)
  return outcome === undefined || ended === undefined ||
    isLostBehind(run, client, first.hold.asked - run.lease, next.hold.asked + run.lease) ||
    // The process was killed before it sent the acknowledgement.
    ended >= (deaths.get(client) ?? Number.POSITIVE_INFINITY) - run.lease ||
    // The handler was interrupted behind its end.
    stop !== undefined && ended > stop.until - 200_000 ||
    // The worker has left, and Redis may have refused the acknowledgement until then.
    !wasLimited(first.hold) && overlaps(run.disturbed.get(""), first.hold.asked, next.hold.asked) ||
    forgot(run, first.hold.asked, next.hold.asked)
}

/** Whether a handler began after its session had expired, and before its process noticed. */
const isLate = ({ run }: Facts, { hold }: Handling): boolean =>
  isLost(run, hold.client, hold.asked - run.lease, (hold.ended ?? hold.asked) + run.lease) ||
  hold.outcome === undefined && hold.steps.length === 0

/** Whether a fault met the client, or it lost a session. */
export const isUnsettled = (run: Run, client: string, from: number, to: number): boolean =>
  isDisturbed(run, client, from, to) || isLost(run, client, from, to)

/** Whether a worker may have received a job again that it had, which then has a new token. */
const isRetold = ({ run }: Facts, { handed, hold }: Handling): boolean =>
  isUnsettled(run, hold.client, handed - 1_000_000, hold.asked) || forgot(run, handed, hold.asked)

const isReplayed = ({ holds }: Facts, value: string): boolean =>
  ofKind(holds, "replay").some(({ told }) => told[0]?.what[2] === value)

/** A job may have been cancelled: as it was asked for, or because its caller was interrupted. */
const isCancelled = ({ holds, offers }: Facts, value: string, id: string): boolean => {
  const offer = offers.get(value)
  return offer !== undefined && kindOf(offer.hold) === "execute" && offer.hold.outcome !== "released" ||
    ofKind(holds, "cancel").some(({ told }) => told[0]?.what[1] === id)
}

// ---------------------------------------------------------------------------------------------------------------------
// Offers
// ---------------------------------------------------------------------------------------------------------------------

/** Nothing is handled that was not offered before, and with its id. */
const phantoms = ({ handled, offers }: Facts): ReadonlyArray<Anomaly> =>
  [...handled.values()].flat().flatMap(({ hold, id, value }) => {
    const offer = offers.get(value)
    const known = offer !== undefined && offer.hold.asked <= hold.asked && (offer.id === "" || offer.id === id)
    return known ? [] : [{ check: "phantom", detail: `${value} with id ${id} was not offered`, holds: [hold] }]
  })

/** An offer is one job, unless that is replayed; and an id that is known has one job. */
const storedOnce = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, offers, run } = facts
  const twice = [...handled.values()].flatMap((all) => {
    const [first] = all as [Handling]
    const other = all.find(({ offered }) => offered !== first.offered)
    if (other === undefined || isReplayed(facts, first.value)) return []
    if (forgot(run, offers.get(first.value)?.hold.asked ?? 0, other.hold.asked)) return []
    return [{ check: "stored", detail: `${first.value} was stored twice`, holds: [first.hold, other.hold] }]
  })
  const ids = groupedBy(
    [...offers.values()].filter(({ duplicate, id, stored }) => id !== "" && (stored ?? "") !== "" && !duplicate),
    ({ id }) => id
  )
  // Ids are known for longer than that.
  return [
    ...twice,
    ...[...ids.values()].filter((found) => {
      const [from, to] = [
        Math.min(...found.map(({ hold }) => hold.asked)),
        Math.max(...found.map((one) => one.confirmed))
      ]
      return found.length > 1 && to - from < run.lease && !forgot(run, from, to)
    }).map((found) => ({
      check: "stored",
      detail: `an id was stored twice: ${
        found.map(({ id, stored, value }) => `${value} as ${id} at ${stored}`).join()
      }`,
      holds: found.map(({ hold }) => hold)
    }))
  ]
}

/** When a job was done, or seen as a dead letter: after a time, and not as one of the letters that it had before. */
const endsOf = ({ handled, letters }: Facts, value: string, after = 0, but = ""): boolean =>
  handled.get(value)?.some((one) => one.hold.asked > after && isDone(one)) === true ||
  letters.get(value)?.some(({ at, letter }) => at > after && letter !== but) === true

/** A job that was confirmed is done, was cancelled, has expired or is a dead letter; so is one that was replayed. */
const concluded = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, holds, offers, run } = facts
  const ids = groupedBy([...offers.values()].filter(({ id }) => id !== ""), ({ id }) => id)
  const lost = [...offers.values()].filter(({ duplicate, expires, hold, id, stored, value }) => {
    if (stored === undefined || expires > 0 || forgot(run, hold.asked, Number.POSITIVE_INFINITY)) return false
    // Of all offers with one id, one was stored.
    const candidates = duplicate || stored === "" && id !== "" ? ids.get(id)!.map((one) => one.value) : [value]
    return !candidates.some((one) => endsOf(facts, one)) && !isCancelled(facts, value, id === "" ? stored : id)
  }).map(({ hold, stored, value }) => ({
    check: "undone",
    detail: `${value} was stored as ${stored || "an unknown job"}, and never done`,
    holds: [hold, ...(handled.get(value) ?? []).map(({ hold }) => hold)]
  }))
  const replayed = ofKind(holds, "replay").filter((hold) => {
    const [, letter, value] = hold.told[0]!.what
    const expires = offers.get(String(value))?.expires ?? 0
    return toldOf(hold, "replayed")?.what[1] === 1 && !endsOf(facts, String(value), hold.asked, String(letter)) &&
      expires === 0 && !forgot(run, hold.asked, Number.POSITIVE_INFINITY)
  }).map((hold) => ({
    check: "undone",
    detail: `${hold.told[0]!.what[2]} was replayed, and never done`,
    holds: [hold]
  }))
  return [...lost, ...replayed]
}

/** A caller that waits for an outcome receives the outcome of its job. */
const results = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, offers, run } = facts
  return [...ofKind(facts.holds, "execute"), ...ofKind(facts.holds, "result")].flatMap((hold) =>
    hold.told.flatMap(({ at, what: [word, asked, id, answer] }) => {
      const value = String(asked)
      const wrong = (why: string) => [{ check: "result", detail: `${value} ${why}`, holds: [hold] }]
      // A client may ask for the result of a job long after the offer.
      const from = Math.min(hold.asked, offers.get(value)?.hold.asked ?? hold.asked)
      if (forgot(run, from, at)) return []
      if (word === "result") {
        const own = [
          ...id === "" ? [value] : [...offers.values()].filter((one) => one.id === id).map((one) => one.value)
        ]
          .find((one) => resultOf(one) === answer)
        if (own === undefined) return wrong(`has the result of another job: ${answer}`)
        return handled.get(own)?.some((one) => (toldOf(one.hold, "done")?.at ?? at + 1) <= at) === true
          ? []
          : wrong("has a result, and was not done")
      }
      if (word === "refused") {
        const refused = handled.get(value)?.some((one) => (toldOf(one.hold, "refuses")?.at ?? at + 1) <= at) === true
        return answer === value && refused ? [] : wrong(`has failed with ${answer}`)
      }
      if (word !== "failed") return []
      const { expires } = offers.get(value) ?? { expires: 0 }
      const excused = answer === "discarded" && value.startsWith("discards/") || answer === "expired" && expires > 0 ||
        answer === "crashed" && run.lost.size > 0 ||
        answer === "unknown" && isUnsettled(run, hold.client, from, at)
      return excused ? [] : wrong(`has no result: ${answer}`)
    })
  )
}

// ---------------------------------------------------------------------------------------------------------------------
// Attempts
// ---------------------------------------------------------------------------------------------------------------------

/** A job that is done is not handled again, unless nothing may have told Redis so. */
const repeated = (facts: Facts): ReadonlyArray<Anomaly> =>
  [...groupedBy([...facts.handled.values()].flat(), lifeOf).values()].flatMap((all) =>
    all.slice(1).flatMap((second, at) => {
      const first = all[at]!
      if (
        !isDone(first) || first.hold.outcome !== "released" || isUntold(facts, first, second) || isLate(facts, second)
      ) return []
      return [{
        check: "repeated",
        detail: `${second.value} was handled again, and nothing was wrong the first time`,
        holds: [first.hold, second.hold]
      }]
    })
  )

/** An attempt counts the attempts that have failed or crashed before it, and waits for the time of its retry. */
const attempts = (facts: Facts): ReadonlyArray<Anomaly> =>
  [...groupedBy([...facts.handled.values()].flat(), lifeOf).values()].flatMap((all) =>
    all.flatMap((one, at) => {
      const { attempt, crashes, handed, hold, value } = one
      const offer = facts.offers.get(value)
      if (offer === undefined || forgot(facts.run, offer.hold.asked, hold.asked)) return []
      const failed = all.slice(0, at).filter((before) =>
        toldOf(before.hold, "refuses") !== undefined || isSlow(value) && before.hold.outcome === "interrupted"
      )
      const sure = failed.filter((before) => before.hold.outcome === "timeout" && !isUntold(facts, before, one))
      const counted = attempt - crashes - 1
      const wrong = (detail: string, others = failed) => [{
        check: "attempts",
        detail: `${value} ${detail}`,
        holds: [...others.map(({ hold }) => hold), hold]
      }]
      const allowed = isSlow(value) ? 2 : offer.attempts
      if (counted >= allowed) return wrong(`is attempted more than ${allowed} times`)
      if (crashes >= mostCrashes) return wrong(`is attempted after ${crashes} crashes`)
      if (counted > failed.length) return wrong(`has failed ${counted} times, and ${failed.length} attempts did`)
      if (counted < sure.length) return wrong(`has failed ${counted} times, and ${sure.length} attempts did`, sure)
      const last = all.slice(0, at).findLast((before) =>
        sure.includes(before) || toldOf(before.hold, "decides") !== undefined && !isUntold(facts, before, one)
      )
      if (last !== undefined && handed < last.hold.ended! + retryDelay * 1000 - 10_000) {
        return wrong("is attempted again too early", [last])
      }
      return []
    })
  )

const numbersOf = ({ told }: Hold, word: string): ReadonlyArray<number> =>
  told.filter(({ what }) => what[0] === word).map(({ what }) => Number(what[1]))

/** An attempt has the last checkpoint of those before it, or a later one that they have asked for. */
const checkpoints = ({ handled, offers, run }: Facts): ReadonlyArray<Anomaly> =>
  [...handled.values()].flatMap((all) =>
    all.flatMap(({ hold, value }, at) => {
      const [found] = numbersOf(hold, "checkpointed")
      if (found === undefined || forgot(run, offers.get(value)?.hold.asked ?? 0, hold.asked)) return []
      const before = all.slice(0, at)
      const last = Math.max(0, ...before.flatMap((one) => numbersOf(one.hold, "kept")))
      const isKnown = found === 0 || before.some((one) => numbersOf(one.hold, "keeps").includes(found))
      if (found >= last && isKnown) return []
      const detail = `${value} has checkpoint ${found}, and ${last} was kept`
      return [{ check: "checkpoint", detail, holds: [...before.map((one) => one.hold), hold] }]
    })
  )

/** A job becomes a dead letter when its attempts are used up, or too many of its workers have died. */
const buried = ({ letters, offers, run }: Facts): ReadonlyArray<Anomaly> =>
  [...letters.values()].flat().flatMap(({ at, attempts, crashes, hold, reason, value }) => {
    const offer = offers.get(value)
    if (offer === undefined || forgot(run, offer.hold.asked, at)) return []
    const allowed = isSlow(value) ? 2 : offer.attempts
    const right = reason === "discarded"
      ? value.startsWith("discards/")
      : reason === "crashed"
      ? crashes === mostCrashes
      : reason === "failed" && attempts >= allowed
    if (right) return []
    const detail = `${value} has ${reason} after ${attempts} of ${allowed} attempts, ${crashes} crashes`
    return [{ check: "buried", detail, holds: [offer.hold, hold] }]
  })

/** Tokens grow: they are larger than all tokens known at the offer, and grow with the attempts of a job. */
const fenced = ({ handled, offers, run }: Facts): ReadonlyArray<Anomaly> => {
  const all = [...handled.values()].flat()
  const asked = all.map(({ hold, token, value }) => ({
    ...hold,
    token,
    asked: offers.get(value)?.hold.asked ?? hold.asked
  }))
  const grown = [...groupedBy(all, lifeOf).values()].flatMap((of) =>
    of.slice(1).flatMap((second, at) => {
      const first = of[at]!
      if (second.attempt >= first.attempt || forgot(run, first.handed, second.hold.asked)) return []
      return [{
        check: "tokens",
        detail: `attempt ${first.attempt} of ${first.value} has a smaller token than attempt ${second.attempt}`,
        holds: [first.hold, second.hold]
      }]
    })
  )
  // Each shard has tokens of its own.
  return asked[0]?.key === spread.name ? grown : [...tokens(asked), ...grown]
}

// A handler that outlives its session may take one step before it is interrupted, and so may what a job was taken for that is cancelled.
// Otherwise a handler keeps its job until it has ended.
const bodyOf = (run: Run) => ({ hold, run: worker, token }: Handling): Hold => {
  const ended = toldOf(hold, "ends")?.at
  const over = worker === 0 && hold.outcome === "interrupted" ||
    isLost(run, hold.client, hold.entered!, Math.max(lastRun(hold) + run.lease / 2, ended ?? 0))
  return over ? { ...hold, token, outcome: "lost session" } : { ...hold, token, left: ended ?? hold.left }
}

/** A job runs in one place at a time; so many jobs at a time as the limit says, and as a pool has room for. */
const apart = ({ handled, holds, run }: Facts): ReadonlyArray<Anomaly> => [
  ...[
    ...groupedBy([...handled.values()].flat().filter((one) => one.run > 0), ({ hold, run }) => `${hold.client} ${run}`)
      .values()
  ].flatMap((all) => exclusive(all.map(bodyOf(run)), mostSize, run)),
  ...[...handled.values()].flatMap((all) => all.length === 1 ? [] : exclusive(all.map(bodyOf(run)), 1, run)),
  ...[...groupedBy([...handled.values()].flat(), ({ value }) => groupOf(value))]
    .flatMap(([group, all]) => group === "" ? [] : exclusive(all.map(bodyOf(run)), 1, run)),
  ...!wasLimited(holds[0]!)
    ? []
    : exclusive([...handled.values()].flat().map(bodyOf(run)), limited.limits.concurrency, run)
]

/** So many jobs begin in an interval as can begin at once, and as many again. */
const rate = (facts: Facts): ReadonlyArray<Anomaly> => {
  if (!wasLimited(facts.holds[0]!) || facts.run.jumped === true) return []
  const { interval, jobs } = limited.limits.rate
  const begun = [...facts.handled.values()].flat().filter((one) => !isRetold(facts, one)).sort((a, b) =>
    a.handed - b.handed
  )
  return begun.slice(2 * jobs).flatMap((last, at) => {
    const first = begun[at]!
    if (last.handed - first.handed > interval * 1000 - 10_000 || forgot(facts.run, first.handed, last.handed)) return []
    return [{ check: "rate", detail: `more than ${2 * jobs} jobs began at once`, holds: [first.hold, last.hold] }]
  })
}

/** No job begins before its delay is over, after it has expired, or after it was cancelled. */
const timely = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, holds, offers, run } = facts
  const cancels = new Map(
    ofKind(holds, "cancel").filter((hold) => toldOf(hold, "cancelled")?.what[1] === 1).map((
      hold
    ) => [String(hold.told[0]!.what[1]), hold])
  )
  return [...handled.values()].flat().flatMap((one) => {
    const { handed, hold, id, stored, value } = one
    const offer = offers.get(value)
    if (offer === undefined || forgot(run, offer.hold.asked, hold.asked)) return []
    if (handed < offer.hold.asked + offer.delay - 10_000) {
      return [{ check: "early", detail: `${value} began before its delay was over`, holds: [offer.hold, hold] }]
    }
    // It is only known when a job began, and that is later than when it was handed out.
    if (run.jumped === true || isRetold(facts, one)) return []
    const isFirst = stored < offer.confirmed + 2000
    if (offer.expires > 0 && isFirst && handed > offer.confirmed + offer.expires + 10_000) {
      return [{ check: "expired", detail: `${value} began after it had expired`, holds: [offer.hold, hold] }]
    }
    const cancel = cancels.get(id)
    if (cancel === undefined || isReplayed(facts, value)) return []
    if (handed > cancel.ended! + 10_000) {
      return [{ check: "cancelled", detail: `${value} began after it was cancelled`, holds: [cancel, hold] }]
    }
    const last = hold.steps.at(-1) ?? hold.asked
    return last < cancel.ended! + 1_000_000 || isUnsettled(run, hold.client, cancel.asked - 1_000_000, last) ? [] : [
      { check: "cancelled", detail: `${value} ran on after it was cancelled`, holds: [cancel, hold] }
    ]
  })
}

/** No job begins between a pause and the next attempt to resume. */
const paused = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { deaths, run } = facts
  if (run.jumped === true) return []
  // One that has failed, or whose process was killed, is refused when its session has expired.
  const resumes = [...ofKind(facts.holds, "resume"), ...ofKind(facts.holds, "settled")].map((
    { asked, client, ended, outcome }
  ) => ({
    asked,
    ended: outcome === "released" ? ended! : (ended ?? deaths.get(client) ?? Number.POSITIVE_INFINITY) + run.lease
  })).sort((a, b) => a.asked - b.asked)
  const spans = ofKind(facts.holds, "pause").filter(({ outcome }) => outcome === "released").map((hold) => ({
    hold,
    from: hold.ended! + 10_000,
    to: (resumes.find(({ ended }) => ended >= hold.asked)?.asked ?? Number.POSITIVE_INFINITY) - 10_000
  })).filter(({ from, to }) => from < to)
  return [...facts.handled.values()].flat().flatMap((one) => {
    const span = spans.find(({ from, to }) => from < one.handed && one.handed < to)
    if (span === undefined || isRetold(facts, one) || forgot(facts.run, span.from, one.hold.asked)) return []
    return [{ check: "paused", detail: `${one.value} began while the queue was paused`, holds: [span.hold, one.hold] }]
  })
}

/** Jobs that must begin in the order of their offers: all of this queue. */
const sequenceOf = (_: Offer): string => ""

/** Jobs of a level begin in the order of their offers, as far as their workers stay and nothing disturbs any of them. */
const ordered = ({ handled, holds, offers, run }: Facts): ReadonlyArray<Anomaly> => {
  if (!wasLimited(holds[0]!)) return []
  const begun = [...offers.values()].flatMap((offer) => {
    const [first] = handled.get(offer.value) ?? []
    const number = /^n\d+-(\d+)$/.exec(offer.stored ?? "")?.[1]
    return first === undefined || number === undefined || offer.duplicate
      ? []
      : [{ offer, first, number: Number(number) }]
  }).sort((a, b) => b.number - a.number)
  const disturbed = [...run.disturbed.values()].flat()
  const lost = [...run.lost.values()].flat().map((at) => ({ from: at - run.lease, to: at }))
  return [...groupedBy(begun, ({ offer }) => sequenceOf(offer)).values()].flatMap((sequence) => {
    let next: typeof begun[number] | undefined
    return sequence.flatMap((one) => {
      const [from, to] = [one.offer.hold.asked - 1_000_000, one.first.hold.asked]
      const before = next
      if (next === undefined || one.first.token < next.first.token) next = one
      // A worker may have had it, and have been lost before it began; also one that was dead already, and had its session for a while.
      const excused = overlaps(disturbed, from, to) || overlaps(lost, from, to) || overlaps(run.expired, from, to) ||
        forgot(run, from, to)
      if (before === undefined || before.first.token > one.first.token || excused) return []
      // Their numbers began anew.
      const [first, second] = [from, before.offer.hold.asked].sort((a, b) => a - b) as [number, number]
      if (forgot(run, first, second)) return []
      return [{
        check: "order",
        detail: `${one.offer.value} was offered before ${before.offer.value}, and began after it`,
        holds: [one.offer.hold, before.offer.hold, one.first.hold, before.first.hold]
      }]
    })
  })
}

/** No other job of its group begins between two attempts of a job. */
const unbroken = ({ handled, run }: Facts): ReadonlyArray<Anomaly> =>
  [...groupedBy([...handled.values()].flat(), ({ value }) => groupOf(value))].flatMap(([group, all]) => {
    if (group === "") return []
    // A job that was replayed is another one.
    const jobs = [...groupedBy(all, lifeOf).values()]
      .map((attempts) => attempts.toSorted((a, b) => a.token - b.token))
      .sort(([a], [b]) => a!.token - b!.token)
    let before = jobs[0]!
    return jobs.slice(1).flatMap((job) => {
      const [first] = job as [Handling]
      const last = before.at(-1)!
      const broken = last.token > first.token
      const excused = !broken || forgot(run, before[0]!.hold.asked, last.hold.asked)
      const detail = `${first.value} began between two attempts of ${last.value}`
      const anomaly = { check: "order", detail, holds: [before[0]!.hold, first.hold, last.hold] }
      if (job.at(-1)!.token > last.token) before = job
      return excused ? [] : [anomaly]
    })
  })

/** A handler is interrupted only if its session was lost, its worker has left, or its job was cancelled or took too long. */
const interrupted = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { deaths, failed, handled, holds, run, stops } = facts
  const settled = new Map(ofKind(holds, "settled").map(({ client, ended }) => [client, ended ?? 0]))
  return [...handled.values()].flat().filter(({ hold }) => hold.outcome === "interrupted").flatMap((one) => {
    const { hold: { client, ended }, hold, id, value } = one
    const stop = stops.get(`${client} ${one.run}`)
    const excused = isSlow(value) || stop !== undefined && ended! > stop.until - 30_000 ||
      // A process that was killed cannot say any more that its pool has failed.
      failed.has(`${client} ${one.run}`) || deaths.has(client) ||
      isLost(run, client, hold.asked - run.lease, ended! + run.lease) || isCancelled(facts, value, id) ||
      ended! > (settled.get(client) ?? Number.POSITIVE_INFINITY) || forgot(run, hold.asked - run.lease, ended!)
    return excused ? [] : [{ check: "interrupted", detail: `${value} was interrupted without a reason`, holds: [hold] }]
  })
}

/** Each tick of a schedule has one job, at its time, and no tick between two of them is left out. */
const scheduled = ({ holds, letters, run }: Facts): ReadonlyArray<Anomaly> => {
  if (run.jumped === true) return []
  const ticks = ofKind(holds, "tick").flatMap((hold) => {
    const told = toldOf(hold, "ticks")
    if (told === undefined) return []
    const [, name, id, tick, skew] = told.what
    return [{ hold, name: String(name), id: String(id), tick: Number(tick) * 1000 - Number(skew), time: Number(tick) }]
  })
  return [...groupedBy(ticks, ({ name }) => name)].flatMap(([name, all]) => {
    const sorted = all.toSorted((a, b) => a.time - b.time)
    // A job that has crashed too often is a dead letter.
    let buried = letters.get(tickOf(name))?.length ?? 0
    return sorted.flatMap((one, at) => {
      const wrong = (detail: string) => [{ check: "tick", detail: `${name}: ${detail}`, holds: [one.hold] }]
      if (one.hold.asked < one.tick - 10_000) return wrong(`the job of ${one.time} began before its tick`)
      const next = sorted[at + 1]
      // A job that a worker had is forgotten with it, perhaps when that has been lost.
      if (next === undefined || forgot(run, one.tick, next.hold.asked + 2 * run.lease)) return []
      if (next.time === one.time) return next.id === one.id ? [] : wrong(`${one.time} has two jobs`)
      const missing = (next.time - one.time) / spread.ticks[name as keyof typeof spread.ticks] - 1
      buried -= missing
      return missing === 0 || Number.isInteger(missing) && buried >= 0
        ? []
        : wrong(`${missing} ticks between ${one.time} and ${next.time} have no job`)
    })
  })
}

/** After the last offer, all jobs are done within a bound. */
const lag = ({ holds }: Facts): ReadonlyArray<Anomaly> =>
  ofKind(holds, "settled").filter(({ outcome }) => outcome === "timeout").map((hold) => ({
    check: "lag",
    detail: hold.told.filter(({ what: [word] }) => word === "open").map(({ what: [, ...counts] }) =>
      `${counts[0]} jobs wait, ${counts[1]} are delayed, ${counts[2]} are active, with ${counts[3]} workers`
    ).join(),
    holds: [hold]
  }))

/** The checks of one queue. The first anomalies of each kind are enough. */
export const kept = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const facts = factsOf(holds, run)
  return [
    phantoms,
    storedOnce,
    concluded,
    results,
    repeated,
    attempts,
    checkpoints,
    buried,
    fenced,
    apart,
    rate,
    timely,
    paused,
    ordered,
    unbroken,
    interrupted,
    scheduled,
    lag
  ].flatMap((check) => check(facts).slice(0, 5))
}
