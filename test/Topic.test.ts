/** Topics: every event reaches every subscriber and every group, in order per key, and what is missing shows. */
import { assert, layer } from "@effect/vitest"
import {
  Cause,
  Context,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Layer,
  Logger,
  Metric,
  Option,
  Queue,
  Schedule,
  Schema,
  SchemaTransformation,
  Scope,
  Stream
} from "effect"
import { Coordinator, Lock, Metrics, SharedRef, TaskGroup, Topic } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { placeIn, spaceOf } from "../src/internal/hold/place.ts"
import { request } from "../src/internal/hold/request.ts"
import { feedOf } from "../src/internal/topic/feed.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { interruptedAfter, interruptedAt } from "./support/interrupter.ts"
import { freshNamespace, type Node, node, short, TestServer, withNode } from "./support/live.ts"
import { keysOf } from "./support/namespace.ts"
import { asks } from "./support/requests.ts"
import { forget, ownedIn } from "./support/sessions.ts"
import { channelOf, forgetSession, lose, missed, on, promptly, revoked, several } from "./support/several.ts"
import { recording } from "./support/spans.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const hostile = "x\u0000}{:\r\n\"é😀"

// Events outlive their program, so the tests remove them.
const purged = <A>(topic: Topic.Topic<A>) => Effect.addFinalizer(() => Effect.orDie(topic.purge))

const make = (options: Partial<Topic.Options<number> & { readonly name: string }> = {}) =>
  Effect.tap(Topic.make({ name: hostile, schema: Schema.Number, ...options }), purged)

const collect = <A, E>(stream: Stream.Stream<Topic.Element<A>, E>, count: number) =>
  promptly(Stream.runCollect(Stream.take(stream, count)), `${count} events`)

const valuesOf = (elements: ReadonlyArray<Topic.Element<number>>) =>
  elements.map((element) => element._tag === "Event" ? element.value : element._tag)

/** How many events they are, with the missing ones. */
const accounted = (elements: ReadonlyArray<Topic.Element<number>>) =>
  elements.reduce((sum, element) => sum + (element._tag === "Gap" ? element.missed! : 1), 0)

const upTo = (count: number, from = 0) => Array.from({ length: count }, (_, at) => from + at)

const groupOf = <A>(topic: Topic.Topic<A>, name: string) =>
  Effect.map(topic.state, ({ groups }) => groups.find((group) => group.name === name))

const joined = <A>(topic: Topic.Topic<A>, name: string, members: number) =>
  eventually(Effect.map(groupOf(topic, name), (group) => assert.strictEqual(group?.members, members)))

const settled = <A>(topic: Topic.Topic<A>, name: string) =>
  eventually(Effect.map(groupOf(topic, name), (group) => assert.deepStrictEqual([group?.lag, group?.pending], [0, 0])))

const refusal = <A, E>(exit: Exit.Exit<A, E>) =>
  Exit.isFailure(exit) ? (Cause.squash(exit.cause) as Topic.TopicError).reason._tag : undefined

const isRangeError = <A, E>(exit: Exit.Exit<A, E>) =>
  assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"), String(exit))

const subscribers = <A>(topics: ReadonlyArray<Topic.Topic<A>>, count: number, options?: Topic.SubscribeOptions) =>
  Effect.forEach(topics, (topic) =>
    Effect.gen(function*() {
      const found: Array<Topic.Element<A>> = []
      const marked = yield* Deferred.make<void>()
      const fiber = yield* Effect.forkChild(
        Stream.runForEach(topic.subscribe(options), (element) =>
          Effect.andThen(
            Effect.sync(() => found.push(element)),
            found.length >= count ? Deferred.succeed(marked, undefined) : Effect.void
          ))
      )
      return { found, fiber }
    }))

layer(TestServer.layer, live)("a topic", (it) => {
  it.effect("brings every event to every subscriber, in order", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const topics = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const reading = yield* subscribers(topics, 100, { from: "beginning" })
        for (let n = 0; n < 100; n++) yield* topics[n % 3]!.publish(n)
        for (const { found } of reading) {
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(valuesOf(found), upTo(100))))
        }
        const [first] = reading[0]!.found as Array<Topic.Event<number>>
        assert.deepStrictEqual([first!.publisher, first!.attempt, first!.key], ["node0", 1, undefined])
        const { bytes, first: oldest, last, length, members } = yield* topics[0]!.state
        assert.deepStrictEqual([length, members, oldest.length, last.length], [100, 3, 1, 1])
        assert.strictEqual(bytes, upTo(100).join("").length)
      })))

  it.effect("begins where its options say", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const published = yield* topic.publishAll(upTo(500))
        // Later than all of them.
        yield* realSleep(2)
        yield* topic.publishAll(upTo(500, 500), { key: "all" })
        const all = yield* collect(topic.subscribe({ from: "beginning" }), 1000)
        assert.deepStrictEqual(valuesOf(all), upTo(1000))
        for (const from of [{ after: published[499]!.id }, { since: (all[500] as Topic.Event<number>).time }]) {
          assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe({ from }), 500)), upTo(500, 500))
        }
        const last = yield* collect(topic.subscribe({ from: { last: 10 } }), 10)
        assert.deepStrictEqual(valuesOf(last), upTo(10, 990))
        const first = (all[0] as Topic.Event<number>).time
        // Also before 1970, and between two milliseconds.
        for (const since of [first, -1, Number(first.epochMilliseconds) - 0.5]) {
          assert.strictEqual((yield* collect(topic.subscribe({ from: { since } }), 1000)).length, 1000)
        }
        const [now] = yield* subscribers([topic], 1)
        // A subscriber that begins now is known by nothing but what it gets.
        yield* eventually(
          Effect.gen(function*() {
            yield* topic.publish(-1)
            assert.isAbove(now!.found.length, 0)
          }),
          { interval: 20 }
        )
        assert.isTrue(valuesOf(now!.found).every((value) => value === -1))
      })))

  it.effect("finds the last events without reading all of them", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const topic = yield* on(context, make())
        // Many in one millisecond, and few in others.
        for (const count of [1, 500, 1, 1, 200, 1]) {
          yield* topic.publishAll(upTo(count))
          yield* realSleep(2)
        }
        let { length } = yield* topic.state
        let counts: Array<number> = []
        yield* line.onRequest(({ args, name }) => {
          if (name.endsWith("RANGE") && args.at(-2) === "COUNT") counts.push(Number(args.at(-1)))
          return "pass"
        })
        for (const last of [1, 2, 3, 202, 203, 204, 400, 709, 710, 711, 712]) {
          counts = []
          const stream = yield* topic.subscribed({ from: { last } })
          const end = yield* topic.publish(-1)
          const found = yield* Stream.runCollect(
            Stream.takeUntil(stream, (event) => event._tag === "Event" && event.id === end.id)
          )
          assert.strictEqual(found.length, Math.min(last, length++) + 1)
          // One page is what a subscriber reads then.
          assert.isAtMost(Math.max(...counts), 256)
          assert.isAtMost(counts.filter((count) => count === 1).length, 40)
        }
      }), {}))

  it.effect("refuses what makes no sense, and loses nothing by it", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        isRangeError(yield* Effect.exit(on(a!, make({ shards: 0 }))))
        isRangeError(yield* Effect.exit(on(a!, make({ retention: { length: 0 } }))))
        isRangeError(yield* Effect.exit(topic.publish(1, { key: "" })))
        isRangeError(yield* Effect.exit(topic.publish(1, { id: "x".repeat(513) })))
        isRangeError(
          yield* Effect.exit(Effect.suspend(() => Stream.runDrain(topic.subscribe({ from: { after: "x" } }))))
        )
        isRangeError(
          yield* Effect.exit(Effect.suspend(() => Stream.runDrain(topic.subscribe({ buffer: { capacity: 0 } }))))
        )
        isRangeError(yield* Effect.exit(Effect.suspend(() => Stream.runDrain(topic.consume({ group: "" })))))
        const invalid = yield* Effect.flip(topic.publish("one" as never))
        assert.strictEqual(invalid.reason._tag, "InvalidPayload")
        assert.strictEqual((yield* topic.state).length, 0)
      })))

  it.effect("stores a publication with an id once, whichever process makes it", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const [a, b] = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const first = yield* a!.publish(1, { id: hostile })
        const second = yield* b!.publish(2, { id: hostile })
        assert.deepStrictEqual([first.duplicate, second], [false, { id: first.id, duplicate: true }])
        const both = yield* Effect.all([a!.publish(3, { id: "x" }), a!.publish(4, { id: "x" })], { concurrency: 2 })
        assert.deepStrictEqual(both.map(({ duplicate }) => duplicate), [false, true])
        assert.deepStrictEqual(valuesOf(yield* collect(b!.subscribe({ from: "beginning" }), 2)), [1, 3])
      })))

  it.effect("sends large events in several requests, however many are published at once", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const topic = yield* on(context, Effect.tap(Topic.make({ name: "texts", schema: Schema.String }), purged))
        const sizes: Array<number> = []
        yield* line.onRequest(({ args }) => {
          sizes.push(...args.map(({ length }) => length))
          return "pass"
        })
        const text = "x".repeat(2 ** 21)
        const published = yield* topic.publishAll(["1", "2", text, text, "3"])
        assert.strictEqual(new Set(published.map(({ id }) => id)).size, 5)
        assert.isTrue(
          sizes.some((size) => size > 2 ** 21) && Math.max(...sizes) <= 2 ** 22,
          `${Math.max(...sizes)} bytes`
        )
        const found = yield* collect(topic.subscribe({ from: "beginning" }), 5)
        assert.deepStrictEqual(found.map((event) => event._tag === "Event" && event.value.slice(0, 1)), [..."12xx3"])
      }), {}))

  it.effect("knows the ids of publications for as long also when it was deleted meanwhile", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const first = yield* Effect.scoped(
          Effect.flatMap(on(a!, make({ dedupe: "1 second" })), (topic) => topic.publish(1, { id: "x" }))
        )
        const kept = Effect.map(keysOf(server, namespace), (keys) => keys.filter((key) => key.includes(":topic")))
        assert.isTrue((yield* kept).every((key) => !key.includes("topic-entries")))
        yield* Effect.scoped(Effect.gen(function*() {
          const topic = yield* on(b!, make())
          assert.deepStrictEqual(yield* topic.publish(2, { id: "x" }), { ...first, duplicate: true })
          assert.strictEqual((yield* topic.state).length, 0)
        }))
        yield* eventually(Effect.map(kept, (keys) => assert.deepStrictEqual(keys, [])))
      })))

  for (const [verb, options] of [["topic.publish", { key: "a" }], ["topic.publishAll", {}]] as const) {
    it.effect(`stores a publication once when its reply is lost with the session: ${verb}`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        yield* Effect.scoped(Effect.gen(function*() {
          const line = yield* proxy(server)
          const context = yield* node(line.url, { namespace, partitions: 1, ...short })
          const topic = yield* on(context, make())
          yield* topic.publish(0, options)
          const { changes } = Context.get(context, Coordinator.Coordinator)
          const lost = yield* Effect.forkChild(
            changes.pipe(Stream.filter(({ to }) => to === "lost"), Stream.take(1), Stream.runDrain)
          )
          yield* Effect.yieldNow
          const sent = yield* line.once(asks(verb), "dropReply")
          const first = yield* Effect.forkChild(topic.publish(1, options))
          yield* sent
          yield* forget(server, namespace)
          yield* Fiber.join(lost)
          // Publications go on while the request is made again by the next session.
          const others: Array<Fiber.Fiber<Topic.Published, Topic.TopicError>> = []
          while (first.pollUnsafe() === undefined || others.length < 100) {
            others.push(yield* Effect.forkChild(topic.publish(2 + others.length, options)))
            yield* Effect.promise(() => new Promise((resolve) => setImmediate(resolve)))
          }
          yield* promptly(Effect.forEach([first, ...others], Fiber.join), "the publications")
          const count = 2 + others.length
          const found = valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), count))
          assert.deepStrictEqual(found, upTo(count))
          assert.strictEqual((yield* topic.state).length, count)
        }))
      }))
  }

  it.effect("does not say that a publication was not stored when Redis refuses its repetition", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const topic = yield* on(context, make())
        yield* topic.publish(0)
        // The connection that is cut stays so until Redis is full.
        yield* line.refuse
        const sent = yield* line.once(asks("topic.publishAll"), "dropReply")
        const publishing = yield* Effect.forkChild(Effect.flip(topic.publish(1)))
        yield* sent
        yield* forgetSession(context, namespace, server)
        const error = yield* Effect.acquireUseRelease(
          server.cli("CONFIG", "SET", "maxmemory", 1),
          () => Effect.andThen(line.pass, promptly(Fiber.join(publishing), "the failure")),
          () => Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 0))
        )
        assert.strictEqual(error.reason._tag, "Timeout")
        yield* eventually(Effect.map(topic.state, ({ length }) => assert.strictEqual(length, 2)))
      }), { lease: "30 seconds", margin: "1 second", requestTimeout: "10 seconds" }))

  it.effect("does not store a publication again that Redis may have forgotten, when the session is lost", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const topic = yield* on(context, make({ name: "numbers", dedupe: "50 millis" }))
        for (const [at, options] of [{}, { key: "k" }].entries()) {
          yield* topic.publish(3 * at, options)
          // The connection that is cut stays so until Redis has forgotten the publication and the session.
          yield* line.refuse
          const sent = yield* line.once(asks(at === 0 ? "topic.publishAll" : "topic.publish"), "dropReply")
          const lost = yield* Effect.forkChild(Effect.flip(topic.publish(3 * at + 1, options)))
          yield* sent
          const known = server.cli(
            "EXISTS",
            `{${namespace}:00}:topic-even:numbers`,
            `{${namespace}:00}:topic-odd:numbers`
          )
          yield* eventually(Effect.map(known, (count) => count === "0"))
          yield* forgetSession(context, namespace, server)
          yield* line.pass
          assert.strictEqual((yield* promptly(Fiber.join(lost), "the failure")).reason._tag, "Timeout")
          yield* topic.publish(3 * at + 2, options)
        }
        assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), 6)), upTo(6))
        assert.strictEqual((yield* topic.state).length, 6)
      }), short))

  it.effect("does not store it again either when another process has said for how long it is known", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const other = yield* direct()
        const topic = yield* on(context, make())
        yield* topic.publish(0)
        const theirs = yield* on(other, make({ dedupe: "50 millis" }))
        // The news of that comes with its mailbox.
        yield* topic.publish(1)
        yield* line.refuse
        const sent = yield* line.once(asks("topic.publishAll"), "dropReply")
        const lost = yield* Effect.forkChild(Effect.flip(topic.publish(2)))
        yield* sent
        const keys = ["even", "odd"].map((role) => `{${namespace}:00}:topic-${role}:${hostile}`)
        yield* eventually(Effect.map(theirs.state, ({ length }) => length === 3))
        const numbers = Effect.map(
          Effect.forEach(keys, (key) => server.cli("HVALS", key)),
          (found) => found.join("\n").split("\n")
        )
        yield* eventually(Effect.map(numbers, (known) => !known.includes("3")))
        yield* forgetSession(context, namespace, server)
        yield* line.pass
        assert.strictEqual((yield* promptly(Fiber.join(lost), "the failure")).reason._tag, "Timeout")
        assert.strictEqual((yield* topic.state).length, 3)
      }), short))

  it.effect("goes on when its process may call the actor again", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        yield* topic.publish(0)
        yield* revoked(a!, server, topic.publish(1))
        yield* promptly(eventually(Effect.asVoid(topic.publish(2))), "a publication")
        yield* promptly(topic.publishAll([3, 4]), "publications")
        assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), 4)), [0, 2, 3, 4])
      }), short))

  it.effect("keeps what retention allows, and shows what was removed unread", () =>
    several(1, ([a], namespace) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ retention: { length: 80 } }))
        const [first] = yield* topic.publishAll(upTo(200))
        const { length } = yield* topic.state
        assert.isTrue(length >= 80 && length <= 90, String(length))
        const found = yield* collect(topic.subscribe({ from: { after: first!.id } }), length + 1)
        assert.deepStrictEqual(found[0], {
          _tag: "Gap",
          topic: hostile,
          namespace,
          reason: "trimmed",
          missed: 199 - length
        })
        assert.deepStrictEqual(valuesOf(found.slice(1)), upTo(length, 200 - length))
        // From the beginning means from what there is.
        assert.strictEqual(valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), 1))[0], 200 - length)
      })))

  it.effect("begins at a time that the clock of Redis has not come to, and others of the process miss nothing", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const other = yield* on(b!, make())
        yield* other.publish(0)
        // The clock of the subscriber is ahead.
        const since = Date.now() + 400
        const early = yield* Effect.forkScoped(collect(topic.subscribe({ from: { since } }), 1))
        yield* realSleep(100)
        const now = yield* topic.subscribed()
        yield* other.publishAll(upTo(5, 1))
        assert.deepStrictEqual(valuesOf(yield* collect(now, 5)), upTo(5, 1))
        while (Date.now() <= since) yield* realSleep(10)
        yield* other.publish(6)
        assert.deepStrictEqual(valuesOf(yield* Fiber.join(early)), [6])
      })))

  it.effect("says at once that the event was lost behind which a subscriber begins, and others go on", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        yield* topic.publish(0)
        const lost = yield* topic.subscribed({ from: { after: `${Date.now() + 60_000}-9` } })
        const now = yield* topic.subscribed()
        yield* topic.publish(1)
        assert.deepStrictEqual(valuesOf(yield* collect(now, 1)), [1])
        const [gap, event] = yield* collect(lost, 2)
        assert.deepInclude(gap, { _tag: "Gap", reason: "lost" })
        assert.deepInclude(event, { _tag: "Event", value: 1 })
      })))

  it.effect("a group that begins behind a lost event hears of that, and of all later events", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const heard = Effect.fnUntraced(function*(topic: Topic.Topic<number>, after: string, published: Array<number>) {
          const found: Array<number | string> = []
          const hear = ({ acknowledge, element }: Topic.Delivery<number>) => {
            found.push(
              element._tag === "Event" ? element.value : element._tag === "Gap" ? element.reason : element._tag
            )
            return acknowledge
          }
          const group = topic.consume({ group: "g", from: { after } }).pipe(Stream.runForEach(hear))
          const fiber = yield* Effect.forkChild(group)
          yield* eventually(Effect.map(topic.state, ({ groups }) => assert.strictEqual(groups[0]?.members, 1)))
          for (const value of published) yield* topic.publish(value)
          yield* eventually(Effect.sync(() => assert.strictEqual(found.at(-1), published.at(-1))))
          yield* Fiber.interrupt(fiber)
          return found
        })
        // Its time has not come.
        const topic = yield* on(a!, make())
        yield* topic.publish(0)
        const ahead = `${Date.now() + 60_000}-1`
        assert.deepStrictEqual(yield* heard(topic, ahead, [1, 2]), ["lost", 1, 2])
        // Its topic was forgotten.
        const open = Topic.make({ name: "forgotten", schema: Schema.Number })
        const last = yield* Effect.scoped(on(
          a!,
          Effect.gen(function*() {
            const former = yield* open
            const published = yield* former.publishAll(upTo(5))
            yield* former.purge
            return published.at(-1)!
          })
        ))
        const anew = yield* on(a!, open)
        yield* Effect.addFinalizer(() => Effect.orDie(Effect.andThen(anew.forget("g"), anew.purge)))
        yield* anew.publishAll([10, 11])
        assert.deepStrictEqual(yield* heard(anew, last.id, [12]), ["lost", 10, 11, 12])
      })))

  it.effect("refuses what has no JSON, and keeps events for longer than since 1970", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const any = yield* on(a!, Topic.make({ name: "any", schema: Schema.Any, retention: { age: "36500 days" } }))
        yield* Effect.addFinalizer(() => Effect.orDie(any.purge))
        for (const value of [undefined, 1n, () => {}]) {
          assert.strictEqual(refusal(yield* Effect.exit(any.publish(value))), "InvalidPayload")
        }
        yield* any.publishAll(upTo(100))
        assert.strictEqual((yield* any.state).length, 100)
      })))

  it.effect("has a handler that is built when it misses nothing, and goes on when it is interrupted from inside", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        class Numbers extends Context.Service<Numbers, Topic.Topic<number>>()("Numbers") {}
        for (const group of [undefined, "g"]) {
          const seen: Array<number> = []
          const handle = ({ attempt, value }: Topic.Event<number>) =>
            value === 1 && attempt === 1 ? Effect.interrupt : Effect.sync(() => void seen.push(value))
          const retry = Schedule.recurs(1)
          const layer = Topic.handler(Numbers, handle, group === undefined ? {} : { group, retry })
          yield* topic.publishAll(upTo(3)).pipe(
            Effect.andThen(eventually(Effect.sync(() => assert.includeMembers(seen, [0, 2])))),
            Effect.provide(layer),
            Effect.provideService(Numbers, topic)
          )
          if (group !== undefined) yield* topic.forget(group)
        }
      })))

  for (const from of ["now", "beginning", { last: 8 }, { since: 0 }] as const) {
    it.effect(`shows what is removed unread once it has its position: from ${JSON.stringify(from)}`, () =>
      several(1, ([a]) =>
        Effect.gen(function*() {
          const topic = yield* on(a!, make({ retention: { length: 8 } }))
          // Of a topic without events, and of one that has some.
          for (const before of [0, 8]) {
            const stream = yield* topic.subscribed({ from })
            yield* topic.publishAll(upTo(296))
            const found: Array<Topic.Element<number>> = []
            yield* Effect.forkChild(Stream.runForEach(stream, (element) => Effect.sync(() => found.push(element))))
            yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(found).at(-1), 295)))
            assert.strictEqual(accounted(found), 296 + (from === "now" ? 0 : before), JSON.stringify(found[0]))
          }
        })))
  }

  it.effect("keeps so many bytes, and so long", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const text = Topic.make({ name: "bytes", schema: Schema.String, retention: { bytes: 10_000 } })
        const topic = yield* on(a!, Effect.tap(text, purged))
        yield* topic.publishAll(Array.from({ length: 1000 }, () => "x".repeat(98)))
        const { bytes, length } = yield* topic.state
        assert.isTrue(bytes <= 17_000 && length >= 90, `${bytes} bytes, ${length} events`)
        const short = yield* on(
          a!,
          Effect.tap(Topic.make({ name: "short", schema: Schema.String, retention: { length: 320 } }), purged)
        )
        for (let n = 0; n < 4; n++) yield* short.publishAll(Array.from({ length: 240 }, () => "x".repeat(8)))
        const kept = yield* short.state
        assert.isAtLeast(kept.bytes, kept.length * 10)
        assert.isAtMost(kept.bytes, kept.length * 10 + 512)
        const aged = yield* on(a!, make({ retention: { age: "1 second" } }))
        yield* aged.publishAll(upTo(10))
        assert.strictEqual((yield* aged.state).length, 10)
        yield* eventually(Effect.map(aged.state, ({ length }) => assert.strictEqual(length, 0)))
      })))

  it.effect("keeps what is within so many bytes when larger events come, and an event alone that is larger", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const bytes = 100_000
        const text = Topic.make({ name: "bytes", schema: Schema.String, retention: { bytes } })
        const topic = yield* on(a!, Effect.tap(text, purged))
        const small = (count: number) => upTo(count).map(String)
        const large = "x".repeat(3 * bytes)
        // As many as there are between two looks at the size.
        for (
          const [events, kept] of [[["", large, ...small(62)], 62], [[...small(63), large], 1], [
            small(64),
            64
          ]] as const
        ) {
          yield* topic.publishAll(events)
          const { last, length } = yield* topic.state
          assert.strictEqual(length, kept)
          const found = yield* collect(topic.subscribe({ from: "beginning" }), length)
          assert.deepStrictEqual(found.map((event) => event._tag === "Event" && event.value), events.slice(-kept))
          assert.strictEqual((found.at(-1) as Topic.Event<string>).id, last[0])
        }
      })))

  it.effect("is kept as the last process says, also when others join again, or Redis has lost it", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        yield* on(a!, make({ retention: { length: 8 } }))
        const topic = yield* on(b!, make({ retention: { length: 1000 } }))
        const keeps = (count: number) => Effect.map(topic.state, ({ length }) => assert.strictEqual(length, count))
        yield* topic.publishAll(upTo(100))
        missed(a!)
        yield* lose(a!, namespace, server)
        yield* eventually(Effect.map(topic.state, ({ members }) => assert.strictEqual(members, 2)))
        yield* keeps(100)
        yield* server.cli("FLUSHALL")
        yield* eventually(on(b!, Effect.asVoid(topic.publish(0))))
        yield* eventually(Effect.map(topic.state, ({ members }) => assert.strictEqual(members, 2)))
        yield* topic.publishAll(upTo(99))
        yield* keeps(100)
      }), short))

  it.effect("does not let a slow subscriber delay another, under any strategy", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const slow = (strategy: "suspend" | "sliding" | "dropping") =>
          Effect.gen(function*() {
            const found: Array<Topic.Element<number>> = []
            yield* Effect.forkChild(
              Stream.runForEach(
                topic.subscribe({ from: "beginning", buffer: { capacity: 100, strategy } }),
                (element) => Effect.andThen(Effect.sync(() => found.push(element)), Deferred.await(gate))
              )
            )
            return found
          })
        const [suspended, sliding, dropping] = [yield* slow("suspend"), yield* slow("sliding"), yield* slow("dropping")]
        const [fast] = yield* subscribers([topic], 5000, { from: "beginning" })
        yield* topic.publish(0)
        yield* eventually(
          Effect.sync(() => assert.deepStrictEqual([suspended.length, sliding.length, dropping.length], [1, 1, 1]))
        )
        for (let n = 1; n < 5000; n += 100) yield* topic.publishAll(upTo(Math.min(100, 5000 - n), n))
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(valuesOf(fast!.found), upTo(5000))))
        yield* Deferred.succeed(gate, undefined)
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(valuesOf(suspended), upTo(5000))))
        yield* eventually(Effect.gen(function*() {
          yield* topic.publish(-1)
          const { length } = yield* topic.state
          assert.deepStrictEqual([accounted(sliding), accounted(dropping)], [length, length])
        }))
        assert.isTrue(sliding.some(({ _tag }) => _tag === "Gap") && dropping.some(({ _tag }) => _tag === "Gap"))
        // The newest are what a sliding buffer keeps, and what a dropping one leaves out.
        assert.include(valuesOf(sliding), 4999)
        assert.notInclude(valuesOf(dropping), 4998)
      })))

  it.effect("reads by itself what could not be taken in", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const [waiting] = yield* subscribers([topic], 1)
        yield* eventually(
          Effect.gen(function*() {
            yield* topic.publish(0)
            assert.isAbove(waiting!.found.length, 0)
          }),
          { interval: 20 }
        )
        const { kernel } = spaceOf(Context.get(a!, Coordinator.Coordinator))
        const partition = kernel.partitionAt(0)
        feedOf(kernel, partition, `${partition.prefix}topic-entries:${hostile}`).missed()
        yield* topic.publish(1)
        yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(waiting!.found).at(-1), 1)))
        assert.isTrue(valuesOf(waiting!.found).every((value) => value === 0 || value === 1))
      })))

  it.effect("leaves nothing of itself in its process", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { kernel } = spaceOf(Context.get(a!, Coordinator.Coordinator))
        const partition = kernel.partitionAt(0)
        const feed = () => feedOf(kernel, partition, `${partition.prefix}topic-entries:${hostile}`)
        const open = Effect.acquireRelease(Scope.make(), (scope) => Scope.close(scope, Exit.void))
        const scopes = yield* Effect.replicateEffect(open, 2)
        const [first, second] = scopes
        yield* Scope.provide(on(a!, make()), first!)
        const known = feed()
        yield* Scope.provide(on(a!, make()), second!)
        yield* Scope.close(first!, Exit.void)
        assert.strictEqual(feed(), known)
        yield* Scope.close(second!, Exit.void)
        assert.notStrictEqual(feed(), known)
      })))

  it.effect("reads each event once, and decodes it once, for all subscribers of a process", () =>
    several(2, ([a, b], _, server) =>
      Effect.gen(function*() {
        let decoded = 0
        const counting = SchemaTransformation.transform({
          decode: (text: string) => {
            decoded++
            return text
          },
          encode: (text: string) => text
        })
        const schema = Schema.String.pipe(Schema.decodeTo(Schema.String, counting))
        const topic = yield* on(a!, Effect.tap(Topic.make({ name: hostile, schema }), purged))
        const publisher = yield* on(b!, Topic.make({ name: hostile, schema: Schema.String }))
        const [count, size] = [100, 10_000]
        const sent = Effect.map(
          server.cli("INFO", "stats"),
          (stats) => Number(/total_net_output_bytes:(\d+)/.exec(stats)![1])
        )
        const reading = (streams: ReadonlyArray<Stream.Stream<Topic.Element<string>, Topic.TopicError>>) =>
          Effect.forEach(streams, (stream) => {
            const found: Array<Topic.Element<string>> = []
            return Effect.as(
              Effect.forkChild(Stream.runForEach(stream, (element) => Effect.sync(() => found.push(element)))),
              found
            )
          })
        const all = (found: ReadonlyArray<ReadonlyArray<unknown>>, length: number) =>
          eventually(
            Effect.sync(() => assert.deepStrictEqual(found.map((one) => one.length), upTo(8).map(() => length)))
          )
        const once = <E>(events: number, read: Effect.Effect<unknown, E>) =>
          Effect.gen(function*() {
            const [bytes, before] = [yield* sent, decoded]
            yield* read
            assert.strictEqual(decoded - before, events)
            // All that Redis has sent meanwhile, to any connection.
            const more = (yield* sent) - bytes
            assert.isTrue(more > count * size && more < 1.5 * count * size, String(more))
          })
        // At the end of the stream, where a subscriber is when it has the last event.
        const live = yield* reading(yield* Effect.forEach(upTo(8), () => topic.subscribed()))
        yield* publisher.publish("")
        yield* all(live, 1)
        const text = "x".repeat(size)
        const publishing = Effect.forEach(upTo(count / 10), () => publisher.publishAll(upTo(10).map(() => text)))
        yield* once(count, Effect.andThen(publishing, all(live, count + 1)))
        // What was published before.
        const before = Effect.flatMap(
          reading(upTo(8).map(() => topic.subscribe({ from: "beginning" }))),
          (found) => all(found, count + 1)
        )
        yield* once(count + 1, before)
      })))

  it.effect("shows what was removed to a slow subscriber also when a faster one has read that", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const slow = yield* topic.subscribed({ buffer: { capacity: 2 } })
        const [fast] = yield* subscribers([topic], 0, { from: "beginning" })
        const publish = (n: number) =>
          Effect.andThen(
            topic.publish(n),
            eventually(Effect.sync(() => assert.strictEqual(valuesOf(fast!.found).at(-1), n)), { interval: 1 })
          )
        for (const n of upTo(10)) yield* publish(n)
        yield* topic.purge
        yield* server.cli("CONFIG", "RESETSTAT")
        const found: Array<Topic.Element<number>> = []
        yield* Effect.forkChild(Stream.runForEach(slow, (element) => Effect.sync(() => found.push(element))))
        // The subscriber reads the remaining events by itself, and later ones with the others.
        yield* eventually(
          Effect.map(server.cli("INFO", "commandstats"), (stats) =>
            assert.isAtLeast(Number(/cmdstat_xrange:calls=(\d+)/.exec(stats)?.[1] ?? 0), 2))
        )
        yield* publish(10)
        yield* eventually(Effect.sync(() =>
          assert.deepStrictEqual(valuesOf(found), [0, 1, "Gap", 10])
        ))
        assert.deepStrictEqual(found[2], { _tag: "Gap", topic: hostile, namespace, reason: "trimmed", missed: 8 })
      })))

  it.effect("shows what was removed unread also when nothing more is published", () =>
    several(1, ([a], namespace) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const [live] = yield* subscribers([topic], 0, { from: "beginning" })
        const slow = yield* topic.subscribed({ buffer: { capacity: 2 } })
        for (const n of upTo(8)) {
          yield* topic.publish(n)
          yield* eventually(Effect.sync(() => assert.strictEqual(live!.found.length, n + 1)), { interval: 1 })
        }
        yield* topic.purge
        const found: Array<Topic.Element<number>> = []
        yield* Effect.forkChild(Stream.runForEach(slow, (element) => Effect.sync(() => found.push(element))))
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(valuesOf(found), [0, 1, "Gap"])))
        assert.deepStrictEqual(found[2], { _tag: "Gap", topic: hostile, namespace, reason: "trimmed", missed: 6 })
        yield* topic.publish(8)
        for (const values of [live!.found, found]) {
          yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(values).at(-1), 8)))
          assert.strictEqual(accounted(values), 9)
        }
      })))

  it.effect("shows what was removed before the shared read has brought it, also when nothing more is published", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const theirs = yield* on(yield* direct(), make())
        const topic = yield* on(context, make())
        const [live] = yield* subscribers([topic], 0, { from: "beginning" })
        const held = yield* line.hold(({ name }) => name === "XREAD")
        // The reading that is under way brings it.
        yield* theirs.publish(0)
        yield* promptly(held.request, "the next reading")
        yield* theirs.publishAll(upTo(3, 1))
        yield* theirs.purge
        yield* held.release()
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(valuesOf(live!.found), [0, "Gap"])))
        assert.strictEqual(accounted(live!.found), 4)
      })
    ))

  it.effect("takes a read without entries for nothing: they were removed in the call that has stored them", () =>
    Effect.suspend(() => {
      const lines: Array<string> = []
      const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
      return withNode(() =>
        Effect.gen(function*() {
          const topic = yield* make()
          const [live] = yield* subscribers([topic], 0)
          yield* eventually(
            Effect.andThen(topic.publish(0), Effect.sync(() => assert.include(valuesOf(live!.found), 0))),
            { interval: 20 }
          )
          yield* Effect.all([topic.publish(1), topic.publish(2), topic.purge], { concurrency: "unbounded" })
          yield* topic.publish(3)
          yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(live!.found).at(-1), 3)))
          assert.deepStrictEqual(valuesOf(live!.found).filter((value) => value !== 0), ["Gap", 3])
          assert.deepStrictEqual(lines, [])
        }), { partitions: 1 }).pipe(Effect.provide(Logger.layer([logger])))
    }))

  it.effect("shows what it has left out also when nothing more is published", () =>
    several(1, ([a], namespace) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const buffer = { capacity: 10, strategy: "dropping" } as const
        const stream = yield* topic.subscribed({ buffer })
        const [live] = yield* subscribers([topic], 0, { from: "beginning" })
        const before = (yield* Metric.value(Metrics.missedEvents)).count
        for (const n of upTo(30)) {
          yield* topic.publish(n)
          yield* eventually(Effect.sync(() => assert.strictEqual(live!.found.length, n + 1)), { interval: 1 })
        }
        const found = yield* collect(stream, 11)
        assert.deepStrictEqual(valuesOf(found), [...upTo(10), "Gap"])
        assert.deepStrictEqual(found[10], { _tag: "Gap", topic: hostile, namespace, reason: "overflow", missed: 20 })
        assert.strictEqual((yield* Metric.value(Metrics.missedEvents)).count - before, 20)
      })))

  it.effect("leaves out as many events as do not fit, though one read has brought them with others", () =>
    several(1, ([a], namespace) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const [live] = yield* subscribers([topic], 0, { from: "beginning" })
        const before = (yield* Metric.value(Metrics.missedEvents)).count
        const full = (strategy: "sliding" | "dropping") => topic.subscribed({ buffer: { capacity: 1000, strategy } })
        const [sliding, dropping] = [yield* full("sliding"), yield* full("dropping")]
        for (const [count, from] of [[990, 0], [20, 990], [1, 1010]] as const) {
          yield* topic.publishAll(upTo(count, from))
          yield* eventually(Effect.sync(() => assert.strictEqual(live!.found.length, from + count)))
        }
        const gap = { _tag: "Gap", topic: hostile, namespace, reason: "overflow", missed: 11 }
        const newest = yield* collect(sliding, 1001)
        assert.deepStrictEqual([newest[0], valuesOf(newest.slice(1))], [gap, upTo(1000, 11)])
        const oldest = yield* collect(dropping, 1001)
        assert.deepStrictEqual([valuesOf(oldest.slice(0, -1)), oldest.at(-1)], [upTo(1000), gap])
        assert.strictEqual((yield* Metric.value(Metrics.missedEvents)).count - before, 22)
      })))

  it.effect("logs what its events leave out", () =>
    several(1, ([a], namespace) =>
      Effect.gen(function*() {
        const name = "texts"
        const open = <A>(schema: Schema.Codec<A>) => on(a!, Topic.make({ name, schema, retention: { length: 2 } }))
        const numbers = yield* Effect.tap(open(Schema.Number), purged)
        const texts = yield* open(Schema.String)
        const first = yield* numbers.publish(1)
        for (const n of [2, 3, 4]) yield* numbers.publish(n)
        const { id } = yield* texts.publish("five")
        const lines: Array<string> = []
        const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
        const found = yield* numbers.subscribe({ from: { after: first.id } }).pipe(
          Stream.takeUntil((element) => element._tag !== "Gap" && element.id === id),
          Topic.values,
          Stream.runCollect,
          Effect.provide(Logger.layer([logger]))
        )
        assert.deepStrictEqual(found, [4])
        assert.deepStrictEqual(
          lines[0],
          `Warn 2 events of topic "${name}" of namespace "${namespace}" are missing (trimmed)`
        )
        assert.include(lines[1], `Warn event ${id} is left out: An event of topic "${name}"`)
      })))

  it.effect("makes the values of a chunk once, for all subscribers of a process", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        yield* topic.publishAll(upTo(3))
        const elements = yield* collect(topic.subscribe({ from: "beginning" }), 3)
        const taken: Array<ReadonlyArray<number>> = []
        for (let subscriber = 0; subscriber < 2; subscriber++) {
          yield* Stream.fromArray(elements).pipe(
            Topic.values,
            Stream.runForEachArray((values) => Effect.sync(() => void taken.push(values)))
          )
        }
        assert.deepStrictEqual(taken[0], upTo(3))
        assert.strictEqual(taken[0], taken[1])
      })))

  it.effect("stores an event once or not at all when its publication is interrupted, and nothing else", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const owned = ownedIn(server, namespace)
        yield* topic.publish(0)
        const before = yield* owned
        const confirmed: Array<number> = []
        let last = 0
        const programs = [
          (n: number) => Effect.asVoid(topic.publish(n, { key: "k" })),
          (n: number) => Effect.asVoid(topic.publishAll([n]))
        ]
        for (const program of programs) {
          for (let at = 1;; at++) {
            const { exit, reached } = yield* interruptedAt(at, program(++last))
            if (Exit.isSuccess(exit)) confirmed.push(last)
            else assert.isTrue(Cause.hasInterruptsOnly(exit.cause), String(exit))
            if (reached) continue
            assert.isAbove(at, 5)
            break
          }
          for (let turns = 0; turns < 20; turns++) {
            if (Exit.isSuccess(yield* interruptedAfter(turns, program(++last)))) confirmed.push(last)
          }
        }
        yield* promptly(topic.publish(++last), "another publication")
        const { length } = yield* topic.state
        const stored = valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), length)).map(Number)
        assert.deepStrictEqual(stored, [...new Set(stored)].toSorted((x, y) => x - y))
        assert.includeMembers(stored, confirmed)
        yield* eventually(Effect.sync(() => channelOf(a!).outbox.isIdle))
        assert.deepStrictEqual(yield* owned, before)
      })))

  it.effect("shows events that do not fit the schema, and goes on", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const texts = yield* on(a!, Topic.make({ name: hostile, schema: Schema.String }))
        const numbers = yield* on(a!, make())
        yield* numbers.publish(1)
        yield* texts.publish("two")
        yield* numbers.publish(3)
        const found = yield* collect(numbers.subscribe({ from: "beginning" }), 3)
        assert.deepStrictEqual(valuesOf(found), [1, "Undecodable", 3])
        assert.strictEqual((found[1] as Topic.Undecodable).body, "\"two\"")
        const letters = yield* on(a!, Effect.tap(numbers.deadLetters("g"), purged))
        const seen: Array<number> = []
        const running = yield* Effect.forkChild(
          numbers.run((event) => Effect.sync(() => seen.push(event.value)), { group: "g", from: "beginning" })
        )
        const [letter] = yield* collect(letters.subscribe({ from: "beginning" }), 1)
        assert.strictEqual((letter as Topic.Event<Topic.DeadLetter>).value.body, "\"two\"")
        yield* settled(numbers, "g")
        assert.deepStrictEqual(seen, [1, 3])
        yield* Fiber.interrupt(running)
      })))

  it.effect("reports what Redis has lost, and goes on", () =>
    several(2, (nodes, _, server) =>
      Effect.gen(function*() {
        const [a, b] = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const [reading] = yield* subscribers([b!], 20, { from: "beginning" })
        yield* a!.publishAll(upTo(10))
        yield* eventually(Effect.sync(() => assert.strictEqual(reading!.found.length, 10)))
        yield* server.cli("FLUSHALL")
        yield* eventually(Effect.asVoid(a!.publish(100)))
        yield* eventually(Effect.sync(() => {
          const found = valuesOf(reading!.found)
          assert.deepStrictEqual(found.slice(0, 10), upTo(10))
          assert.include(found.slice(10), "Gap")
          assert.strictEqual(found[found.length - 1], 100)
        }))
      })))

  it.effect("reports what Redis has lost to a subscriber that leaves the oldest out", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const stream = yield* topic.subscribed({ buffer: { capacity: 2, strategy: "sliding" } })
        const [live] = yield* subscribers([topic], 0)
        const comes = (n: number) =>
          eventually(
            Effect.gen(function*() {
              yield* topic.publish(n)
              assert.include(valuesOf(live!.found), n)
            }),
            { interval: 20 }
          )
        yield* comes(0)
        yield* server.cli("FLUSHALL")
        for (const n of upTo(5, 1)) yield* comes(n)
        yield* topic.publish(6)
        const found = yield* promptly(
          Stream.runCollect(Stream.takeUntil(stream, (one) => one._tag === "Event" && one.value === 6)),
          "the last event"
        )
        assert.includeDeepMembers([...found], [{
          _tag: "Gap",
          topic: hostile,
          namespace,
          reason: "lost",
          missed: undefined
        }])
      })))
})

