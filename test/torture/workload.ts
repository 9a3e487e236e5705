import { Effect, type Scope, Stream } from "effect"
import type * as Lockstep from "../../src/index.ts"
import type { Anomaly, Run } from "./checks.ts"
import type { Client } from "./client.ts"
import type { Hold } from "./history.ts"

export interface Workload {
  readonly name: string
  /** Runs until `client.stopping()`. */
  readonly run: (client: Client) => Effect.Effect<void, never, Lockstep.Coordinator.Coordinator>
  /** What is wrong with the holds of its kind on one key. */
  readonly check: (holds: ReadonlyArray<Hold>, run: Run) => ReadonlyArray<Anomaly>
  /** Removes what stays when all clients have ended, because users store it. It can wait for the delivery of errands, by their name. */
  readonly clear?: (
    lockstep: typeof Lockstep,
    delivered: (errands: string) => Effect.Effect<void, unknown, Lockstep.Coordinator.Coordinator>
  ) => Effect.Effect<void, unknown, Lockstep.Coordinator.Coordinator>
}

/** Why what was asked was given up. */
export const gaveUp = { reason: { _tag: "GaveUp" } }

/** As if the lease had been lost once, and nothing done with the next one. */
export const again = { reason: { _tag: "LeaseLost", reason: "again" } }

/** For what runs a body again after a loss: the second time, it fails. */
export const onlyOnce = <A, E, R>(body: Effect.Effect<A, E, R>): Effect.Effect<A, E | typeof again, R> => {
  let ran = false
  return Effect.suspend((): Effect.Effect<A, E | typeof again, R> => {
    if (ran) return Effect.fail(again)
    ran = true
    return body
  })
}

/** How long what no client has open is remembered, in milliseconds. */
export const keepOf = (lease: number): number => lease * 3 + 1000

/** When a request was executed at the latest. */
export const latest = ({ asked, ended = asked, entered }: Hold, run: Run): number =>
  entered ?? ended + keepOf(run.lease / 1000) * 1000

// In milliseconds: some handlers take seconds.
const leastPatience = 7000

/** How long jobs may take at least, in milliseconds. */
export const longest = ({ keep }: Client): number => Math.max(keep, leastPatience)

/**
 * Says when to give up what gets no further: when not less is left than before, for a while. With many clients on few cores, or a
 * rate, what the faults have left behind can take long.
 */
export const patienceOf = (client: Client): (left: number) => boolean => {
  const { now } = client.clock
  const patience = longest(client)
  let [until, least] = [now() + patience, Number.POSITIVE_INFINITY]
  return (left) => {
    if (left < least) [until, least] = [Math.max(until, now() + patience / 2), left]
    return now() > until
  }
}

// Between two looks at what settles, in milliseconds: each look takes several requests, so it looks less and less often.
const [firstPause, longestPause] = [50, 400]

/** Waits longer and longer. */
export const growingPause = (): Effect.Effect<void> => {
  let next = firstPause
  return Effect.suspend(() => {
    const pause = Effect.sleep(next)
    next = Math.min(next * 2, longestPause)
    return pause
  })
}

/** All events that a topic with one shard has. */
export const allOf = <A>(topic: Lockstep.Topic.Topic<A>) =>
  Effect.flatMap(
    topic.state,
    ({ last: [last], length }) =>
      length === 0 ? Effect.succeed([]) : topic.subscribe({ from: "beginning" }).pipe(
        Stream.takeUntil((element) => element._tag === "Event" && element.id === last),
        Stream.filter((element) => element._tag === "Event"),
        Stream.runCollect
      )
  )

/** So many fibers at once, each again and again, as fast as Redis answers. */
export const fibers = (
  count: number,
  client: Client,
  once: Effect.Effect<void, never, Lockstep.Coordinator.Coordinator>
): Effect.Effect<void, never, Lockstep.Coordinator.Coordinator> => {
  const body = Effect.andThen(once, client.rest)
  return Effect.forEach(
    Array.from({ length: count }),
    () => Effect.whileLoop({ while: () => !client.stopping(), body: () => body, step: () => {} }),
    { concurrency: "unbounded", discard: true }
  )
}

/**
 * The lives of a client, each in a scope. Another one follows each that fails, as Redis may be out of memory or out of reach at that
 * moment, and each that answers false. So the last one has done what work the client had left.
 */
export const lives = <A, E, R>(life: Effect.Effect<A, E, R>): Effect.Effect<void, never, Exclude<R, Scope.Scope>> =>
  life.pipe(
    Effect.scoped,
    Effect.map((answer) => answer !== false),
    Effect.catch(() => Effect.as(Effect.sleep(100), false)),
    Effect.repeat({ until: (isLast) => isLast }),
    Effect.asVoid
  )
