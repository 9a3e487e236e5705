import { Effect, Schedule, Schema, type Scope, Stream } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import type { Client } from "../client.ts"
import { kept, keyOf } from "../topics.ts"
import { fibers, growingPause, lives, patienceOf, type Workload } from "../workload.ts"

type Topic = Lockstep.Topic.Topic<string>
type Event = Lockstep.Topic.Event<string>
type Element = Lockstep.Topic.Element<string>

/** One topic keeps all events of a round; another one keeps few, unless a group needs them; shards of the last one change. */
const shapes = [
  { name: "whole", shards: 1 },
  { name: "short {b}:\n", shards: 3, retention: { length: 16 } },
  { name: "moving" }
] as const

const keys = ["a", "b", "c}:\n", "d", "e", "f", "\u{1f512}", ""]

/** A failure on purpose. It is recorded as a timeout. */
const refusal = { reason: { _tag: "WaitTimeout" } }

const open = (
  { Topic }: typeof Lockstep,
  shape: { readonly name: string; readonly shards?: number; readonly retention?: Lockstep.Topic.Retention }
) => Topic.make({ ...shape, schema: Schema.String, key: keyOf })

/** An id without its shard. */
const plain = (id: string): string => id.slice(id.indexOf(":") + 1)

// Restarts after every failure, until its scope closes.
const forever = <E, R>(effect: Effect.Effect<unknown, E, R>) =>
  effect.pipe(Effect.catch(() => Effect.sleep(100)), Effect.forever, Effect.forkScoped)

// ---------------------------------------------------------------------------------------------------------------------
// Publish
// ---------------------------------------------------------------------------------------------------------------------

const publisher = (client: Client, topic: Topic) => {
  // Few, so that publishers of one key meet while its shard changes.
  const own = topic.name === "moving" ? keys.slice(0, 3) : keys
  const name = client.unique().slice(0, 8)
  let count = 0
  const value = (key: string) => `${key}/${name}.${++count}`
  const publish = (values: ReadonlyArray<string>, id: string) =>
    client.pursue(
      { kind: "topic publish", key: topic.name, weight: values.length, wait: false },
      ({ tell }) =>
        Effect.suspend(() => {
          for (const value of values) tell("publishes", value, id)
          const published = id === ""
            ? values.length === 1 ? Effect.map(topic.publish(values[0]!), (one) => [one]) : topic.publishAll(values)
            : Effect.map(topic.publish(values[0]!, { id }), (one) => [one])
          return Effect.map(published, (all) => {
            for (const [at, { duplicate, id }] of all.entries()) tell("stored", values[at]!, id, duplicate ? 1 : 0)
          })
        })
    )
  // Changes the number of shards while events of one key are on their way.
  const move = Effect.gen(function*() {
    const key = client.pick(own)
    const shards = 1 + Math.floor(client.random() * client.partitions)
    yield* publish([1, 2, 3, 4].map(() => value(key)), "")
    yield* Effect.scoped(open(client.lockstep, { name: topic.name, shards }))
    yield* publish([value(key)], "")
  })
  return Effect.gen(function*() {
    if (topic.name === "moving" && client.random() < client.moves) yield* move
    const way = client.random()
    // Clients that come at the same time bring the same id.
    const turn = Math.floor(client.clock.wall() / 100)
    const size = way < client.moves / 4
      ? 20 + Math.floor(client.random() * 80)
      : way < 0.2
      ? 2 + Math.floor(client.random() * 6)
      : 1
    const values = Array.from({ length: size }, () => value(client.pick(own)))
    yield* way > 0.8 ? publish([value(own[turn % own.length]!)], `turn ${turn}`) : publish(values, "")
    yield* Effect.sleep(client.random() ** 2 * 200)
  }).pipe(Effect.catch(() => Effect.sleep(20 + client.random() * 50)))
}

// ---------------------------------------------------------------------------------------------------------------------
// Subscribe
// ---------------------------------------------------------------------------------------------------------------------

// Seen instead of an id: Redis has lost events, and what was published until this process was connected again may be missing, too.
const lost = "lost"

// Of a slow subscriber, in milliseconds: retention removes what comes meanwhile.
const longestPause = 3000

