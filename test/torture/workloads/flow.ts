import { Context, Effect, Schedule, Schema, type Scope, Stream } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import type { Client, Request } from "../client.ts"
import {
  batchName,
  bodyOf,
  conducted,
  filesOf,
  flowName,
  groupsOfQueues,
  partsOf,
  planOf,
  queueNames,
  turn
} from "../flows.ts"
import { fibers, growingPause, lives, longest, patienceOf, type Workload } from "../workload.ts"

// A failure on purpose. Its reason makes the history say "timeout".
const Refusal = Schema.Struct({ reason: Schema.Struct({ _tag: Schema.Literal("WaitTimeout") }) })
type Refusal = typeof Refusal.Type

const refusal: Refusal = { reason: { _tag: "WaitTimeout" } }

type Queue = Lockstep.Queue.Queue<string, string, Refusal>
type Flow = Lockstep.Flow.Flow<string, ReadonlyArray<string>>
type Batch = Lockstep.Batch.Batch

class Left extends Context.Service<Left, Queue>()("torture/flow/left") {}
class Right extends Context.Service<Right, Queue>()("torture/flow/right") {}

const tags = [Left, Right] as const

interface Open {
  readonly flow: Flow
  readonly batch: Batch
  readonly queues: ReadonlyArray<Queue>
}

const build = (builder: Lockstep.Flow.Builder, id: string) => {
  const nodes: Array<Lockstep.Flow.Node<string>> = []
  const plan = planOf(id)
  for (const [at, { after, group, queue, undo }] of plan.entries()) {
    const tag = tags[queue]!
    const name = String(at)
    const node = after.length === 0
      ? builder.job(tag, bodyOf("node", id, at), { name, group })
      : builder.job(tag, {
        name,
        group,
        after: after.map(([from, onFailure]) => ({ node: nodes[from]!, onFailure })),
        payload: (results) => bodyOf("node", id, at, results.map((result) => result ?? ""))
      })
    if (undo) builder.compensate(node, tags[1 - queue]!, (result) => bodyOf("undo", id, at, [result]))
    nodes.push(node)
  }
  return nodes.filter((_, at) => !plan.some(({ after }) => after.some(([from]) => from === at)))
}

/** Runs are known for a while after their ends, and gone before the harness looks for leaks; so are the ids of their jobs, for longer. */
const open = ({ Batch, Flow, Queue }: typeof Lockstep, keep: number, onFailure: "cancel" | "finish"): Effect.Effect<
  Open,
  Lockstep.Queue.QueueError | Lockstep.Flow.FlowError | Lockstep.Batch.BatchError,
  Lockstep.Coordinator.Coordinator | Scope.Scope
> =>
  Effect.gen(function*() {
    const schemas = { payload: Schema.String, success: Schema.String, error: Refusal }
    const [left, right] = yield* Effect.all([
      Queue.make({ ...schemas, name: queueNames[0], groups: groupsOfQueues, retention: keep }),
      Queue.make({ ...schemas, name: queueNames[1], groups: groupsOfQueues, retention: keep })
    ])
    const retention = (keep - 1000) / 2
    const opened = Effect.all({
      flow: Flow.make(
        flowName,
        { queues: tags, input: Schema.String, onFailure, retention, colocate: queueNames[0] },
        build
      ),
      batch: Batch.make(batchName, {
        queues: tags,
        retention,
        onDone: { queue: Left, payload: ({ done, id, jobs }) => bodyOf("done", id, 0, [`${done} of ${jobs}`]) },
        onFailed: { queue: Right, payload: ({ done, id, jobs }) => bodyOf("failed", id, 0, [`${done} of ${jobs}`]) }
      })
    })
    const found = yield* opened.pipe(Effect.provideService(Left, left), Effect.provideService(Right, right))
    return { ...found, queues: [left, right] }
  })

const about = (key: string, verb: string): Request => ({ kind: `flow ${verb}`, key, weight: 1, wait: false })

// ---------------------------------------------------------------------------------------------------------------------
// Work
// ---------------------------------------------------------------------------------------------------------------------

