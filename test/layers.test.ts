/** Each layer of the kernel stands alone: on a connection to Redis, without a coordinator and without the layers above it. */
import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Effect, Exit, Fiber, Layer, type Scope } from "effect"
import { Redis } from "../src/index.ts"
import { Channel } from "../src/internal/actor/channel.ts"
import type { CoordinatorError } from "../src/internal/actor/errors.ts"
import { Home } from "../src/internal/actor/home.ts"
import type { Hooks } from "../src/internal/actor/hooks.ts"
import { Partition } from "../src/internal/actor/kernel.ts"
import { prefixOf } from "../src/internal/actor/keys.ts"
import { library, protocol, type Requests } from "../src/internal/actor/lua.ts"
import type { Office } from "../src/internal/actor/office.ts"
import { Outbox } from "../src/internal/actor/outbox.ts"
import { Pulse } from "../src/internal/actor/pulse.ts"
import { type Entry, Reader } from "../src/internal/actor/reader.ts"
import { Reaper } from "../src/internal/actor/reaper.ts"
import { Session } from "../src/internal/actor/session.ts"
import { Transport, type Verb } from "../src/internal/actor/transport.ts"
import { Vigil } from "../src/internal/actor/vigil.ts"
import type { Claim } from "../src/internal/hold/claim.ts"
import { Hold } from "../src/internal/hold/hold.ts"
import { Tenancy } from "../src/internal/hold/tenancy.ts"
import { type Io, live as io } from "../src/internal/io.ts"
import { connectionsOf } from "../src/internal/redis/connection.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, TestServer } from "./support/live.ts"
import { promptly } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const lease = 60_000

const settings = { lease, maxBatch: 64, maxPending: 64 }

const ignore = () => {}

