/** Waits for the shards of a task group, and shows how they come along. */

import * as Effect from "effect/Effect"
import * as Queue from "effect/Queue"
import * as Stream from "effect/Stream"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Payload } from "../hold/payload.ts"
import { fail, GroupGone, GroupReset, type TaskGroupError, WorkerFailed, WorkerLost } from "./errors.ts"
import { isComplete, type Page, type State, type Status, type Tasks } from "./tasks.ts"

/** The schemas and the state that the processes of a group share. */
export interface Group<in out A, in out E> {
  readonly tasks: Tasks
  readonly result: Payload<A>
  readonly error: Payload<E>
}

export const resultOf = (name: string, shard: string): string =>
  `The result of shard ${JSON.stringify(shard)} of task group ${JSON.stringify(name)}`

export const errorOf = (name: string, shard: string): string =>
  `The error of shard ${JSON.stringify(shard)} of task group ${JSON.stringify(name)}`

// Of the run that the group was opened with.
const own = (
  tasks: Tasks,
  reading: Effect.Effect<Page | undefined, CoordinatorError>
): Effect.Effect<Page | undefined, TaskGroupError> =>
  Effect.flatMap(
    Effect.mapError(reading, ({ reason }) => fail(reason)),
    (page) =>
      page !== undefined && tasks.isOver(page.state)
        ? Effect.fail(fail(tasks.superseded(page.state.run)))
        : Effect.succeed(page)
  )

export const ownPage = (tasks: Tasks, from: number, wanted: string): Effect.Effect<Page | undefined, TaskGroupError> =>
  own(tasks, tasks.read(from, wanted))

/** The shards that have one of the wanted statuses, of all pages. Begins again if a new round begins meanwhile. */
export const shardsOf = Effect.fnUntraced(function*(
  tasks: Tasks,
  wanted: ReadonlyArray<Status>
): Effect.fn.Return<Page["shards"], TaskGroupError> {
  let shards: Array<Page["shards"][number]> = []
  let round = 0
  for (let from = 1; from > 0;) {
    const page: Page | undefined = yield* ownPage(tasks, from, wanted.join(" "))
    if (page === undefined) return yield* Effect.fail(fail(new GroupGone(tasks.about)))
    const again = from > 1 && page.state.round !== round
    round = page.state.round
    if (again) shards = []
    else shards.push(...page.shards)
    from = again ? 1 : page.next
  }
  return shards
})

export const resultsOf = Effect.fnUntraced(function*<A>(
  name: string,
  result: Payload<A>,
  shards: Page["shards"],
  results: Map<string, A> = new Map()
): Effect.fn.Return<ReadonlyMap<string, A>, TaskGroupError> {
  for (const [shard, , value] of shards) {
    results.set(shard, yield* Effect.mapError(result.decode(value, resultOf(name, shard)), fail))
  }
  return results
})

const pageOf = (tasks: Tasks, from: number, wanted: string): Effect.Effect<Page | undefined, TaskGroupError> =>
  own(tasks, tasks.readWaiting(from, wanted))

/** Waits until all shards are done. `faults` are the statuses that end the wait. */
export const awaitAll = <A, E>(
  group: Group<A, E>,
  faults: ReadonlyArray<Status>
): Effect.Effect<ReadonlyMap<string, A>, TaskGroupError<E>> =>
  Effect.acquireUseRelease(
    Effect.sync(() => group.tasks.place.partition.watch()),
    () => awaiting(group, faults),
    (end) => Effect.sync(end)
  )

const awaiting = Effect.fnUntraced(function*<A, E>(
  group: Group<A, E>,
  faults: ReadonlyArray<Status>
): Effect.fn.Return<ReadonlyMap<string, A>, TaskGroupError<E>> {
  const { tasks } = group
  const { about } = tasks
  const isFaulty = (state: State) => state.failed > 0 || faults.includes("lost") && state.lost > 0
  let round = 0
  for (;;) {
    const { heard } = tasks
    const look = yield* pageOf(tasks, 1, "")
    if (look !== undefined) {
      const { state } = look
      if (round > 0 && state.round > round) return yield* Effect.fail(fail(new GroupReset({ ...about, round })))
      round = state.round
      if (isFaulty(state)) yield* fault(group, state, faults)
      else if (isComplete(state)) {
        const results = yield* allResults(group, state)
        if (results !== undefined) return results
      }
    }
    // The state that was read is exact. Events only say when to read again.
    yield* news(
      tasks,
      heard,
      (state) => look === undefined || state.round !== round || isFaulty(state) || isComplete(state)
    )
  }
})

