/** A process that was cut off, and whose lease has run out since. */
import { Effect } from "effect"
import type { Scope } from "effect"
import { Coordinator } from "../../src/index.ts"
import { make as proxy } from "../../src/testing/Proxy.ts"
import { eventually } from "./eventually.ts"
import { deadlineOf, type Node } from "./live.ts"
import type { Server } from "./servers.ts"
import { fragile } from "./several.ts"

/**
 * Runs the effect with a coordinator of its own, cuts that off, and waits until its lease has run out. `others` are the
 * coordinators that have a session in the partition: with a longer lease, they do not know.
 */
export const departed = <A, E>(
  server: Server,
  namespace: string,
  others: number,
  effect: (context: Node) => Effect.Effect<A, E, Scope.Scope>
) =>
  Effect.gen(function*() {
    const line = yield* proxy(server)
    const context = yield* fragile(server, line, namespace, others)
    const result = yield* effect(context)
    const [session] = yield* Effect.provideContext(
      Effect.flatMap(Coordinator.Coordinator, ({ sessions }) => sessions),
      context
    )
    yield* line.blackhole
    yield* eventually(
      Effect.gen(function*() {
        const [seconds, micros] = (yield* server.cli("TIME")).split("\n")
        return Number(seconds) * 1000 + Number(micros) / 1000 > (yield* deadlineOf(server, namespace, session!.id!))
      }),
      { message: "its lease has run out" }
    )
    return result
  })
