/** One coordinator's runtime: its channels to the partitions, their shared parts, and how they are closed. */

import { giveUpAfter, type Io } from "../io.ts"
import type { Connections } from "../redis/connection.ts"
import { showAs } from "../text.ts"
import { Channel, type Tenant } from "./channel.ts"
import type { CoordinatorError } from "./errors.ts"
import { Home } from "./home.ts"
import type { Hooks, Settings } from "./hooks.ts"
import { partitionOf, prefixOf } from "./keys.ts"
import type { Office } from "./office.ts"
import { Pulse } from "./pulse.ts"
import { Questions } from "./questions.ts"
import { Reader } from "./reader.ts"
import { Reads } from "./reads.ts"
import { Reaper } from "./reaper.ts"
import { Transport } from "./transport.ts"
import { Vigil } from "./vigil.ts"

/** A part of the namespace, and the unit of atomicity: one actor in Redis. */
export class Partition {
  readonly index: number
  readonly prefix: string
  readonly reaper: Reaper
  readonly questions: Questions
  readonly reads: Reads
  /** By the length of the lease. */
  readonly channels = new Map<number, Channel>()
  // Of waits that no claim stands for.
  #watching = 0

  constructor(office: Office, index: number) {
    const { hooks, io, settings, transport } = office
    this.index = index
    this.prefix = prefixOf(settings.namespace, index)
    this.reaper = new Reaper(transport, io, this.prefix, hooks.log, () => this.isWaiting(), () => this.#wanted())
    this.questions = new Questions(settings.maxPending)
    this.reads = new Reads(office, this.questions)
  }

  isWaiting(): boolean {
    if (this.#watching > 0) return true
    for (const { tenant } of this.channels.values()) if (tenant.isWaiting()) return true
    return false
  }

  #wanted(): string | undefined {
    for (const { tenant } of this.channels.values()) {
      const key = tenant.wanted()
      if (key !== undefined) return key
    }
    return undefined
  }

  /**
   * From now until the result is called, something waits for what the partition has to do in time, such as the end of another session.
   * Answers to requests say when that is.
   */
  expect(): () => void {
    this.#watching++
    let over = false
    return () => {
      if (over) return
      over = true
      this.#watching--
    }
  }

  /** As `expect`, of what no request is about: asks when that is. */
  watch(): () => void {
    void this.reaper.tick()
    return this.expect()
  }
}

/** The user of a channel, and how long it has to end when the coordinator is closed. */
export interface ClosingTenant extends Tenant {
  /** Begins to release everything. Settles when that is done, and when no protected program runs any more. */
  readonly close: () => Promise<void>
}

export class Kernel implements Office {
  readonly settings: Settings
  readonly hooks: Hooks
  readonly io: Io
  readonly transport: Transport
  readonly about: string
  readonly vigil: Vigil
  readonly away = new Map<object, number>()
  silentSince: number | undefined = undefined
  readonly home = new Home()

  readonly #partitions: Array<Partition | undefined>
  readonly #node: string
  readonly #tenants = new Set<ClosingTenant>()
  readonly #readers = new Map<number, Reader>()
  readonly #pulses = new Map<number, Pulse>()
  readonly #unsubscribe: () => void
  #state: "open" | "closing" | "closed" = "open"
  #first: Channel | undefined = undefined
  #incompatible: CoordinatorError | undefined = undefined
  #sessions = 0
  #ids = 0

