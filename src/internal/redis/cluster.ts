/** A connection to a Redis Cluster, and to single nodes of it for blocking reads. */
import * as IoRedis from "ioredis"
import * as net from "node:net"
import * as tls from "node:tls"
import {
  backoff,
  checkServer,
  codeOf,
  type CommandConnection,
  type Connection,
  disconnectTimeout,
  helloOf,
  makeInFlight,
  makeListeners,
  profile,
  single,
  slotOf
} from "./connection.ts"
import { ConnectionLost, detailOf, errorFrom, fail, NotConnected, type RedisError } from "./errors.ts"
import * as handshakes from "./handshake.ts"

interface ClusterOptions {
  readonly address: string
  /** The name of its connections. */
  readonly name: string
  readonly connectTimeout: number
  readonly nodes: ReadonlyArray<IoRedis.ClusterNode>
  readonly base: IoRedis.ClusterOptions
  /** A client of the caller's, of which only a duplicate is used. */
  readonly from?: IoRedis.Cluster | undefined
  /** A server has refused the name of a connection. */
  readonly onUnnamed?: (() => void) | undefined
}

export interface ClusterConnection extends CommandConnection {
  readonly client: IoRedis.Cluster
  readonly dedicated: (key: string | undefined, role: string) => Connection
  /** The masters, in an order that only changes when they do. */
  readonly masters: () => ReadonlyArray<{ readonly send: Connection["send"] }>
}

const hostPort = (node: IoRedis.Redis): string => `${node.options.host}:${node.options.port}`

