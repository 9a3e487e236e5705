import { assert } from "@effect/vitest"
import { Context, Deferred, Effect, Fiber, Layer, Option, type Scope } from "effect"
import { randomBytes } from "node:crypto"
import { Coordinator, Lease, Lock, Redis } from "../../src/index.ts"
import { apart } from "../../src/internal/hold/holding.ts"
import { eventually } from "./eventually.ts"
import { remainsOf } from "./namespace.ts"
import { type Server, type ServerOptions, standalone } from "./servers.ts"

/** The server that the tests of a file share. */
export class TestServer extends Context.Service<TestServer, Server>()("test/TestServer") {
  static readonly layer = Layer.effect(TestServer, standalone())
  static readonly layerWith = (options: ServerOptions) => Layer.effect(TestServer, standalone(options))
}

export const freshNamespace = (): string => `t${randomBytes(6).toString("hex")}`

export type Node = Context.Context<Coordinator.Coordinator | Redis.Redis>

/** A coordinator with a connection of its own, as another process would have. */
export const node = (
  redis: string | Redis.Options,
  options: Coordinator.Options
): Effect.Effect<Node, unknown, Scope.Scope> => {
  const connection = Redis.layer(typeof redis === "string" ? { url: redis } : redis)
  return Layer.build(Coordinator.layer(options).pipe(Layer.provideMerge(connection), Layer.fresh))
}

/** Runs it on another coordinator, as another process would. */
export const onNode =
  <R2>(context: Context.Context<R2>) =>
  <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<A, E, Exclude<R, R2>> =>
    Effect.provideContext(apart(effect), context)

/** Short enough for tests that lose it, long enough for a busy machine. */
export const short = { lease: "2 seconds", margin: "400 millis" } as const

/** For a coordinator whose own lease is not the subject, beside others with shorter ones: machines stand still for a second now and then. */
export const sturdy = { lease: "4 seconds", margin: "400 millis" } as const

/** Nothing may stay behind in a namespace but the numbers of its partitions. */
export const assertEmpty = (where: Server | ReadonlyArray<Server>, namespace: string): Effect.Effect<void> =>
  eventually(
    Effect.map(remainsOf([where].flat(), namespace), (left) => assert.deepStrictEqual(left, [])),
    { message: "the namespace is empty" }
  )

/** When a session of partition 0 ends, in milliseconds of the server's clock. */
export const deadlineOf = (server: Server, namespace: string, session: string): Effect.Effect<number, unknown> =>
  Effect.map(
    server.cli(
      "EVAL",
      "local _, _, deadline = struct.unpack('<Bddddd', redis.call('HGET', KEYS[1], 's' .. ARGV[1])) return deadline",
      1,
      `{${namespace}:00}:sessions`,
      session
    ),
    Number
  )

/** Runs a test in a namespace of its own, with one coordinator, and checks that nothing stays behind. */
export const withNode = <A, E, R>(
  self: (namespace: string) => Effect.Effect<A, E, R>,
  options?: Coordinator.Options
): Effect.Effect<A, unknown, Exclude<Exclude<R, Scope.Scope>, Coordinator.Coordinator | Redis.Redis> | TestServer> =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    const result = yield* Effect.scoped(
      Effect.flatMap(
        node(server.url, { ...options, namespace }),
        (context) => Effect.provideContext(Effect.scoped(self(namespace)), context)
      )
    )
    yield* assertEmpty(server, namespace)
    return result
  }) as never

/** Holds a lock in a fiber until it is asked to leave. */
export const holding = Effect.fnUntraced(function*(key: string) {
  const inside = yield* Deferred.make<Lease.Lease>()
  const leave = yield* Deferred.make<void>()
  const fiber = yield* Effect.forkChild(
    Effect.flatMap(Lease.current, (lease) => Deferred.succeed(inside, Option.getOrThrow(lease))).pipe(
      Effect.andThen(Deferred.await(leave)),
      Lock.withLock(key)
    )
  )
  const lease = yield* Deferred.await(inside)
  return { lease, fiber, leave: Effect.andThen(Deferred.succeed(leave, undefined), Fiber.join(fiber)) }
})
