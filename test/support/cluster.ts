import { Effect, type Scope } from "effect"
import { type Workspace, workspace } from "../../src/internal/testing/workspace.ts"
import type { CommandError } from "./command.ts"
import { eventually } from "./eventually.ts"
import { awaitInSync, launch, type Server, type ServerOptions } from "./servers.ts"

/** Moves one slot in the steps an operator takes, so that a test can act between them. */
export interface Migration {
  readonly slot: number
  readonly from: Server
  readonly to: Server
  /** IMPORTING and MIGRATING: from here on the source answers ASK for keys it does not have. */
  readonly begin: Effect.Effect<void, CommandError>
  /** Moves these keys, or up to `count` of the slot's keys; returns how many were sent. */
  readonly move: (keys: ReadonlyArray<string> | { readonly count: number }) => Effect.Effect<number, CommandError>
  /** Assigns the slot to the target on every node; fails while the source still has keys of it. */
  readonly end: Effect.Effect<void, CommandError>
  /** What is left of the three steps, under any load. */
  readonly complete: Effect.Effect<void, CommandError>
}

/** Three primaries, each with as many replicas as asked for. */
export interface Cluster {
  readonly servers: ReadonlyArray<Server>
  /** For the constructor of a client: every node. */
  readonly startupNodes: ReadonlyArray<{ readonly host: string; readonly port: number }>
  readonly slotOf: (key: string) => Effect.Effect<number, CommandError>
  /** The primary that serves the slot of `key` (a string) or a slot (a number), by the view of the nodes that answer. */
  readonly serving: (target: string | number) => Effect.Effect<Server, CommandError>
  readonly primaries: Effect.Effect<ReadonlyArray<Server>, CommandError>
  readonly replicasOf: (primary: Server) => Effect.Effect<ReadonlyArray<Server>, CommandError>
  /** Stops a replica and closes its link, so that it misses every later write of its primary. `resume` ends it. */
  readonly cut: (replica: Server) => Effect.Effect<void, CommandError>
  /**
   * Waits until all nodes that answer see another primary than `previous` for the slot, the cluster is whole, and that
   * primary accepts writes. About 2 to 5 seconds from the moment the primary stops answering.
   */
  readonly awaitPromotion: (target: string | number, previous: Server) => Effect.Effect<Server, CommandError>
  readonly migration: (target: string | number, to: Server) => Effect.Effect<Migration, CommandError>
}

interface Node {
  readonly id: string
  readonly port: number
  readonly primary: boolean
  readonly primaryId: string
  readonly failed: boolean
  readonly linked: boolean
  readonly slots: ReadonlyArray<readonly [first: number, last: number]>
}

const slotCount = 16_384
const primaryCount = 3

const answers = (server: Server) => server.running && !server.paused

const parseNode = (line: string): Node => {
  const [id = "", address = "", flags = "", primaryId = "", , , , link = "", ...ranges] = line.split(" ")
  const slots = ranges.filter((range) => !range.startsWith("[")).map((range) => {
    const [first, last] = range.split("-").map(Number)
    return [first ?? -1, last ?? first ?? -1] as const
  })
  return {
    id,
    port: Number(/:(\d+)@/.exec(address)?.[1]),
    primary: flags.split(",").includes("master"),
    primaryId,
    failed: /fail|noaddr|handshake/.test(flags),
    linked: link === "connected",
    slots
  }
}

const view = (server: Server) =>
  Effect.map(server.cli("CLUSTER", "NODES"), (text) => text.trim().split("\n").map(parseNode))

const owner = (nodes: ReadonlyArray<Node>, slot: number) =>
  nodes.find((node) => node.primary && node.slots.some(([first, last]) => first <= slot && slot <= last))

const whole = (server: Server) => Effect.map(server.cli("CLUSTER", "INFO"), (text) => text.includes("cluster_state:ok"))

const myId = (server: Server) => server.cli("CLUSTER", "MYID")

