/** A coordinator whose line to Redis fails as the test says. */
import { assert } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import type { Coordinator } from "../../src/index.ts"
import { make as proxy, type Proxy } from "../../src/testing/Proxy.ts"
import { assertEmpty, freshNamespace, type Node, node, TestServer } from "./live.ts"
import type { Server } from "./servers.ts"
import { promptly } from "./several.ts"

export interface BehindLine {
  /** The coordinator behind the line. */
  readonly context: Node
  readonly line: Proxy
  /** Another coordinator, whose line never fails; with the same options where it has none of its own. */
  readonly direct: (options?: Coordinator.Options) => Effect.Effect<Node, unknown, Scope.Scope>
  readonly namespace: string
  readonly server: Server
}

/** Runs a test in a namespace of its own, with one partition, and checks that nothing stays behind. */
export const behindLine = <A, E, R>(
  self: (behind: BehindLine) => Effect.Effect<A, E, R>,
  options: Coordinator.Options = { lease: "2 seconds", margin: "200 millis", requestTimeout: "200 millis" }
) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const line = yield* proxy(server)
      const direct = (own: Coordinator.Options = options) => node(server.url, { ...own, namespace, partitions: 1 })
      const context = yield* node(line.url, { ...options, namespace, partitions: 1 })
      yield* Effect.scoped(self({ context, line, direct, namespace, server }))
    }))
    yield* assertEmpty(server, namespace)
  })

/** Each of them fails in time, and says that Redis did not answer, and what it asked about. */
export const assertUnanswered = (
  questions: ReadonlyArray<
    Effect.Effect<unknown, { readonly reason: { readonly _tag: string; readonly message: string } }>
  >
) =>
  Effect.map(
    promptly(
      Effect.forEach(questions, (question) => Effect.flip(question), { concurrency: "unbounded" }),
      "the answers"
    ),
    (errors) => {
      for (const { reason } of errors) {
        assert.include(["Timeout", "ConnectionLost", "NotConnected"], reason._tag)
        assert.match(reason.message, / about \w+ ".*" of namespace "/)
      }
    }
  )
