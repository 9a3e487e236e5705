/** Several OS processes: killed, paused, and with a blocked event loop. */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber, Option } from "effect"
import type { Scope } from "effect"
import { Fence, Lease, Lock, Semaphore } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/holder.ts"
import { elapsed } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, onNode, sturdy, TestServer } from "./support/live.ts"
import { now } from "./support/now.ts"
import { fields } from "./support/requests.ts"
import type { Server } from "./support/servers.ts"
import { deadForgotten } from "./support/several.ts"

const lease = 2000
const timing = { lease: `${lease} millis`, margin: "400 millis" } as const

interface Case {
  readonly server: Server
  readonly namespace: string
  readonly here: Node
  readonly start: (
    options: Pick<Argument, "mode" | "what"> & { readonly millis?: number }
  ) => Effect.Effect<Effect.Success<ReturnType<typeof spawn<Event>>>, never, Scope.Scope>
}

const scenario = <A, E, R>(self: (scenario: Case) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const here = yield* node(server.url, { namespace, ...sturdy })
      yield* self({
        server,
        namespace,
        here,
        start: ({ millis = 0, mode, what }) =>
          spawn<Event>(new URL("./programs/holder.ts", import.meta.url), {
            argument: { url: server.url, namespace, ...timing, what, mode, millis } satisfies Argument
          })
      })
      // The process that is left cleans up behind the dead.
      yield* deadForgotten(here, namespace, server)
    }))
    yield* server.cli("DEL", `${namespace}:written`, `{${namespace}:written}lockstep:fence:${namespace}:written`)
    yield* assertEmpty(server, namespace)
  })

const is = <T extends Event["event"]>(name: T) => (event: Event): event is Extract<Event, { event: T }> =>
  event.event === name

const token = Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token)