export const cluster = (options: ClusterOptions): ClusterConnection => {
  const { address } = options
  const listeners = makeListeners()
  let closed = false
  let lastError: RedisError | undefined
  let revival: NodeJS.Timeout | undefined
  // Nodes that let a deadline pass since the last reset: those are the ones that a reset cuts off.
  const suspects = new Set<string>()

  const redisOptions = { ...(options.from?.options.redisOptions ?? options.base.redisOptions) }
  const overrides = {
    ...options.base,
    lazyConnect: true,
    enableOfflineQueue: false,
    enableReadyCheck: false,
    enableAutoPipelining: false,
    shardedSubscribers: false,
    scaleReads: "master",
    keyPrefix: "",
    // Anything else resends what may have been executed.
    retryDelayOnFailover: 0,
    retryDelayOnTryAgain: 100,
    retryDelayOnClusterDown: 100,
    retryDelayOnMoved: 0,
    maxRedirections: 16,
    slotsRefreshTimeout: Math.min(options.connectTimeout, 2000),
    slotsRefreshInterval: 5000,
    clusterRetryStrategy: backoff,
    clusterNodeRetryStrategy: null,
    himportFieldsets: undefined,
    scripts: undefined,
    redisOptions: {
      ...redisOptions,
      ...profile,
      connectionName: options.name,
      connectTimeout: options.connectTimeout,
      reconnectOnError: (error: Error) => codeOf(error) === "READONLY" || codeOf(error) === "MASTERDOWN" ? 1 : false
    }
  } satisfies IoRedis.ClusterOptions
  const client = options.from === undefined
    ? new IoRedis.Cluster([...options.nodes], overrides)
    : options.from.duplicate([], overrides)

  const ownerOf = (slot: number): { readonly host: string; readonly port: number } | undefined => {
    const name = client.slots[slot]?.[0]
    return name === undefined ? undefined : reachedBy(name)
  }

  /** Where a node is that the cluster has this name for. */
  const reachedBy = (name: string): { readonly host: string; readonly port: number } => {
    const known = client.nodes("master").find((node) => hostPort(node) === name)
    if (known !== undefined) return { host: known.options.host!, port: known.options.port! }
    const natMap = client.options.natMap
    const mapped = typeof natMap === "function" ? natMap(name) : natMap?.[name]
    if (mapped) return mapped
    const colon = name.lastIndexOf(":")
    return { host: name.slice(0, colon), port: Number(name.slice(colon + 1)) }
  }

  const isServed = (): boolean => {
    const connected = new Set(client.nodes("master").filter(({ status }) => status === "ready").map(hostPort))
    return [...new Set(client.slots.map((names) => names?.[0]))].every((name) => {
      if (name === undefined) return true
      const { host, port } = reachedBy(name)
      return connected.has(`${host}:${port}`)
    })
  }

  // Until a primary is there in place of the one that is gone: who only holds sends nothing that would find it.
  let chase: NodeJS.Timeout | undefined
  let chased = 0
  let refreshedAt = 0
  const refresh = (): void => {
    if (chase !== undefined || closed || client.status !== "ready") return
    // A node that is gone is tried again with every refresh, and its failure asks for the next one.
    const pause = chased++ < 40 ? 250 : 2000
    chase = setTimeout(() => {
      chase = undefined
      refreshedAt = performance.now()
      if (!closed && client.status === "ready") client.refreshSlotsCache(() => look() || refresh())
    }, Math.max(1, refreshedAt + pause - performance.now()))
  }

  // As of the last `up`: who hears it asks the sessions, so later changes are those that nobody has asked about.
  let primaries = ""
  const primariesNow = (): string => client.nodes("master").map(hostPort).sort().join()
  const up = (): void => {
    primaries = primariesNow()
    listeners.up()
  }

  /** Whether every slot is served. A replica that was connected before and is a primary now may have missed something. */
  const look = (): boolean => {
    if (!isServed()) return false
    chased = 0
    if (listeners.state() === "ready" && primariesNow() !== primaries) up()
    return true
  }

  const inFlight = makeInFlight({
    address: () => address,
    dispatch: (command) => client.sendCommand(command),
    onExpired: (command) => {
      const owner = command.getKeys().length === 0 ? undefined : ownerOf(command.getSlot())
      if (owner !== undefined) suspects.add(`${owner.host}:${owner.port}`)
    }
  })

  // Connects at once: while a lazily created node connects, ioredis refuses every command but the first.
  const watch = (node: IoRedis.Redis): void => {
    const handshake = handshakes.watch(node, 0, hostPort(node))
    let watchdog: NodeJS.Timeout | undefined
    node.on("connect", () => {
      watchdog = setTimeout(() => node.stream.destroy(), options.connectTimeout)
    })
    node.on("ready", () => {
      clearTimeout(watchdog)
      if (handshake.isUnnamed()) options.onUnnamed?.()
      // A master that is new or back may have forgotten something.
      if (listeners.state() === "ready") up()
    })
    node.on("close", () => {
      clearTimeout(watchdog)
      refresh()
    })
    setImmediate(() => connectNode(node))
  }

  const connectNode = (node: IoRedis.Redis): void => {
    if (!closed && node.status === "wait" && !node.options.readOnly) node.connect().catch(() => {})
  }

  /** Until the masters are connected; one that is down holds up the others for a moment only. */
  const mastersConnected = (): Promise<unknown> => {
    const patience = new Promise((resolve) => setTimeout(resolve, Math.min(1000, options.connectTimeout / 2)).unref())
    const nodes = client.nodes("master").map((node) => {
      connectNode(node)
      return node.status === "ready"
        ? undefined
        : new Promise((resolve) => node.once("ready", resolve).once("close", resolve))
    })
    return Promise.race([patience, Promise.all(nodes)])
  }

  client.on("+node", watch)
  client.on("refresh", () => void look())
  client.on("error", (error: unknown) => {
    lastError = errorFrom(error, "CLUSTER", false, address)
  })
  client.on("node error", (error: unknown) => {
    const nodeError = errorFrom(error, "CLUSTER", false, address)
    if (nodeError.reason._tag !== "NotConnected" || lastError === undefined) lastError = nodeError
  })
  let epoch = 0
  client.on("ready", async () => {
    const mine = epoch
    await mastersConnected()
    if (mine !== epoch || closed) return
    lastError = undefined
    up()
  })
  // ioredis goes from "close" to "reconnecting" by itself.
  client.on("close", () => {
    epoch++
    inFlight.rejectAll(fail(new ConnectionLost({ address, detail: detailOf(lastError) })))
    listeners.down(lastError)
    // ioredis has been seen to stay in this state for ever.
    clearTimeout(revival)
    if (!closed) revival = setTimeout(revive, 5000)
  })
  client.on("end", () => {
    clearTimeout(revival)
    if (!closed) revival = setTimeout(revive, 1000)
  })
  const revive = (): void => {
    if (!closed && (client.status === "end" || client.status === "close")) client.connect().catch(() => {})
  }
  client.connect().catch(() => {})

  const destroyAll = (names?: ReadonlySet<string>): void => {
    for (const node of client.nodes("all")) {
      if (names === undefined || names.has(hostPort(node))) node.stream?.destroy()
    }
  }

  const dedicated = (key: string | undefined, role: string): Connection => {
    const slot = key === undefined ? undefined : slotOf(key)
    const base = client.nodes("master")[0]?.options ?? client.options.redisOptions ?? {}
    const { host: _host, path: _path, port: _port, ...rest } = base as IoRedis.RedisOptions
    const connection = single({
      address: key === undefined ? address : `${address} (slot ${slot})`,
      connectTimeout: options.connectTimeout,
      topology: "cluster",
      base: {
        ...rest,
        connectionName: `${options.name}:${role}`,
        Connector: nodeConnector(() => owner(slot), rest.tls) as never
      },
      onMoved: refresh,
      onUnnamed: options.onUnnamed
    })
    connection.onDown(() => {
      if (connection.state() !== "closed") refresh()
    })
    return connection
  }

  const owner = (slot: number | undefined) => {
    const found = slot === undefined ? undefined : ownerOf(slot)
    if (found !== undefined) return found
    const sample = client.nodes("master")[0]?.options
    return sample === undefined ? undefined : { host: sample.host!, port: sample.port! }
  }

  const unready = () => fail(new NotConnected({ address, detail: detailOf(lastError) }))

  const send: Connection["send"] = (name, args, deadlineMillis) =>
    listeners.state() === "ready" ? inFlight.send(name, args, deadlineMillis) : Promise.reject(unready())

  const run: Connection["run"] = (name, script, call, deadlineMillis) =>
    listeners.state() === "ready" ? inFlight.run(name, script, call, deadlineMillis) : Promise.reject(unready())

  return {
    client,
    dedicated,
    send,
    run,
    server: async (deadlineMillis) =>
      checkServer(await helloOf((name, ...args) => send(name, args, deadlineMillis)), "cluster", address),
    failure: () => lastError,
    masters: () =>
      client.nodes("master").sort((a, b) => hostPort(a) < hostPort(b) ? -1 : 1).map((node) =>
        makeInFlight({
          address: () => hostPort(node),
          dispatch: (command) => node.sendCommand(command),
          onExpired: () => suspects.add(hostPort(node))
        })
      ),
    isReady: () => listeners.state() === "ready",
    state: listeners.state,
    onReady: listeners.onReady,
    onDown: listeners.onDown,
    reset: () => {
      if (closed) return
      if (suspects.size === 0) {
        inFlight.rejectAll(fail(new ConnectionLost({ address, detail: "reset" })))
        destroyAll()
      } else {
        // What is in flight to these nodes rejects when their sockets close; the others are not disturbed.
        destroyAll(suspects)
        suspects.clear()
      }
    },
    close: async () => {
      if (closed) return
      closed = true
      clearTimeout(revival)
      clearTimeout(chase)
      inFlight.rejectAll(fail(new ConnectionLost({ address, detail: "closed" })))
      const nodes = client.nodes("all")
      client.disconnect()
      for (const node of nodes) node.stream?.destroy()
      clearTimeout(revival)
      listeners.close()
    }
  }
}

/** Looks the node up anew at every attempt, so that reconnecting follows a slot that has moved. */
const nodeConnector = (
  owner: () => { readonly host: string; readonly port: number } | undefined,
  security: tls.ConnectionOptions | undefined
) =>
  class NodeConnector extends IoRedis.AbstractConnector {
    constructor() {
      super(disconnectTimeout)
    }
    override async connect() {
      this.connecting = true
      const node = owner()
      // Ends ioredis's own attempts; `single` revives it.
      if (node === undefined) throw new Error("No node of the cluster is known")
      this.stream = security === undefined ? net.createConnection({ ...node }) : tls.connect({ ...security, ...node })
      this.stream.once("error", (error) => {
        this.firstError = error
      })
      return this.stream
    }
  }
