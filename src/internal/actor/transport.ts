/** Calls the partition actors, loads them where they are missing, and decodes what they answer. */

import { createHash } from "node:crypto"
import type { Io } from "../io.ts"
import type { Caller, Connection, Connections } from "../redis/connection.ts"
import { MissingPermission, NotConnected, RedisError, Timeout } from "../redis/errors.ts"
import { ascii, type Call, call } from "../redis/resp.ts"
import { messageOf } from "../text.ts"
import { ActorDefect, CoordinatorError, type CoordinatorReason, Overloaded } from "./errors.ts"
import { resourceOf } from "./keys.ts"
import { allowOom, body, library, replies as shapes, type Requests } from "./lua.ts"
import type { Session } from "./session.ts"
import { type Address, addressOf, batch, type Message } from "./wire.ts"

export type Verb = keyof Requests

export type Reply = Requests[Verb]["reply"] | readonly ["failed", detail: string]

/** The answer to a call. */
export interface Answer {
  /** Whether the session is known, and how the number of the batch fits. */
  readonly status: "ok" | "unknown" | "expired" | "stale" | "gap"
  readonly replies: ReadonlyArray<Reply>
  /** For claims of the session that has asked. */
  readonly events: ReadonlyArray<ReadonlyArray<unknown>>
  /** Undefined if it was not asked. */
  readonly next: Next | undefined
}

/** The next thing that a partition has to do: in how many milliseconds, -1 for never, and the session that may end then, if it is one. */
export interface Next {
  readonly millis: number
  readonly ending: string | undefined
}

/** The reply to the renewal of a session, and what its partition has to do next. */
export interface Renewed {
  readonly reply: Requests["session.renew"]["reply"]
  readonly next: Next
}

// The functions of the library: the name of each, its entry point, and how it is registered.
const variants = {
  "": { name: library, entry: "run", flags: "" },
  "_oom": { name: `${library}_oom`, entry: "run", flags: "allow-oom" },
  "_renew": { name: `${library}_renew`, entry: "renew", flags: "allow-oom" },
  "_ro": { name: `${library}_ro`, entry: "inspect", flags: "no-writes" },
  "_fence": { name: `${library}_fence`, entry: "fence", flags: "" }
} as const

type Variant = keyof typeof variants

/** All of it, for `FUNCTION LOAD`. */
export const source = (): string =>
  `#!lua name=${library}\n${body}\n` +
  Object.values(variants).map(({ entry, flags, name }) =>
    `redis.register_function{function_name='${name}', callback=${entry}, flags={${flags === "" ? "" : `'${flags}'`}}}`
  ).join("\n")

// The same source for servers that have no functions, or do not let the user call them.
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

const transient: ReadonlySet<string> = new Set([
  "ConnectionLost",
  "NotConnected",
  "Timeout",
  "Unavailable",
  "FunctionMissing"
])

/** Whether the same request may succeed later. */
export const isTransient = (error: RedisError): boolean => transient.has(error.reason._tag)

// A server that forgets the library as fast as it is loaded is not worth more tries in one call.
const maxLoads = 5

// The batch number of requests that belong to no session.
const unnumbered = ascii("0")
/** That of questions that are answered though an expired session may falsify the answer. */
export const unnumberedAnyway = ascii("1")

const needsNoMemory = ({ verb }: Message): boolean => allowOom.has(verb)

const isMissing = (cause: unknown): cause is RedisError =>
  cause instanceof RedisError && cause.reason._tag === "FunctionMissing"

/** A request that an actor could not execute. */
const defect = (verb: string, detail: string): CoordinatorError =>
  new CoordinatorError({ reason: new ActorDefect({ request: verb, detail }) })

/** Why an actor could not execute a request, by the detail that it gives. */
export const failed = (verb: string, detail: string): CoordinatorError =>
  detail === "denied"
    ? new CoordinatorError({ reason: new MissingPermission({ command: verb }) })
    : defect(verb, detail)

/** A failure on the way to an actor, as the error that users see: it names the resource that the request was about. */
export const coordinatorError = (cause: unknown, key?: string): CoordinatorError => {
  const error = cause instanceof RedisError
    // Requests are sent when the layer has connected.
    ? new CoordinatorError({ reason: cause.reason as CoordinatorReason })
    : cause instanceof CoordinatorError
    ? cause
    : defect("batch", messageOf(cause))
  const { reason } = error
  if (key === undefined || "kind" in reason && reason.kind !== undefined) return error
  // The constructor drops these fields where the reason is not about one request.
  const Reason = reason.constructor as new(fields: object) => CoordinatorReason
  return new CoordinatorError({ reason: new Reason({ ...reason, ...resourceOf(key) }) })
}

