/** Each layer of the kernel stands alone: on a connection to Redis, without a coordinator and without the layers above it. */
import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Effect, Exit, Layer, type Scope } from "effect"
import { Redis } from "../src/index.ts"
import type { CoordinatorError } from "../src/internal/actor/errors.ts"
import { prefixOf } from "../src/internal/actor/keys.ts"
import { library, protocol, type Requests } from "../src/internal/actor/lua.ts"
import { Outbox } from "../src/internal/actor/outbox.ts"
import { type Entry, Reader } from "../src/internal/actor/reader.ts"
import { Reaper } from "../src/internal/actor/reaper.ts"
import { Session } from "../src/internal/actor/session.ts"
import { Transport, type Verb } from "../src/internal/actor/transport.ts"
import { live as io } from "../src/internal/io.ts"
import { connectionsOf } from "../src/internal/redis/connection.ts"
import { assertEmpty, freshNamespace, TestServer } from "./support/live.ts"
import { promptly } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const lease = 60_000

const settings = { lease, maxBatch: 64, maxPending: 64 }

const ignore = () => {}

/** A transport, a namespace with one partition, and sessions there. */
const alone = Effect.gen(function*() {
  const server = yield* TestServer
  const namespace = freshNamespace()
  const context = yield* Layer.build(Layer.fresh(Redis.layer({ url: server.url })))
  const connections = connectionsOf(Context.get(context, Redis.Redis))
  const transport = yield* Effect.acquireRelease(
    Effect.sync(() => new Transport(connections, io, 1000)),
    (transport) => Effect.sync(() => transport.close())
  )
  const prefix = prefixOf(namespace, 0)
  const ask = (session: string, verb: Verb, args: ReadonlyArray<string | number>) =>
    Effect.promise(async () => {
      const { replies } = await transport.ask(transport.addressOf(prefix, session, ""), [{ verb, args }])
      return replies[0] as ReadonlyArray<unknown>
    })
  const open = (id: string) =>
    Effect.gen(function*() {
      const [sentAt, sentAtWall] = [io.now(), io.wall()]
      const [tag, position] = yield* ask(id, "session.open", [id, "", lease, protocol, 1, "a test", library, -1])
      assert.strictEqual(tag, "opened")
      const session = new Session(prefix, id, transport.addressOf(prefix, id), String(position), io, ignore)
      session.renewed(sentAt, sentAtWall, lease)
      return session
    })
  const outbox = (session: Session) =>
    new Outbox({
      current: () => session,
      open: ignore,
      answered: ignore,
      suspended: ignore,
      unread: ignore,
      lose: ignore
    }, {
      transport,
      io,
      log: ignore,
      ...settings
    })
  const reaper = yield* Effect.acquireRelease(
    Effect.sync(() => new Reaper(transport, io, prefix, ignore, () => true)),
    (reaper) => Effect.sync(() => reaper.close())
  )
  const end = (id: string) => Effect.andThen(ask(id, "session.end", [id, "1"]), Effect.promise(() => reaper.reap(id)))
  return { server, namespace, connections, transport, signal: `${prefix}signal:a`, ask, open, end, outbox, reaper }
})

const requested = <V extends Verb>(
  outbox: Outbox,
  verb: V,
  key: string,
  args: Requests[V]["args"]
): Effect.Effect<Requests[V]["reply"], CoordinatorError> =>
  Effect.callback((resume) => {
    outbox.request<V>({
      verb,
      key,
      args,
      settle: (reply) => resume(Effect.succeed(reply as Requests[V]["reply"])),
      fail: (error) => resume(Effect.fail(error))
    })
  })

const standing = <A, E>(
  self: (layers: Effect.Success<typeof alone>) => Effect.Effect<A, E, Scope.Scope>
): Effect.Effect<void, unknown, TestServer> =>
  Effect.gen(function*() {
    const { namespace, server } = yield* Effect.scoped(Effect.tap(alone, self))
    yield* assertEmpty(server, namespace)
  })

