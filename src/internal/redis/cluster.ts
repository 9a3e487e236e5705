/** A connection to a Redis Cluster, and to single nodes of it for blocking reads. */

import * as IoRedis from "ioredis"
import { giveUpAfter, type Io, type Timer } from "../io.ts"
import { showAs } from "../text.ts"
import { slotOf } from "./command.ts"
import type { ClusterConnection, Connection, NodeConnection } from "./connection.ts"
import {
  atAnnounced,
  codeOf,
  ConnectionLost,
  detailOf,
  errorFrom,
  fail,
  NotConnected,
  type RedisError,
  withoutSlots
} from "./errors.ts"
import * as handshakes from "./handshake.ts"
import { InFlight, type Routed } from "./inFlight.ts"
import { makeListeners } from "./listeners.ts"
import { nodeConnector, toleratingErrors } from "./nodeConnector.ts"
import { checkServer, helloOf } from "./probe.ts"
import { backoff, profile, shareOf } from "./profile.ts"
import { single } from "./single.ts"
import { hostPort, isServed, nodeFor, ownerOf } from "./slots.ts"

export interface ClusterOptions {
  readonly io: Io
  readonly address: string
  /** The name of its connections. */
  readonly name: string
  readonly connectTimeout: number
  readonly nodes: ReadonlyArray<IoRedis.ClusterNode>
  /** How many are listed, here or in the caller's client. */
  readonly listed: number
  readonly base: IoRedis.ClusterOptions
  /** A client of the caller's, of which only a duplicate is used. */
  readonly from?: IoRedis.Cluster | undefined
  /** A server has refused the name of a connection. */
  readonly onUnnamed?: (() => void) | undefined
}

export const cluster = (options: ClusterOptions): ClusterConnection => new Cluster(options)

/** How long one of several nodes may take that are asked in turn. */
const sharedBy = (connectTimeout: number, nodes: number): number =>
  Math.min(connectTimeout, Math.max(500, shareOf(connectTimeout, nodes)))

const makeClient = (options: ClusterOptions): IoRedis.Cluster => {
  const { base, connectTimeout, from, io, listed, name, nodes } = options
  const overrides = {
    ...base,
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
    slotsRefreshTimeout: Math.min(2000, sharedBy(connectTimeout, listed)),
    slotsRefreshInterval: 5000,
    clusterRetryStrategy: backoff(io),
    clusterNodeRetryStrategy: null,
    himportFieldsets: undefined,
    scripts: undefined,
    redisOptions: {
      ...(from?.options.redisOptions ?? base.redisOptions),
      ...profile,
      connectionName: name,
      connectTimeout,
      reconnectOnError: (error: Error) => codeOf(error) === "READONLY" || codeOf(error) === "MASTERDOWN" ? 1 : false
    }
  } satisfies IoRedis.ClusterOptions
  return from === undefined ? new IoRedis.Cluster([...nodes], overrides) : from.duplicate([], overrides)
}

const listedAs = (node: IoRedis.ClusterNode): string =>
  typeof node === "object" ? `${node.host ?? "127.0.0.1"}:${node.port ?? 6379}` : String(node)

// ioredis says that a connection was closed before it says why, or after that.
const saysWhy = ({ reason }: RedisError): boolean => reason._tag !== "NotConnected" || reason.detail !== undefined

class Cluster implements ClusterConnection {
  readonly client: IoRedis.Cluster
  readonly #options: ClusterOptions
  readonly #listeners = makeListeners()
  readonly #inFlight: InFlight
  readonly #masters = new Map<IoRedis.Redis, InFlight>()
  #closed = false
  #epoch = 0
  #lastError: RedisError | undefined
  #revival: Timer | undefined
  // Connections to nodes on which a step of the handshake was refused.
  readonly #refused = new WeakSet<IoRedis.Redis>()
  // Nodes that let a deadline pass since the last reset: those are the ones that a reset cuts off. Whether an unknown node did, which
  // ioredis has chosen by itself.
  readonly #suspects = new Set<string>()
  #isUnknownSuspect = false
  // The next look for the owners of slots, how many there have been in a row, and when the last one was.
  #chase: Timer | undefined
  #chased = 0
  #refreshedAt = -Infinity
  // As of the last `up`: its listeners ask the sessions, so later changes are those that have not been checked.
  #primaries = ""