layer(TestServer.layer, live)("a group", (it) => {
  it.effect("shares events out, each to one member", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const topics = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const seen: Array<number> = []
        const by = [0, 0]
        const running = yield* Effect.forEach(topics, (topic, at) =>
          Effect.forkChild(topic.run((event) =>
            Effect.sync(() => {
              seen.push(event.value)
              by[at]!++
            }), { group: "g" })))
        yield* joined(topics[0]!, "g", 2)
        yield* topics[0]!.publishAll(upTo(500))
        yield* eventually(Effect.sync(() => assert.strictEqual(seen.length, 500)))
        assert.deepStrictEqual(
          seen.toSorted((x, y) =>
            x - y
          ),
          upTo(500)
        )
        assert.isTrue(by.every((count) => count > 0), String(by))
        yield* settled(topics[0]!, "g")
        yield* Effect.forEach(running, Fiber.interrupt)
        yield* joined(topics[0]!, "g", 0)
        // It is durable: what is published now waits for its next member.
        yield* topics[1]!.publish(500)
        assert.strictEqual((yield* groupOf(topics[1]!, "g"))!.lag, 1)
        const [delivery] = yield* promptly(
          Stream.runCollect(Stream.take(topics[1]!.consume({ group: "g" }), 1)),
          "a delivery"
        )
        assert.deepStrictEqual(valuesOf([delivery!.element]), [500])
        // It was not acknowledged, so it is delivered again when its member has left.
        const [again] = yield* promptly(
          Stream.runCollect(
            Stream.take(Stream.tap(topics[1]!.consume({ group: "g" }), ({ acknowledge }) => acknowledge), 1)
          ),
          "another delivery"
        )
        assert.strictEqual((again!.element as Topic.Event<number>).attempt, 1)
        yield* settled(topics[0]!, "g")
        assert.isTrue(yield* topics[0]!.forget("g"))
        assert.isFalse(yield* topics[0]!.forget("g"))
      })))

  it.effect("begins where its options say, and only when it is new", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const published = yield* topic.publishAll(upTo(10))
        const first = (group: string, from: Topic.GroupOptions["from"]) =>
          promptly(
            Effect.map(
              Stream.runHead(topic.consume({ group, from, prefetch: 1 })),
              (found) => found._tag === "Some" ? valuesOf([found.value.element])[0] : undefined
            ),
            group
          )
        assert.strictEqual(yield* first("all", "beginning"), 0)
        assert.strictEqual(yield* first("all", { after: published[7]!.id }), 0)
        assert.strictEqual(yield* first("some", { after: published[7]!.id }), 8)
        assert.strictEqual((yield* groupOf(topic, "some"))!.lag, 1)
      })))

  it.effect("observes what was removed behind the event that it begins after, also when nothing is there", () =>
    several(1, ([a], namespace) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ retention: { length: 8 } }))
        const published = yield* topic.publishAll(upTo(100))
        const after = published[10]!.id
        const first = (group: string, count: number) =>
          promptly(
            Effect.map(
              Stream.runCollect(Stream.take(topic.consume({ group, from: { after } }), count)),
              (found) => found.map(({ element }) => element)
            ),
            group
          )
        const found = yield* first("some", 9)
        assert.deepStrictEqual(valuesOf(found).filter((value) => value !== "Gap"), upTo(8, 92))
        assert.includeDeepMembers(found, [{ _tag: "Gap", topic: hostile, namespace, reason: "trimmed", missed: 81 }])
        yield* topic.purge
        assert.deepStrictEqual(yield* first("none", 1), [{
          _tag: "Gap",
          topic: hostile,
          namespace,
          reason: "trimmed",
          missed: 89
        }])
      })))

  it.effect("retries by the schedule, and puts aside what fails for good", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const letters = yield* on(a!, Effect.tap(topic.deadLetters("g"), purged))
        const attempts: Array<readonly [number, number, number]> = []
        const running = yield* Effect.forkChild(topic.run((event) => {
          attempts.push([event.value, event.attempt, performance.now()])
          return event.value === 1 ? Effect.fail("no") : Effect.void
        }, { group: "g", from: "beginning", retry: Schedule.spaced("300 millis").pipe(Schedule.upTo({ times: 2 })) }))
        yield* topic.publishAll([0, 1, 2])
        const [letter] = yield* collect(letters.subscribe({ from: "beginning" }), 1)
        const { attempts: made, error, group, id } = (letter as Topic.Event<Topic.DeadLetter>).value
        assert.deepStrictEqual([made, group], [3, "g"])
        assert.include(error, "no")
        const of = attempts.filter(([value]) => value === 1)
        assert.deepStrictEqual(of.map(([, attempt]) => attempt), [1, 2, 3])
        assert.isTrue(of[1]![2] - of[0]![2] >= 299 && of[2]![2] - of[1]![2] >= 299)
        // The others did not wait for it.
        assert.isTrue(attempts.findIndex(([value]) => value === 2) < 3)
        yield* settled(topic, "g")
        assert.match(id, /^\d+-2$/)
        yield* Fiber.interrupt(running)
      })))

  it.effect("puts aside an event whose error cannot be looked at", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const letters = yield* on(a!, Effect.tap(topic.deadLetters("g"), purged))
        const running = yield* Effect.forkChild(topic.run(
          () => Effect.andThen(Effect.sleep(1), Effect.fail(Object.assign(new Error("x"), { name: Symbol("name") }))),
          { group: "g", from: "beginning", retry: Schedule.recurs(0) }
        ))
        yield* topic.publish(1)
        const [letter] = yield* collect(letters.subscribe({ from: "beginning" }), 1)
        assert.strictEqual((letter as Topic.Event<Topic.DeadLetter>).value.attempts, 1)
        yield* settled(topic, "g")
        yield* Fiber.interrupt(running)
      })))

  it.effect("puts aside an event whose retry schedule throws", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const letters = yield* on(a!, Effect.tap(topic.deadLetters("g"), purged))
        const retry = Schedule.spaced("10 millis").pipe(Schedule.while(() => {
          throw new Error("the schedule")
        }))
        let handled = 0
        const running = yield* Effect.forkChild(
          topic.run(() => Effect.suspend(() => Effect.fail(handled++)), { group: "g", from: "beginning", retry })
        )
        yield* topic.publish(1)
        const [letter] = yield* collect(letters.subscribe({ from: "beginning" }), 1)
        const { attempts, error } = (letter as Topic.Event<Topic.DeadLetter>).value
        assert.strictEqual(attempts, 1)
        assert.match(error, /^Error: the schedule/)
        yield* settled(topic, "g")
        assert.strictEqual(handled, 1)
        yield* Fiber.interrupt(running)
      })))

  for (const deadLetter of [undefined, false] as const) {
    const what = deadLetter === undefined ? "puts aside" : "drops"
    it.effect(`${what} an event whose members have died too often, and goes on with its key`, () =>
      several(2, (nodes, namespace, server) =>
        Effect.gen(function*() {
          const [a, b] = yield* Effect.forEach(nodes, (context) => on(context, make({ key: () => "k" })))
          const letters = yield* on(nodes[0]!, Effect.tap(a!.deadLetters("g"), purged))
          const begun: Array<readonly [value: number, attempt: number, crashes: number]> = []
          const run = (topic: Topic.Topic<number>) =>
            Effect.forkChild(topic.run(({ attempt, crashes, value }) => {
              begun.push([value, attempt, crashes])
              return value === 0 ? Effect.never : Effect.void
            }, { group: "g", from: "beginning", orderBy: "key", crashes: 2, deadLetter }))
          const begins = (expected: typeof begun) =>
            eventually(Effect.sync(() => assert.deepStrictEqual(begun, expected)))
          yield* a!.publishAll([0, 1, 2])
          const first = yield* run(a!)
          const once = [[0, 1, 0]] as typeof begun
          yield* begins(once)
          // A member that leaves does not count.
          yield* Fiber.interrupt(first)
          const second = yield* run(b!)
          const again = [...once, ...once]
          yield* begins(again)
          yield* lose(nodes[1]!, namespace, server)
          yield* begins([...again, [0, 2, 1]])
          yield* lose(nodes[1]!, namespace, server)
          yield* begins([...again, [0, 2, 1], [1, 1, 0], [2, 1, 0]])
          yield* settled(b!, "g")
          if (deadLetter === undefined) {
            const [letter] = yield* collect(letters.subscribe({ from: "beginning" }), 1)
            const { attempts, error, id } = (letter as Topic.Event<Topic.DeadLetter>).value
            assert.match(id, /-1$/)
            assert.deepStrictEqual([attempts, error], [3, "crashed: the session of its member has ended 2 times"])
          } else {
            assert.strictEqual((yield* letters.state).length, 0)
          }
          yield* Fiber.interrupt(second)
        })))
  }

  it.effect("has all its retries for an event that members had in hand when they left", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const letters = yield* on(a!, Effect.tap(topic.deadLetters("g"), purged))
        yield* topic.publishAll(upTo(3))
        for (let left = 4; left > 0; left--) {
          const members = yield* Effect.forkChild(
            topic.run(() => Effect.never, { group: "g", from: "beginning", prefetch: 3, retry: Schedule.recurs(1) })
          )
          yield* eventually(Effect.map(groupOf(topic, "g"), (group) => assert.strictEqual(group?.pending, 3)))
          yield* Fiber.interrupt(members)
          yield* joined(topic, "g", 0)
        }
        const attempts: Array<readonly [number, number]> = []
        const running = yield* Effect.forkChild(topic.run(({ attempt, value }) => {
          attempts.push([value, attempt])
          return Effect.fail("no")
        }, { group: "g", retry: Schedule.recurs(1) }))
        yield* collect(letters.subscribe({ from: "beginning" }), 3)
        assert.deepStrictEqual(attempts.toSorted(([a], [b]) => a - b), upTo(3).flatMap((n) => [[n, 1], [n, 2]]))
        yield* settled(topic, "g")
        yield* Fiber.interrupt(running)
      })))

  it.effect("waits for a retry that never comes", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const handled: Array<number> = []
        const running = yield* Effect.forkChild(topic.run((event) => {
          handled.push(event.value)
          return event.value === 0 ? Effect.fail("no") : Effect.void
        }, { group: "g", from: "beginning", retry: Schedule.spaced(Duration.infinity) }))
        yield* topic.publishAll([0, 1])
        yield* eventually(
          Effect.map(topic.state, ({ groups: [group] }) => assert.deepInclude(group, { lag: 0, pending: 1 }))
        )
        yield* topic.publish(2)
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(handled, [0, 1, 2])))
        yield* Fiber.interrupt(running)
      })))

  it.effect("keeps the order of each key, across retries and members that leave", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const topics = yield* Effect.forEach(nodes, (context) => on(context, make({ key: (n) => String(n % 7) })))
        const done = new Map<number, Array<number>>()
        const inside = new Set<number>()
        const failed = new Set<number>()
        const member = (topic: Topic.Topic<number>) =>
          topic.run((event) =>
            Effect.gen(function*() {
              const key = event.value % 7
              assert.isFalse(inside.has(key), "two events of a key at once")
              inside.add(key)
              yield* Effect.ensuring(realSleep(1), Effect.sync(() => inside.delete(key)))
              if (event.value % 11 === 0 && !failed.has(event.value)) {
                failed.add(event.value)
                return yield* Effect.fail("once")
              }
              done.set(key, [...done.get(key) ?? [], event.value])
            }), { group: "g", orderBy: "key", concurrency: 4, from: "beginning", retry: Schedule.spaced("5 millis") })
        const running = yield* Effect.forEach(topics, (topic) => Effect.forkChild(member(topic)))
        yield* joined(topics[0]!, "g", 3)
        yield* topics[0]!.publishAll(upTo(700))
        yield* eventually(Effect.sync(() => assert.isAbove(done.get(0)?.length ?? 0, 20)), { interval: 1 })
        yield* Fiber.interrupt(running[1]!)
        yield* eventually(Effect.sync(() => {
          for (const key of upTo(7)) {
            const unique = [...new Set(done.get(key))]
            assert.deepStrictEqual(unique, upTo(100).map((n) => 7 * n + key))
          }
        }))
        yield* settled(topics[0]!, "g")
        yield* Effect.forEach(running, Fiber.interrupt)
      })))

  it.effect("interrupts handlers when the session is lost, and the event goes to another member", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [a, b] = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const interrupted = yield* Deferred.make<void>()
        const begun = yield* Deferred.make<void>()
        const first = yield* Effect.forkChild(a!.run(() =>
          Effect.andThen(
            Deferred.succeed(begun, undefined),
            Effect.onInterrupt(Effect.never, () => Deferred.succeed(interrupted, undefined))
          ), { group: "g" }))
        yield* joined(a!, "g", 1)
        yield* a!.publish(1)
        yield* promptly(Deferred.await(begun), "the first handler")
        const taken = yield* Queue.unbounded<Topic.Event<number>>()
        const second = yield* Effect.forkChild(b!.run((event) => Queue.offer(taken, event), { group: "g" }))
        yield* joined(b!, "g", 2)
        yield* lose(nodes[0]!, namespace, server)
        yield* promptly(Deferred.await(interrupted), "the interruption")
        const event = yield* Effect.timeout(Queue.take(taken), "6 seconds")
        assert.deepStrictEqual([event.value, event.attempt], [1, 2])
        yield* Effect.forEach([first, second], Fiber.interrupt)
      })))

  it.effect("handles again what a member had in hand when Redis lost the group, but not the events", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const begun: Array<number> = []
        const handled: Array<number> = []
        const go = yield* Deferred.make<void>()
        yield* topic.publishAll(upTo(20))
        const keys = (yield* keysOf(server, namespace)).filter((key) => /:topic[^:]*:/.test(key))
        for (const key of keys) yield* server.cli("COPY", key, `${key} before`)
        yield* Effect.forkScoped(
          topic.run(({ value }) =>
            Effect.gen(function*() {
              begun.push(value)
              yield* Deferred.await(go)
              handled.push(value)
            }), { group: "g", from: "beginning", prefetch: 16, concurrency: 16 })
        )
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(begun, upTo(16))))
        for (const key of keys) yield* server.cli("RENAME", `${key} before`, key)
        yield* lose(a!, namespace, server)
        yield* Deferred.succeed(go, undefined)
        yield* eventually(
          Effect.sync(() => assert.deepStrictEqual(handled.toSorted((one, other) => one - other), upTo(20)))
        )
        yield* settled(topic, "g")
      })))

  for (const [orderBy, joining] of [[undefined, [1, 0]], [undefined, [2, 0, 1]], ["key", [2, 0]]] as const) {
    const what = `${orderBy === undefined ? "" : "by key, "}joined again by ${joining}`
    it.effect(`handles again what each member had in hand when Redis lost the group: ${what}`, () =>
      several(3, (nodes, namespace, server) =>
        Effect.gen(function*() {
          const topics = yield* Effect.forEach(nodes, (context) => on(context, make()))
          const [topic] = topics
          const keyOf = (value: number) => orderBy === undefined ? value : value % 2
          const begun = new Set<number>()
          const handled = new Set<number>()
          const inside = new Set<number>()
          const gaps: Array<readonly [member: number, reason: string]> = []
          const go = yield* Deferred.make<void>()
          const run = (at: number, from: "beginning" | "now") =>
            Effect.forkScoped(topics[at]!.run(({ value }) =>
              Effect.gen(function*() {
                begun.add(value)
                yield* Deferred.await(go)
                assert.isFalse(inside.has(keyOf(value)), "two events of a key at once")
                inside.add(keyOf(value))
                yield* Effect.ensuring(realSleep(1), Effect.sync(() => inside.delete(keyOf(value))))
                handled.add(value)
              }), {
              group: "g",
              from,
              orderBy,
              prefetch: 8,
              concurrency: 8,
              onGap: ({ reason }) => Effect.sync(() => void gaps.push([at, reason]))
            }))
          yield* topic!.publishAll(upTo(20), (value) => ({ key: String(keyOf(value)) }))
          const keys = (yield* keysOf(server, namespace)).filter((key) => /:topic[^:]*:/.test(key))
          for (const key of keys) yield* server.cli("COPY", key, `${key} before`)
          const first = joining.filter((at) => at < 2).toSorted()
          for (const at of first) {
            yield* run(at, "beginning")
            const count = orderBy === undefined ? 8 * (at + 1) : 2
            yield* eventually(Effect.sync(() => assert.deepStrictEqual([...begun], upTo(count))))
          }
          for (const key of keys) yield* server.cli("RENAME", `${key} before`, key)
          for (const [others, at] of joining.entries()) {
            yield* at < 2 ? lose(nodes[at]!, namespace, server) : run(at, "now")
            yield* joined(topic!, "g", others + 1)
          }
          yield* Deferred.succeed(go, undefined)
          yield* eventually(Effect.sync(() => assert.includeMembers([...handled], [...begun])))
          yield* settled(topic!, "g")
          // A member that is new does not know of the loss.
          assert.sameDeepMembers(gaps, first.map((at) => [at, "lost"]))
        })))
  }

  it.effect("handles what it had not acknowledged when Redis lost the topic, but not the events", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const begun = new Set<number>()
        const handled: Array<number> = []
        const go = yield* Deferred.make<void>()
        const hash = (yield* keysOf(server, namespace)).find((key) => key.includes(":topic:"))!
        yield* topic.publishAll(upTo(20))
        const retry = Schedule.spaced("1 hour")
        yield* Effect.forkScoped(
          topic.run(({ value }) =>
            Effect.gen(function*() {
              if (value === 2 && !begun.has(value)) return yield* Effect.fail(void begun.add(value))
              begun.add(value)
              if (value > 4) yield* Deferred.await(go)
              handled.push(value)
            }), { group: "g", from: "beginning", prefetch: 4, concurrency: 4, retry })
        )
        yield* eventually(Effect.sync(() => assert.strictEqual(begun.size, 9)))
        yield* eventually(Effect.map(groupOf(topic, "g"), (group) => assert.strictEqual(group?.pending, 5)))
        yield* server.cli("DEL", hash)
        yield* lose(a!, namespace, server)
        yield* Deferred.succeed(go, undefined)
        yield* eventually(Effect.sync(() => assert.sameMembers([...new Set(handled)], upTo(20))))
        yield* settled(topic, "g")
        // What it had acknowledged before the first event that it had not is not handled again.
        assert.deepStrictEqual(handled.filter((value) => value < 2), [0, 1])
      })))

  for (const [orderBy, ends] of [[undefined, "succeed"], ["key", "succeed"], ["key", "fail"]] as const) {
    it.effect(`goes on when its stream is deleted while handlers run that ${ends}, ordered by ${orderBy}`, () =>
      several(1, ([a], namespace, server) =>
        Effect.gen(function*() {
          const topic = yield* on(a!, make({ key: () => "k" }))
          const gate = yield* Deferred.make<void>()
          const handled: Array<number> = []
          const handler = ({ value }: Topic.Event<number>) =>
            Effect.sync(() => handled.push(value)).pipe(
              Effect.andThen(Deferred.await(gate)),
              Effect.andThen(ends === "fail" && value < 4 ? Effect.fail("removed") : Effect.void)
            )
          yield* Effect.forkScoped(topic.run(handler, { group: "g", concurrency: 2, prefetch: 2, orderBy }))
          yield* joined(topic, "g", 1)
          yield* topic.publishAll(upTo(4))
          yield* eventually(Effect.sync(() => assert.lengthOf(handled, orderBy === undefined ? 2 : 1)))
          assert.strictEqual(yield* server.cli("DEL", `{${namespace}:00}:topic-entries:${hostile}`), "1")
          yield* Deferred.succeed(gate, undefined)
          yield* eventually(
            Effect.gen(function*() {
              yield* topic.publish(9)
              assert.isAbove(handled.filter((value) => value === 9).length, 3)
            }),
            { interval: 20 }
          )
          // It has no more in hand than before.
          const before = handled.length
          yield* topic.publishAll(upTo(10, 10))
          yield* eventually(Effect.sync(() => assert.includeMembers(handled, upTo(10, 10))))
          assert.isAtLeast(handled.length, before + 10)
        })))
  }

  it.effect("gives nothing to a member that has as much as it can take", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const [a, b] = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const slow: Array<Topic.Delivery<number>> = []
        const fiber = yield* Effect.forkChild(
          Stream.runForEach(a!.consume({ group: "g", from: "beginning", prefetch: 3 }), (delivery) =>
            Effect.sync(() => slow.push(delivery)))
        )
        yield* joined(a!, "g", 1)
        yield* a!.publishAll(upTo(10))
        yield* eventually(Effect.sync(() =>
          assert.strictEqual(slow.length, 3)
        ))
        const rest: Array<number | string> = []
        const other = yield* Effect.forkChild(
          b!.run((event) => Effect.sync(() => rest.push(event.value)), { group: "g" })
        )
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(rest, upTo(7, 3))))
        yield* slow[1]!.acknowledge
        yield* slow[1]!.acknowledge
        yield* slow[2]!.retry()
        yield* eventually(
          Effect.sync(() =>
            assert.include([...rest, ...slow.slice(3).flatMap(({ element }) => valuesOf([element]))], 2)
          )
        )
        yield* Effect.forEach([fiber, other], Fiber.interrupt)
      })))

  it.effect("shows its lag and what is pending as metrics", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        class Numbers extends Topic.Service<Numbers>()("numbers", { schema: Schema.Number }) {}
        const topic = yield* on(a!, make({ name: "numbers" }))
        const member = yield* Effect.forkChild(
          Stream.runForEach(topic.consume({ group: "g", prefetch: 2 }), () => Effect.void)
        )
        yield* joined(topic, "g", 1)
        yield* topic.publishAll(upTo(5))
        const monitor = Topic.monitor(Numbers, { every: "20 millis" }).pipe(
          Layer.provide(Numbers.layer),
          Layer.provide(Layer.succeedContext(a!))
        )
        const fiber = yield* Effect.forkChild(Layer.launch(monitor))
        const shows = (values: ReadonlyArray<number>) =>
          eventually(Effect.gen(function*() {
            const gauges = [
              Metrics.topicLength("numbers"),
              Metrics.groupMembers("numbers", "g"),
              Metrics.groupLag("numbers", "g"),
              Metrics.groupPending("numbers", "g")
            ]
            const found = yield* Effect.forEach(gauges, (gauge) => Metric.value(gauge))
            assert.deepStrictEqual(found.map(({ value }) => value), values)
          }))
        yield* shows([5, 1, 3, 2])
        assert.isAbove((yield* Metric.value(Metrics.groupAge("numbers", "g"))).value, 0)
        assert.isAbove((yield* Metric.value(Metrics.topicBytes("numbers"))).value, 0)
        yield* Fiber.interrupt(member)
        yield* shows([5, 0, 3, 2])
        // Events that no member was given yet have an age too.
        const { length } = yield* topic.state
        yield* Effect.scoped(Effect.gen(function*() {
          const rest = yield* Stream.toPull(topic.consume({ group: "late", from: "beginning", prefetch: length }))
          for (let left = length; left > 0;) {
            const deliveries = yield* rest
            for (const { acknowledge } of deliveries) yield* acknowledge
            left -= deliveries.length
          }
        }))
        yield* topic.publish(6)
        yield* eventually(Effect.gen(function*() {
          const late = (yield* topic.state).groups.find(({ name }) => name === "late")!
          assert.deepInclude(late, { members: 0, lag: 1, pending: 0 })
          assert.isDefined(late.oldest)
          assert.isAbove((yield* Metric.value(Metrics.groupAge("numbers", "late"))).value, 0)
        }))
        assert.isTrue(yield* topic.forget("late"))
        assert.isTrue(yield* topic.forget("g"))
        yield* shows([6, 0, 0, 0])
        assert.strictEqual((yield* Metric.value(Metrics.groupAge("numbers", "g"))).value, 0)
        yield* Fiber.interrupt(fiber)
      })))

  it.effect("takes no event twice when an answer overtakes the mailbox", () =>
    behindLine(({ context: b, direct, line }) =>
      Effect.gen(function*() {
        const published = yield* on(yield* direct(), make())
        const topic = yield* on(b, make())
        const handled: Array<number> = []
        const member = yield* Effect.forkChild(
          topic.run((event) => Effect.sync(() => handled.push(event.value)), { group: "g", from: "beginning" })
        )
        const handles = (count: number) => eventually(Effect.sync(() => assert.deepStrictEqual(handled, upTo(count))))
        yield* joined(topic, "g", 1)
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* published.publish(0)
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* handles(1)
        yield* published.publish(1)
        missed(b)
        yield* handles(2)
        yield* settled(topic, "g")
        yield* held.release()
        yield* published.publish(2)
        yield* handles(3)
        yield* Fiber.interrupt(member)
      })
    ))

  it.effect("receives a gap once when an answer overtakes the mailbox", () =>
    behindLine(({ context: b, direct, line }) =>
      Effect.gen(function*() {
        const theirs = yield* on(yield* direct(), make())
        const topic = yield* on(b, make())
        const told: Array<number | string> = []
        const begun = yield* Deferred.make<void>()
        const go = yield* Deferred.make<void>()
        const member = yield* Effect.forkChild(
          topic.run(({ value }) =>
            Effect.gen(function*() {
              told.push(value)
              yield* Deferred.succeed(begun, undefined)
              yield* Deferred.await(go)
            }), {
            group: "g",
            from: "beginning",
            prefetch: 1,
            onGap: ({ missed }) => Effect.sync(() => void told.push(`misses ${missed}`))
          })
        )
        yield* joined(topic, "g", 1)
        yield* theirs.publishAll(upTo(4))
        yield* promptly(Deferred.await(begun), "the first event")
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* theirs.purge
        yield* promptly(held.request, "the next reading of the mailbox")
        missed(b)
        yield* Deferred.succeed(go, undefined)
        const tells = (values: ReadonlyArray<number | string>) =>
          eventually(Effect.sync(() => assert.deepStrictEqual(told, values)))
        yield* tells([0, "misses 3"])
        yield* held.release()
        yield* theirs.publish(4)
        yield* tells([0, "misses 3", 4])
        yield* Fiber.interrupt(member)
      })
    ))

  for (const asked of [false, true]) {
    it.effect(`receives every gap when a later one overtakes the mailbox${asked ? ", and an answer does" : ""}`, () =>
      behindLine(({ context, direct, line }) =>
        Effect.gen(function*() {
          const retention = { length: 8, protect: false }
          const theirs = yield* on(yield* direct(), make({ retention }))
          const topic = yield* on(context, make({ retention }))
          const told: Array<Topic.Element<number>> = []
          const go = yield* Deferred.make<void>()
          const member = yield* Effect.forkChild(
            topic.run((event) => Effect.andThen(Effect.sync(() => told.push(event)), Deferred.await(go)), {
              group: "g",
              from: "beginning",
              prefetch: 2,
              onGap: (gap) => Effect.sync(() => void told.push(gap))
            })
          )
          yield* joined(topic, "g", 1)
          yield* theirs.publish(0)
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(valuesOf(told), [0])))
          const held = yield* line.hold(({ name }) => name === "XREAD")
          // The reading that is under way brings it.
          yield* theirs.publish(1)
          yield* promptly(held.request, "the next reading of the mailbox")
          yield* theirs.publishAll(upTo(3, 2))
          // This gap it receives through the mailbox.
          yield* theirs.purge
          yield* theirs.publishAll(upTo(100, 5))
          // And of the events that retention has removed, with the reply to its acknowledgement.
          yield* Deferred.succeed(go, undefined)
          yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(told).at(-1), 104)))
          if (asked) {
            missed(context)
            yield* eventually(Effect.sync(() => assert.strictEqual(accounted(told), 105)))
          }
          yield* held.release()
          yield* theirs.publish(105)
          yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(told).at(-1), 105)))
          assert.strictEqual(accounted(told), 106)
          yield* settled(topic, "g")
          yield* Fiber.interrupt(member)
          // All of that is acknowledged.
          const next = yield* Effect.forkChild(
            topic.run((event) => Effect.sync(() => void told.push(event)), {
              group: "g",
              onGap: (gap) => Effect.sync(() => void told.push(gap))
            })
          )
          yield* theirs.publish(106)
          yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(told).at(-1), 106)))
          assert.strictEqual(accounted(told), 107)
          yield* Fiber.interrupt(next)
        })
      ))
  }

  for (const handled of [false, true]) {
    const what = handled ? "not told of a gap that was handled" : "told of a gap whose member has died with it"
    it.effect(`is ${what}`, () =>
      several(2, (nodes, namespace, server) =>
        Effect.gen(function*() {
          const [a, b] = yield* Effect.forEach(nodes, (context) => on(context, make()))
          const told: Array<readonly [member: string, what: number | undefined]> = []
          const run = (topic: Topic.Topic<number>, name: string, onGap: Effect.Effect<void>) =>
            Effect.forkChild(topic.run(() => name === "a" ? Effect.never : Effect.void, {
              group: "g",
              from: "beginning",
              concurrency: 2,
              prefetch: 1,
              onGap: ({ missed }) => Effect.andThen(Effect.sync(() => void told.push([name, missed])), onGap)
            }))
          const first = yield* run(a!, "a", handled ? Effect.void : Effect.never)
          yield* joined(a!, "g", 1)
          yield* a!.publishAll(upTo(4))
          yield* eventually(Effect.map(groupOf(a!, "g"), (group) => assert.strictEqual(group?.pending, 1)))
          yield* a!.purge
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(told, [["a", 3]])))
          const second = yield* run(b!, "b", Effect.void)
          yield* joined(b!, "g", 2)
          yield* forgetSession(nodes[0]!, namespace, server)
          // The event that the member had in hand was purged too.
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(told.slice(1), [["b", handled ? 1 : 4]])))
          yield* Effect.forEach([first, second], Fiber.interrupt)
        })))
  }

  it.effect("receives a gap again when the member that received it leaves before it has handled that", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const told: Array<readonly [member: string, what: number | undefined]> = []
        const run = (name: string, onGap: Effect.Effect<void>) =>
          Effect.forkChild(topic.run(() => Effect.never, {
            group: "g",
            from: "beginning",
            concurrency: 2,
            prefetch: 1,
            onGap: ({ missed }) => Effect.andThen(Effect.sync(() => void told.push([name, missed])), onGap)
          }))
        const first = yield* run("a", Effect.never)
        yield* joined(topic, "g", 1)
        yield* topic.publishAll(upTo(4))
        yield* eventually(Effect.map(groupOf(topic, "g"), (group) => assert.strictEqual(group?.pending, 1)))
        yield* topic.purge
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(told, [["a", 3]])))
        const second = yield* run("b", Effect.void)
        yield* joined(topic, "g", 2)
        yield* Fiber.interrupt(first)
        // The event that the member had in hand was purged too.
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(told.slice(1), [["b", 4]])))
        yield* Fiber.interrupt(second)
      })))

  it.effect("takes no event again that it acknowledges while it asks for what it has", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const taken: Array<number | string> = []
        const member = yield* Effect.forkChild(
          Stream.runForEach(topic.consume({ group: "g", from: "beginning" }), ({ acknowledge, element }) =>
            Effect.suspend(() => {
              taken.push(...valuesOf([element]))
              missed(a!)
              return acknowledge
            }))
        )
        yield* joined(topic, "g", 1)
        yield* topic.publish(0)
        yield* settled(topic, "g")
        yield* topic.publish(1)
        yield* settled(topic, "g")
        yield* Fiber.interrupt(member)
        assert.deepStrictEqual(taken, [0, 1])
      })))

  it.effect("keeps what it has not acknowledged from retention, unless that is not wished", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        for (const protect of [true, false]) {
          const name = `protect ${protect}`
          const topic = yield* on(
            a!,
            make({ name, retention: { length: 8, protect } })
          )
          yield* Stream.runHead(Stream.mapEffect(topic.consume({ group: "g", from: "beginning" }), Effect.succeed))
            .pipe(
              Effect.race(joined(topic, "g", 1))
            )
          yield* topic.publishAll(upTo(100))
          const { length } = yield* topic.state
          if (protect) assert.strictEqual(length, 100)
          else assert.isBelow(length, 12)
          const found = yield* promptly(Stream.runCollect(Stream.take(topic.consume({ group: "g" }), 2)), name)
          const elements = valuesOf(found.map(({ element }) => element))
          assert.deepStrictEqual(elements, protect ? [0, 1] : ["Gap", 100 - length])
        }
      })))

  for (const [limit, retention, most] of [["length", { length: 8 }, 8], ["age", { age: "500 millis" }, 0]] as const) {
    for (const end of ["caught up", "been forgotten"] as const) {
      it.effect(`keeps no event beyond the limits when it has ${end}: ${limit}`, () =>
        several(1, ([a]) =>
          Effect.gen(function*() {
            const topic = yield* on(a!, make({ retention }))
            const go = yield* Deferred.make<void>()
            const handled: Array<number> = []
            const run = topic.run(
              ({ value }) => Effect.andThen(Deferred.await(go), Effect.sync(() => handled.push(value))),
              { group: "g", from: "beginning" }
            )
            const member = yield* Effect.forkChild(run)
            yield* joined(topic, "g", 1)
            yield* topic.publishAll(upTo(300))
            const { time } = (yield* collect(topic.subscribe({ from: { last: 1 } }), 1))[0] as Topic.Event<number>
            // So old that the alarm has rung that would have removed it.
            if (limit === "age") {
              yield* eventually(Effect.sync(() => Date.now() > Number(time.epochMilliseconds) + 1500))
            }
            assert.strictEqual((yield* topic.state).length, 300)
            if (end === "caught up") yield* Deferred.succeed(go, undefined)
            else yield* Effect.andThen(Fiber.interrupt(member), topic.forget("g"))
            yield* eventually(Effect.map(topic.state, ({ length }) => assert.isAtMost(length, most)))
            // Some of the last events may stay that are not handled yet.
            const all = end === "caught up" ? 300 : 0
            yield* eventually(Effect.sync(() => assert.strictEqual(handled.length, all)))
            yield* Fiber.interrupt(member)
          }), short))
    }
  }

  it.effect("receives the number of events that were purged before their delivery", () =>
    several(1, ([a], namespace) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ key: (n) => String(n % 2) }))
        for (const orderBy of [undefined, "key"] as const) {
          const group = String(orderBy)
          const taken: Array<Topic.Delivery<number>> = []
          const member = yield* Effect.forkChild(
            Stream.runForEach(topic.consume({ group, orderBy, prefetch: 2 }), (delivery) =>
              Effect.sync(() => taken.push(delivery)))
          )
          yield* joined(topic, group, 1)
          yield* topic.publishAll(upTo(10))
          const takes = (values: ReadonlyArray<number | string>) =>
            eventually(Effect.sync(() =>
              assert.deepStrictEqual(valuesOf(taken.map(({ element }) => element)), values)
            ))
          yield* takes([0, 1])
          yield* taken[1]!.retry("1 minute")
          yield* takes(orderBy === "key" ? [0, 1] : [0, 1, 2])
          yield* topic.purge
          const gap = { _tag: "Gap", topic: hostile, namespace, reason: "trimmed", missed: orderBy === "key" ? 9 : 8 }
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(taken.at(-1)!.element, gap as Topic.Gap)))
          yield* taken[0]!.acknowledge
          yield* topic.publish(11)
          yield* eventually(
            Effect.sync(() => assert.deepStrictEqual(valuesOf([taken.at(-1)!.element]), [11]))
          )
          yield* Fiber.interrupt(member)
          yield* topic.purge
        }
      })))

  it.effect("is removed when it had no members for as long as that is kept", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ retention: { abandon: "1 second" } }))
        const fiber = yield* Effect.forkChild(topic.run(() => Effect.void, { group: "g" }))
        yield* joined(topic, "g", 1)
        yield* Fiber.interrupt(fiber)
        yield* eventually(Effect.map(groupOf(topic, "g"), (group) => assert.isUndefined(group)))
      })))

  it.effect("refuses another order, and more groups than there may be", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const scope = yield* Effect.scope
        const join = (group: string) =>
          Effect.flatMap(Stream.toPull(topic.consume({ group })), (pull) =>
            Effect.raceFirst(pull, joined(topic, group, 1)))
            .pipe(Effect.provideService(Scope.Scope, scope))
        yield* join("0")
        assert.strictEqual(
          refusal(yield* Effect.exit(Stream.runHead(topic.consume({ group: "0", orderBy: "key" })))),
          "OrderMismatch"
        )
        for (let n = 1; n < 64; n++) {
          yield* join(String(n))
        }
        assert.strictEqual(refusal(yield* Effect.exit(Stream.runHead(topic.consume({ group: "64" })))), "TooManyGroups")
      })))
})