const whyGone = ({ about, place: { channel, space: { kernel } } }: Tasks) =>
  kernel.isClosing() ? channel.closedError().reason : new GroupGone(about)

/** Waits until an event has come since that is worth another look. */
const news = (tasks: Tasks, since: number, isWorth: (state: State) => boolean): Effect.Effect<void, TaskGroupError> =>
  Effect.callback((resume) => {
    const wake = () => {
      if (!tasks.closed && (tasks.heard === since || !isWorth(tasks.state))) return
      tasks.waiting.delete(wake)
      resume(tasks.closed ? Effect.fail(fail(whyGone(tasks))) : Effect.void)
    }
    tasks.waiting.add(wake)
    wake()
    return Effect.sync(() => tasks.waiting.delete(wake))
  })

/** Nothing if they change meanwhile. */
const allResults = Effect.fnUntraced(function*<A, E>(
  { result, tasks }: Group<A, E>,
  { done, round }: State
): Effect.fn.Return<ReadonlyMap<string, A> | undefined, TaskGroupError> {
  const results = new Map<string, A>()
  for (let from = 1; from > 0;) {
    const page: Page | undefined = yield* pageOf(tasks, from, "done")
    if (page === undefined || page.state.round !== round) return undefined
    yield* resultsOf(tasks.place.name, result, page.shards, results)
    from = page.next
  }
  return results.size < done ? undefined : results
})

/** Fails with the first one, if it is still there. */
const fault = Effect.fnUntraced(function*<A, E>(
  { error, tasks }: Group<A, E>,
  { round }: State,
  faults: ReadonlyArray<Status>
): Effect.fn.Return<void, TaskGroupError<E>> {
  const { about } = tasks
  const { name } = about
  for (let from = 1; from > 0;) {
    const page: Page | undefined = yield* pageOf(tasks, from, faults.join(" "))
    if (page === undefined || page.state.round !== round) return
    const [first] = page.shards
    if (first !== undefined) {
      const [shard, status, value] = first
      if (status === "lost") return yield* Effect.fail(fail(new WorkerLost({ ...about, shard })))
      const decoded = yield* Effect.mapError(error.decode(value, errorOf(name, shard)), fail)
      return yield* Effect.fail(fail<E>(new WorkerFailed({ ...about, shard, error: decoded }) as WorkerFailed<E>))
    }
    from = page.next
  }
})

/** The state now, by Redis's word or else as far as it is known here, and then every change. */
export const changesOf = (tasks: Tasks): Stream.Stream<State> =>
  Stream.callback<State>((queue) => {
    // Changes that come before the first state is known come behind it, or are part of it.
    let early: Array<State> | undefined = []
    let known = 0
    // Redis may have gone back with the loss of a session.
    const { losses } = tasks
    const show = (state: State) => {
      if (tasks.isOver(state)) return Queue.endUnsafe(queue)
      if (state.version <= known && tasks.losses === losses) return
      known = 0
      Queue.offerUnsafe(queue, state)
    }
    const see = (state: State | undefined) => {
      if (state === undefined) Queue.endUnsafe(queue)
      else if (early === undefined) show(state)
      else early.push(state)
    }
    const subscribed = Effect.acquireRelease(
      Effect.sync(() => {
        if (tasks.closed) see(undefined)
        tasks.streams.add(see)
        return tasks.place.partition.watch()
      }),
      (end) =>
        Effect.sync(() => {
          end()
          tasks.streams.delete(see)
        })
    )
    return Effect.gen(function*() {
      yield* subscribed
      const page = yield* Effect.orElseSucceed(tasks.read(1, ""), () => undefined)
      const first = page?.state ?? tasks.state
      if (tasks.isOver(first)) return Queue.endUnsafe(queue)
      Queue.offerUnsafe(queue, { ...first, changed: undefined })
      known = first.version
      early?.forEach(show)
      early = undefined
    })
  }, { bufferSize: Number.POSITIVE_INFINITY })