/**
 * Answers the ids that it has seen. A slow subscriber has a small buffer, pauses now and then, and resumes behind its last
 * event.
 */
const subscriber = Effect.fnUntraced(function*(client: Client, topic: Topic, slow: boolean) {
  const seen = new Set<string>()
  let last: string | undefined
  const see = (element: Element, tell: (...what: ReadonlyArray<string | number>) => void): Effect.Effect<void> => {
    if (element._tag === "Gap") {
      tell("gap", element.reason, element.missed ?? -1)
      if (element.reason === "lost") seen.add(lost)
    } else {
      seen.delete(lost)
      tell("saw", element.id, element._tag === "Event" ? element.value : "undecodable", element.key ?? "")
      last = element.id
      seen.add(plain(element.id))
    }
    if (!slow || client.stopping() || client.random() > 0.03) return Effect.void
    return Effect.sleep(client.random() ** 3 * longestPause)
  }
  yield* forever(Effect.suspend(() => {
    // For the other shards, an id is only a time.
    const from = topic.name === "whole" && last !== undefined ? { after: last } : "beginning"
    const reading = client.pursue(
      { kind: "topic subscriber", key: topic.name, weight: 0, wait: false },
      ({ tell }) => {
        if (from !== "beginning") tell("from", from.after)
        return Stream.runForEach(
          topic.subscribe({ from, buffer: slow ? { capacity: 8 } : undefined }),
          (element) => see(element, tell)
        )
      }
    )
    // Most readings are short: they begin often, and hardly ever where the shared read stands.
    return slow ? Effect.timeoutOption(reading, 50 + client.random() ** 6 * 7000) : reading
  }))
  return seen
})

// ---------------------------------------------------------------------------------------------------------------------
// Groups
// ---------------------------------------------------------------------------------------------------------------------

/** Handles an event. That it is done is recorded before it is acknowledged. */
const handled = <E>(
  client: Client,
  topic: Topic,
  group: string,
  event: Event,
  refuse: boolean,
  conclude: Effect.Effect<void, E>
) =>
  client.follow(
    { kind: `topic ${group}`, key: topic.name, weight: 1, wait: false },
    ({ step, tell }) =>
      Effect.gen(function*() {
        tell("handles", event.id, event.value, event.key ?? "", event.attempt, event.crashes)
        for (let left = 1 + Math.floor(client.random() * 3); left > 0; left--) {
          yield* Effect.sleep(client.random() * (client.random() < 0.01 ? 300 : 6))
          step()
        }
        if (!refuse) tell("done")
        yield* conclude
        if (refuse) return yield* Effect.fail(refusal)
      })
  )

const gapped = (client: Client, topic: Topic, group: string, { missed, reason }: Lockstep.Topic.Gap) =>
  client.follow(
    { kind: `topic ${group}`, key: topic.name, weight: 0, wait: false },
    ({ tell }) => Effect.sync(() => tell("gap", reason, missed ?? -1))
  )

const running = (client: Client, topic: Topic, group: string, often: number, orderBy: "key" | undefined) =>
  topic.run((event) => handled(client, topic, group, event, client.random() < often, Effect.void), {
    group,
    orderBy,
    from: "beginning",
    concurrency: orderBy === "key" ? 4 : 2,
    retry: Schedule.spaced(Math.round(client.random() * 100)),
    // Sessions are lost on purpose: every event is to be handled, and none becomes a dead letter.
    crashes: 1000,
    onGap: (gap) => gapped(client, topic, group, gap)
  })

/** Acknowledges explicitly, returns some events at once or later, and leaves now and then without having handled all. */
const consuming = (client: Client, topic: Topic, group: string) =>
  Effect.raceFirst(
    Stream.runForEach(
      topic.consume({ group, from: "beginning", prefetch: 8 }),
      ({ acknowledge, element, lost, retry }) => {
        if (element._tag === "Gap") return gapped(client, topic, group, element)
        const way = client.random()
        const returned = retry(way < 0.1 ? undefined : client.random() * 300)
        return Effect.raceFirst(
          Effect.ignore(handled(client, topic, group, element as Event, way < 0.2, way < 0.2 ? returned : acknowledge)),
          lost
        )
      }
    ),
    client.pause(500 + client.random() * 4000)
  )

