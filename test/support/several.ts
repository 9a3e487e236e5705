/** Several coordinators in one process, as several processes would have them. */
import { assert } from "@effect/vitest"
import { Context, Effect, type Fiber, type Scope } from "effect"
import { Coordinator, Lock } from "../../src/index.ts"
import type { Channel } from "../../src/internal/actor/channel.ts"
import { apart } from "../../src/internal/hold/holding.ts"
import { spaceOf } from "../../src/internal/hold/place.ts"
import type { Tenancy } from "../../src/internal/hold/tenancy.ts"
import type { Proxy } from "../../src/testing/Proxy.ts"
import { awake } from "./awake.ts"
import { eventually } from "./eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, TestServer } from "./live.ts"
import type { Server } from "./servers.ts"
import { forget } from "./sessions.ts"

/** Runs a test with so many of them in a namespace of its own, with one partition, and checks that nothing stays behind. */
export const several = <A, E, R>(
  count: number,
  self: (nodes: ReadonlyArray<Node>, namespace: string, server: Server) => Effect.Effect<A, E, R>,
  options: Coordinator.Options = { lease: "3 seconds", margin: "500 millis" }
) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const nodes = yield* Effect.forEach(
        Array.from({ length: count }),
        (_, at) => node(server.url, { name: `node${at}`, partitions: 1, ...options, namespace })
      )
      yield* Effect.scoped(self(nodes, namespace, server))
    }))
    yield* assertEmpty(server, namespace)
  })

/** Another coordinator of a namespace, behind a line that loses its requests: they last for longer than it takes to lose its session. */
export const behind = (line: Proxy, namespace: string) =>
  node(line.url, { namespace, partitions: 1, lease: "6 seconds", requestTimeout: "2 seconds" })

export const on = <A, E>(context: Node, effect: Effect.Effect<A, E, Coordinator.Coordinator | Scope.Scope>) =>
  Effect.provideContext(apart(effect as Effect.Effect<A, E, Coordinator.Coordinator>), context) as Effect.Effect<
    A,
    E,
    Scope.Scope
  >

export const promptly = <A, E, R>(effect: Effect.Effect<A, E, R>, what: string): Effect.Effect<A, E, R> =>
  Effect.raceFirst(effect, Effect.andThen(awake("3 seconds"), Effect.die(new Error(`${what}: not in time`))))

export const isPending = <A, E>(fiber: Fiber.Fiber<A, E>): boolean => fiber.pollUnsafe() === undefined

export const pending = <A, E>(fiber: Fiber.Fiber<A, E>) => Effect.sync(() => assert.isUndefined(fiber.pollUnsafe()))

export const sessionsOf = (context: Node) =>
  Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, ({ sessions }) => sessions), context)

const sessionOf = (context: Node) => Effect.map(sessionsOf(context), ([session]) => session!.id!)

/** The only channel of a coordinator with one partition and one length of lease. */
export const channelOf = (context: Node): Channel => {
  const [channel] = spaceOf(Context.get(context, Coordinator.Coordinator)).kernel.partitionAt(0).channels.values()
  return channel!
}

/** Has a coordinator ask what has become of everything, as if events of its mailbox were missing. */
export const missed = (context: Node): void => {
  const { session, tenant } = channelOf(context)
  ;(tenant as Tenancy).missed(session!)
}

/** Waits until no session is known any more but those of these coordinators. */
export const deadForgotten = (context: Node | ReadonlyArray<Node>, namespace: string, server: Server) =>
  eventually(
    Effect.gen(function*() {
      const keys = (yield* server.cli("KEYS", `{${namespace}:*:mail:*`)).split("\n").filter((key) => key !== "")
      const own = (yield* Effect.forEach(
        [context].flat(),
        (one) => Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions), one)
      )).flat()
      return keys.every((key) => own.some(({ id }) => id !== undefined && key.endsWith(id)))
    }),
    { message: "the dead are forgotten" }
  )

/**
 * A coordinator whose connection may fail, so that it may not be able to say that it is closed: when the scope is, others
 * that have a session clean up behind it.
 */
export const fragile = (
  server: Server,
  line: Proxy,
  namespace: string,
  others: number,
  partitions = 1
): Effect.Effect<Node, unknown, Scope.Scope> =>
  Effect.gen(function*() {
    yield* Effect.addFinalizer(() =>
      eventually(Effect.map(server.cli("ZCARD", `{${namespace}:00}:due`), (left) => Number(left) <= others), {
        message: "nothing is left of it"
      })
    )
    return yield* node(line.url, {
      namespace,
      partitions,
      lease: "1 second",
      margin: "200 millis",
      requestTimeout: "200 millis"
    })
  })

/** Has Redis forget the session of a coordinator, which learns of it with its next request. */
export const forgetSession = (context: Node, namespace: string, server: Server) =>
  Effect.flatMap(sessionOf(context), (session) => forget(server, namespace, session))

/** Has Redis forget the session of a coordinator, and the coordinator notice it. */
export const lose = (context: Node, namespace: string, server: Server) =>
  Effect.andThen(
    forgetSession(context, namespace, server),
    on(context, Lock.withLockIfAvailable(Effect.void, "to be told"))
  )

/** For longer than a lease, the user may not call the actor: requests are refused, and then no session can be opened. */
export const revoked = <A, E extends { readonly reason: { readonly _tag: string } }>(
  context: Node,
  server: Server,
  request: Effect.Effect<A, E>
) =>
  Effect.gen(function*() {
    const { sessions } = Context.get(context, Coordinator.Coordinator)
    yield* server.cli("ACL", "SETUSER", "default", "-fcall")
    yield* eventually(
      Effect.map(sessions, (all) => assert.isTrue(all.every(({ state }) => state !== "open" && state !== "suspended")))
    )
    for (let tries = 0; tries < 3; tries++) {
      assert.strictEqual((yield* promptly(Effect.flip(request), "a refusal")).reason._tag, "MissingPermission")
    }
  }).pipe(Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+fcall"))))

/** How many events the mailbox of a coordinator has had. */
export const eventsOf = (context: Node, namespace: string, server: Server) =>
  Effect.gen(function*() {
    const lines = (yield* server.cli("XINFO", "STREAM", `{${namespace}:00}:mail:${yield* sessionOf(context)}`)).split(
      "\n"
    )
    return Number(lines[lines.indexOf("entries-added") + 1])
  })

/** Waits until the lease of every session in partition 0 has run out. */
export const sessionsExpired = (server: Server, namespace: string) =>
  eventually(
    Effect.map(
      server.cli(
        "EVAL",
        "local time, fields = redis.call('TIME'), redis.call('HGETALL', KEYS[1]) for at = 1, #fields, 2 do if fields[at]:sub(1, 1) == 's' " +
          "and select(3, struct.unpack('<Bdd', fields[at + 1])) > time[1] * 1000 + time[2] / 1000 then return 'alive' end end return 'expired'",
        1,
        `{${namespace}:00}:sessions`
      ),
      (found) => found === "expired"
    ),
    { message: "all sessions have expired" }
  )