  constructor(connections: Connections, settings: Settings, about: string, hooks: Hooks, io: Io) {
    showAs(this, { _id: "lockstep/Coordinator", namespace: settings.namespace, name: settings.name })
    this.settings = settings
    this.about = about
    this.hooks = hooks
    this.io = io
    this.vigil = new Vigil(io)
    this.transport = new Transport(connections, io, settings.requestTimeout)
    this.#partitions = new Array(settings.partitions).fill(undefined)
    this.#node = io.id()
    let first = true
    this.#unsubscribe = connections.commands.onReady(() => {
      // Every reconnect asks at once, so that a roll-back is noticed in a round trip and not at the next renewal.
      if (!first) { for (const channel of this.channels()) channel.reconnected() }
      first = false
    })
  }

  nextId(): string {
    return (++this.#ids).toString(36)
  }

  /** No other coordinator has it: for what outlives a session. */
  uniqueId(): string {
    return `${this.#node}.${this.nextId()}`
  }

  readonly newSession = (): string => `${this.#node}${(++this.#sessions).toString(36)}`

  readonly pulseOf = (lease: number): Pulse => {
    let pulse = this.#pulses.get(lease)
    if (pulse === undefined) this.#pulses.set(lease, pulse = new Pulse(this.transport, this.io, this.hooks, lease))
    return pulse
  }

  readonly first = (): Channel => this.#first!

  readonly admitted = (identity: string): void => {
    this.home.admitted(identity)
    this.#incompatible = undefined
  }

  readonly refused = (refusal: CoordinatorError): void => {
    this.#incompatible = refusal.reason._tag === "Incompatible" ? refusal : undefined
    if (this.#incompatible === undefined) return
    for (const channel of this.channels()) channel.forgo()
  }

  readonly refusal = (): CoordinatorError | undefined =>
    this.isClosing() ? this.first().closedError() : this.#incompatible

  readonly isClosing = (): boolean => this.#state !== "open"

  readonly isClosed = (): boolean => this.#state === "closed"

  partitionAt(index: number): Partition {
    return this.#partitions[index] ??= new Partition(this, index)
  }

  partitionFor(name: string): Partition {
    return this.partitionAt(partitionOf(name, this.settings.partitions))
  }

  *channels(): Iterable<Channel> {
    for (const partition of this.#partitions) if (partition !== undefined) yield* partition.channels.values()
  }

  /** The channel of a partition for a lease; a first time it is made, for a tenant of its own. */
  channel(partition: Partition, lease: number, tenant: (channel: () => Channel) => ClosingTenant): Channel {
    let channel = partition.channels.get(lease)
    if (channel === undefined) {
      const { settings } = this
      const made = tenant(() => channel!)
      this.#tenants.add(made)
      channel = new Channel({
        office: this,
        index: partition.index,
        prefix: partition.prefix,
        lease,
        margin: lease === settings.lease ? settings.margin : marginOf(lease),
        reaper: partition.reaper,
        reader: () => this.readerOf(partition),
        tenant: made
      })
      this.#first ??= channel
      partition.channels.set(lease, channel)
    }
    return channel
  }

  /** XREAD cannot span slots: on a cluster every partition in use has a reader of its own. */
  readerOf(partition: Partition): Reader {
    const { connections } = this.transport
    const index = connections.topology === "cluster" ? partition.index : -1
    let reader = this.#readers.get(index)
    if (reader === undefined) {
      // Events would come later than a lease if a connection that does not answer were waited for longer.
      const connect = () => connections.dedicated(`${partition.prefix}sessions`, undefined, this.settings.lease)
      this.#readers.set(index, reader = new Reader(this.transport, this.io, this.hooks.log, connect))
    }
    return reader
  }

  /**
   * Releases everything: first the holds of protected programs, when these have ended or the margin has passed, and then the
   * sessions. Bounded by the margin and the request timeout, without the time that releases have waited for Redis already: holds that
   * cannot be released in time expire with their lease.
   */
  async close(): Promise<void> {
    if (this.#state !== "open") return
    this.#state = "closing"
    const { margin, requestTimeout } = this.settings
    const { log } = this.hooks
    const channels = [...this.channels()]
    const patience = Math.min(requestTimeout, ...channels.map((channel) => channel.patience()))
    const until = this.io.now() + margin + patience
    const ending = [...this.#tenants].map((tenant) => tenant.close())
    const calming = channels.map((channel) => channel.calm())
    await this.#within(margin, Promise.all([...ending, ...calming]))
    this.#state = "closed"
    const ended = Promise.allSettled([...this.channels()].map((channel) => channel.close())).then((results) => {
      for (const result of results) {
        if (result.status === "rejected") log("Warn", "a session could not be ended and will expire", result.reason)
      }
    })
    // Redis has not answered releases either, so the sessions may have to expire.
    const isAway = () => this.away.size > 0
    const reapers = this.#partitions.flatMap((partition) => partition === undefined ? [] : [partition.reaper])
    const finished = ended.then(() => isAway() ? [] : Promise.all(reapers.map((reaper) => reaper.finish())))
    const rest = Math.min(requestTimeout, Math.max(0, until - this.io.now()))
    await this.#within(isAway() ? Math.min(margin, rest) : rest, finished)
    for (const reaper of reapers) reaper.close()
    this.#unsubscribe()
    this.transport.close()
    await Promise.allSettled([...this.#readers.values()].map((reader) => reader.close()))
  }

  async #within(millis: number, work: Promise<unknown>): Promise<void> {
    let cancel = () => {}
    const limit = new Promise<void>((resolve) => {
      const timer = giveUpAfter(this.io, millis, () => resolve())
      cancel = timer.cancel
    })
    await Promise.race([work, limit])
    cancel()
  }
}

/** The margin of a lease, unless it is set: 10 %, at least a second, at most half of it. In milliseconds. */
export const marginOf = (lease: number): number => Math.min(lease / 2, Math.max(1000, lease / 10))
