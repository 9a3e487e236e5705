/** What is done to clients, connections and servers. Each fault ends by itself. */
import { Effect } from "effect"
import { prefixOf } from "../../src/internal/actor/keys.ts"
import type { Proxy, Verdict } from "../../src/testing/Proxy.ts"
import { realSleep } from "../support/eventually.ts"
import { awaitInSync, type Server } from "../support/servers.ts"
import type { Settings } from "./client.ts"
import type { Deployment, Name } from "./deployments.ts"
import { clockKey } from "./library.ts"

/** A client as faults see it. */
export interface Victim {
  readonly name: string
  readonly proxies: ReadonlyArray<Proxy>
  readonly sigstop: Effect.Effect<void>
  readonly sigcont: Effect.Effect<void>
  readonly block: Effect.Effect<void>
  /** Kills it and starts another one in its place, of whichever version. */
  readonly replace: (after: number) => Effect.Effect<void>
}

export interface Scene extends Settings {
  readonly deployment: Deployment
  readonly victim: Victim
  readonly random: () => number
}

export interface Fault {
  readonly name: string
  /** One client, or all of them. Faults of one thing come one after another; others are combined. */
  readonly of: "client" | "server"
  readonly on: (deployment: Name) => boolean
  /** Redis may forget what it has acknowledged. */
  readonly forgets?: boolean | undefined
  readonly run: (scene: Scene) => Effect.Effect<void, unknown>
}

const between = ({ random }: Scene, low: number, high: number): number => Math.round(low + random() * (high - low))

const everywhere = () => true

const eachProxy = (scene: Scene, f: (proxy: Proxy) => Effect.Effect<void>): Effect.Effect<void> =>
  Effect.forEach(scene.victim.proxies, f, { discard: true })

const forAWhile = (
  scene: Scene,
  low: number,
  high: number,
  begin: (proxy: Proxy) => Effect.Effect<void>,
  end: (proxy: Proxy) => Effect.Effect<void>
): Effect.Effect<void> =>
  Effect.acquireUseRelease(
    eachProxy(scene, begin),
    () => realSleep(between(scene, low, high)),
    () => eachProxy(scene, end)
  )

const restored = (proxy: Proxy) => Effect.andThen(proxy.pass, proxy.closeAll)

/** On every server that keeps data now. */
const onPrimaries = (scene: Scene, ...command: ReadonlyArray<string | number>) =>
  Effect.flatMap(
    scene.deployment.primaries,
    (primaries) => Effect.forEach(primaries, (server) => server.cli(...command), { discard: true })
  )

const forAWhileOnServers = (
  scene: Scene,
  low: number,
  high: number,
  begin: ReadonlyArray<string | number>,
  end: ReadonlyArray<string | number>
) =>
  onPrimaries(scene, ...begin).pipe(
    Effect.andThen(realSleep(between(scene, low, high))),
    Effect.ensuring(
      Effect.forEach(scene.deployment.servers, (server) => Effect.ignore(server.cli(...end)), { discard: true })
    )
  )

const isPlain = (name: Name) => name === "standalone" || name === "aof" || name === "rolling"

const pick = <A>(scene: Scene, items: ReadonlyArray<A>): A => items[Math.floor(scene.random() * items.length)]!

/** The first slot that a node of a cluster serves. */
const slotOf = (primary: Server) =>
  Effect.map(primary.cli("CLUSTER", "NODES"), (text) => Number(/myself.* connected (\d+)/.exec(text)![1]))

/** A primary dies and a replica takes over; a stale one has missed the last writes. */
const failOver = (name: string, stale: boolean): Fault => ({
  name,
  of: "server",
  on: (name) => name === "sentinel" || name === "cluster",
  forgets: true,
  run: Effect.fnUntraced(function*(scene) {
    const { cluster, primaries, sentinel } = scene.deployment
    const primary = pick(scene, yield* primaries)
    const replicas = cluster === undefined ? yield* sentinel!.replicas : yield* cluster.replicasOf(primary)
    const promotion = cluster === undefined
      ? sentinel!.awaitFailover(primary)
      : cluster.awaitPromotion(yield* slotOf(primary), primary)
    const cut = Effect.gen(function*() {
      // All of them, as the one that knows most is promoted.
      for (const replica of replicas) yield* (cluster ?? sentinel!).cut(replica)
      yield* realSleep(between(scene, 100, 400))
    })
    const successor = yield* (stale ? cut : Effect.void).pipe(
      Effect.andThen(primary.stop()),
      Effect.ensuring(Effect.forEach(replicas, (replica) => replica.resume, { discard: true })),
      Effect.andThen(promotion),
      Effect.ensuring(primary.start())
    )
    // The next fault finds the deployment whole.
    yield* awaitInSync(successor, [primary])
  })
})

