/** Offers and other waits while their process is overloaded, Redis is out of memory or out of reach, or their queue is closed. */
import { assert, it, layer } from "@effect/vitest"
import { Effect, Exit, Fiber, Schema, Scope, Stream } from "effect"
import { type Coordinator, Queue } from "../src/index.ts"
import type { Request } from "../src/internal/actor/sending.ts"
import type { Place } from "../src/internal/hold/place.ts"
import { type Caller, Callers } from "../src/internal/queue/callers.ts"
import { elapsed } from "./support/awake.ts"
import { type BehindLine, behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, TestServer } from "./support/live.ts"
import { emptied, inLine, make, shows, upTo, working } from "./support/queues.ts"
import { asks } from "./support/requests.ts"
import { standalone } from "./support/servers.ts"
import { channelOf, lose, on, pending, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const narrow = {
  lease: "9 seconds",
  margin: "1 second",
  requestTimeout: "3 seconds",
  batch: { maxPending: 20, maxRequests: 10 }
} as const satisfies Coordinator.Options

/** A queue, and offers to it of which two requests' worth is on its way to Redis, and the others wait. */
const behind = ({ context, line }: BehindLine, count: number) =>
  Effect.gen(function*() {
    const queue = yield* on(context, make())
    yield* queue.offer(0)
    const held = yield* line.hold(({ name }) => name === "FCALL")
    const offers = yield* Effect.forEach(
      upTo(count),
      (n) => Effect.forkChild(Effect.exit(queue.offer(n)), { startImmediately: true })
    )
    yield* held.request
    return { queue, offers, release: held.release() }
  })

layer(TestServer.layer, live)("an offer", (it) => {
  it.effect("fails while too many requests wait, and later ones do not", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offer(0)
        const others = yield* Effect.forEach(upTo(40), (n) =>
          Effect.forkChild(Effect.exit(queue.job(`none ${n}`).reschedule({ delay: 1 })), { startImmediately: true }))
        const refused = Effect.all([Effect.flip(queue.offer(1)), Effect.flip(queue.offerAll([2, 3]))], {
          concurrency: "unbounded"
        })
        const reasons = yield* promptly(refused, "the refusals")
        assert.deepStrictEqual(
          reasons.map(({ reason }) =>
            reason._tag
          ),
          ["Overloaded", "Overloaded"]
        )
        yield* Effect.forEach(others, (fiber) => Fiber.join(fiber))
        yield* promptly(queue.offer(4), "the next offer")
        yield* shows(queue, { waiting: 2 })
      }), narrow))

  it.effect("behind many others fails in time while Redis is away, and so do all", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const queue = yield* on(context, make())
        yield* queue.offer(0)
        yield* line.blackhole
        // Ten times as many as two requests have.
        const offers = yield* Effect.forEach(
          upTo(10_240),
          (n) => Effect.forkChild(Effect.flip(queue.offer(n)), { startImmediately: true })
        )
        const began = performance.now()
        const errors = yield* promptly(Effect.forEach(offers, Fiber.join), "the failures")
        assert.isBelow(performance.now() - began, 2000)
        for (const { reason } of errors) assert.strictEqual(reason._tag, "Timeout")
        yield* line.pass
        yield* line.closeAll
        yield* eventually(Effect.isSuccess(queue.offer(1)))
        // None comes later of those that were not sent.
        assert.isAtMost(yield* queue.drain(), 2 + 2 * 512)
      }), { lease: "9 seconds", margin: "1 second", requestTimeout: "500 millis" }))

  it.effect("fails at once while too many wait to be offered, and none of those before it", () =>
    behindLine((line) =>
      Effect.gen(function*() {
        const { offers, queue, release } = yield* behind(line, 2000)
        for (const offer of [queue.offer(1), queue.offerAll(upTo(3000)), queue.offerAll([1, 2])]) {
          const { reason } = yield* promptly(
            Effect.flip(offer as Effect.Effect<unknown, Queue.QueueError>),
            "the refusal"
          )
          assert.strictEqual(reason._tag, "Overloaded")
        }
        yield* release
        const stored = yield* promptly(Effect.forEach(offers, Fiber.join), "the others")
        // Two requests with 512 jobs each, and as many callers behind them as may wait.
        assert.strictEqual(stored.filter(Exit.isSuccess).length, 2 * 512 + narrow.batch.maxPending)
        // They hold up no others.
        yield* promptly(queue.offer(1), "a later offer")
        yield* queue.drain()
      }), narrow))

  it.effect("costs the same when it is given up, however many wait beside it", () =>
    behindLine((line) =>
      Effect.gen(function*() {
        const { offers, queue, release } = yield* behind(line, 40_000)
        const began = performance.now()
        yield* Effect.forEach(offers, (fiber) => Fiber.interrupt(fiber), { discard: true })
        assert.isBelow(performance.now() - began, 3000)
        yield* release
        yield* promptly(queue.offer(1), "another one")
        yield* queue.drain()
      }), { ...narrow, batch: { maxPending: 65_536 } }))

  it.effect("that waits for room is stored when there is some, also while too many requests wait", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const limits = { length: 3 }
        const queue = yield* on(context, make({ limits }))
        const other = yield* on(yield* direct(), make({ limits }))
        yield* other.offerAll(upTo(3))
        const waiting = yield* Effect.forkChild(queue.offerAll(upTo(3, 10)))
        const asked = Effect.forEach(upTo(40), (n) =>
          Effect.forkChild(Effect.exit(queue.job(`none ${n}`).reschedule({ delay: 1 })), { startImmediately: true }))
        yield* inLine(server, namespace, 1)
        const { session } = channelOf(context)
        const read = session!.read
        const held = yield* line.hold(({ name }) =>
          name === "FCALL"
        )
        yield* asked
        yield* held.request
        // Some requests are under way, and then as many wait as may.
        yield* asked
        assert.strictEqual(yield* other.drain(), 3)
        yield* eventually(Effect.sync(() => assert.isAbove(session!.read, read)), { message: "the news of room" })
        yield* held.release()
        yield* promptly(Fiber.join(waiting), "the offer")
        yield* shows(other, { waiting: 3 })
      }), narrow))
  it.effect("that Redis has no memory for holds up no others that wait for room", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      const options = { namespace, partitions: 1, lease: "3 seconds", margin: "500 millis" } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const [queue, second, other] = yield* Effect.forEach(
          upTo(3),
          () => Effect.flatMap(node(server.url, options), (context) => on(context, make({ limits: { length: 1 } })))
        )
        const { id } = yield* other!.offer(0)
        const first = yield* Effect.forkChild(queue!.offer(1))
        yield* inLine(server, namespace, 1)
        const behind = yield* Effect.forkChild(second!.offer(2))
        yield* inLine(server, namespace, 2)
        yield* server.cli("CONFIG", "SET", "maxmemory", 1)
        assert.isTrue(yield* other!.job(id).cancel)
        const { reason } = yield* promptly(Effect.flip(Fiber.join(first)), "the refusal")
        assert.strictEqual(reason._tag, "OutOfMemory")
        yield* pending(behind)
        yield* server.cli("CONFIG", "SET", "maxmemory", 0)
        yield* promptly(Fiber.join(behind), "the offer")
        yield* inLine(server, namespace, 0)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("that has failed while Redis was away holds up no others that wait for room", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const limits = { length: 1 }
        const queue = yield* on(context, make({ limits }))
        const other = yield* on(yield* direct(), make({ limits }))
        const { id } = yield* other.offer(0)
        const first = yield* Effect.forkChild(queue.offer(1))
        yield* inLine(server, namespace, 1)
        const behind = yield* Effect.forkChild(other.offer(2))
        yield* inLine(server, namespace, 2)
        const { session } = channelOf(context)
        yield* line.refuse
        const held = yield* line.hold(({ name }) => name === "FCALL")
        const asked = yield* Effect.forkChild(Effect.exit(queue.job("none").promote))
        yield* held.request
        assert.isTrue(yield* other.job(id).cancel)
        // It was notified of room, and cannot say so.
        const { reason } = yield* Effect.flip(Fiber.join(first))
        assert.strictEqual(reason._tag, "Timeout")
        yield* pending(behind)
        yield* held.release("drop")
        yield* line.pass
        yield* promptly(Fiber.join(behind), "the offer")
        assert.strictEqual(channelOf(context).session, session)
        yield* Fiber.join(asked)
        yield* inLine(server, namespace, 0)
      }), { lease: "15 seconds", margin: "1 second", requestTimeout: "500 millis" }))
})