/** Handles a job as its plan says. That it is done is recorded before the worker acknowledges it. */
const handled = (client: Client, body: string) =>
  Effect.flatMap(client.lockstep.Queue.Job, ({ attempt, crashes, id, offeredAt }) => {
    const { inputs, kind, node, run } = partsOf(body)
    // That it runs is for the end: no job is left.
    if (kind === "side") return Effect.as(Effect.sleep(client.random() * 30), "")
    const { key, plan } = kind === "node"
      ? { key: flowName, plan: planOf(run)[node]!.plan }
      : kind === "job"
      ? { key: batchName, plan: filesOf(run).plans[node]! }
      : { key: kind === "undo" ? flowName : batchName, plan: "plain" }
    return client.follow(about(key, "handle"), ({ step, tell }) =>
      Effect.gen(function*() {
        tell("handles", run, node, kind, id, offeredAt.epochMilliseconds, ...inputs)
        for (let left = plan === "long" ? 10 + client.random() * 40 : 2; left > 0; left--) {
          yield* Effect.sleep(plan === "long" ? 25 : client.random() * 20)
          step()
        }
        if (plan === "never" || plan === "fails" && attempt - crashes === 1) {
          tell("refuses")
          return yield* Effect.fail(refusal)
        }
        const result = `${run}/${node} ${client.unique().slice(0, 8)}`
        tell("done", result)
        return result
      }))
  })

/** Works until the scope closes, despite all failures. Simulations interrupt the handlers at any moment. */
const working = (client: Client, queue: Queue) =>
  queue.run((body) => handled(client, body), { concurrency: 4, attempts: 2, retry: Schedule.spaced(80) }).pipe(
    Effect.raceFirst(client.pause(Number.POSITIVE_INFINITY)),
    Effect.catch(() => Effect.sleep(100)),
    Effect.forever,
    Effect.forkScoped
  )

// ---------------------------------------------------------------------------------------------------------------------
// Run
// ---------------------------------------------------------------------------------------------------------------------

/** Clients that come at about the same time run the same flow, and the same batch. */
const turnOf = (client: Client): number => Math.floor(client.clock.wall() / turn) - client.pick([0, 0, 1, reach])

const runOf = (turn: number): string => `run ${turn}`

const fillOf = (turn: number): string => `fill ${turn}`

/** Records what a run has come to, and what has become of its nodes. */
const awaited = (client: Client, flow: Flow, id: string) =>
  client.pursue(about(flowName, "await"), ({ tell }) => {
    tell("awaits", id)
    const run = flow.attach(id)
    const result = run.await.pipe(
      Effect.map((results) => tell("result", id, "done", ...results)),
      Effect.catch((error) => {
        const { reason } = error
        if (reason._tag === "NodeFailed") {
          return Effect.sync(() => tell("result", id, "failed", reason.node, reason.outcome))
        }
        if (reason._tag === "NodeSkipped") return Effect.sync(() => tell("result", id, "skipped", reason.node))
        if (reason._tag === "FlowCancelled") return Effect.sync(() => tell("result", id, "cancelled"))
        return Effect.fail(error)
      })
    )
    const states = Effect.map(
      Effect.all([run.status, Stream.runCollect(run.nodes)]),
      ([{ state }, nodes]) => tell("states", id, state, ...nodes.map((node) => node.state))
    )
    return Effect.andThen(result, states).pipe(
      // It was not begun yet, or is over for long.
      Effect.catchIf(({ reason }) => reason._tag === "RunUnknown", () => Effect.sync(() => tell("unknown", id)))
    )
  })

const cancelling = (client: Client, flow: Flow, id: string) =>
  client.pursue(about(flowName, "cancel"), ({ tell }) => {
    tell("cancels", id)
    return Effect.map(flow.attach(id).cancel, (found) => tell("cancelled", found ? 1 : 0))
  }).pipe(Effect.catchIf(({ reason }) => reason._tag === "RunUnknown", () => Effect.void))

/** Starts runs, cancels some, and waits for results, also of runs that others have started. */
const running = (client: Client, { flow }: Open) =>
  Effect.gen(function*() {
    const id = runOf(turnOf(client))
    if (client.random() < 0.7) {
      yield* client.pursue(about(flowName, "start"), ({ tell }) => {
        tell("starts", id)
        return Effect.map(flow.start(id, { id }), () => tell("begun", id))
      })
      if (client.random() < 0.15) {
        yield* Effect.sleep(client.random() * client.random() * 300)
        yield* cancelling(client, flow, id)
      }
    }
    yield* Effect.timeoutOption(awaited(client, flow, id), client.keep)
    yield* Effect.sleep(client.random() * 400)
  }).pipe(Effect.catch(() => Effect.sleep(20 + client.random() * 50)))

