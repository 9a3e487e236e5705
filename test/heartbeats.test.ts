/** Sessions of several partitions are renewed by one call: what becomes of them when it is lost, or comes twice. */
import { assert, layer } from "@effect/vitest"
import { Context, Effect } from "effect"
import { Coordinator, Lock } from "../src/index.ts"
import { make as proxy, type Request, type Verdict } from "../src/testing/Proxy.ts"
import { realSleep } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, onNode, TestServer } from "./support/live.ts"

const renews = ({ args }: Request): boolean => args[1]?.endsWith("_renew") === true

layer(TestServer.layer, { excludeTestServices: true, timeout: "12 seconds" })("a heartbeat", (it) => {
  const verdicts: ReadonlyArray<Verdict> = ["drop", "dropReply", "blackhole", "blackholeReply", "duplicate"]
  for (const verdict of verdicts) {
    it.effect(`that is struck costs no session: ${verdict}`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const line = yield* proxy(server)
        const namespace = freshNamespace()
        const lease = 3000
        yield* Effect.scoped(Effect.gen(function*() {
          const context = yield* node(line.url, { namespace, lease, margin: 300, requestTimeout: 500 })
          const { sessions } = Context.get(context, Coordinator.Coordinator)
          yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
            const leases = yield* Effect.forEach(["a", "b", "c", "d"], (key) => Lock.acquire(key))
            const before = yield* sessions
            assert.isAbove(new Set(before.map(({ partition }) => partition)).size, 1)
            const struck = yield* line.once(renews, verdict)
            yield* struck
            // Nothing else has renewed them.
            yield* realSleep(lease + 500)
            assert.deepStrictEqual(
              (yield* sessions).map(({ id, state }) => [id, state]),
              before.map(({ id }) => [id, "open"])
            )
            for (const lease of leases) assert.isTrue(yield* lease.isHeld)
          })))
        }))
        yield* assertEmpty(server, namespace)
      }).pipe(Effect.scoped))
  }
})