layer(TestServer.layer, live)("the wait for a result", (it) => {
  it.effect("of many jobs whose options take long lets the process go on", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        for (const shards of [1, 3]) {
          const queue = yield* on(a!, make({ name: `shards ${shards}`, shards }))
          let turns = 0
          const turning = setInterval(() => turns++, 1)
          const slow = (): Queue.OfferOptions => {
            const until = performance.now() + 5
            while (performance.now() < until);
            return {}
          }
          const offered = yield* queue.offerAll(upTo(100), slow)
          clearInterval(turning)
          assert.deepStrictEqual(offered.length, 100)
          assert.isAbove(turns, 10)
          yield* queue.drain()
        }
      }), { partitions: 3, lease: "3 seconds", margin: "500 millis" }))

  it.effect("is never refused for the load when the job is stored, nor in the next session", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ success: Schema.Number }))
        const other = yield* on(b!, make({ success: Schema.Number }))
        // More than may wait to be sent.
        const executing = yield* Effect.forEach(upTo(60), (n) => Effect.forkChild(queue.execute(n)))
        yield* shows(other, { waiting: 60 })
        // A coordinator refuses one more request while so many wait.
        yield* eventually(lose(a!, namespace, server))
        const worker = yield* working(other, Effect.succeed, { concurrency: 10 })
        const results = yield* promptly(Effect.forEach(executing, (fiber) => Fiber.join(fiber)), "the results")
        assert.deepStrictEqual(results, upTo(60))
        yield* worker.stop
      }), narrow))

  it.effect("cancels its job when it is interrupted, also while Redis is away", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const queue = yield* on(context, make({ success: Schema.Number }))
        const other = yield* on(yield* direct(), make())
        const executing = yield* Effect.forEach(upTo(3), (n) => Effect.forkChild(queue.execute(n, { delay: "1 hour" })))
        yield* shows(other, { delayed: 3 })
        const { session } = channelOf(context)
        yield* line.refuse
        yield* line.closeAll
        // The first request is under way when the others are made.
        for (const fiber of executing) {
          yield* Effect.forkChild(Fiber.interrupt(fiber))
          yield* Effect.yieldNow
        }
        yield* Effect.forEach(executing, (fiber) => Fiber.await(fiber))
        yield* line.pass
        yield* shows(other, { delayed: 0 })
        // While Redis is away for longer than a request waits, many that end one after the other do not wait for that long each.
        const many = yield* Effect.forEach(upTo(20), (n) => Effect.forkChild(queue.execute(n, { delay: "1 hour" })))
        yield* shows(other, { delayed: 20 })
        yield* line.refuse
        yield* line.closeAll
        assert.include(["NotConnected", "Timeout"], (yield* Effect.flip(queue.offer(4))).reason._tag)
        const began = Date.now()
        yield* Effect.forEach(many, (fiber) => Fiber.interrupt(fiber))
        assert.isBelow(elapsed(began), 2000)
        yield* line.pass
        yield* shows(other, { delayed: 0 })
        // Of one whose offer is on its way, the answer comes after the offer was given up.
        yield* line.once(asks("queue.offer"), "blackholeReply")
        const early = yield* Effect.forkChild(queue.execute(3, { delay: "1 hour" }))
        yield* shows(other, { delayed: 1 })
        yield* line.refuse
        yield* Fiber.interrupt(early)
        assert.strictEqual((yield* Effect.flip(queue.offer(4))).reason._tag, "Timeout")
        yield* line.pass
        yield* shows(other, { delayed: 0 })
        assert.strictEqual(channelOf(context).session, session)
      }), { lease: "15 seconds", margin: "1 second", requestTimeout: "500 millis" }))
})

