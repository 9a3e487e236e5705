import { Effect, Layer, Schedule, Schema, Stream } from "effect"
import { PersistedQueue } from "effect/persistence"
import type * as Lockstep from "../../../src/index.ts"
import type { Client, Log } from "../client.ts"
import { mostAttempts, name, persisted, retryDelay } from "../persisted.ts"
import { planOf } from "../queues.ts"
import { fibers, lives, type Workload } from "../workload.ts"
import { emptied, forever, longestRetention, refusal, valuesOf } from "./queue.ts"

const retentionOf = ({ keep }: Client): number => Math.min(keep - 1000, longestRetention)

const follow = <A, E, R>(client: Client, verb: string, use: (log: Log) => Effect.Effect<A, E, R>) =>
  client.follow({ kind: `persistedQueue ${verb}`, key: name, weight: 1, wait: false }, use)

// The error of the library is behind that of Effect.
const bare = <A, E, R>(self: Effect.Effect<A, E, R>) =>
  Effect.mapError(self, (error) => error instanceof PersistedQueue.PersistedQueueError ? error.cause : error)

const opened = PersistedQueue.make({
  name,
  schema: Schema.String,
  maxAttempts: mostAttempts,
  retrySchedule: Schedule.spaced(retryDelay)
})

type Elements = Effect.Success<typeof opened>

/** Handles an element as its plan says. Some takers give up at any moment, also before they have an element. */
const taking = (client: Client, elements: Elements) =>
  Effect.suspend(() => {
    const taken = take(client, elements)
    return client.random() < 0.3 ? Effect.timeoutOption(taken, client.random() * 300) : taken
  })

const take = (client: Client, elements: Elements) =>
  client.pursue(
    { kind: "persistedQueue take", key: name, weight: 1, wait: false },
    ({ step, tell }) =>
      bare(elements.take((value, { attempts, id }) =>
        Effect.gen(function*() {
          tell("begins", value, id, attempts)
          const { failing, long } = planOf(value)
          let left = long ? 40 : 1 + Math.floor(client.random() * 3)
          yield* Effect.whileLoop({ while: () => left-- > 0, body: () => Effect.sleep(client.random() * 10), step })
          if (attempts <= failing) {
            tell("fails")
            return yield* Effect.fail(refusal(value))
          }
          tell("done")
        }).pipe(Effect.ensuring(Effect.sync(() => tell("over"))))
      ))
  )

const plans = ["plain", "plain", "plain", "plain", "fails1", "fails2", "never", "long"]

// Some are ids that a job cannot have.
const idsOf = (turn: number): ReadonlyArray<string> => [`turn ${turn}`, `=${turn}`, `n1-${turn}`, `${turn}`.repeat(100)]

const offering = (client: Client, elements: Elements) => {
  const { pick, random } = client
  const value = valuesOf(client)
  return Effect.suspend(() =>
    follow(client, "offer", ({ tell }) => {
      const own = value(pick(plans))
      // Clients that come at the same time bring the same id.
      const id = random() < 0.4 ? pick(idsOf(Math.floor(client.clock.wall() / 100))) : undefined
      const delay = random() < 0.2 ? Math.round(random() * 300) : undefined
      tell("offers", own, id ?? "", delay ?? 0)
      return Effect.andThen(bare(elements.offer(own, { id, delay })), Effect.sync(() => tell("stored", own)))
    })
  ).pipe(
    Effect.andThen(Effect.suspend(() => Effect.sleep(random() * 200))),
    Effect.catch(() => Effect.sleep(20 + random() * 50))
  )
}

const Body = Schema.Struct({ element: Schema.String })

/** Waits until nothing is left but dead letters, no longer than a bound, and reads these. */
const settled = (client: Client, queue: Lockstep.Queue.Queue<Schema.Json>) =>
  follow(client, "settled", (log) =>
    Effect.gen(function*() {
      if (!(yield* emptied(client, log, queue.state))) return
      const { tell } = log
      const letters = yield* Effect.retry(Stream.runCollect(queue.deadLetters), Schedule.spaced(100))
      for (const { body, letter, reason } of letters) {
        tell("letter", letter, Schema.decodeUnknownSync(Body)(JSON.parse(body)).element, reason)
      }
      tell("counted")
    }))

const using = Effect.fnUntraced(function*(client: Client) {
  const { layerStore, lockstep } = client
  const retention = retentionOf(client)
  const store = PersistedQueue.layer.pipe(Layer.provide(layerStore({ retention })))
  const elements = yield* Effect.provide(opened, yield* Layer.build(store))
  // It leaves to the store how the queue works.
  const queue = yield* lockstep.Queue.make({ name, payload: Schema.Json })
  yield* follow(client, "open", ({ tell }) => Effect.sync(() => tell("retains", retention)))
  yield* forever(taking(client, elements))
  yield* forever(taking(client, elements))
  yield* fibers(1, client, offering(client, elements))
  yield* settled(client, queue)
})

/** A `PersistedQueue` whose takers are interrupted at any moment. */
export const persistedQueue: Workload = {
  name: "persistedQueue",
  run: (client) => lives(using(client)),
  check: persisted,
  clear: ({ Queue }) =>
    Effect.scoped(
      Effect.flatMap(Queue.make({ payload: Schema.Json, name, shards: 1 }), (queue) =>
        Effect.andThen(queue.drain({ delayed: true }), queue.discard()))
    )
}
