import { Effect, Option, Schedule, Schema } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import type { Client, Log } from "../client.ts"
import { published, released } from "../outboxes.ts"
import { allOf, fibers, type Workload } from "../workload.ts"

type Events = Lockstep.Topic.Topic<string>

const locks = ["released", "released {o}:\n"]

const job = "submitted"

/** Lives where the lock or the group of its name does. */
const eventsOf = ({ Topic }: typeof Lockstep, name: string) =>
  Topic.make({ name: `of ${name}`, schema: Schema.String, colocate: name })

const pursue = <A, E, R>(client: Client, what: string, key: string, use: (log: Log) => Effect.Effect<A, E, R>) =>
  client.pursue({ kind: `outbox ${what}`, key, weight: 0, wait: true }, use)

// Redis may be out of reach at that moment.
const insist = <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<A, never, R> =>
  Effect.orDie(Effect.retry(effect, Schedule.spaced(100)))

// An operation that failed is recorded as such; the next one follows a moment later.
const paced = <E, R>(client: Client, operation: Effect.Effect<unknown, E, R>): Effect.Effect<void, never, R> =>
  Effect.andThen(operation, Effect.sleep(client.random() * 50)).pipe(
    Effect.catch(() => Effect.sleep(20 + client.random() * 50)),
    Effect.asVoid
  )

// Most work is short, and some takes longer than a lease.
const work = ({ keep, random }: Client) => Effect.sleep(random() < 0.03 ? keep / 2 : random() * 20)

/** Releases a lock with an event. Values begin with the token, so their order is known; some releases share an id. */
const releasing = (client: Client, name: string, events: Events) =>
  Effect.suspend(() =>
    pursue(client, "release", name, ({ tell }) =>
      Effect.gen(function*() {
        const { Lock } = client.lockstep
        const cached = client.random() < 0.3
        const [value, outcome] = yield* Effect.scoped(Effect.gen(function*() {
          const lease = yield* Lock.acquire(name, { wait: 1000, cached })
          const value = `${lease.token} ${client.unique()}`
          const id = client.random() < 0.3 ? `turn ${Math.floor(client.clock.wall() / 100)}` : ""
          tell("writes", name, value, id)
          const outcome = yield* events.publishOnRelease(lease, value, { id: id === "" ? undefined : id })
          yield* work(client)
          if (!(yield* lease.isHeld)) tell("refused", name, value)
          return [value, outcome] as const
        }))
        const stored = yield* outcome
        if (Option.isNone(stored)) tell("refused", name, value)
        else tell(stored.value.duplicate ? "duplicate" : "wrote", name, value)
      }))
  )

/** Submits the result of a shard with an event, unless a reset comes before it. */
const submitting = (client: Client, group: Lockstep.TaskGroup.TaskGroup<string, string>, events: Events) =>
  Effect.suspend(() =>
    client.random() < 0.1 ?
      group.reset :
      pursue(client, "submit", job, ({ tell }) =>
        Effect.scoped(Effect.gen(function*() {
          const task = yield* group.register(String(Math.floor(client.clock.wall() / 100)))
          const value = `${task.lease.token} ${client.unique()}`
          tell("writes", job, value, "")
          yield* work(client)
          yield* task.submit(value, { publish: yield* events.publication(value) }).pipe(
            Effect.tapErrorTag("TaskGroupError", ({ reason }) =>
              Effect.sync(() => {
                if (reason._tag === "SubmitRefused") tell("refused", job, value)
              }))
          )
          tell("wrote", job, value)
        })))
  )

/** Reads all events. */
const census = (client: Client, key: string, events: Events) =>
  pursue(client, "census", key, ({ tell }) =>
    Effect.map(allOf(events), (all) => {
      for (const { id, value } of all) tell("event", key, value, id)
      tell("counted", key)
    })).pipe(Effect.timeoutOption(client.keep), Effect.ignore)

const using = (client: Client, name: string) =>
  Effect.gen(function*() {
    const events = yield* insist(eventsOf(client.lockstep, name))
    if (name === job) {
      const { TaskGroup } = client.lockstep
      const group = yield* insist(TaskGroup.make({ name, result: Schema.String, timeToLive: client.keep }))
      yield* fibers(1, client, paced(client, submitting(client, group, events)))
    } else {
      yield* fibers(2, client, paced(client, releasing(client, name, events)))
    }
    yield* census(client, name, events)
  }).pipe(Effect.scoped)

/** Two locks whose releases store an event each, and a group of tasks whose results do. */
export const outbox: Workload = {
  name: "outbox",
  run: (client) =>
    Effect.forEach([...locks, job], (name) => using(client, name), { concurrency: "unbounded", discard: true }),
  check: (holds, run) => [...published(holds, run), ...released(holds, run)],
  clear: (lockstep) =>
    Effect.forEach(
      [...locks, job],
      (name) => Effect.scoped(Effect.flatMap(eventsOf(lockstep, name), ({ purge }) => purge)),
      { discard: true }
    )
}