const groups = ["ordered", "unordered"]

const members = Effect.fnUntraced(function*(client: Client, topic: Topic) {
  yield* forever(Effect.suspend(() => running(client, topic, "ordered", 0.05, "key")))
  yield* forever(Effect.suspend(() =>
    client.random() < 0.5
      ? Effect.raceFirst(
        running(client, topic, "unordered", 0.2, undefined),
        client.pause(500 + client.random() * 4000)
      )
      : consuming(client, topic, "unordered")
  ))
  // Retention may remove events that are published before all shards have the groups.
  const exist = Effect.map(
    topic.state,
    (state) => state.groups.filter(({ members }) => members > 0).length === groups.length
  )
  yield* exist.pipe(
    Effect.catch(() => Effect.succeed(false)),
    Effect.delay(20),
    Effect.repeat({ while: (known) => !known && !client.stopping() })
  )
})

// ---------------------------------------------------------------------------------------------------------------------
// Settle
// ---------------------------------------------------------------------------------------------------------------------

/** Waits until groups and subscribers have caught up, but no longer than a bound. */
const settled = (client: Client, topic: Topic, readings: ReadonlyArray<ReadonlySet<string>>) =>
  client.follow(
    { kind: "topic settled", key: topic.name, weight: 0, wait: true },
    ({ tell }) =>
      Effect.gen(function*() {
        const isOver = patienceOf(client)
        const pause = growingPause()
        for (;;) {
          const state = yield* topic.state.pipe(Effect.catch(() => Effect.undefined))
          const open = state === undefined ? [] : state.groups.filter(({ lag, pending }) => lag + pending > 0)
          const behind = state === undefined
            ? 0
            : readings.filter((seen) => !seen.has(lost) && state.last.some((id) => !seen.has(plain(id)))).length
          // A group whose members could not join all shards knows nothing of the events of the others.
          const joined = state?.groups.filter(({ members }) => members > 0) ?? []
          if (joined.length === groups.length && open.length === 0 && behind === 0) return
          const left = open.reduce((sum, { lag, pending }) => sum + lag + pending, 0)
          if (isOver(state === undefined ? Number.POSITIVE_INFINITY : left)) {
            for (const { lag, members, name, pending } of open) tell("open", name, members, lag, pending)
            tell("behind", behind, state?.groups.length ?? -1)
            return yield* Effect.fail(refusal)
          }
          yield* pause
        }
      })
  ).pipe(Effect.ignore)

const using = (client: Client, shape: typeof shapes[number]): Effect.Effect<
  void,
  Lockstep.Topic.TopicError,
  Lockstep.Coordinator.Coordinator | Scope.Scope
> =>
  Effect.gen(function*() {
    const topic = yield* open(client.lockstep, shape)
    const readings: Array<ReadonlySet<string>> = []
    if (client.random() < 0.7) readings.push(yield* subscriber(client, topic, false))
    for (let slow = Math.floor(client.random() * 4); slow > 0; slow--) {
      readings.push(yield* subscriber(client, topic, true))
    }
    yield* members(client, topic)
    yield* fibers(1, client, publisher(client, topic))
    yield* settled(client, topic, readings)
  })

/**
 * Three topics. Every client has some of them, and publishes: with keys, with ids, and many events at once. Some clients subscribe.
 * Every client is a member of two groups: one is ordered by key; in the other one handlers fail, return events, and leave.
 */
export const topic: Workload = {
  name: "topic",
  run: (client) =>
    Effect.suspend(() => {
      const some = shapes.filter(() => client.random() < 0.5)
      const chosen = some.length === 0 ? [client.pick(shapes)] : some
      return lives(Effect.forEach(chosen, (shape) => using(client, shape), { concurrency: "unbounded", discard: true }))
    }),
  check: kept,
  clear: (lockstep) =>
    Effect.scoped(
      Effect.forEach(shapes, (shape) => Effect.flatMap(open(lockstep, shape), ({ purge }) => purge), { discard: true })
    )
}