/** What was read is data that Lockstep did not write. */
export const foreign = (request: string, key: string): CoordinatorError =>
  coordinatorError(defect(request, "malformed value"), key)

/** So many requests wait already that no other one may. */
export const overloaded = (pending: number, key?: string): CoordinatorError =>
  coordinatorError(new CoordinatorError({ reason: new Overloaded({ pending }) }), key)

export class Transport {
  readonly connections: Connections
  readonly io: Io
  readonly requestTimeout: number

  readonly #sleeping = new Set<() => void>()
  #ready: { readonly promise: Promise<void>; readonly resolve: () => void } | undefined = undefined
  #closed = false
  /** How often the connection has become ready, but for the first time if it was ready already. */
  connects = 0
  readonly #unsubscribe: () => void

  constructor(connections: Connections, io: Io, requestTimeout: number) {
    this.connections = connections
    this.io = io
    this.requestTimeout = requestTimeout
    this.#unsubscribe = connections.commands.onReady(() => {
      this.connects++
      this.#ready?.resolve()
      this.#ready = undefined
    })
  }

  get commands(): Connection {
    return this.connections.commands
  }

  /** The address of a session; with an empty id, that of requests that need no session. */
  addressOf(prefix: string, id: string): Address {
    return addressOf(prefix, this.connections.topology === "cluster", id)
  }

  /**
   * Why a request is not waited for any longer. `cause` is what keeps Redis from answering, where that is known; it is about others if
   * this one was never sent.
   */
  late(key: string | undefined, cause?: RedisError, unsent = false): CoordinatorError {
    const command = this.connections.features.functions ? "FCALL" : "EVALSHA"
    if (cause === undefined || cause.reason._tag === "Timeout") {
      return coordinatorError(new RedisError({ reason: new Timeout({ command }) }), key)
    }
    if (!unsent || cause.reason._tag !== "ConnectionLost") return coordinatorError(cause, key)
    const { address, detail } = cause.reason
    return coordinatorError(new RedisError({ reason: new NotConnected({ address, detail }) }), key)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Calls
  // ---------------------------------------------------------------------------------------------------------------

  /**
   * Sends a batch of a session; throws if it cannot be written as a call. `header` is its number, and the id of the last event
   * read. The answer has to be decoded.
   */
  send(
    address: Address,
    messages: ReadonlyArray<Message>,
    header: string,
    timeout: number,
    caller: { readonly resolve: (raw: unknown) => void; readonly reject: (cause: unknown) => void }
  ): void {
    const variant = messages.every(needsNoMemory) ? "_oom" : ""
    const call = batch(address, header, messages)
    this.#run(variant, call, timeout, {
      resolve: caller.resolve,
      reject: (cause) => {
        if (isMissing(cause)) void this.#reload(variant, call, timeout, cause).then(caller.resolve, caller.reject)
        else caller.reject(cause)
      }
    })
  }

  /** Renews sessions that have nothing else to ask, see lua/calls.lua. Undefined for those that have to ask by themselves. */
  async renew(sessions: ReadonlyArray<Session>, lease: number): Promise<ReadonlyArray<Renewed | undefined>> {
    const keys = sessions.map(({ address }) => address.key)
    const numbered = sessions.flatMap(({ id, number }) => [id, number])
    const raw = await this.invoke("_renew", call(keys, numbered), this.renewalTimeout(lease))
    const answers: unknown = typeof raw === "string" ? JSON.parse(raw) : undefined
    return sessions.map((_, at) => {
      const answer: unknown = Array.isArray(answers) ? answers[at] : undefined
      if (!Array.isArray(answer) || !fits("session.renew", answer[0]) || answer[0][0] === "failed") return undefined
      return {
        reply: answer[0] as Requests["session.renew"]["reply"],
        next: { millis: Number(answer[1]), ending: answer[2] }
      }
    })
  }

  /** Requests that need no session: they are idempotent. */
  async ask(address: Address, messages: ReadonlyArray<Message>): Promise<Answer> {
    const variant = messages.every(needsNoMemory) ? "_oom" : ""
    return decode(messages, await this.invoke(variant, batch(address, unnumbered, messages)))
  }

  /** A question, which changes nothing. With `anyway` it is answered though an expired session may falsify it. */
  async inspect(address: Address, message: Message, anyway: boolean): Promise<Answer> {
    return decode(
      [message],
      await this.invoke("_ro", batch(address, anyway ? unnumberedAnyway : unnumbered, [message]))
    )
  }

  /** Asks until there is an answer, for as long as a question waits, unless there is a reason not to ask. */
  async answered<A>(key: string, refusal: () => Error | undefined, ask: () => Promise<A>): Promise<A> {
    const { io, requestTimeout } = this
    const until = io.now() + requestTimeout
    for (let attempt = 0;; attempt++) {
      const refused = refusal()
      if (refused !== undefined) throw refused
      try {
        return await ask()
      } catch (cause) {
        if (!(cause instanceof RedisError) || !isTransient(cause)) throw cause
        if (io.now() >= until) throw this.late(key, cause)
        await Promise.race([this.backoff(attempt, cause), this.sleep(until - io.now())])
        if (io.now() >= until) throw cause.executed === "no" ? cause : this.late(key)
      }
    }
  }

  /** A plain command that only reads one key, which is its first argument. */
  read(command: string, args: ReadonlyArray<string | number>): Promise<unknown> {
    return this.commands.send(command, args, this.requestTimeout)
  }

  /** Calls a function of the library, or its script where there are no functions; loads it where it is missing. */
  invoke(
    variant: Variant,
    call: Call,
    requestTimeout: number = this.requestTimeout
  ): Promise<unknown> {
    return this.#ran(variant, call, requestTimeout).catch((cause: unknown) =>
      this.#reload(variant, call, requestTimeout, cause)
    )
  }

  #ran(variant: Variant, call: Call, requestTimeout: number): Promise<unknown> {
    return new Promise((resolve, reject) => this.#run(variant, call, requestTimeout, { resolve, reject }))
  }

  #run(variant: Variant, call: Call, requestTimeout: number, caller: Caller): void {
    const { commands, features } = this.connections
    if (features.functions) commands.run("FCALL", variants[variant].name, call, requestTimeout, caller)
    else commands.run("EVALSHA", script(variant).sha, call, requestTimeout, caller)
  }

  /** Goes on after a failed call: a missing function or script is loaded, and called again. */
  async #reload(variant: Variant, call: Call, requestTimeout: number, cause: unknown): Promise<unknown> {
    const { commands, features } = this.connections
    const evaluate = () =>
      new Promise((resolve, reject) =>
        commands.run("EVAL", script(variant).source, call, requestTimeout, { resolve, reject })
      )
    let refusal: unknown
    for (let load = 0;; load++) {
      if (!isMissing(cause)) throw cause
      if (load === maxLoads) throw refusal ?? cause
      // EVAL carries a key, so on a cluster it reaches the node that lacks the script; functions go to every primary.
      if (!features.functions) return evaluate()
      try {
        refusal = await this.#load()
      } catch (error) {
        // Unlike a library, a script that needs no memory can come in.
        if (error instanceof RedisError && error.reason._tag === "OutOfMemory") return evaluate()
        throw error
      }
      try {
        return await this.#ran(variant, call, requestTimeout)
      } catch (error) {
        cause = error
      }
    }
  }

  // To every master that can be reached. Two coordinators may load it at the same time: the second is refused, and the
  // next call finds it. Where it could not be loaded, that finds it missing again.
  async #load(): Promise<unknown> {
    const results = await Promise.allSettled(
      this.connections.masters().map((master) => master.send("FUNCTION", ["LOAD", source()], this.requestTimeout))
    )
    const failures = results.flatMap((result) => result.status === "rejected" ? [result.reason] : [])
    const refusal = failures.find((cause) => cause instanceof RedisError && cause.reason._tag === "CommandFailed")
    if (refusal === undefined && failures.length === results.length) throw failures[0]
    return refusal
  }

  /**
   * Removes function libraries that no coordinator calls any more, and answers which of them are deleted. A coordinator that
   * needs one all the same loads it again.
   */
  async unload(libraries: ReadonlyArray<string>): Promise<ReadonlyArray<string>> {
    if (!this.connections.features.functions) return []
    const removed = await Promise.all(libraries.map(async (name) => {
      const deletions = this.connections.masters().map((master) =>
        master.send("FUNCTION", ["DELETE", name], this.requestTimeout)
      )
      const results = await Promise.allSettled(deletions)
      return results.every((result) => result.status === "fulfilled" || isAbsent(result.reason))
    }))
    return libraries.filter((_, at) => removed[at])
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Waiting
  // ---------------------------------------------------------------------------------------------------------------

  /** How long a call is waited for that renews a session: of a lease, two renewals may go without an answer. In milliseconds. */
  renewalTimeout(lease: number): number {
    return Math.min(this.requestTimeout, Math.floor(lease / 3))
  }

  /** No answer in time: it may be half-open, when the other side has died and the socket does not know. */
  doubt(cause: unknown): void {
    if (cause instanceof RedisError && cause.reason._tag === "Timeout") this.commands.reset()
  }

  /** Waits before the next try: for the connection if it is lost, or longer each time. */
  backoff(attempt: number, cause: RedisError): Promise<void> {
    this.doubt(cause)
    if (!this.commands.isReady()) return this.#untilReady()
    const limit = Math.min(500, 5 * 2 ** Math.min(attempt, 10))
    return this.sleep(limit / 2 + this.io.random() * limit / 2)
  }

  #untilReady(): Promise<void> {
    if (this.#closed) return Promise.resolve()
    const ready = this.#ready ??= Promise.withResolvers<void>()
    return ready.promise
  }

  /** Ends early when the coordinator is closed. */
  sleep(millis: number): Promise<void> {
    if (this.#closed) return Promise.resolve()
    return new Promise((resolve) => {
      const wake = () => {
        timer.cancel()
        this.#sleeping.delete(wake)
        resolve()
      }
      const timer = this.io.after(millis, wake)
      this.#sleeping.add(wake)
    })
  }

  /** Calls that wait for another try go on at once. */
  close(): void {
    this.#closed = true
    this.#unsubscribe()
    this.#ready?.resolve()
    for (const wake of [...this.#sleeping]) wake()
  }
}

/** There was no such library. */
const isAbsent = (cause: unknown): boolean =>
  cause instanceof RedisError && cause.reason._tag === "CommandFailed" && cause.reason.detail === "Library not found"

const none: ReadonlyArray<never> = []

const malformed = ["failed", "malformed reply"] as const

/** One way that a request can come out. */
interface Outcome {
  readonly tag: string
  readonly shape: ReadonlyArray<string>
  /** All of an answer without a value, or what precedes the value in an answer with one text. */
  readonly text: string
}

const outcomes = new Map<string, ReadonlyArray<Outcome>>(
  Object.entries(shapes).map(([verb, byTag]) => [
    verb,
    Object.entries(byTag).map(([tag, shape]) => ({
      tag,
      shape,
      text: shape.length === 0 ? `["ok",[["${tag}"]]]` : `["ok",[["${tag}","`
    }))
  ])
)

// Behind a value that stands alone.
const end = `"]]]`

/** The digits from that place on, if nothing else is there but the end. */
const digitsFrom = (raw: string, from: number): string | undefined => {
  const to = raw.length - end.length
  if (to <= from || !raw.endsWith(end)) return undefined
  for (let at = from; at < to; at++) {
    const code = raw.charCodeAt(at)
    if (code < 48 || code > 57) return undefined
  }
  return raw.slice(from, to)
}

/** The reply in most answers to one request: a tag, or a tag and a whole number as text. JSON.parse takes ten times as long. */
const plain = (verb: string, raw: string): Reply | undefined => {
  for (const { shape, tag, text } of outcomes.get(verb)!) {
    if (shape.length === 0) {
      if (raw === text) return [tag] as unknown as Reply
    } else if (shape.length === 1 && shape[0] === "string" && raw.startsWith(text)) {
      const value = digitsFrom(raw, text.length)
      return value === undefined ? undefined : [tag, value] as unknown as Reply
    }
  }
  return undefined
}

/** The answer to a batch. `before` may be answered instead, because it was sent before under the same number. */
export const decode = (
  messages: ReadonlyArray<Message>,
  raw: unknown,
  before: ReadonlyArray<Message> = messages
): Answer => {
  if (typeof raw === "string" && before.length === 1) {
    const reply = plain(before[0]!.verb, raw)
    if (reply !== undefined) return { status: "ok", replies: [reply], events: none, next: undefined }
  }
  const parsed: unknown = typeof raw === "string" ? JSON.parse(raw) : undefined
  if (!Array.isArray(parsed)) throw defect("batch", "malformed reply")
  const [status, replies = none, events = none, millis, ending] = parsed
  switch (status) {
    case "unknown":
    case "expired":
    case "stale":
    case "gap":
      return { status, replies: none, events: none, next: undefined }
    case "ok":
      break
    default:
      throw defect("batch", "malformed reply")
  }
  if (!Array.isArray(replies) || !Array.isArray(events)) throw defect("batch", "malformed reply")
  const asked = replies.length === before.length ? before : messages
  if (replies.length !== asked.length) throw defect("batch", "malformed reply")
  for (let at = 0; at < asked.length; at++) {
    if (!fits(asked[at]!.verb, replies[at])) replies[at] = malformed
  }
  return { status, replies, events, next: millis === undefined ? undefined : { millis, ending } }
}

const fits = (verb: string, reply: unknown): boolean => {
  if (!Array.isArray(reply)) return false
  const [tag] = reply
  if (tag === "failed") return true
  const shape = outcomes.get(verb)!.find((one) => one.tag === tag)?.shape
  if (shape === undefined || shape.length !== reply.length - 1) return false
  for (let at = 0; at < shape.length; at++) {
    const type = shape[at]
    if (type === "strings" ? !Array.isArray(reply[at + 1]) : type !== "json" && typeof reply[at + 1] !== type) {
      return false
    }
  }
  return true
}