class Numbers extends Topic.Service<Numbers>()("numbers", { schema: Schema.Number }) {}

layer(TestServer.layer, live)("a handler", (it) => {
  it.effect("runs for as long as its layer: on a group's events, or on all", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const [shared, all]: [Array<number>, Array<number>] = [[], []]
        // It is purged when the members of the group have left.
        yield* on(a!, make({ name: "numbers" }))
        const layers = Layer.mergeAll(
          Topic.handler(Numbers, ({ value }) => Effect.sync(() => shared.push(value)), {
            group: "g",
            from: "beginning"
          }),
          Topic.handler(
            Numbers,
            ({ value }) =>
              Effect.andThen(Effect.sync(() => all.push(value)), value === 1 ? Effect.fail("no") : Effect.void),
            {
              from: "beginning"
            }
          )
        ).pipe(Layer.provideMerge(Numbers.layer))
        yield* on(
          a!,
          Effect.scoped(Effect.gen(function*() {
            const numbers = Context.get(yield* Layer.build(layers), Numbers)
            yield* purged(numbers)
            yield* numbers.publishAll([0, 1, 2])
            yield* eventually(Effect.sync(() => assert.deepStrictEqual([shared, all], [[0, 1, 2], [0, 1, 2]])))
            yield* settled(numbers, "g")
          }))
        )
      })))

  it.effect("begins when Redis has memory again, if it was full as the layer was built", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        // It is purged when the members of the group have left.
        yield* on(a!, make({ name: "numbers" }))
        const lines: Array<string> = []
        const logger = Logger.make(({ message }) => void lines.push(String(message)))
        const seen: Array<number> = []
        const handler = Topic.handler(Numbers, ({ value }) => Effect.sync(() => seen.push(value)), {
          group: "g",
          from: "beginning"
        })
        yield* on(
          a!,
          Effect.gen(function*() {
            const numbers = yield* Numbers
            yield* server.cli("CONFIG", "SET", "maxmemory", 1)
            yield* Layer.build(handler).pipe(
              Effect.andThen(eventually(Effect.sync(() =>
                assert.match(lines.join(), /handler of topic "numbers" of namespace "\w+" could not/)
              ))),
              Effect.provide(Logger.layer([logger])),
              Effect.ensuring(Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 0)))
            )
            yield* numbers.publish(1)
            yield* eventually(Effect.sync(() =>
              assert.deepStrictEqual(seen, [1])
            ))
            yield* settled(numbers, "g")
          }).pipe(Effect.scoped, Effect.provide(Numbers.layer))
        )
      })))

  for (const from of ["now", "beginning"] as const) {
    it.effect(`of all events goes on where it was, from ${from}, when Redis has refused a read`, () =>
      several(1, ([a], _, server) =>
        Effect.gen(function*() {
          const lines: Array<string> = []
          const logger = Logger.make(({ message }) => void lines.push(String(message)))
          const seen: Array<number> = []
          const gate = yield* Deferred.make<void>()
          const handler = Topic.handler(Numbers, ({ value }) => {
            seen.push(value)
            return value === 0 ? Deferred.await(gate) : Effect.void
          }, { from, buffer: { capacity: 1 } })
          yield* on(
            a!,
            Effect.gen(function*() {
              const numbers = yield* Numbers
              yield* purged(numbers)
              yield* Layer.build(handler)
              // It is known to have begun by nothing but what it gets.
              yield* eventually(
                Effect.andThen(numbers.publish(-1), Effect.sync(() => assert.isAbove(seen.length, 0)))
              )
              yield* numbers.publishAll(upTo(2000))
              yield* eventually(Effect.sync(() => assert.strictEqual(seen.at(-1), 0)))
              yield* server.cli("ACL", "SETUSER", "default", "-xrange").pipe(
                Effect.andThen(Deferred.succeed(gate, undefined)),
                Effect.andThen(eventually(Effect.sync(() =>
                  assert.match(lines.join(), /handler of topic "numbers" of namespace "\w+" could not go on/)
                ))),
                Effect.andThen(numbers.publish(2000)),
                Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+xrange")))
              )
              yield* eventually(Effect.sync(() =>
                assert.strictEqual(seen.at(-1), 2000)
              ))
              assert.deepStrictEqual(seen.filter((value) => value >= 0), upTo(2001))
            }).pipe(Effect.scoped, Effect.provide(Numbers.layer), Effect.provide(Logger.layer([logger])))
          )
        })))
  }

  it.effect("goes on when what it is given has a defect", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        let defects = 0
        const failing = () => {
          if (defects++ === 0) throw new Error("a defect")
          return undefined
        }
        const topic = yield* on(a!, make())
        const letters = yield* on(
          a!,
          Effect.tap(Topic.make({ name: "letters", schema: Topic.DeadLetter, key: failing }), purged)
        )
        const [handled, gaps]: [Array<number>, Array<Topic.Gap>] = [[], []]
        const gate = yield* Deferred.make<void>()
        const running = yield* Effect.forkChild(topic.run(({ value }) => {
          handled.push(value)
          if (value === 9) throw new Error("no")
          return value === 0 ? Deferred.await(gate) : Effect.void
        }, {
          group: "g",
          from: "beginning",
          prefetch: 1,
          retry: Schedule.recurs(0),
          deadLetter: letters,
          onGap: (gap) => {
            gaps.push(gap)
            return Effect.die("another defect")
          }
        }))
        yield* topic.publishAll([0, 1, 2])
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(handled, [0])))
        yield* topic.purge
        yield* Deferred.succeed(gate, undefined)
        yield* eventually(Effect.sync(() => assert.strictEqual(gaps[0]?.missed, 2)))
        yield* topic.publishAll([8, 9, 10])
        const [letter] = yield* collect(letters.subscribe({ from: "beginning" }), 1)
        assert.strictEqual((letter as Topic.Event<Topic.DeadLetter>).value.body, "9")
        yield* settled(topic, "g")
        assert.deepStrictEqual(handled, [0, 8, 9, 10, 9])
        yield* Fiber.interrupt(running)
      })))

  it.effect("has a span as a subscriber too", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { spans, traced } = recording()
        yield* on(a!, make({ name: "numbers" }))
        const handled = yield* Deferred.make<void>()
        const layers = Topic.handler(Numbers, () => Deferred.succeed(handled, undefined), { from: "beginning" }).pipe(
          Layer.provideMerge(Numbers.layer)
        )
        yield* on(
          a!,
          traced(Effect.scoped(Effect.gen(function*() {
            const numbers = Context.get(yield* Layer.build(layers), Numbers)
            yield* numbers.publish(1)
            yield* promptly(Deferred.await(handled), "the event")
          })))
        )
        assert.include(spans.map(({ name }) => name), "lockstep.Topic.handle")
      })))

  it.effect("has a span that is linked to that of the publisher, and is counted", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { spans, traced } = recording()
        const topic = yield* on(a!, make())
        const before = (yield* Metric.value(Metrics.deliveries)).count
        const running = yield* Effect.forkChild(
          traced(topic.run(() => Effect.void, { group: "g", from: "beginning" }))
        )
        yield* traced(topic.publish(1))
        yield* settled(topic, "g")
        const named = (name: string) => spans.find((span) => span.name === name)!
        const [published, handled] = [named("lockstep.Topic.publish"), named("lockstep.Topic.handle")]
        assert.deepStrictEqual(handled.links.map(({ span }) => [span.traceId, span.spanId]), [
          [published.traceId, published.spanId]
        ])
        yield* eventually(Effect.map(Metric.value(Metrics.deliveries), ({ count }) => assert.isAbove(count, before)))
        yield* Fiber.interrupt(running)
      })))
})