/** Callers that are answered when the test says so, and how many news each received with its answer. */
class Probe extends Callers<Caller, readonly [tag: string, job: string], "queue.watch"> {
  readonly asked: Array<() => void> = []
  readonly early: Array<number> = []

  constructor() {
    super({
      key: "queue",
      channel: {
        outbox: { request: ({ settle }: Request<"queue.watch">) => this.asked.push(() => settle(["missing"])) }
      },
      partition: { expect: () => () => {} },
      space: { kernel: { isClosing: () => false } }
    } as unknown as Place, "queue.watch")
  }

  ask(): void {
    this.add({ name: "job", job: undefined, fail: () => {} }, false)
  }

  protected tell(): void {}

  protected answered(caller: Caller, _: unknown, early: ReadonlyArray<unknown>): void {
    this.remove(caller)
    this.early.push(early.length)
  }
}

it("keeps no news from before all questions that are under way", () => {
  const probe = new Probe()
  probe.ask()
  for (let turn = 0; turn < 1000; turn++) {
    probe.told(["outcome", "job"])
    probe.ask()
    probe.told(["outcome", "job"])
    probe.asked[turn]!()
  }
  // What came while each of them was asked.
  assert.deepStrictEqual(probe.early, upTo(1000).map((turn) => turn === 0 ? 2 : 3))
})

layer(TestServer.layer, live)("a queue whose scope is closed", (it) => {
  it.effect("ends all waits on it, and refuses others", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const options = { payload: Schema.Number, success: Schema.Number, limits: { length: 1 } }
        const open = Queue.make({ name: "closes", retention: "200 millis", ...options })
        const scope = yield* Scope.make()
        const queue = yield* Scope.provide(on(a!, open), scope)
        const other = yield* Effect.tap(on(b!, open), emptied)
        const { id } = yield* other.offer(0, { result: true })
        const waits = Effect.all([
          Effect.flip(queue.job(id).result()),
          Effect.flip(Stream.runDrain(queue.job(id).progress)),
          Effect.flip(queue.offer(1)),
          Effect.flip(queue.offerAll([2, 3])),
          Effect.flip(queue.execute(4))
        ], { concurrency: "unbounded" })
        const closed = Effect.map(waits, (errors) =>
          assert.deepStrictEqual(
            errors.map(({ reason }) => reason._tag),
            Array.from({ length: 5 }, () => "QueueClosed")
          ))
        const waiting = yield* Effect.forkChild(closed)
        yield* inLine(server, namespace, 1)
        yield* Scope.close(scope, Exit.void)
        yield* promptly(Fiber.join(waiting), "the ends of the waits")
        yield* promptly(closed, "the refusals")
        yield* inLine(server, namespace, 0)
        const behind = yield* Effect.forkChild(other.offer(5))
        yield* inLine(server, namespace, 1)
        assert.isTrue(yield* queue.job(id).cancel)
        yield* promptly(Fiber.join(behind), "the offer")
      })))
})
