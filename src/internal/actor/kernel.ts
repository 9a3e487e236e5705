/**
 * One coordinator's runtime: it calls the partition actors, loads them where they are missing, reads the mailboxes and
 * reaps dead sessions. The only place that calls Redis scripts.
 */
import { createHash, randomBytes } from "node:crypto"
import { MissingPermission, RedisError } from "../../Redis.ts"
import type { Claim, LossReason, Phase, Session, Verb } from "../hold/claim.ts"
import type { Connections } from "../redis/connection.ts"
import { ascii, type Call } from "../redis/resp.ts"
import { ActorDefect, CoordinatorClosed, CoordinatorError } from "./errors.ts"
import { partitionOf } from "./keys.ts"
import { allowOom, body, library, replies as shapes, type Requests } from "./lua.ts"
import { Partition } from "./partition.ts"
import { Reader } from "./reader.ts"
import { type Address, addressOf, batch } from "./wire.ts"

export interface Settings {
  readonly namespace: string
  readonly name: string
  /** All in milliseconds. */
  readonly lease: number
  readonly margin: number
  readonly requestTimeout: number
  readonly partitions: number
  readonly maxBatch: number
  readonly maxPending: number
}

export interface Hooks {
  readonly log: (level: "Debug" | "Info" | "Warn" | "Error", message: string, cause?: unknown) => void
  readonly transition: (
    partition: number,
    session: string | undefined,
    from: Phase,
    to: Phase,
    reason: LossReason | undefined
  ) => void
  readonly metrics: {
    readonly batch: (requests: number, millis: number) => void
    readonly waiting: () => void
    readonly granted: () => void
    readonly released: () => void
    readonly lost: (reason: LossReason, holds: number) => void
    readonly overrun: (holds: number) => void
  }
}

type Message<V extends Verb = Verb> = {
  readonly verb: V
  readonly key?: string | undefined
  readonly args: ReadonlyArray<string | number | boolean>
}

type Reply = Requests[Verb]["reply"] | readonly ["failed", string]

/** The events are for claims of the session that has asked. */
type Answer = readonly [
  status: string,
  replies?: ReadonlyArray<Reply>,
  events?: ReadonlyArray<ReadonlyArray<unknown>>
]

type Variant = "" | "_oom" | "_ro" | "_fence"

const variants: { readonly [variant in Variant]: { readonly entry: string; readonly flags: string } } = {
  "": { entry: "run", flags: "" },
  "_oom": { entry: "run", flags: "allow-oom" },
  "_ro": { entry: "inspect", flags: "no-writes" },
  "_fence": { entry: "fence", flags: "" }
}

const functionNames: { readonly [variant in Variant]: string } = {
  "": library,
  "_oom": `${library}_oom`,
  "_ro": `${library}_ro`,
  "_fence": `${library}_fence`
}

const functions = () =>
  `#!lua name=${library}\n${body}\n` +
  Object.entries(variants).map(([variant, { entry, flags }]) =>
    `redis.register_function{function_name='${functionNames[variant as Variant]}', callback=${entry}, flags={${
      flags === "" ? "" : `'${flags}'`
    }}}`
  ).join("\n")

// The same source for servers that have no functions, or do not let us use them.
const scripts = new Map<Variant, { readonly sha: string; readonly source: string }>()

const script = (variant: Variant) => {
  let found = scripts.get(variant)
  if (found === undefined) {
    const { entry, flags } = variants[variant]
    const source = `#!lua${flags === "" ? "" : ` flags=${flags}`}\n${body}\nreturn ${entry}(KEYS, ARGV)`
    found = { source, sha: createHash("sha1").update(source).digest("hex") }
    scripts.set(variant, found)
  }
  return found
}

// The batch number, the lease and the mailbox id of requests that belong to no session.
const unnumbered = ascii("0") + ascii("0") + ascii("")

const transient: ReadonlySet<string> = new Set([
  "ConnectionLost",
  "NotConnected",
  "Timeout",
  "Unavailable",
  "FunctionMissing"
])

// A server that forgets the library as fast as it is loaded is not worth more tries in one call.
const maxLoads = 5
// Of requests for which nobody waits, and which somebody else makes when we do not.
const maxAttempts = 10

export class Kernel {
  readonly partitions: Array<Partition | undefined>
  closed = false
  readonly settings: Settings
  readonly about: string
  readonly metrics: Hooks["metrics"]
  /** The lease, as an argument. */
  readonly lease: string