export const faults: ReadonlyArray<Fault> = [
  {
    name: "kill -9",
    of: "client",
    on: everywhere,
    run: (scene) => scene.victim.replace(between(scene, 0, 1000))
  },
  {
    name: "SIGSTOP",
    of: "client",
    on: everywhere,
    run: (scene) =>
      Effect.acquireUseRelease(
        scene.victim.sigstop,
        () => realSleep(between(scene, scene.lease * 0.2, scene.lease * 1.8)),
        () => scene.victim.sigcont
      )
  },
  {
    name: "blocked event loop",
    of: "client",
    on: everywhere,
    run: (scene) => Effect.andThen(scene.victim.block, realSleep(scene.lease * 1.6))
  },
  { name: "cut", of: "client", on: everywhere, run: (scene) => eachProxy(scene, (proxy) => proxy.closeAll) },
  {
    name: "reconnect storm",
    of: "client",
    on: everywhere,
    run: (scene) =>
      Effect.forEach(
        [1, 2, 3, 4, 5, 6],
        () => Effect.andThen(eachProxy(scene, (proxy) => proxy.closeAll), realSleep(between(scene, 10, 150))),
        { discard: true }
      )
  },
  {
    name: "stall",
    of: "client",
    on: everywhere,
    run: (scene) => forAWhile(scene, 200, scene.lease, (proxy) => proxy.blackhole, restored)
  },
  {
    name: "partition",
    of: "client",
    on: everywhere,
    // Longer than the lease: what the client holds, others are given.
    run: (scene) => forAWhile(scene, scene.lease * 1.2, scene.lease * 2.2, (proxy) => proxy.blackhole, restored)
  },
  {
    name: "half-open",
    of: "client",
    on: everywhere,
    // What was open stays silent: the client has to find out.
    run: (scene) => forAWhile(scene, 10, 300, (proxy) => proxy.blackhole, (proxy) => proxy.pass)
  },
  {
    name: "slow",
    of: "client",
    on: everywhere,
    run: (scene) => {
      const requests = between(scene, 0, 120)
      const replies = between(scene, 0, 120)
      return forAWhile(scene, 500, 2500, (proxy) => proxy.delay({ requests, replies }), (proxy) => proxy.pass)
    }
  },
  {
    name: "lost replies",
    of: "client",
    on: everywhere,
    run: (scene) => forAWhile(scene, 100, 800, (proxy) => proxy.dropReplies, restored)
  },
  {
    name: "lost and repeated requests",
    of: "client",
    on: everywhere,
    run: (scene) =>
      forAWhile(
        scene,
        500,
        2000,
        (proxy) =>
          proxy.onRequest(({ name }): Verdict =>
            name !== "FCALL" || scene.random() < 0.85
              ? "pass"
              : pick(scene, ["drop", "dropReply", "dropReply", "duplicate"] as const)
          ),
        (proxy) => proxy.onRequest(undefined)
      )
  },
  {
    name: "refused connections",
    of: "client",
    on: everywhere,
    run: (scene) =>
      forAWhile(
        scene,
        200,
        scene.lease,
        (proxy) => Effect.andThen(scene.random() < 0.5 ? proxy.refuse : proxy.acceptThenClose, proxy.closeAll),
        restored
      )
  },
  {
    name: "CLIENT KILL",
    of: "server",
    on: everywhere,
    run: (scene) => Effect.ignore(onPrimaries(scene, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
  },
  {
    name: "paused server",
    of: "server",
    on: isPlain,
    run: (scene) => {
      const server = scene.deployment.servers[0]!
      return Effect.acquireUseRelease(
        server.pause,
        () => realSleep(between(scene, 100, scene.lease * 0.9)),
        () => server.resume
      )
    }
  },
  { name: "FUNCTION FLUSH", of: "server", on: everywhere, run: (scene) => onPrimaries(scene, "FUNCTION", "FLUSH") },
  {
    name: "full memory",
    of: "server",
    on: everywhere,
    run: (scene) =>
      forAWhileOnServers(
        scene,
        300,
        scene.lease,
        ["CONFIG", "SET", "maxmemory", 1],
        ["CONFIG", "SET", "maxmemory", 0]
      )
  },
  {
    name: "changed ACL",
    of: "server",
    on: everywhere,
    run: (scene) =>
      forAWhileOnServers(
        scene,
        200,
        scene.lease * 1.5,
        ["ACL", "SETUSER", "default", "-fcall"],
        ["ACL", "SETUSER", "default", "+fcall"]
      )
  },
  {
    name: "restart with its data",
    of: "server",
    on: (name) => name === "aof",
    run: ({ deployment }) => {
      const server = deployment.servers[0]!
      return Effect.andThen(server.stop(), server.start())
    }
  },
  {
    name: "restart without data",
    of: "server",
    on: (name) => name === "standalone",
    forgets: true,
    run: ({ deployment }) => {
      const server = deployment.servers[0]!
      return Effect.andThen(server.stop(), server.start({ data: "discard" }))
    }
  },
  {
    name: "FLUSHALL",
    of: "server",
    on: (name) => name === "standalone" || name === "cluster" || name === "sentinel",
    forgets: true,
    run: (scene) => onPrimaries(scene, "FLUSHALL")
  },
  failOver("fail-over", false),
  failOver("fail-over to a stale replica", true),
  {
    name: "slot migration",
    of: "server",
    on: (name) => name === "cluster",
    run: Effect.fnUntraced(function*(scene) {
      const cluster = scene.deployment.cluster!
      const key = prefixOf(scene.namespace, between(scene, 0, scene.partitions - 1))
      const from = yield* cluster.serving(key)
      const others = (yield* cluster.primaries).filter((server) => server !== from)
      const migration = yield* cluster.migration(key, pick(scene, others))
      yield* migration.begin
      yield* realSleep(between(scene, 0, 500))
      yield* migration.move({ count: 2 })
      yield* realSleep(between(scene, 0, 500))
      yield* migration.complete
    })
  },
  {
    name: "clock jump",
    of: "server",
    on: (name) => name === "clock",
    // A jump ahead ends every lease; a jump back prolongs those of the dead.
    forgets: true,
    run: (scene) => {
      const jump = between(scene, -4, 4)
      return Effect.asVoid(scene.deployment.servers[0]!.cli("INCRBY", clockKey, jump))
    }
  }
]