layer(TestServer.layer, live)("an event that follows something", (it) => {
  it.effect("is published with the release of a lock, and not when that is lost", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [a, b] = yield* Effect.forEach(nodes, (context) => on(context, make({ colocate: "lock" })))
        const outcome = yield* on(
          nodes[0]!,
          Effect.scoped(Effect.gen(function*() {
            const lease = yield* Lock.acquire("lock")
            const outcome = yield* a!.publishOnRelease(lease, 1)
            yield* realSleep(50)
            assert.strictEqual((yield* b!.state).length, 0)
            return outcome
          }))
        )
        assert.isFalse(Option.getOrThrow(yield* outcome).duplicate)
        assert.deepStrictEqual(valuesOf(yield* collect(b!.subscribe({ from: "beginning" }), 1)), [1])
        const lost = yield* on(
          nodes[0]!,
          Effect.scoped(Effect.gen(function*() {
            const lease = yield* Lock.acquire("lock")
            const outcome = yield* a!.publishOnRelease(lease, 2)
            yield* lose(nodes[0]!, namespace, server)
            yield* Effect.flip(lease.lost)
            return outcome
          }))
        )
        assert.isTrue(Option.isNone(yield* lost))
        assert.strictEqual((yield* b!.state).length, 1)
      })))

  it.effect("is published with others, in their order", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ colocate: "shared" }))
        const ref = yield* on(a!, SharedRef.make({ name: "shared", schema: Schema.Number, initial: 0 }))
        const publications = (values: ReadonlyArray<number>) => Effect.forEach(values, (n) => topic.publication(n))
        yield* ref.publishing(yield* publications([0, 1, 2])).set(1)
        assert.isFalse(yield* ref.publishing(yield* publications([10, 11])).compareAndSet(1e6, 3))
        // The first ones follow a write that is not made, and the others one that is.
        yield* Effect.all([
          Effect.flatMap(publications([20, 21]), (publish) => ref.publishing(publish).compareAndSet(1e6, 3)),
          Effect.flatMap(publications([3, 4]), (publish) => ref.publishing(publish).set(2))
        ], { concurrency: "unbounded" })
        const outcomes = yield* on(
          a!,
          Effect.scoped(Effect.gen(function*() {
            const lease = yield* Lock.acquire("shared")
            return yield* Effect.forEach([5, 6], (n) => topic.publishOnRelease(lease, n))
          }))
        )
        const published = yield* promptly(Effect.forEach(outcomes, (outcome) => outcome), "the outcomes")
        assert.deepStrictEqual(published.map(Option.isSome), [true, true])
        yield* topic.publish(7)
        assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), 8)), upTo(8))
        yield* ref.delete
      })))

  it.effect("is published with the release of a lock that its process may keep", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ colocate: "lock" }))
        for (const n of upTo(4)) {
          const outcome = yield* on(
            a!,
            Effect.scoped(
              Effect.flatMap(Lock.acquire("lock", { cached: true }), (lease) => topic.publishOnRelease(lease, n))
            )
          )
          assert.isTrue(Option.isSome(yield* promptly(outcome, "the outcome")), String(n))
        }
        assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), 4)), upTo(4))
      })))

  it.effect("is not published with a release that was made before", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ colocate: "lock" }))
        const lease = yield* on(a!, Effect.scoped(Lock.acquire("lock")))
        assert.isTrue(Option.isNone(yield* promptly(Effect.flatten(topic.publishOnRelease(lease, 1)), "the outcome")))
        assert.strictEqual((yield* topic.state).length, 0)
      })))

  for (const verdict of ["dropReply", "drop"] as const) {
    it.effect(`says whether it was published when the session is lost with its answer: ${verdict}`, () =>
      behindLine(({ context, line, namespace, server }) =>
        Effect.gen(function*() {
          const topic = yield* on(context, make({ colocate: "lock" }))
          const scope = yield* Scope.make()
          const lease = yield* Scope.provide(on(context, Lock.acquire("lock")), scope)
          const outcome = yield* topic.publishOnRelease(lease, 1)
          yield* line.refuse
          const sent = yield* line.once(asks("lock.release"), verdict)
          const released = yield* Effect.forkChild(Scope.close(scope, Exit.void))
          yield* sent
          const count = verdict === "dropReply" ? 1 : 0
          yield* eventually(Effect.map(
            server.cli("XLEN", `{${namespace}:00}:topic-entries:${hostile}`),
            (found) => assert.strictEqual(Number(found), count)
          ))
          yield* forgetSession(context, namespace, server)
          yield* line.pass
          const published = yield* promptly(outcome, "the outcome")
          assert.strictEqual(Option.isSome(published), verdict === "dropReply")
          yield* Fiber.join(released)
          assert.strictEqual((yield* topic.state).length, count)
        }), short))
  }

  it.effect("is said to be a duplicate when the session is lost with the answer that it is", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const topic = yield* on(context, make({ colocate: "lock" }))
        const { id } = yield* topic.publish(1, { id: "order" })
        const scope = yield* Scope.make()
        const lease = yield* Scope.provide(on(context, Lock.acquire("lock")), scope)
        const outcome = yield* topic.publishOnRelease(lease, 2, { id: "order" })
        const held = Effect.map(
          server.cli("HEXISTS", `{${namespace}:00}:sessions`, "@lock:lock"),
          (found) => found === "1"
        )
        yield* eventually(held)
        yield* line.refuse
        const sent = yield* line.once(asks("lock.release"), "dropReply")
        const released = yield* Effect.forkChild(Scope.close(scope, Exit.void))
        yield* sent
        yield* eventually(Effect.map(held, (held) => !held))
        yield* forgetSession(context, namespace, server)
        yield* line.pass
        assert.deepStrictEqual(yield* promptly(outcome, "the outcome"), Option.some({ id, duplicate: true }))
        yield* Fiber.join(released)
        assert.strictEqual((yield* topic.state).length, 1)
      }), short))

  it.effect("is not published with a later release when it was said that it could not be", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ colocate: "lock" }))
        const scope = yield* Scope.make()
        const lease = yield* Scope.provide(on(a!, Lock.acquire("lock")), scope)
        const outcome = yield* topic.publishOnRelease(lease, 1)
        const permit = (how: "+fcall" | "-fcall") => Effect.orDie(server.cli("ACL", "SETUSER", "default", how))
        const error = yield* Effect.acquireUseRelease(
          permit("-fcall"),
          () => Effect.andThen(Effect.forkChild(Scope.close(scope, Exit.void)), promptly(Effect.flip(outcome), "it")),
          () => permit("+fcall")
        )
        assert.strictEqual(error.reason._tag, "MissingPermission")
        // The release is made again with the next heartbeat.
        yield* promptly(Effect.scoped(on(a!, Lock.acquire("lock"))), "the lock")
        assert.strictEqual((yield* topic.state).length, 0)
      }), { lease: "3 seconds" }))

  it.effect("is not said to be unpublished when Redis may have forgotten that it was", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const topic = yield* on(context, make({ name: "shared", colocate: "lock", dedupe: "50 millis" }))
        const scope = yield* Scope.make()
        const lease = yield* Scope.provide(on(context, Lock.acquire("lock")), scope)
        const outcome = yield* topic.publishOnRelease(lease, 1)
        yield* line.refuse
        const sent = yield* line.once(asks("lock.release"), "dropReply")
        const released = yield* Effect.forkChild(Scope.close(scope, Exit.void))
        yield* sent
        const keys = ["even", "odd"].map((role) => `{${namespace}:00}:topic-${role}:shared`)
        yield* eventually(Effect.map(server.cli("XLEN", `{${namespace}:00}:topic-entries:shared`), (n) => n === "1"))
        yield* eventually(Effect.map(server.cli("EXISTS", ...keys), (count) => count === "0"))
        yield* forgetSession(context, namespace, server)
        yield* line.pass
        const error = yield* promptly(Effect.flip(outcome), "the outcome")
        assert.strictEqual(error.reason._tag, "Timeout")
        yield* Fiber.join(released)
      }), short))

  it.effect("is published with a value that is written", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ colocate: "ref" }))
        const ref = yield* on(a!, SharedRef.make({ name: "ref", schema: Schema.Number, initial: 0 }))
        yield* ref.publishing(yield* topic.publication(10)).set(1)
        const { version } = yield* ref.versioned
        assert.isTrue(yield* ref.publishing(yield* topic.publication(20)).compareAndSet(version, 2))
        assert.isFalse(yield* ref.publishing(yield* topic.publication(30)).compareAndSet(version, 3))
        yield* topic.publish(40)
        assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), 3)), [10, 20, 40])
        yield* ref.delete
      })))

  it.effect("is published with a result that is accepted", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ colocate: "group" }))
        const group = yield* on(a!, TaskGroup.make({ name: "group", result: Schema.Number, timeToLive: "100 millis" }))
        yield* Effect.scoped(Effect.gen(function*() {
          const task = yield* on(a!, group.register("shard"))
          yield* task.submit(7, { publish: yield* topic.publication(70) })
          yield* Effect.flip(task.submit(8, { publish: yield* topic.publication(80) }))
        }))
        yield* topic.publish(90)
        assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe({ from: "beginning" }), 2)), [70, 90])
        // In another partition it could not be one step.
        const other = yield* on(
          a!,
          make({ name: "other", colocate: "group", lease: "1 second" })
        )
        yield* Effect.scoped(Effect.gen(function*() {
          const task = yield* on(a!, group.register("shard 2"))
          isRangeError(
            yield* Effect.exit(Effect.flatMap(other.publication(1), (publish) => task.submit(9, { publish })))
          )
        }))
      })))
})