const create = Effect.fnUntraced(function*(space: Workspace, replicas: number, options: ServerOptions | undefined) {
  const servers = yield* Effect.forEach(Array.from({ length: primaryCount * (1 + replicas) }), () =>
    launch(space, {
      ...options,
      config: {
        "cluster-enabled": "yes",
        "cluster-node-timeout": 1500,
        "cluster-allow-replica-migration": "no",
        // A replica that was cut may be promoted all the same: losing its missed writes is what tests want to see.
        "cluster-replica-validity-factor": 0,
        ...options?.config
      },
      clusterBus: true
    }), { concurrency: "unbounded" })
  const primaries = servers.slice(0, primaryCount)
  const width = Math.ceil(slotCount / primaryCount)
  for (const [index, primary] of primaries.entries()) {
    const last = Math.min(slotCount, (index + 1) * width) - 1
    yield* primary.cli("CLUSTER", "ADDSLOTSRANGE", index * width, last)
  }
  for (const [index, server] of servers.entries()) yield* server.cli("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
  for (const [index, server] of servers.entries()) {
    // Every node meets every other: faster than waiting for gossip.
    for (const other of servers.slice(index + 1)) {
      yield* server.cli("CLUSTER", "MEET", "127.0.0.1", other.port, other.busPort ?? 0)
    }
  }
  const acquainted = Effect.gen(function*() {
    for (const server of servers) {
      const nodes = yield* view(server)
      if (nodes.length !== servers.length || nodes.some((node) => node.failed || !node.linked)) {
        return yield* Effect.fail(`node ${server.port} sees ${JSON.stringify(nodes)}`)
      }
    }
  })
  yield* eventually(acquainted, { timeout: "30 seconds", message: "cluster nodes" })
  for (const [index, replica] of servers.slice(primaryCount).entries()) {
    const primary = primaries[index % primaryCount]
    if (primary !== undefined) yield* replica.cli("CLUSTER", "REPLICATE", yield* myId(primary))
  }
  for (const [index, primary] of primaries.entries()) {
    const own = servers.filter((_, at) => at >= primaryCount && at % primaryCount === index)
    yield* awaitInSync(primary, own)
  }
  // Roles travel by gossip: a client must not receive yesterday's.
  const known = Effect.map(
    Effect.forEach(servers, view),
    (views) => views.every((nodes) => nodes.filter((node) => node.primary).length === primaryCount)
  )
  yield* eventually(known, { timeout: "30 seconds", message: "roles of cluster nodes" })
  const ready = Effect.map(Effect.forEach(servers, whole), (states) => states.every((state) => state))
  yield* eventually(ready, { timeout: "30 seconds", message: "cluster state" })
  return servers
})

/** A cluster of three primaries: a node is taken for dead after one and a half seconds of silence. */
export const cluster = (
  options?: Omit<ServerOptions, "tls"> & { readonly replicas?: number | undefined }
): Effect.Effect<Cluster, never, Scope.Scope> =>
  Effect.gen(function*() {
    const space = yield* workspace
    const servers = yield* create(space, options?.replicas ?? 0, options)

    const byPort = (port: number) => {
      const server = servers.find((server) => server.port === port)
      return server === undefined ? Effect.die(new Error(`no node on port ${port}`)) : Effect.succeed(server)
    }
    const someone = Effect.suspend(() => {
      const server = servers.find(answers)
      return server === undefined ? Effect.die(new Error("no node is running")) : Effect.succeed(server)
    })
    const slotOf = (key: string) =>
      Effect.flatMap(someone, (server) => Effect.map(server.cli("CLUSTER", "KEYSLOT", key), Number))
    const toSlot = (target: string | number) => typeof target === "number" ? Effect.succeed(target) : slotOf(target)

    // Right after a change the nodes differ; they agree within a second.
    const agreedOwner = Effect.fnUntraced(function*(slot: number) {
      const views = yield* Effect.forEach(servers.filter(answers), view)
      const ports = new Set(views.map((nodes) => owner(nodes, slot)?.port))
      const [port] = ports
      if (port === undefined || ports.size !== 1) {
        return yield* Effect.fail(`owners of slot ${slot}: ${Array.from(ports).join(", ")}`)
      }
      return yield* byPort(port)
    })
    const serving = Effect.fnUntraced(function*(target: string | number) {
      return yield* eventually(agreedOwner(yield* toSlot(target)), { message: "one owner of the slot" })
    })
    const primaries = Effect.gen(function*() {
      const nodes = yield* view(yield* someone)
      const ports = nodes.filter((node) => node.primary && !node.failed && node.slots.length > 0)
      return yield* Effect.forEach(ports, (node) => byPort(node.port))
    })
    const replicasOf = Effect.fnUntraced(function*(primary: Server) {
      const nodes = yield* view(yield* someone)
      const id = nodes.find((node) => node.port === primary.port)?.id
      return yield* Effect.forEach(nodes.filter((node) => node.primaryId === id), (node) => byPort(node.port))
    })
    const cut = Effect.fnUntraced(function*(replica: Server) {
      const nodes = yield* view(yield* someone)
      const id = nodes.find((node) => node.port === replica.port)?.primaryId
      const source = yield* byPort(nodes.find((node) => node.id === id)?.port ?? 0)
      yield* replica.pause
      yield* source.cli("CLIENT", "KILL", "TYPE", "replica")
      const rest = (yield* replicasOf(source)).filter(answers)
      yield* awaitInSync(source, rest)
    })
    const awaitPromotion = Effect.fnUntraced(function*(target: string | number, previous: Server) {
      const slot = yield* toSlot(target)
      const promoted = Effect.gen(function*() {
        const next = yield* agreedOwner(slot)
        const states = yield* Effect.forEach(servers.filter(answers), whole)
        const role = (yield* next.cli("ROLE")).split("\n")[0]
        if (next === previous || role !== "master" || states.includes(false)) {
          return yield* Effect.fail(`slot ${slot} on ${next.port} (${role}), whole: ${states.join(" ")}`)
        }
        return next
      })
      return yield* eventually(promoted, { timeout: "30 seconds", message: "promotion" })
    })

    const migration = Effect.fnUntraced(function*(target: string | number, to: Server) {
      const slot = yield* toSlot(target)
      const from = yield* serving(slot)
      const [fromId, toId] = [yield* myId(from), yield* myId(to)]
      let begun = false
      const begin = Effect.gen(function*() {
        yield* to.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", fromId)
        yield* from.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", toId)
        begun = true
      })
      const move: Migration["move"] = Effect.fnUntraced(function*(which) {
        const keys = "count" in which
          // There can be line ends in a key, so this is no text.
          ? (yield* from.call("CLUSTER", "GETKEYSINSLOT", slot, which.count)) as ReadonlyArray<string>
          : which
        if (keys.length === 0) return 0
        yield* from.cli("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "REPLACE", "KEYS", ...keys)
        return keys.length
      })
      // The target first: if the source gave the slot away first, for a moment no node would own it.
      const end = Effect.gen(function*() {
        yield* to.cli("CLUSTER", "SETSLOT", slot, "NODE", toId)
        yield* from.cli("CLUSTER", "SETSLOT", slot, "NODE", toId)
        const rest = (yield* primaries).filter((server) => server !== to && server !== from && answers(server))
        for (const server of rest) yield* server.cli("CLUSTER", "SETSLOT", slot, "NODE", toId)
      })
      const complete = Effect.gen(function*() {
        if (!begun) yield* begin
        while ((yield* move({ count: 100 })) > 0);
        yield* end
      })
      return { slot, from, to, begin, move, end, complete }
    })

    return {
      servers,
      startupNodes: servers.map(({ host, port }) => ({ host, port })),
      slotOf,
      serving,
      primaries,
      replicasOf,
      cut,
      awaitPromotion,
      migration
    }
  }).pipe(Effect.catchTag("CommandError", Effect.die))
