/** Processes that wait for a latch, killed or paused: the others pass, and nothing stays. */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { CountDownLatch, Latch } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/waiter.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, sturdy, TestServer } from "./support/live.ts"
import { fields, within } from "./support/requests.ts"
import { deadForgotten, on } from "./support/several.ts"

const timing = { lease: "2 seconds", margin: "300 millis" } as const
const timeToLive = "100 millis"
const is = (name: Event["event"]) => (event: Event): event is Event => event.event === name

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("processes that wait", (it) => {
  for (const waits of ["countdown latch", "latch"] as const) {
    it.effect(`for a ${waits} pass, also one that was paused beyond its lease; one that was killed is forgotten`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        yield* Effect.scoped(Effect.gen(function*() {
          const here = yield* node(server.url, { namespace, ...sturdy })
          yield* Effect.scoped(Effect.gen(function*() {
            const opener = waits === "countdown latch"
              ? yield* on(here, CountDownLatch.make({ name: "it", count: 1, timeToLive }))
              : yield* on(here, Latch.make({ name: "it", timeToLive }))
            const start = spawn<Event>(new URL("./programs/waiter.ts", import.meta.url), {
              argument: { url: server.url, namespace, ...timing, waits } satisfies Argument
            })
            const [killed, paused, other] = yield* Effect.all([start, start, start], { concurrency: "unbounded" })
            yield* Effect.forEach([killed, paused, other], (one) => one.waitFor(is("waiting")))
            const mine = yield* Effect.forkChild(opener.await)
            yield* killed.kill9
            yield* paused.sigstop
            const key = `${waits === "latch" ? "latch" : "countDownLatch"}:it`
            // The dead and the paused one are forgotten when their leases have run out.
            yield* eventually(
              Effect.map(fields(server, namespace, key, "o"), (members) => assert.strictEqual(members, 2))
            )
            assert.isUndefined(mine.pollUnsafe())
            yield* "open" in opener ? opener.open : opener.countDown()
            yield* within(Fiber.join(mine), 1000, "the one here")
            yield* within(other.waitFor(is("passed")), 1000, "the other one")
            yield* paused.sigcont
            yield* within(paused.waitFor(is("passed")), 5000, "the one that was paused")
            if ("close" in opener) yield* opener.close
            // One that was killed while it leaves would be forgotten only if another coordinator were there.
            yield* Effect.forEach([paused, other], (one) => within(one.exit, 10_000, "the end of a process"))
            yield* deadForgotten(here, namespace, server)
          }))
        }))
        yield* assertEmpty(server, namespace)
      }))
  }
})