/** Adds all jobs of a batch: those that are there already are left out. */
const filled = (client: Client, batch: Batch, id: string, part: number) =>
  client.pursue(about(batchName, "fill"), ({ tell }) =>
    Effect.gen(function*() {
      const { plans, seals } = filesOf(id)
      tell("starts", id)
      const run = yield* batch.start({ id, size: seals ? undefined : plans.length })
      const nodes = [...plans.keys()]
      const tagOf = (node: number) => tags[node % 2]!
      const bodyAt = (node: number) => bodyOf("job", id, node)
      yield* Effect.forEach(nodes.filter(() => client.random() < part), (node) =>
        run.add(tagOf(node), bodyAt(node), { name: String(node) }), { concurrency: 2, discard: true })
      if (part < 1 && client.random() < 0.1) {
        return
      }
      for (const side of [0, 1]) {
        const some = nodes.filter((node) =>
          node % 2 === side
        )
        yield* run.addAll(tagOf(side), some.map(bodyAt), { name: (_, at) => String(some[at]) })
      }
      if (seals) yield* run.seal
      tell("filled", id)
    }))

const finished = (client: Client, batch: Batch, id: string) =>
  client.pursue(about(batchName, "await"), ({ tell }) => {
    tell("awaits", id)
    return batch.attach(id).await.pipe(
      Effect.map(({ done, jobs }) => tell("result", id, "done", done, jobs)),
      Effect.catch((error) => {
        const { reason } = error
        if (reason._tag === "BatchFailed") {
          const { done, failed, job, outcome } = reason
          return Effect.sync(() => tell("result", id, "failed", done, done + failed, job, outcome))
        }
        if (reason._tag === "BatchCancelled") return Effect.sync(() => tell("result", id, "cancelled"))
        if (reason._tag === "BatchUnknown") return Effect.sync(() => tell("unknown", id))
        return Effect.fail(error)
      })
    )
  })

/** Offers jobs of groups to the queues of the runs: these end, and nodes begin, with the same calls. */
const crossing = (client: Client, { queues }: Open) =>
  Effect.gen(function*() {
    const group = `sides ${client.pick([0, 1, 2])}`
    const bodies = Array.from({ length: 1 + Math.floor(client.random() * 4) }, (_, at) => bodyOf("side", "", at))
    yield* client.pick(queues).offerAll(bodies, { group })
    yield* Effect.sleep(client.random() * 400)
  }).pipe(Effect.catch(() => Effect.sleep(20 + client.random() * 50)))

const filling = (client: Client, { batch }: Open) =>
  Effect.gen(function*() {
    const id = fillOf(turnOf(client))
    if (client.random() < 0.8) yield* filled(client, batch, id, 0.5)
    yield* Effect.timeoutOption(finished(client, batch, id), client.keep)
    yield* Effect.sleep(client.random() * 600)
  }).pipe(Effect.catch(() => Effect.sleep(20 + client.random() * 50)))

// ---------------------------------------------------------------------------------------------------------------------
// Settle
// ---------------------------------------------------------------------------------------------------------------------

const again = Schedule.spaced(100)

/** Waits for the end of a run. A run whose jobs Redis has lost goes on when it is retried, and the check says whether that is excused. */
const ended = (client: Client, flow: Flow, id: string) =>
  Effect.gen(function*() {
    const over = flow.attach(id).status.pipe(
      Effect.map(({ state }) => !["loading", "running", "compensating"].includes(state)),
      Effect.catchIf(({ reason }) => reason._tag === "RunUnknown", () => Effect.succeed(true)),
      Effect.retry(again)
    )
    if (yield* over) return true
    const awaiting = Effect.timeoutOption(Effect.retry(awaited(client, flow, id), again), longest(client))
    yield* awaiting
    if (yield* over) return true
    yield* client.pursue(about(flowName, "retry"), ({ tell }) => {
      tell("retries", id)
      return flow.attach(id).retry
    }).pipe(Effect.ignore)
    yield* awaiting
    return yield* over
  })