const waiting = (server: Server, namespace: string, count: number) =>
  eventually(
    Effect.gen(function*() {
      const found = yield* Effect.forEach(["lock", "semaphore"], (kind) =>
        fields(server, namespace, `${kind}:shared`, "q"))
      return found.reduce((sum, some) =>
        sum + some, 0) === count
    }),
    { message: `${count} waiters` }
  )

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("processes", (it) => {
  it.effect("a holder that is killed is succeeded when its lease has run out, by a larger token", () =>
    scenario(({ here, start }) =>
      Effect.gen(function*() {
        const holder = yield* start({ mode: "hold", what: "lock" })
        const held = yield* holder.waitFor(is("held"))
        const successor = yield* Effect.forkChild(
          Effect.map(token, (token) => ({ token, at: Date.now() })).pipe(
            Lock.withLock("shared"),
            Effect.provideContext(here)
          )
        )
        yield* holder.waitFor(is("tick"))
        yield* holder.kill9
        const killed = Date.now()
        const next = yield* Fiber.join(successor)
        assert.isAbove(next.token, held.token)
        // Not before its lease is over: the last renewal can be a third of a lease old.
        assert.isAbove(next.at - killed, lease * 0.6)
        assert.isBelow(elapsed(killed, next.at), lease + 1000)
      })
    ))

  it.effect("a waiter that is killed is passed over", () =>
    scenario(({ here, namespace, server, start }) =>
      Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          const other = yield* node(server.url, { namespace, ...sturdy })
          const behind = yield* Effect.scoped(Effect.gen(function*() {
            yield* Effect.provideContext(Lock.acquire("shared"), here)
            const waiter = yield* start({ mode: "hold", what: "lock" })
            yield* waiter.waitFor(is("asked"))
            yield* waiting(server, namespace, 1)
            const behind = yield* Effect.forkDetach(
              Lock.withLock(Effect.sync(now), "shared").pipe(onNode(other))
            )
            yield* waiting(server, namespace, 2)
            yield* waiter.kill9
            yield* waiter.exit
            // Its session has to be over before the lock is released; then it is passed over without a grant.
            yield* waiting(server, namespace, 1)
            return behind
          }))
          yield* Fiber.join(behind)
        }))
      })
    ))

  it.effect("is interrupted before it can do more, when it goes on after a pause longer than the lease", () =>
    scenario(({ here, namespace, start }) =>
      Effect.gen(function*() {
        const holder = yield* start({ mode: "hold", what: "lock" })
        const held = yield* holder.waitFor(is("held"))
        yield* holder.waitFor(is("tick"))
        yield* holder.sigstop
        const seen = holder.received.length
        const next = yield* Effect.gen(function*() {
          const mine = Option.getOrThrow(yield* Lease.current)
          yield* Fence.run(mine, `${namespace}:written`, "SET", "mine")
          return { token: mine.token, at: now() }
        }).pipe(Lock.withLock("shared"), Effect.provideContext(here))
        assert.isAbove(next.token, held.token)
        const continued = now()
        yield* holder.sigcont
        const lost = yield* holder.waitFor(is("lost"))
        assert.strictEqual(lost.reason, "expired")
        yield* holder.waitFor(is("interrupted"))
        // Its own timer was due long before ours, and yet it did nothing more.
        const after = holder.received.slice(seen).filter(is("tick")).filter(({ at }) => at >= continued)
        assert.deepStrictEqual(after, [])
        // And what it writes nevertheless, with its old token, is refused.
        assert.isFalse((yield* holder.waitFor(is("fenced"))).fine)
        yield* holder.exit
      })
    ))

  it.effect("is interrupted before it can do more, when its event loop was blocked for longer than the lease", () =>
    scenario(({ here, start }) =>
      Effect.gen(function*() {
        const holder = yield* start({ mode: "block", what: "lock", millis: lease * 2 })
        const held = yield* holder.waitFor(is("held"))
        const next = yield* token.pipe(Lock.withLock("shared"), Effect.provideContext(here))
        assert.isAbove(next, held.token)
        assert.strictEqual((yield* holder.waitFor(is("lost"))).reason, "expired")
        yield* holder.waitFor(is("stopped"))
        assert.deepStrictEqual(holder.received.filter(is("tick")), [])
        yield* holder.exit
      })
    ))

  it.effect("the permits of a process that was killed come back", () =>
    scenario(({ here, start }) =>
      Effect.gen(function*() {
        const holder = yield* start({ mode: "cycle", what: "permits", millis: 10 })
        yield* holder.waitFor(is("released"))
        const semaphore = yield* Effect.provideContext(Semaphore.attach({ name: "shared" }), here)
        assert.strictEqual(yield* semaphore.permits, 2)
        yield* holder.kill9
        // Both permits come back, also the one that the killed process may have held.
        yield* semaphore.withPermits(2, { wait: "5 seconds" })(Effect.void)
        assert.strictEqual(yield* semaphore.available, 2)
      })
    ))

  it.effect("processes that are killed at random never let two in, and lose nothing", () =>
    scenario(({ here, start }) =>
      Effect.gen(function*() {
        const all: Array<Event & { readonly process: number }> = []
        for (let round = 0; round < 3; round++) {
          const running = yield* Effect.all(
            [0, 1, 2].map(() => start({ mode: "cycle", what: "lock", millis: 5 })),
            { concurrency: "unbounded" }
          )
          yield* Effect.forEach(running, (process) => process.waitFor(is("released")))
          const victim = running[round]!
          yield* victim.kill9
          // The others go on after it.
          for (const process of running) {
            if (process === victim) continue
            yield* process.waitFor(is("released"), { after: process.received.length })
          }
          for (const process of running) yield* process.kill9
          for (const [at, process] of running.entries()) {
            yield* process.exit
            all.push(...process.received.map((event) => ({ ...event, process: round * 3 + at })))
          }
        }
        const tokens = all.filter((event) => event.event === "held").sort((a, b) => a.at - b.at)
        assert.isAtLeast(tokens.length, 3 * 5, "each round waits for one hold of three processes, and another of two")
        for (const [at, event] of tokens.entries()) {
          const next = tokens[at + 1]
          if (next === undefined) break
          assert.isAbove(next.token, event.token, "tokens increase in the order of entry")
          const released = all.find((other) => other.event === "released" && other.token === event.token)
          if (released?.event === "released") {
            assert.isAtMost(released.at, next.at, "nobody enters before the last has left")
          }
        }
        yield* Lock.withLock(Effect.void, "shared", { wait: "5 seconds" }).pipe(Effect.provideContext(here))
      })
    ))
})