/** Nodes of a namespace with several partitions. What Redis knows of the shards of a topic, it keeps for a day. */
const spread = <A, E>(
  count: number,
  use: (nodes: ReadonlyArray<Node>) => Effect.Effect<A, E, Scope.Scope>,
  namespace = freshNamespace()
): Effect.Effect<void, unknown, TestServer> =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const options: Coordinator.Options = { namespace, partitions: 8 }
    const nodes = yield* Effect.forEach(Array.from({ length: count }), () => node(server.url, options))
    yield* use(nodes)
  }).pipe(Effect.scoped)

layer(TestServer.layer, live)("a topic of several shards", (it) => {
  it.effect("keeps the order of each key, for subscribers and groups", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const options: Coordinator.Options = { namespace, partitions: 8 }
        const context = yield* node(server.url, options)
        const topic = yield* on(context, make({ shards: 5, key: (n) => String(n % 20) }))
        const handled: Array<number> = []
        const running = yield* Effect.forkChild(
          topic.run((event) => Effect.sync(() => handled.push(event.value)), {
            group: "g",
            orderBy: "key",
            from: "beginning"
          })
        )
        yield* topic.publishAll(upTo(1000))
        const found = yield* collect(topic.subscribe({ from: "beginning" }), 1000)
        const ofKey = (values: ReadonlyArray<number | string>, key: number) =>
          values.filter((n) => Number(n) % 20 === key)
        yield* eventually(Effect.sync(() => assert.strictEqual(handled.length, 1000)))
        for (const key of upTo(20)) {
          const expected = upTo(50).map((n) => 20 * n + key)
          assert.deepStrictEqual(ofKey(valuesOf(found), key), expected)
          assert.deepStrictEqual(ofKey(handled, key), expected)
        }
        const { first, length } = yield* topic.state
        assert.deepStrictEqual([first.length, length], [5, 1000])
        const { id } = found[500] as Topic.Event<number>
        assert.isAbove((yield* collect(topic.subscribe({ from: { after: id } }), 1)).length, 0)
        assert.strictEqual((yield* collect(topic.subscribe({ from: { last: 10 } }), 10)).length, 10)
        yield* Fiber.interrupt(running)
      }))
    }))

  it.effect("changes their number while processes publish, subscribe and handle, and keeps the order of each key", () =>
    spread(3, (nodes) =>
      Effect.gen(function*() {
        const topics = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const reading = yield* subscribers(topics, 0, { from: "beginning" })
        const handled: Array<number> = []
        for (const topic of topics) {
          yield* Effect.forkChild(
            topic.run((event) => Effect.andThen(Effect.yieldNow, Effect.sync(() => handled.push(event.value))), {
              group: "g",
              orderBy: "key",
              from: "beginning",
              concurrency: 4
            })
          )
        }
        const keys = 24
        let published = 0
        let over = false
        // Each key is published from another process each time, and the next event of it when that is confirmed.
        const publishing = yield* Effect.forEach(upTo(keys), (key) =>
          Effect.forkChild(Effect.gen(function*() {
            for (let n = 0; !over; n++) {
              yield* topics[(key + n) % 3]!.publish(n * keys + key, { key: String(key) })
              published++
            }
          })))
        for (const shards of [4, 2, 8, 1, 3]) {
          const before = published
          yield* eventually(Effect.sync(() => assert.isAbove(published, before + 200)))
          yield* Effect.scoped(on(nodes[shards % 3]!, Topic.make({ name: hostile, schema: Schema.Number, shards })))
          yield* eventually(
            Effect.sync(() => assert.deepStrictEqual(topics.map((topic) => topic.shards), [shards, shards, shards]))
          )
        }
        const before = published
        yield* eventually(Effect.sync(() => assert.isAbove(published, before + 200)))
        over = true
        yield* promptly(Effect.forEach(publishing, Fiber.join), "the publishers")
        const expected = (values: ReadonlyArray<number | string>) =>
          upTo(keys).map((key) => values.filter((n) => Number(n) % keys === key))
        const all = yield* collect(topics[0]!.subscribe({ from: "beginning" }), published)
        const inOrder = expected(valuesOf(all))
        for (const [key, values] of inOrder.entries()) {
          assert.deepStrictEqual(values, values.map((_, n) => n * keys + key))
        }
        for (const { found } of reading) {
          yield* eventually(Effect.sync(() => assert.strictEqual(found.length, published)))
          assert.deepStrictEqual(expected(valuesOf(found)), inOrder)
        }
        yield* eventually(Effect.sync(() => assert.strictEqual(handled.length, published)))
        assert.deepStrictEqual(expected(handled), inOrder)
        // A group that is made now handles what there was before the changes in order too.
        const later: Array<number> = []
        yield* Effect.forkChild(
          topics[1]!.run((event) => Effect.sync(() => later.push(event.value)), {
            group: "later",
            orderBy: "key",
            from: "beginning",
            concurrency: 4
          })
        )
        yield* eventually(Effect.sync(() => assert.strictEqual(later.length, published)))
        assert.deepStrictEqual(expected(later), inOrder)
      })))

  it.effect("stores what follows something in its first shard, while their number changes", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ colocate: "lock" }))
        const ref = yield* on(a!, SharedRef.make({ name: "lock", schema: Schema.Number, initial: 0 }))
        yield* Effect.addFinalizer(() => Effect.orDie(ref.delete))
        const resize = (shards: number) =>
          Effect.andThen(
            on(b!, Effect.scoped(Topic.make({ name: hostile, schema: Schema.Number, colocate: "lock", shards }))),
            eventually(Effect.sync(() => assert.strictEqual(topic.shards, shards)))
          )
        const released = (n: number, options?: Topic.PublishOptions) =>
          Effect.flatten(on(
            a!,
            Effect.scoped(Effect.flatMap(Lock.acquire("lock"), (lease) => topic.publishOnRelease(lease, n, options)))
          ))
        const written = (n: number, options?: Topic.PublishOptions) =>
          Effect.flatMap(topic.publication(n, options), (event) => ref.publishing(event).set(n))
        const keys = upTo(100).map(String)
        const beside = keys.find((key) => partitionOf(key, 4) === 0)!
        const apart = keys.find((key) => partitionOf(key, 4) !== 0)!
        const early = yield* topic.publication(8, { key: apart })
        yield* resize(4)
        for (const n of upTo(4)) {
          assert.isTrue(Option.isSome(yield* promptly(released(2 * n), "the outcome")))
          yield* written(2 * n + 1)
        }
        // No event is refused once the write that it follows is under way.
        yield* ref.publishing(early).set(8)
        yield* written(9, { key: beside })
        assert.isTrue(Option.isSome(yield* promptly(released(10, { id: beside }), "the outcome")))
        for (const options of [{ key: apart }, { id: apart }, { key: apart, id: beside }]) {
          assert.strictEqual(refusal(yield* Effect.exit(released(100, options))), "OtherShard")
          assert.strictEqual(refusal(yield* Effect.exit(written(100, options))), "OtherShard")
        }
        assert.strictEqual(yield* ref.get, 9)
        yield* resize(1)
        yield* written(11, { key: apart })
        const events = yield* collect(topic.subscribe({ from: "beginning" }), 12)
        assert.deepStrictEqual(valuesOf(events), upTo(12))
        assert.strictEqual((yield* topic.state).length, 12)
      })))

  it.effect("leaves nothing behind when not all of them can be joined", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      yield* spread(1, ([a]) =>
        Effect.gen(function*() {
          const { kernel } = spaceOf(Context.get(a!, Coordinator.Coordinator))
          const { index } = kernel.partitionFor(hostile)
          const [first, second] = upTo(2, index).map((at) => `${kernel.partitionAt(at % 8).prefix}topic:${hostile}`)
          yield* server.cli("SET", second!, "no topic")
          assert.strictEqual(refusal(yield* Effect.exit(on(a!, make({ shards: 2 })))), "ActorDefect")
          const members = Effect.map(
            server.cli("HKEYS", first!),
            (fields) => fields.split("\n").filter((field) => field.startsWith("o")).length
          )
          yield* eventually(Effect.map(members, (count) => assert.strictEqual(count, 0)))
          yield* server.cli("DEL", second!)
          yield* on(a!, make({ shards: 2 }))
          assert.strictEqual(yield* members, 1)
        }))
    }))

  it.effect("has as many shards as before when it was closed, and its first one is empty", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* spread(1, ([a]) =>
        Effect.gen(function*() {
          const brief = { retention: { age: "2 seconds" }, dedupe: "1 second" } as const
          const published = yield* Effect.scoped(Effect.gen(function*() {
            const topic = yield* on(a!, Topic.make({ name: hostile, schema: Schema.Number, shards: 4, ...brief }))
            for (const key of upTo(64).map(String)) {
              const first = yield* topic.publish(0, { key, id: "x" })
              if (first.id.includes(":")) return { key, id: first.id }
              yield* topic.purge
            }
            return assert.fail("all keys belong to the first shard")
          }))
          yield* Effect.scoped(Effect.gen(function*() {
            const topic = yield* on(a!, Topic.make({ name: hostile, schema: Schema.Number }))
            assert.strictEqual(topic.shards, 4)
            assert.isTrue((yield* topic.publish(0, { key: published.key, id: "x" })).duplicate)
            yield* topic.publish(1, { key: published.key })
            const [all, behind] = [{ from: "beginning" }, { from: { after: published.id } }] as const
            assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe(all), 2)), upTo(2))
            assert.deepStrictEqual(valuesOf(yield* collect(topic.subscribe(behind), 1)), [1])
          }))
          const kept = Effect.map(keysOf(server, namespace), (keys) => keys.filter((key) => key.includes(":topic")))
          yield* eventually(Effect.map(kept, (keys) => assert.deepStrictEqual(keys, [])))
        }), namespace)
    }))

  it.effect("begins with the last events of all shards together", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ shards: 4 }))
        const shardOf = ({ id }: Topic.Published) => id.includes(":") ? Number(id.split(":")[0]) : 0
        const old = yield* topic.publishAll(upTo(40), (n) => ({ key: String(n) }))
        assert.deepStrictEqual(new Set(old.map(shardOf)), new Set(upTo(4)))
        // Later than all of them, and all in one shard.
        yield* realSleep(2)
        yield* topic.publishAll(upTo(10, 100), () => ({ key: "x" }))
        const last = (n: number, count: number) =>
          Effect.gen(function*() {
            const stream = yield* topic.subscribed({ from: { last: n } })
            yield* topic.publishAll(upTo(40, 1000), (n) => ({ key: String(n) }))
            return valuesOf(yield* collect(stream, count + 40)).filter((value) => Number(value) < 1000)
          })
        assert.deepStrictEqual(yield* last(5, 5), upTo(5, 105))
        yield* topic.purge
        assert.deepStrictEqual(yield* last(5, 0), [])
        // Several shards have events of one millisecond.
        for (const n of [1, 7, 39, 40, 41]) {
          yield* topic.purge
          yield* topic.publishAll(upTo(40), (n) => ({ key: String(n) }))
          assert.lengthOf(yield* last(n, Math.min(n, 40)), Math.min(n, 40))
        }
      })))

  it.effect("knows the ids that were published before a change", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make())
        const ids = upTo(20).map((n) => `id ${n}`)
        const before = yield* Effect.forEach(ids, (id, n) => topic.publish(n, { id }))
        const other = yield* on(b!, make({ shards: 4 }))
        for (const one of [topic, other]) {
          const again = yield* Effect.forEach(ids, (id, n) => one.publish(n, { id }))
          assert.deepStrictEqual(again, before.map(({ id }) => ({ id, duplicate: true })))
          const all = yield* one.publishAll(upTo(21), (n) => ({ id: `id ${n}` }))
          assert.deepStrictEqual(all.map(({ duplicate }) => duplicate), upTo(21).map((n) => n < 20 || one === other))
        }
        assert.strictEqual((yield* topic.state).length, 21)
      })))

  it.effect("knows the ids that were published before a change also of what waits for its end", () =>
    Effect.gen(function*() {
      const line = yield* proxy(yield* TestServer)
      const namespace = freshNamespace()
      yield* spread(1, ([b]) =>
        Effect.gen(function*() {
          const a = yield* node(line.url, { namespace, partitions: 8 })
          const topic = yield* on(a, make())
          const other = yield* on(b!, make())
          for (const shards of [2, 3]) {
            const ids = upTo(30).map((n) => `${shards} ${n}`)
            const before = yield* other.publishAll(upTo(30), (n) => ({ id: ids[n] }))
            // Its process is not notified of the change. The reading that is under way brings the other news.
            const reading = yield* line.hold(({ name }) => name === "XREAD")
            yield* on(b!, make({ dedupe: `${shards} minutes` }))
            yield* promptly(reading.request, "the next reading of the mailbox")
            yield* on(b!, make({ shards }))
            const sealing = yield* line.hold(asks("topic.seal"))
            const moved = yield* Effect.forkChild(topic.publish(-1, { key: "k" }))
            yield* promptly(sealing.request, "the change")
            const again = yield* Effect.forkChild(
              Effect.forEach(ids, (id, n) => topic.publish(n, { id }), { concurrency: "unbounded" })
            )
            yield* realSleep(20)
            yield* sealing.release()
            yield* reading.release()
            yield* promptly(Fiber.join(moved), "the publication")
            assert.deepStrictEqual(
              yield* promptly(Fiber.join(again), "the publications"),
              before.map(({ id }) => ({ id, duplicate: true }))
            )
          }
          assert.strictEqual((yield* topic.state).length, 62)
        }), namespace)
    }))

  it.effect("reports what was purged in a shard that a group's members had not joined before the next change", () =>
    Effect.gen(function*() {
      const line = yield* proxy(yield* TestServer)
      const namespace = freshNamespace()
      yield* spread(1, ([b]) =>
        Effect.gen(function*() {
          const a = yield* node(line.url, { namespace, partitions: 8 })
          const topic = yield* on(a, make())
          const theirs = yield* on(b!, make())
          const told: Array<Topic.Element<number>> = []
          const run = (group: string) =>
            Effect.forkChild(topic.run((event) => Effect.sync(() => void told.push(event)), {
              group,
              onGap: (gap) => Effect.sync(() => void told.push(gap))
            }))
          const former = yield* run("former")
          yield* joined(topic, "former", 1)
          yield* Fiber.interrupt(former)
          yield* joined(topic, "former", 0)
          const member = yield* run("g")
          yield* joined(topic, "g", 1)
          const joining = yield* line.hold(asks("topic.consume"))
          yield* on(b!, make({ shards: 2 }))
          yield* promptly(joining.request, "the member in the other shard")
          yield* theirs.publishAll(upTo(20))
          yield* theirs.purge
          yield* on(b!, make({ shards: 1 }))
          yield* joining.release()
          yield* eventually(Effect.sync(() => assert.strictEqual(accounted(told), 20)))
          // One that has no members in any shard is removed.
          assert.deepStrictEqual((yield* topic.state).groups.map(({ name }) => name), ["g"])
          yield* Fiber.interrupt(member)
        }), namespace)
    }))

  it.effect("ends a change that its process did not live to end", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ shards: 2 }))
        const space = spaceOf(Context.get(a!, Coordinator.Coordinator))
        const place = placeIn(space, space.kernel.partitionFor(hostile), "topic", hostile, undefined)
        yield* request(place, "topic.seal", [1, 3, 3])
        assert.isFalse((yield* topic.publish(1, { key: "a" })).duplicate)
        yield* eventually(Effect.sync(() => assert.strictEqual(topic.shards, 3)))
        const other = yield* on(b!, make())
        assert.strictEqual(other.shards, 3)
        yield* Effect.forEach(upTo(30), (n) => other.publish(n, { key: String(n) }))
        assert.strictEqual((yield* topic.state).last.length, 3)
      })))

  it.effect("keeps as much in a shard that is added as in the others, whichever process adds it", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const retention = { length: 8, protect: false, abandon: "1 hour" } as const
        const decided = Effect.scoped(on(
          b!,
          Topic.make({
            name: hostile,
            schema: Schema.Number,
            dedupe: "1 second",
            retention
          })
        ))
        const space = spaceOf(Context.get(a!, Coordinator.Coordinator))
        const { index } = space.kernel.partitionFor(hostile)
        const placeOf = (shard: number) =>
          placeIn(space, space.kernel.partitionAt((index + shard) % 8), "topic", hostile, undefined)
        const keeps = (topic: Topic.Topic<number>, shards: number) =>
          Effect.gen(function*() {
            yield* topic.publishAll(upTo(1000), (n) => ({ key: String(n) }))
            assert.isAtMost((yield* topic.state).length, 9 * shards)
            const all = yield* Effect.forEach(upTo(shards), (at) =>
              Effect.map(
                request(placeOf(at), "topic.seal", [0, 0, 1]),
                ([, , , , , , , kept]) => (kept as ReadonlyArray<unknown>).slice(1)
              ))
            assert.deepStrictEqual(all, upTo(shards).map(() => [8, 0, 86_400_000, 3_600_000, 1000, false]))
          })
        yield* Effect.scoped(Effect.gen(function*() {
          const topic = yield* on(a!, make())
          yield* decided
          // One that has opened it before that was decided.
          yield* request(placeOf(0), "topic.seal", [1, 2, 2])
          yield* eventually(Effect.sync(() => assert.strictEqual(topic.shards, 2)))
          yield* keeps(topic, 2)
        }))
        // And one that opens it when no other process has it open.
        yield* keeps(yield* on(b!, make({ shards: 4 })), 4)
      })))

  it.effect("has one number again when its first one has lost its data", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      yield* spread(2, ([a, b]) =>
        Effect.gen(function*() {
          const topic = yield* on(a!, make({ shards: 4 }))
          const { kernel } = spaceOf(Context.get(a!, Coordinator.Coordinator))
          yield* server.cli("DEL", `${kernel.partitionFor(hostile).prefix}topic:${hostile}`)
          const other = yield* on(b!, make({ shards: 3 }))
          yield* eventually(Effect.sync(() => assert.deepStrictEqual([topic.shards, other.shards], [3, 3])))
          const reading = yield* subscribers([topic, other], 80, { from: "beginning" })
          const publish = (from: number) =>
            Effect.forEach(
              [topic, other],
              (one, at) => one.publishAll(upTo(20, from + 20 * at), (n) => ({ key: String(n) }))
            )
          yield* publish(0)
          // A reader that waited for a shard that the first one does not know of would wait here for ever.
          yield* on(b!, make({ shards: 2 }))
          yield* publish(40)
          for (const { found } of reading) {
            yield* eventually(
              Effect.sync(() =>
                assert.deepStrictEqual(valuesOf(found).map(Number).toSorted((one, other) => one - other), upTo(80))
              )
            )
          }
        }))
    }))

  it.effect("has all of them again when its first one has lost its data, as those that stay say", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const options: Coordinator.Options = { namespace: freshNamespace(), partitions: 8 }
      const forget = Effect.fnUntraced(function*(context: Node) {
        const { kernel } = spaceOf(Context.get(context, Coordinator.Coordinator))
        yield* server.cli("DEL", `${kernel.partitionFor(hostile).prefix}topic:${hostile}`)
      })
      const open = (options: Partial<Topic.Options<number>> = {}) =>
        Topic.make({ name: hostile, schema: Schema.Number, ...options })
      const publish = (topic: Topic.Topic<number>, from: number) =>
        topic.publishAll(upTo(40, from), (n) => ({ key: String(n) }))
      yield* Effect.scoped(Effect.gen(function*() {
        const first = yield* node(server.url, options)
        yield* publish(yield* on(first, open({ shards: 4 })), 0)
        yield* forget(first)
      }))
      // Only three shards know by now that there were four.
      yield* Effect.scoped(Effect.gen(function*() {
        const next = yield* node(server.url, options)
        const topic = yield* on(next, open({ shards: 2 }))
        yield* publish(topic, 40)
        const [reading] = yield* subscribers([topic], 80, { from: "beginning" })
        yield* eventually(Effect.sync(() => assert.isAtLeast(reading!.found.length, 80)))
        yield* topic.purge
      }))
    }))

  for (const [named, shards] of [[undefined, 4], [1, 1], [3, 3]] as const) {
    it.effect(`has ${shards} shards of 4 when its first one is made again by a process that names ${named}`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        yield* spread(2, ([a, b]) =>
          Effect.gen(function*() {
            const topic = yield* on(a!, make({ shards: 4 }))
            const { kernel } = spaceOf(Context.get(a!, Coordinator.Coordinator))
            const { prefix } = kernel.partitionFor(hostile)
            yield* server.cli("DEL", `${prefix}topic:${hostile}`)
            const other = yield* on(b!, make({ shards: named }))
            yield* server.cli("DEL", `${prefix}sessions`)
            yield* eventually(
              Effect.gen(function*() {
                yield* Effect.forEach([topic, other], (one) => one.publishAll(upTo(20), (n) => ({ key: String(n) })))
                assert.deepStrictEqual([topic.shards, other.shards], [shards, shards])
              })
            )
          }))
      }))
  }

  it.effect("is handled again by a group with an order after Redis has lost it", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      yield* spread(2, ([a, b]) =>
        Effect.gen(function*() {
          const topic = yield* on(a!, make({ shards: 2 }))
          const handled = new Set<number>()
          yield* Effect.forkScoped(
            topic.run(({ value }) => Effect.sync(() => handled.add(value)), { group: "g", orderBy: "key" })
          )
          yield* joined(topic, "g", 1)
          for (const round of upTo(6)) {
            yield* on(b!, make({ shards: 1 + (round % 3) }))
            // What was published before the shards were found again can be forgotten with them.
            const all = eventually(
              Effect.gen(function*() {
                yield* Effect.forEach(upTo(8), (n) => topic.publish(round * 8 + n, { key: String(n) }))
                yield* Effect.sync(() => assert.includeMembers([...handled], upTo(8, round * 8)))
              })
            )
            yield* all
            yield* server.cli("FLUSHALL")
            handled.clear()
            yield* all
          }
        }))
    }), 60_000)

  it.effect("keeps what is published after a change for a group without members", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ shards: 2 }))
        yield* Effect.scoped(Effect.gen(function*() {
          yield* Effect.forkScoped(topic.run(() => Effect.void, { group: "g", orderBy: "key" }))
          yield* joined(topic, "g", 1)
        }))
        yield* joined(topic, "g", 0)
        yield* on(b!, make({ shards: 4 }))
        yield* Effect.forEach(upTo(40), (n) => topic.publish(n, { key: String(n) }))
        const handled: Array<number> = []
        yield* Effect.forkChild(
          topic.run(({ value }) => Effect.sync(() => handled.push(value)), { group: "g", orderBy: "key" })
        )
        yield* eventually(
          Effect.sync(() => assert.deepStrictEqual(handled.toSorted((one, other) => one - other), upTo(40)))
        )
      })))

  it.effect("is handled after two changes that a member observes in another order", () =>
    Effect.gen(function*() {
      const line = yield* proxy(yield* TestServer)
      const namespace = freshNamespace()
      yield* spread(1, ([b]) =>
        Effect.gen(function*() {
          const a = yield* node(line.url, { namespace, partitions: 8 })
          const topic = yield* on(a, make())
          const other = yield* on(b!, make())
          const handled: Array<number> = []
          const handles = (values: ReadonlyArray<number>) =>
            eventually(
              Effect.sync(() => assert.deepStrictEqual(handled.toSorted((one, other) => one - other), values))
            )
          yield* Effect.forkScoped(
            topic.run(({ value }) => Effect.sync(() => handled.push(value)), {
              group: "g",
              from: "beginning",
              orderBy: "key"
            })
          )
          yield* joined(topic, "g", 1)
          const held = yield* line.hold(({ name }) => name === "XREAD")
          // The reading that is under way brings it.
          yield* other.publish(0)
          yield* promptly(held.request, "the next reading of the mailbox")
          yield* handles([0])
          const resize = (context: Node, shards: number) => Effect.scoped(on(context, make({ shards })))
          // Redis tells the member of the first change through its mailbox, and of the second one with a reply.
          yield* resize(b!, 2)
          yield* resize(a, 3)
          yield* held.release()
          yield* Effect.forEach(upTo(30, 1), (n) => other.publish(n, { key: String(n) }))
          yield* handles(upTo(31))
        }), namespace)
    }))

  it.effect("is read in order across a change by a slow subscriber", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ shards: 2 }))
        const key = (n: number) => ({ key: String(n % 7) })
        yield* topic.publishAll(upTo(2000), key)
        yield* on(a!, make({ shards: 1 }))
        yield* topic.publishAll(upTo(100, 2000), key)
        const slow = topic.subscribe({ from: "beginning", buffer: { capacity: 16 } }).pipe(
          Stream.rechunk(1),
          Stream.tap(() => Effect.yieldNow)
        )
        const values = valuesOf(yield* collect(slow, 2100))
        for (const one of upTo(7)) {
          assert.deepStrictEqual(values.filter((n) => Number(n) % 7 === one), upTo(2100).filter((n) => n % 7 === one))
        }
      })))

  it.effect("shows what was removed unread of a shard that was added", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const topic = yield* on(a!, make({ retention: { length: 8 } }))
        const keyOf = (shard: number) => ({ key: upTo(9).map(String).find((key) => partitionOf(key, 2) === shard)! })
        const stream = yield* topic.subscribed({ buffer: { capacity: 2 } })
        const [live] = yield* subscribers([topic], 0, { from: "beginning" })
        // Its buffer is full, so it has to read what comes.
        yield* topic.publishAll(upTo(6), () => keyOf(0))
        yield* eventually(Effect.sync(() => assert.strictEqual(live!.found.length, 6)))
        yield* on(a!, make({ shards: 2 }))
        yield* topic.publishAll(upTo(300, 6), () => keyOf(1))
        const found: Array<Topic.Element<number>> = []
        yield* Effect.forkChild(Stream.runForEach(stream, (element) => Effect.sync(() => found.push(element))))
        yield* eventually(Effect.sync(() => assert.strictEqual(valuesOf(found).at(-1), 305)))
        assert.strictEqual(accounted(found), 306)
      })))

  for (const cause of ["purge", "age"] as const) {
    it.effect(`goes on with a slow subscriber when what it had to read before a change is removed: ${cause}`, () =>
      spread(1, ([a]) =>
        Effect.gen(function*() {
          const retention = cause === "age" ? { age: "1 second" } as const : undefined
          const topic = yield* on(a!, make({ shards: 2, retention }))
          const keyOf = (shard: number) => ({ key: upTo(9).map(String).find((key) => partitionOf(key, 2) === shard)! })
          yield* topic.publish(0, keyOf(0))
          yield* topic.publish(100, keyOf(1))
          const stream = yield* topic.subscribed({ from: "beginning", buffer: { capacity: 2 } })
          yield* topic.publishAll(upTo(500, 101), () => keyOf(1))
          yield* on(a!, make({ shards: 1 }))
          yield* topic.publish(1, keyOf(0))
          // The shard that stays waits for the other one, and that for the subscriber.
          yield* realSleep(50)
          if (cause === "purge") yield* topic.purge
          else yield* eventually(Effect.map(topic.state, ({ length }) => assert.strictEqual(length, 0)))
          const found: Array<Topic.Element<number>> = []
          yield* Effect.forkChild(Stream.runForEach(stream, (element) => Effect.sync(() => found.push(element))))
          yield* topic.publish(2, keyOf(0))
          yield* eventually(Effect.sync(() => assert.include(valuesOf(found), 2)))
          // Nothing is published any more in the shard that has gone.
          yield* eventually(Effect.sync(() => assert.strictEqual(accounted(found), 504)))
        })))
  }
})