const hooks: Hooks = {
  log: ignore,
  transition: ignore,
  metrics: new Proxy({} as Hooks["metrics"], { get: () => ignore })
}

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
  const ask = (verb: Verb, args: ReadonlyArray<string | number>) =>
    Effect.promise(async () => {
      const { replies } = await transport.ask(transport.addressOf(prefix, ""), [{ verb, args }])
      return replies[0] as ReadonlyArray<unknown>
    })
  const open = (id: string) =>
    Effect.gen(function*() {
      const [sentAt, sentAtWall] = [io.now(), io.wall()]
      const [tag, position] = yield* ask("session.open", [id, "", lease, protocol, 1, "a test", library, -1])
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
  const wanted: { key: string | undefined } = { key: undefined }
  const reaper = yield* Effect.acquireRelease(
    Effect.sync(() => new Reaper(transport, io, prefix, ignore, () => true, () => wanted.key)),
    (reaper) => Effect.sync(() => reaper.close())
  )
  const end = (id: string) => Effect.andThen(ask("session.end", [id, "1"]), Effect.promise(() => reaper.reap(id)))
  return {
    server,
    namespace,
    connections,
    transport,
    signal: `${prefix}signal:a`,
    ask,
    open,
    end,
    outbox,
    reaper,
    wanted
  }
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

  it.effect.each(["not", "expected", "expected and waited for", "expected, and another is waited for"])(
    "a reaper releases what a session owned that has ended, which was %s",
    (expected) =>
      standing(({ ask, end, open, outbox, reaper, signal, transport, wanted }) =>
        Effect.gen(function*() {
          if (expected === "expected and waited for") wanted.key = signal
          if (expected === "expected, and another is waited for") wanted.key = `${signal}b`
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
          yield* Effect.promise(() => reaper.tick(one.id))
          assert.strictEqual(yield* waiters, 1)
          yield* ask("session.end", [one.id, "1"])
          yield* Effect.promise(() => reaper.tick(expected === "not" ? undefined : one.id))
          assert.strictEqual(yield* waiters, 0)
          yield* end(other.id)
        })
      )
  )

  it.effect("a reaper asks as long before the time as the way to Redis was the last time", () =>
    Effect.gen(function*() {
      const { transport } = yield* alone
      const timers: Array<number> = []
      const clock: Io = {
        ...io,
        now: () => 1000,
        random: () => 0,
        exactly: (millis) => {
          timers.push(millis)
          return { cancel: ignore }
        }
      }
      const reaper = new Reaper(transport, clock, "p:", ignore, () => true, () => undefined)
      reaper.expect({ millis: 300, ending: "a session" }, 998)
      // Not as near.
      reaper.expect({ millis: 299, ending: "a session" }, 1000)
      reaper.expect({ millis: 10, ending: "a session" }, 970)
      assert.deepStrictEqual(timers, [298, 0])
    }).pipe(Effect.scoped))

  it.effect("what waits to a part of a millisecond is never early", () =>
    Effect.promise(async () => {
      for (let turn = 0; turn < 60; turn++) {
        const until = performance.now() + turn / 7
        await new Promise<void>((resolve) => io.exactly(turn / 7, resolve))
        assert.isAtLeast(performance.now(), until)
      }
    }))

  it.effect("holds and waits live on a channel, and are passed on when their keeper releases them", () =>
    Effect.gen(function*() {
      const { namespace, server, transport } = yield* alone
      const tenant = (name: string) =>
        Effect.gen(function*() {
          const pulse = new Pulse(transport, io, hooks, lease)
          let sessions = 0
          const office: Office = {
            settings: { ...settings, namespace, name, margin: 1000, requestTimeout: 1000, partitions: 1 },
            hooks,
            io,
            transport,
            about: "{}",
            newSession: () => `${name}${++sessions}`,
            first: () => channel,
            admitted: ignore,
            refused: ignore,
            refusal: () => undefined,
            pulseOf: () => pulse,
            vigil: new Vigil(io),
            away: new Map(),
            silentSince: undefined,
            isClosing: () => false,
            isClosed: () => false
          }
          const partition = new Partition(office, 0)
          const { prefix, reaper } = partition
          const reader = new Reader(transport, io, ignore, () => transport.connections.dedicated())
          const tenancy = new Tenancy(office, partition, () => channel)
          const channel: Channel = new Channel({
            office,
            index: 0,
            prefix,
            lease,
            margin: 1000,
            reaper,
            reader: () => reader,
            tenant: tenancy
          })
          yield* Effect.addFinalizer(() =>
            Effect.promise(async () => {
              await tenancy.close()
              await channel.close()
              await reaper.finish()
              reaper.close()
              await reader.close()
            })
          )
          const place = { kind: "lock", name: "a", key: `${prefix}lock:a`, home: new Home(), namespace } as const
          const claim: Claim = { place, verb: "lock.take", args: () => ["1"], leave: "lock.release" }
          return (id: string) => {
            const hold = new Hold(id, claim, tenancy, undefined, 1)
            const granted = Effect.callback<string>((resume) => {
              hold.settle = ([outcome]) => resume(Effect.succeed(outcome))
              tenancy.take(hold)
            })
            return {
              hold,
              granted,
              release: Effect.callback<void>((resume) => tenancy.release(hold, () => resume(Effect.void)))
            }
          }
        })
      yield* Effect.scoped(Effect.gen(function*() {
        const [one, other] = [yield* tenant("one"), yield* tenant("other")]
        const [first, second] = [one("1"), other("2")]
        assert.strictEqual(yield* promptly(first.granted, "the first grant"), "granted")
        const waiting = yield* Effect.forkChild(second.granted, { startImmediately: true })
        yield* eventually(Effect.sync(() => second.hold.state === "queued"))
        yield* first.release
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the second grant"), "granted")
        assert.isAbove(second.hold.token, first.hold.token)
        yield* second.release
      }))
      yield* assertEmpty(server, namespace)
    }).pipe(Effect.scoped))
})