/** The jobs of a batch that Redis has lost end when it is cancelled. */
const sealed = (client: Client, batch: Batch, id: string) =>
  Effect.gen(function*() {
    const known = batch.attach(id).status.pipe(
      Effect.as(true),
      Effect.catchIf(({ reason }) => reason._tag === "BatchUnknown", () => Effect.succeed(false)),
      Effect.retry(again)
    )
    if (!(yield* known)) return true
    const awaiting = Effect.timeoutOption(Effect.retry(finished(client, batch, id), again), longest(client))
    yield* Effect.ignore(filled(client, batch, id, 1))
    const first = yield* awaiting
    if (first._tag === "Some") return true
    yield* client.pursue(about(batchName, "cancel"), ({ tell }) => {
      tell("cancels", id)
      return batch.attach(id).cancel
    }).pipe(Effect.ignore)
    return (yield* awaiting)._tag === "Some"
  })

interface Settling {
  readonly id: string
  readonly over: Effect.Effect<boolean, unknown>
}

/** Waits until all runs are over, and no job is left, no longer than a bound. */
const settled = (client: Client, { batch, flow, queues }: Open, first: number) =>
  client.follow({ kind: "flow settled", key: flowName, weight: 0, wait: true }, ({ tell }) =>
    Effect.gen(function*() {
      const turns = Array.from({ length: Math.floor(client.clock.wall() / turn) - first + 1 }, (_, at) => first + at)
      const runs = turns.flatMap((turn): ReadonlyArray<Settling> => [
        { id: runOf(turn), over: ended(client, flow, runOf(turn)) },
        { id: fillOf(turn), over: sealed(client, batch, fillOf(turn)) }
      ])
      const open = yield* Effect.filter(
        runs,
        ({ over }) => Effect.map(Effect.orElseSucceed(over, () => false), (is) => !is),
        { concurrency: 64 }
      )
      for (const { id } of open) tell("open", id)
      const isOver = patienceOf(client)
      const pause = growingPause()
      const counts = Effect.map(
        Effect.forEach(queues, ({ state }) => state, { concurrency: 2 }),
        (all) => all.reduce((sum, { active, delayed, waiting }) => sum + active + delayed + waiting, 0)
      ).pipe(Effect.orElseSucceed(() => Number.POSITIVE_INFINITY))
      for (let left = yield* counts; left > 0; left = yield* counts) {
        if (isOver(left)) {
          tell("open", `${left} jobs`)
          return yield* Effect.fail(refusal)
        }
        yield* pause
      }
      if (open.length > 0) return yield* Effect.fail(refusal)
    })).pipe(Effect.ignore)

// In milliseconds: the ids of jobs need not be known any more.
const forgotten = 1100

// So many turns before a process has started may have runs that it has to wait for, and so many before anything began.
const [past, reach] = [Math.ceil(15_000 / turn), 2]

/**
 * Every client runs the same flow, a graph of jobs of two queues, and fills the same batch. Runs have the ids of moments, so that
 * several clients begin, cancel and await the same one, or go on with what a killed one has left behind; their graphs follow from the ids.
 * Some nodes have groups, and other jobs of groups are in the same queues.
 */
export const flow: Workload = {
  name: "flow",
  run: (client) => {
    const { began, wall } = client.clock
    const first = Math.max(Math.floor(wall() / turn) - past, Math.floor(began / turn) - reach)
    return lives(Effect.gen(function*() {
      const opened = yield* open(client.lockstep, client.keep, client.pick(["cancel", "finish"]))
      for (const queue of opened.queues) yield* working(client, queue)
      yield* Effect.all(
        [running, filling, crossing].map((program) => fibers(1, client, program(client, opened))),
        { concurrency: "unbounded" }
      )
      yield* settled(client, opened, first)
      // For the checks of the batch.
      yield* client.follow(about(batchName, "settled"), () => Effect.void)
    }))
  },
  check: conducted,
  // The last client may have left while errands were on their way: they wait for the next one.
  clear: (lockstep, delivered) =>
    Effect.scoped(
      Effect.gen(function*() {
        const { queues } = yield* open(lockstep, forgotten, "cancel")
        yield* Effect.all([delivered(flowName), delivered(`batch:${batchName}`)])
        for (const queue of queues) yield* Effect.andThen(queue.drain({ delayed: true }), queue.discard())
      })
    )
}