layer(TestServer.layer, live)("without the layers above it", (it) => {
  it.effect("the transport asks an actor", () =>
    standing(({ end, open, signal, transport }) =>
      Effect.gen(function*() {
        const { address, id } = yield* open("one")
        const found = yield* Effect.promise(() =>
          transport.inspect(address, { verb: "signal.state", key: signal, args: [] }, false)
        )
        assert.deepStrictEqual(found.replies, [["state", 0, 0]])
        yield* end(id)
      })
    ))

  it.effect("a session is trusted until its lease is over by either clock", () =>
    Effect.sync(() => {
      let [now, wall] = [1000, 5000]
      const lost: Array<Session> = []
      const clock = { ...io, now: () => now, wall: () => wall }
      const session = new Session("p:", "id", { key: "k" } as never, "1-0", clock, (session) => lost.push(session))
      session.renewed(1000, 5000, 300)
      assert.strictEqual(session.remaining, 300)
      now += 100
      wall += 250
      assert.strictEqual(session.remaining, 50)
      assert.isFalse(session.expireIfDue())
      wall += 50
      assert.isTrue(session.expireIfDue())
      assert.deepStrictEqual(lost, [session])
    }))

  it.effect("an outbox sends the requests of a session, in one batch and in their order", () =>
    standing(({ end, open, outbox, signal }) =>
      Effect.gen(function*() {
        const session = yield* open("one")
        const box = outbox(session)
        const replies = yield* Effect.all([
          requested(box, "signal.set", signal, [2, 1000]),
          requested(box, "signal.set", signal, [1, 1000]),
          requested(box, "signal.clear", signal, [])
        ], { concurrency: 3 })
        assert.deepStrictEqual(replies, [["set"], ["set"], ["cleared", 3]])
        assert.strictEqual(session.number, 1)
        yield* end(session.id)
      })
    ))

  it.effect("a reader receives what an actor posts to a session", () =>
    standing(({ connections, end, open, outbox, signal, transport }) =>
      Effect.gen(function*() {
        const one = yield* open("one")
        const other = yield* open("other")
        const reply = yield* requested(outbox(one), "signal.await", signal, ["claim"])
        assert.strictEqual(reply[0], "queued")
        const posted = yield* Deferred.make<ReadonlyArray<Entry>>()
        const reader = new Reader(transport, io, ignore, () => connections.dedicated())
        yield* Effect.addFinalizer(() => Effect.promise(() => reader.close()))
        reader.include({
          key: one.mailbox,
          position: one.position,
          isActive: () => true,
          onEntries: (entries) => Deferred.doneUnsafe(posted, Exit.succeed(entries)),
          onGap: ignore
        })
        yield* requested(outbox(other), "signal.set", signal, [1, 50])
        const [[, fields]] = (yield* promptly(Deferred.await(posted), "the event")) as [Entry]
        assert.include(fields![1], "granted")
        yield* end(one.id)
        yield* end(other.id)
      })
    ))

  it.effect("a reaper releases what a session owned that has ended", () =>
    standing(({ ask, end, open, outbox, reaper, signal, transport }) =>
      Effect.gen(function*() {
        const one = yield* open("one")
        const other = yield* open("other")
        yield* requested(outbox(one), "signal.await", signal, ["claim"])
        const waiters = Effect.promise(async () => {
          const { replies } = await transport.inspect(
            other.address,
            { verb: "signal.state", key: signal, args: [] },
            true
          )
          return (replies[0] as ReadonlyArray<unknown>)[2]
        })
        assert.strictEqual(yield* waiters, 1)
        yield* ask(one.id, "session.end", [one.id, "1"])
        yield* Effect.promise(() => reaper.tick())
        assert.strictEqual(yield* waiters, 0)
        yield* end(other.id)
      })
    ))
})
