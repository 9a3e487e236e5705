/** Processes that change a shared ref and a counter, killed while they do: no change is lost, and none is made twice. */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { Counter, SharedRef } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/updater.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, sturdy, TestServer } from "./support/live.ts"
import { fields } from "./support/requests.ts"
import { deadForgotten, on } from "./support/several.ts"

const timing = { lease: "2 seconds", margin: "300 millis" } as const

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("processes", (it) => {
  it.effect("that are killed while they change what they share have changed it as often as they know, or once more", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const here = yield* node(server.url, { namespace, ...sturdy })
        const ref = yield* on(here, SharedRef.make({ name: "shared", schema: Schema.Number, initial: 0 }))
        const counter = yield* on(here, Counter.make({ name: "shared" }))
        const start = spawn<Event>(new URL("./programs/updater.ts", import.meta.url), {
          argument: { url: server.url, namespace, ...timing } satisfies Argument
        })
        const all = yield* Effect.all([start, start, start], { concurrency: "unbounded" })
        for (const [at, one] of all.entries()) {
          yield* one.waitFor(({ event }) => event === "updated", { after: 60 * (at + 1) })
          yield* one.kill9
          yield* one.exit
        }
        const events = all.flatMap(({ received }) => received)
        const updated = events.flatMap((event) => event.event === "updated" ? [event.value] : [])
        const added = events.flatMap((event) => event.event === "added" ? [event.sum] : [])
        const found = [yield* ref.get, yield* counter.get]
        for (const [at, seen] of [updated, added].entries()) {
          assert.strictEqual(new Set(seen).size, seen.length)
          assert.isAtLeast(found[at]!, seen.length)
          assert.isAtMost(found[at]!, seen.length + all.length)
          assert.isAtMost(Math.max(...seen), found[at]!)
        }
        // The memberships of the dead end with their leases, when a process that uses the partition notices.
        yield* counter.add(1)
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:shared", "o"), (members) => members === 0))
        yield* ref.delete
        yield* counter.reset
        yield* deadForgotten(here, namespace, server)
      }))
      yield* assertEmpty(server, namespace)
    }))
})