  constructor(options: ClusterOptions) {
    this.#options = options
    this.client = makeClient(options)
    showAs(this.client, { _id: "ioredis/Cluster", address: options.address })
    this.#inFlight = new InFlight({
      io: options.io,
      addressOf: (command) => this.#nodeOf(command) ?? options.address,
      dispatch: (command) => this.client.sendCommand(command),
      onExpired: (command) => {
        const node = this.#nodeOf(command)
        if (node === undefined) this.#isUnknownSuspect = true
        else this.#suspects.add(node)
      }
    })
    this.#listen()
    this.client.connect().catch(() => {})
  }

  readonly send: Connection["send"] = (name, args, deadlineMillis) =>
    this.isReady() ? this.#inFlight.send(name, args, deadlineMillis) : Promise.reject(this.#unready())

  readonly run: Connection["run"] = (name, script, call, deadlineMillis, caller) => {
    if (this.isReady()) this.#inFlight.run(name, script, call, deadlineMillis, caller)
    else this.#inFlight.refuse(caller, this.#unready())
  }

  readonly server = async (deadlineMillis: number) => {
    const hello = await helloOf((name, ...args) => this.send(name, args, deadlineMillis))
    // It was the primary when ioredis looked last.
    if (hello.get("role") === "replica") this.#refresh()
    return checkServer(hello, "cluster", this.#options.address)
  }

  readonly state = this.#listeners.state
  readonly isReady = () => this.#listeners.state() === "ready"
  readonly failure = () => this.#lastError
  readonly onReady = this.#listeners.onReady
  readonly onDown = this.#listeners.onDown

  readonly isServed = () => isServed(this.client)

  readonly masters = () =>
    this.client.nodes("master").sort((a, b) => hostPort(a) < hostPort(b) ? -1 : 1).map((node) => {
      const known = this.#masters.get(node)
      if (known !== undefined) return known
      const inFlight = new InFlight({
        io: this.#options.io,
        addressOf: () => hostPort(node),
        dispatch: (command) => node.sendCommand(command),
        onExpired: () => this.#suspects.add(hostPort(node))
      })
      this.#masters.set(node, inFlight)
      return inFlight
    })

  readonly dedicated = (key: string | undefined, role: string, within?: number | undefined): NodeConnection => {
    const { address, connectTimeout, io, name, onUnnamed } = this.#options
    const { client } = this
    const slot = key === undefined ? undefined : slotOf(key)
    const base = client.nodes("master")[0]?.options ?? client.options.redisOptions ?? {}
    const { host: _host, path: _path, port: _port, ...rest } = base as IoRedis.RedisOptions
    // Without a slot, a node that does not answer leaves the others their share of the time.
    let turn = Math.floor(io.random() * 16_384)
    const share = slot === undefined ? sharedBy(connectTimeout, client.nodes("master").length) : connectTimeout
    const connection = single({
      io,
      address: key === undefined ? address : `${address} (slot ${slot})`,
      connectTimeout: Math.min(share, within ?? share),
      topology: "cluster",
      base: {
        ...rest,
        connectionName: `${name}:${role}`,
        Connector: nodeConnector(() => nodeFor(client, slot, turn++), rest.tls) as never
      },
      onMoved: this.#refresh,
      onUnnamed
    })
    connection.onDown(() => {
      if (connection.state() !== "closed") this.#refresh()
    })
    return connection
  }

  // Of several commands that expire together, each asks for a reset: the first one does it.
  readonly reset = (): void => {
    if (this.#closed) return
    if (this.#suspects.size > 0) {
      // Commands in flight to these nodes reject when their sockets close; the others are not disturbed.
      this.#destroy((node) => this.#suspects.has(hostPort(node)))
    } else if (this.#isUnknownSuspect) {
      this.#inFlight.rejectAll(fail(new ConnectionLost({ address: this.#options.address, detail: "reset" })))
      this.#destroy(() => true)
    }
    this.#suspects.clear()
    this.#isUnknownSuspect = false
  }

  readonly close = async (): Promise<void> => {
    if (this.#closed) return
    this.#closed = true
    this.#revival?.cancel()
    this.#chase?.cancel()
    const error = fail(new ConnectionLost({ address: this.#options.address, detail: "closed" }))
    for (const inFlight of [this.#inFlight, ...this.#masters.values()]) inFlight.rejectAll(error)
    const nodes = this.client.nodes("all")
    this.client.disconnect()
    for (const node of nodes) node.stream?.destroy()
    this.#revival?.cancel()
    this.#listeners.close()
  }

  /** The address of the node that a command goes to, if its keys say so. */
  #nodeOf(command: Routed): string | undefined {
    const owner = command.getKeys().length === 0 ? undefined : ownerOf(this.client, command.getSlot())
    return owner && `${owner.host}:${owner.port}`
  }

  #unready(): RedisError {
    const last = this.#lastError
    // It may name a node.
    if (last?.reason._tag === "NotConnected") return last
    return fail(new NotConnected({ address: this.#options.address, detail: detailOf(last) }))
  }

  #destroy(which: (node: IoRedis.Redis) => boolean): void {
    for (const node of this.client.nodes("all")) if (which(node)) node.stream?.destroy()
  }

  #listen(): void {
    const { client } = this
    const { address, io } = this.#options
    client.on("+node", (node: IoRedis.Redis) => this.#watch(node))
    client.on("-node", (node: IoRedis.Redis) => this.#forget(node))
    client.on("refresh", () => {
      if (client.slots.length === 0) this.#lastError = fail(new NotConnected({ address, detail: withoutSlots }))
      this.#look()
    })
    client.on("error", (error: unknown) => {
      const found = errorFrom(error, "CLUSTER", false, address)
      if (saysWhy(found) || this.#lastError === undefined) this.#lastError = found
    })
    client.on("node error", (error: unknown, node: string) => {
      const found = errorFrom(error, "CLUSTER", false, address)
      const nodeError = found.reason._tag === "NotConnected" && this.#isAnnounced(node)
        ? atAnnounced(node, found.reason.detail)
        : found
      const last = this.#lastError
      const isNews = last === undefined || !saysWhy(last) && saysWhy(nodeError)
      if (nodeError.reason._tag !== "NotConnected" || isNews) this.#lastError = nodeError
    })
    client.on("ready", () => void this.#onClientReady())
    // ioredis goes from "close" to "reconnecting" by itself.
    client.on("close", () => {
      this.#epoch++
      this.#inFlight.rejectAll(fail(new ConnectionLost({ address, detail: detailOf(this.#lastError) })))
      // A name that does not resolve leaves no error.
      this.#listeners.down(this.#lastError ?? this.#unready())
      // ioredis has been seen to stay in this state for ever.
      this.#revival?.cancel()
      if (!this.#closed) this.#revival = io.after(5000, this.#revive)
    })
    client.on("end", () => {
      this.#revival?.cancel()
      if (!this.#closed) this.#revival = io.after(1000, this.#revive)
    })
  }

  /** Whether only the Cluster has named this node, and nobody has said how to reach it. */
  #isAnnounced(node: string): boolean {
    const { base, nodes } = this.#options
    return base.natMap === undefined && !nodes.some((listed) => listedAs(listed) === node) &&
      this.client.slots.some((names) => names?.includes(node))
  }

  readonly #revive = (): void => {
    const { client } = this
    if (!this.#closed && (client.status === "end" || client.status === "close")) client.connect().catch(() => {})
  }

  async #onClientReady(): Promise<void> {
    const epoch = this.#epoch
    await this.#mastersConnected()
    if (epoch !== this.#epoch || this.#closed) return
    // ioredis closes the client when the last of them is lost.
    if (this.client.nodes("master").every((node) => this.#refused.has(node))) return
    this.#lastError = undefined
    this.#up()
  }

  /** Until the masters are connected; one that is down holds up the others for a moment only. */
  async #mastersConnected(): Promise<void> {
    const { connectTimeout, io } = this.#options
    const nodes = this.client.nodes("master").map((node) => {
      this.#connectNode(node)
      return node.status === "ready"
        ? undefined
        : new Promise((resolve) => node.once("ready", resolve).once("close", resolve))
    })
    await new Promise<void>((resolve) => {
      const timer = io.after(Math.min(1000, connectTimeout / 2), resolve)
      void Promise.all(nodes).then(() => {
        timer.cancel()
        resolve()
      })
    })
  }

  /** Connects at once: while a lazily created node connects, ioredis refuses every command but the first. */
  #watch(node: IoRedis.Redis): void {
    const { connectTimeout, io, onUnnamed } = this.#options
    const handshake = handshakes.watch(node, 0, hostPort(node))
    showAs(node, { _id: "ioredis/Redis", address: hostPort(node) })
    toleratingErrors(node)
    let watchdog: Timer | undefined
    node.on("connect", () => {
      watchdog = giveUpAfter(io, connectTimeout, () => node.stream.destroy())
    })
    node.on("ready", () => {
      watchdog?.cancel()
      const refusal = handshake.failure()
      if (refusal !== undefined) {
        this.#lastError = refusal
        this.#refused.add(node)
        return node.disconnect()
      }
      if (handshake.isUnnamed()) onUnnamed?.()
      // A master that is new or back may have forgotten something.
      if (this.isReady()) this.#up()
    })
    node.on("close", () => {
      watchdog?.cancel()
      this.#forget(node)
      this.#refresh()
    })
    // Once ioredis has added it.
    io.defer(() => this.#connectNode(node))
  }

  #forget(node: IoRedis.Redis): void {
    this.#masters.get(node)?.rejectAll(fail(new ConnectionLost({ address: hostPort(node), detail: undefined })))
    this.#masters.delete(node)
  }

  #connectNode(node: IoRedis.Redis): void {
    if (!this.#closed && node.status === "wait" && !node.options.readOnly) node.connect().catch(() => {})
  }

  /**
   * Looks for the owners of slots until there is a primary in place of the one that is lost: a process that only holds
   * sends nothing that would find it.
   */
  readonly #refresh = (): void => {
    const { client } = this
    if (this.#chase !== undefined || this.#closed || client.status !== "ready") return
    const { io } = this.#options
    // A node that is lost is tried again with every refresh, and its failure asks for the next one.
    const pause = this.#chased++ < 40 ? 250 : 2000
    this.#chase = io.after(Math.max(0, this.#refreshedAt + pause - io.now()), () => {
      this.#chase = undefined
      this.#refreshedAt = io.now()
      if (!this.#closed && client.status === "ready") client.refreshSlotsCache(() => this.#look() || this.#refresh())
    })
  }

  /** Whether every slot is served. A replica that was connected before and is a primary now may have missed something. */
  #look(): boolean {
    if (!isServed(this.client)) return false
    this.#chased = 0
    if (this.isReady() && this.#primariesNow() !== this.#primaries) this.#up()
    return true
  }

  #primariesNow(): string {
    return this.client.nodes("master").map(hostPort).sort().join()
  }

  #up(): void {
    this.#primaries = this.#primariesNow()
    this.#listeners.up()
  }
}
