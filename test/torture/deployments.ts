/** The deployments of Redis, each client behind proxies of its own. */
import { Effect, type Scope } from "effect"
import type { Redis } from "../../src/index.ts"
import { Proxy } from "../../src/testing.ts"
import * as clusters from "../support/cluster.ts"
import * as sentinels from "../support/sentinel.ts"
import { type Server, standalone } from "../support/servers.ts"

export interface Link {
  readonly options: Redis.Options
  readonly proxies: ReadonlyArray<Proxy.Proxy>
}

export interface Deployment {
  readonly servers: ReadonlyArray<Server>
  readonly sentinel?: sentinels.Sentinel | undefined
  readonly cluster?: clusters.Cluster | undefined
  /** Of the harness itself, past all proxies. */
  readonly direct: Redis.Options
  /** For one more client. */
  readonly link: Effect.Effect<Link, never, Scope.Scope>
  /** Which servers keep the data at the moment. */
  readonly primaries: Effect.Effect<ReadonlyArray<Server>, unknown>
}

export const names = ["standalone", "aof", "sentinel", "cluster", "rolling", "clock"] as const

export type Name = typeof names[number]

const single = (persistence: "none" | "aof") =>
  Effect.map(standalone({ persistence }), (server): Deployment => ({
    servers: [server],
    direct: { url: server.url },
    link: Effect.map(Proxy.make(server), (proxy) => ({ options: { url: proxy.url }, proxies: [proxy] })),
    primaries: Effect.succeed([server])
  }))

/** A proxy for each server, and the map from the addresses that the servers tell. */
const behind = (servers: ReadonlyArray<Server>) =>
  Effect.map(Effect.forEach(servers, (server) => Proxy.make(server)), (proxies) => ({
    proxies,
    addresses: proxies.map(({ host, port }) => ({ host, port })),
    natMap: Object.fromEntries(
      servers.map((server, at) => [`${server.host}:${server.port}`, { host: "127.0.0.1", port: proxies[at]!.port }])
    )
  }))

export const deploy = (name: Name): Effect.Effect<Deployment, never, Scope.Scope> => {
  switch (name) {
    case "aof":
      return single("aof")
    case "sentinel":
      return Effect.map(sentinels.sentinel(), (sentinel): Deployment => {
        const addresses = sentinel.sentinels.map(({ host, port }) => ({ host, port }))
        return {
          servers: sentinel.servers,
          sentinel,
          direct: { sentinels: addresses, name: sentinel.name },
          link: Effect.map(behind(sentinel.servers), ({ natMap, proxies }) => ({
            options: { sentinels: addresses, name: sentinel.name, natMap },
            proxies
          })),
          primaries: Effect.map(sentinel.primary, (primary) => [primary])
        }
      })
    case "cluster":
      return Effect.map(clusters.cluster({ replicas: 1 }), (cluster): Deployment => ({
        servers: cluster.servers,
        cluster,
        direct: { cluster: cluster.startupNodes },
        link: Effect.map(behind(cluster.servers), ({ addresses, natMap, proxies }) => ({
          options: { cluster: addresses, natMap },
          proxies
        })),
        primaries: cluster.primaries
      }))
    default:
      return single("none")
  }
}