  readonly #connections: Connections
  readonly #hooks: Hooks
  readonly #node = randomBytes(9).toString("base64url")
  readonly #reaping = new Map<string, Promise<void>>()
  readonly #readers = new Map<number, Reader>()
  readonly #unsubscribe: () => void
  readonly #sleeping = new Set<() => void>()
  // Whoever waits for another try has to hear that there is none.
  readonly #retrying = new Set<() => void>()
  #sessions = 0
  #claims = 0
  #ready: { readonly promise: Promise<void>; readonly resolve: () => void } | undefined = undefined

  constructor(connections: Connections, settings: Settings, about: string, hooks: Hooks) {
    this.#connections = connections
    this.settings = settings
    this.about = about
    this.lease = ascii(String(settings.lease))
    this.#hooks = hooks
    this.metrics = hooks.metrics
    this.partitions = new Array(settings.partitions).fill(undefined)
    let first = true
    this.#unsubscribe = connections.commands.onReady(() => {
      this.#ready?.resolve()
      this.#ready = undefined
      // Every reconnect asks at once, so that a roll-back is noticed in a round trip and not at the next renewal.
      if (!first) { for (const partition of this.partitions) partition?.resync() }
      first = false
    })
  }

  nextId(): string {
    return (++this.#claims).toString(36)
  }

  /** No other coordinator has it: for what outlives a session. */
  uniqueId(): string {
    return `${this.#node}.${this.nextId()}`
  }

  newSession(): string {
    return `${this.#node}${(++this.#sessions).toString(36)}`
  }

  partitionAt(index: number): Partition {
    return this.partitions[index] ??= new Partition(this, index)
  }

  partitionFor(name: string): Partition {
    return this.partitionAt(partitionOf(name, this.settings.partitions))
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Calls
  // ---------------------------------------------------------------------------------------------------------------

  async call(
    address: Address,
    messages: ReadonlyArray<Message>,
    /** Batch number, lease, and mailbox id read so far, as arguments. */
    header: string,
    oom: boolean,
    // What may be answered instead, because it was sent before under the same number.
    before: ReadonlyArray<Message> = messages
  ): Promise<Answer> {
    const raw = await this.invoke(oom ? "_oom" : "", batch(address, header, messages))
    return this.#decode(messages, raw, before)
  }

  /** Requests that need no session: they are idempotent. The keys of a session still have to be declared. */
  async ask(partition: Partition, session: string, messages: ReadonlyArray<Message>): Promise<ReadonlyArray<Reply>> {
    const oom = messages.every(({ verb }) => allowOom.has(verb))
    const [, replies] = await this.call(addressOf(partition.prefix, session, ""), messages, unnumbered, oom)
    return replies!
  }

  /** As `ask`, and again when the connection was lost meanwhile. */
  async insist(partition: Partition, session: string, messages: ReadonlyArray<Message>): Promise<ReadonlyArray<Reply>> {
    return this.#again(() => this.ask(partition, session, messages))
  }

  async #again<A>(f: () => Promise<A>): Promise<A> {
    for (let attempt = 0;; attempt++) {
      try {
        return await f()
      } catch (cause) {
        if (!(cause instanceof RedisError) || !this.isTransient(cause) || attempt === maxAttempts) throw cause
        await this.backoff(attempt, cause)
      }
    }
  }

  async inspect<V extends Verb>(
    partition: Partition,
    message: { readonly verb: V; readonly key: string; readonly args: Requests[V]["args"] }
  ): Promise<Requests[V]["reply"]> {
    const call = batch(addressOf(partition.prefix, ""), unnumbered, [message])
    const raw = await this.#again(() => {
      if (this.closed) throw new CoordinatorError({ reason: new CoordinatorClosed({}) })
      return this.invoke("_ro", call)
    })
    const [reply] = this.#decode([message], raw)[1]!
    if (reply![0] === "failed") throw this.failed(message.verb, String(reply![1]))
    return reply as Requests[V]["reply"]
  }

  /** Calls a function of the library, or its script where there are no functions; loads it where it is missing. */
  async invoke(variant: Variant, call: Call): Promise<unknown> {
    const { commands, features } = this.#connections
    const { requestTimeout } = this.settings
    let refusal: unknown
    for (let load = 0;; load++) {
      try {
        return features.functions
          ? await commands.run("FCALL", functionNames[variant], call, requestTimeout)
          : await commands.run("EVALSHA", script(variant).sha, call, requestTimeout)
      } catch (cause) {
        if (!(cause instanceof RedisError) || cause.reason._tag !== "FunctionMissing") throw cause
        if (load === maxLoads) throw refusal ?? cause
        // EVAL carries a key, so on a cluster it reaches the node that lacks the script; functions go to every primary.
        if (!features.functions) return await commands.run("EVAL", script(variant).source, call, requestTimeout)
        refusal = await this.#load()
      }
    }
  }

  // To every master that can be reached. Two coordinators may load it at the same time: the second is refused, and the
  // next call finds it. Where it could not be loaded, that finds it missing again.
  async #load(): Promise<unknown> {
    const results = await Promise.allSettled(
      this.#connections.masters().map((master) =>
        master.send("FUNCTION", ["LOAD", functions()], this.settings.requestTimeout)
      )
    )
    const failures = results.flatMap((result) => result.status === "rejected" ? [result.reason] : [])
    const refusal = failures.find((cause) => cause instanceof RedisError && cause.reason._tag === "CommandFailed")
    if (refusal === undefined && failures.length === results.length) throw failures[0]
    return refusal
  }

  #decode(
    messages: ReadonlyArray<Message>,
    raw: unknown,
    before: ReadonlyArray<Message> = messages
  ): Answer {
    const decoded = typeof raw === "string" ? JSON.parse(raw) : undefined
    if (!Array.isArray(decoded) || typeof decoded[0] !== "string") throw this.defect("batch", "malformed reply")
    if (decoded[0] === "ok") {
      const replies: ReadonlyArray<any> = decoded[1]
      const asked = replies.length === before.length ? before : messages
      if (replies.length !== asked.length) throw this.defect("batch", "malformed reply")
      for (let at = 0; at < asked.length; at++) {
        const reply = replies[at]
        const shape = shapes[asked[at]!.verb]![reply[0]]
        if (reply[0] !== "failed" && (shape === undefined || !matches(shape, reply))) {
          throw this.defect(asked[at]!.verb, "malformed reply")
        }
      }
    }
    return decoded as unknown as Answer
  }

  /** What it means that an actor could not do what it was asked. */
  failed(verb: string, detail: string): CoordinatorError {
    return detail === "denied"
      ? new CoordinatorError({ reason: new RedisError({ reason: new MissingPermission({ command: verb }) }) })
      : this.defect(verb, detail)
  }

  defect(verb: string, detail: string): CoordinatorError {
    return new CoordinatorError({ reason: new ActorDefect({ request: verb, detail }) })
  }

  isTransient(error: RedisError): boolean {
    return transient.has(error.reason._tag)
  }

  /** Waits before the next try: for the connection if it is gone, or longer each time. */
  async backoff(attempt: number, cause: RedisError): Promise<void> {
    // Half-open: the other side is gone, and the socket does not know.
    if (cause.reason._tag === "Timeout") this.#connections.commands.reset()
    const limit = Math.min(500, 5 * 2 ** Math.min(attempt, 10))
    const wait = this.#connections.commands.isReady()
      ? this.sleep(limit / 2 + Math.random() * limit / 2)
      : (this.#ready ??= Promise.withResolvers<void>()).promise
    return new Promise((resolve) => {
      const go = () => {
        this.#retrying.delete(go)
        resolve()
      }
      this.#retrying.add(go)
      void wait.then(go)
    })
  }

  /** Ends early when the coordinator is closed. */
  sleep(millis: number): Promise<void> {
    return new Promise((resolve) => {
      const wake = () => {
        clearTimeout(timer)
        this.#sleeping.delete(wake)
        resolve()
      }
      const timer = setTimeout(wake, millis)
      this.#sleeping.add(wake)
    })
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Reaping
  // ---------------------------------------------------------------------------------------------------------------

  /**
   * Releases what a dead session owned, a part at a time: its resources have to be declared as keys, so they are read
   * first. Whoever notices does it; doing it twice changes nothing, and what is left undone the next one finds.
   */
  reap(partition: Partition, session: string): Promise<void> {
    let running = this.#reaping.get(session)
    if (running === undefined) {
      running = this.#reap(partition, session).catch((cause) => {
        this.log("Debug", `partition ${partition.index}: reaping was cut short`, cause)
      }).finally(() => this.#reaping.delete(session))
      this.#reaping.set(session, running)
    }
    return running
  }

  async #reap(partition: Partition, session: string): Promise<void> {
    for (;;) {
      const [owned] = await this.insist(partition, session, [{ verb: "session.owned", args: [session] }])
      if (owned![0] !== "owns") return
      const replies = await this.insist(
        partition,
        session,
        (owned as ReadonlyArray<string>).slice(1).map((entry) => ({
          verb: "session.reap",
          key: partition.prefix + entry.slice(entry.indexOf(":") + 1),
          args: [session, entry]
        }))
      )
      if (replies.some((reply) => reply[0] !== "reaped")) return
    }
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Mailboxes
  // ---------------------------------------------------------------------------------------------------------------

  /** Has the mailbox of a partition read for as long as something waits there. */
  listen(partition: Partition): void {
    // XREAD cannot span slots: on a cluster every partition in use has a reader of its own.
    const clustered = this.#connections.topology === "cluster"
    const index = clustered ? partition.index : -1
    let reader = this.#readers.get(index)
    if (reader === undefined) {
      reader = new Reader(
        this,
        () => this.#connections.dedicated(`${partition.prefix}sessions`),
        () => clustered ? [partition] : this.partitions
      )
      this.#readers.set(index, reader)
    }
    reader.include(partition)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // What others see
  // ---------------------------------------------------------------------------------------------------------------

  log(level: "Debug" | "Info" | "Warn" | "Error", message: string, cause?: unknown): void {
    this.#hooks.log(level, message, cause)
  }

  transition(
    partition: Partition,
    session: Session | undefined,
    from: Phase,
    to: Phase,
    reason: LossReason | undefined
  ): void {
    this.#hooks.transition(partition.index, session?.id, from, to, reason)
  }

  lost(partition: Partition, session: Session, reason: LossReason, holds: number): void {
    this.metrics.lost(reason, holds)
    this.log(
      holds > 0 ? "Error" : "Info",
      `partition ${partition.index}: session ${session.id} was lost (${reason}), leases lost: ${holds}`
    )
    for (const reader of this.#readers.values()) reader.exclude(session)
  }

  /** The margin is the time that finalizers have before anyone else can be granted. Who needs longer is told. */
  watchOverruns(claims: ReadonlyArray<Claim>): void {
    void this.sleep(this.settings.margin).then(() => {
      if (this.closed) return
      const late = claims.filter((claim) => claim.protecting > 0).length
      if (late === 0) return
      this.metrics.overrun(late)
      this.log(
        "Error",
        `${late} protected programs were still running ${this.settings.margin} ms after their lease was lost`
      )
    })
  }

  /** Releases everything. Bounded: what cannot be released in time expires with the lease. */
  async close(): Promise<void> {
    if (this.closed) return
    this.closed = true
    for (const reader of this.#readers.values()) void reader.close()
    const closing = this.partitions.map((partition) => partition?.close())
    await Promise.race([
      Promise.allSettled(closing).then((results) => {
        for (const result of results) {
          if (result.status === "rejected") {
            this.log("Warn", "a session could not be ended and will expire", result.reason)
          }
        }
      }),
      this.sleep(this.settings.requestTimeout)
    ])
    this.#unsubscribe()
    for (const wake of [...this.#sleeping]) wake()
    for (const go of [...this.#retrying]) go()
    await Promise.allSettled([...this.#readers.values()].map((reader) => reader.close()))
  }
}

const matches = (shape: ReadonlyArray<string>, reply: ReadonlyArray<unknown>): boolean => {
  if (shape.at(-1) === "...") return reply.every((value) => typeof value === "string")
  if (shape.length !== reply.length - 1) return false
  for (let at = 0; at < shape.length; at++) {
    if (typeof reply[at + 1] !== shape[at] && shape[at] !== "unknown") return false
  }
  return true
}

const registry = new WeakMap<object, Kernel>()

export const register = (coordinator: object, kernel: Kernel): void => {
  registry.set(coordinator, kernel)
}

/** The kernel behind a `Coordinator` service. */
export const kernelOf = (coordinator: object): Kernel => {
  const kernel = registry.get(coordinator)
  if (kernel === undefined) throw new TypeError("This Coordinator was not made by lockstep/Coordinator")
  return kernel
}
