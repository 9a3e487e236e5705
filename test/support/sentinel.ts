import { Effect, type Scope } from "effect"
import { workspace } from "../../src/internal/testing/workspace.ts"
import type { CommandError } from "./command.ts"
import { eventually } from "./eventually.ts"
import { awaitInSync, launchReplicated, launchSentinel } from "./servers.ts"
import type { Server, ServerOptions } from "./servers.ts"

/** A primary, two replicas and three sentinels. */
export interface Sentinel {
  /** Of the monitored primary, for the `name` option of a client. */
  readonly name: string
  readonly servers: ReadonlyArray<Server>
  readonly sentinels: ReadonlyArray<Server>
  /** As sentinels name it at the moment, running or not. */
  readonly primary: Effect.Effect<Server, CommandError>
  /** All the others. */
  readonly replicas: Effect.Effect<ReadonlyArray<Server>, CommandError>
  /**
   * Stops a replica (SIGSTOP) and closes its link, so that it misses every later write. Returns when the other running
   * replicas are in sync again. `replica.resume` ends it; with the primary dead by then, the writes are lost to it.
   */
  readonly cut: (replica: Server) => Effect.Effect<void, CommandError>
  /**
   * Waits until all running sentinels agree on a primary other than `previous` that accepts writes, and returns it.
   * About 2 to 4 seconds from the moment the primary stops answering.
   */
  readonly awaitFailover: (previous: Server) => Effect.Effect<Server>
}

const name = "primary"

const answers = (server: Server) => server.running && !server.paused

/** A primary with two replicas under three sentinels: a primary is taken for dead after one second of silence. */
export const sentinel = (
  options?: Omit<ServerOptions, "acl" | "tls">
): Effect.Effect<Sentinel, never, Scope.Scope> =>
  Effect.gen(function*() {
    const space = yield* workspace
    const { primary: first, replicas: others } = yield* launchReplicated(space, 2, options)
    const servers = [first, ...others]
    const sentinels = yield* Effect.forEach([1, 2, 3], () =>
      launchSentinel(space, {
        sentinel: [
          `monitor ${name} 127.0.0.1 ${first.port} 2`,
          `down-after-milliseconds ${name} 1000`,
          // Also the wait before a second election when the first one had no winner: twice this.
          `failover-timeout ${name} 3000`,
          `parallel-syncs ${name} 2`
        ]
      }), { concurrency: "unbounded" })
    // The defaults (10 s and 2 s) would make the start, and the discovery of a new role, slower.
    for (const one of sentinels) {
      yield* one.cli("SENTINEL", "DEBUG", "info-period", 1000, "publish-period", 300, "ping-period", 300)
    }

    const nameOn = Effect.fnUntraced(function*(one: Server) {
      const answer = yield* one.cli("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
      const port = Number(answer.split("\n")[1])
      const server = servers.find((server) => server.port === port)
      return server === undefined ? yield* Effect.die(new Error(`a sentinel names port ${port}`)) : server
    })
    const primary = Effect.suspend(() => {
      const one = sentinels.find(answers)
      return one === undefined ? Effect.die(new Error("no sentinel is running")) : nameOn(one)
    })

    const complete = Effect.gen(function*() {
      for (const one of sentinels) {
        const words = (yield* one.cli("SENTINEL", "MASTER", name)).split("\n")
        const field = (key: string) => words[words.indexOf(key) + 1]
        if (field("num-slaves") !== "2" || field("num-other-sentinels") !== "2" || field("flags") !== "master") {
          return yield* Effect.fail(words.join(" "))
        }
        // A promotion needs a replica whose INFO the sentinel has read.
        const replicas = yield* one.cli("SENTINEL", "REPLICAS", name)
        if (replicas.match(/master-link-status\nok/g)?.length !== 2) return yield* Effect.fail(replicas)
      }
    })
    yield* eventually(complete, { timeout: "30 seconds", message: "sentinels" })

    return {
      name,
      servers,
      sentinels,
      primary,
      replicas: Effect.map(primary, (primary) => servers.filter((server) => server !== primary)),
      cut: Effect.fnUntraced(function*(replica: Server) {
        const source = yield* primary
        yield* replica.pause
        yield* source.cli("CLIENT", "KILL", "TYPE", "replica")
        const rest = servers.filter((server) => server !== source && answers(server))
        yield* awaitInSync(source, rest)
      }),
      awaitFailover: (previous: Server) => {
        const agreed = Effect.gen(function*() {
          const named = yield* Effect.forEach(sentinels.filter(answers), nameOn)
          const next = named[0]
          if (next === undefined || next === previous || named.some((server) => server !== next)) {
            return yield* Effect.fail(`sentinels name ${named.map((server) => server.port).join(", ")}`)
          }
          const role = (yield* next.cli("ROLE")).split("\n")[0]
          return role === "master" ? next : yield* Effect.fail(`${next.port} is ${role}`)
        })
        return eventually(agreed, { timeout: "30 seconds", message: "failover" })
      }
    }
  }).pipe(Effect.catchTag("CommandError", Effect.die))
