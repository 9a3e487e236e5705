/** A batch of requests on its way: what of it is sent, how often, and what is left out. */

import { RedisError, RequestTooLarge } from "../redis/errors.ts"
import { ascii } from "../redis/resp.ts"
import type { CoordinatorError } from "./errors.ts"
import { heard, type Requests } from "./lua.ts"
import type { Session } from "./session.ts"
import type { Verb } from "./transport.ts"

export interface Request<V extends Verb = Verb> {
  readonly verb: V
  /** Of the resource that it is about, if it is about one. */
  readonly key?: string | undefined
  /** Those of the other resources, if it is about several of one kind. */
  readonly others?: ReadonlyArray<string> | undefined
  readonly args: Requests[V]["args"]
  /** The session it is bound to: when that is lost, the request is moot. */
  readonly session?: Session | undefined
  /** Executed right behind it, in the same call: all of them, or none if Redis does not execute that. */
  readonly following?: ReadonlyArray<Request> | undefined
  /** It has followed a request that is not made again: from now on, it only asks whether it was executed. */
  readonly orphan?: (() => void) | undefined
  /** While Redis has no memory for what follows it, it is not executed either, though it needs none. */
  readonly whole?: boolean | undefined
  /** Never refused for the load: it goes on with what was accepted before. */
  readonly urgent?: boolean | undefined
  /**
   * Called instead of a reply when the session was lost; `sent` says whether it can have been executed. Of requests that
   * are bound to no session, it is called for those that were sent: they are not to be repeated. All others go to the
   * next session.
   */
  readonly moot?: ((sent: boolean) => void) | undefined
  readonly settle: (reply: Requests[V]["reply"]) => void
  /** `sent` says whether it can have been executed. */
  readonly fail: (error: CoordinatorError, sent: boolean) => void
  /**
   * Called before it is sent, while Redis cannot have executed it. If it is too late for that, it answers how to tell the caller. It must
   * not lose a session itself: a batch is being made.
   */
  readonly lapses?: (() => (() => void) | undefined) | undefined
  /** A session that was lost has sent it, and it can have been executed there. The channel sets it. */
  forwarded?: boolean | undefined
  /** Redis has been away for longer than a question waits: called once. It may be executed all the same if it was sent. */
  expire?: ((error: CoordinatorError) => void) | undefined
  /**
   * For so many milliseconds Redis knows that it was executed. If its outcome is not known for longer, it is not sent again by another
   * session: it fails, and may be executed all the same.
   */
  readonly knownFor?: number | undefined
  /** When it was first sent, by the monotonic clock and by the wall clock, if it has `knownFor`. The outbox sets it. */
  sent?: readonly [at: number, wall: number] | undefined
  /** When it was made, if it can expire; whether it is in the queue, and not sent yet. The outbox sets them. */
  askedAt?: number | undefined
  queued?: boolean | undefined
  cancelled?: boolean | undefined
  /** How many it counts for. Default 1. */
  weight?: number | undefined
  /** It shares a call with no other one but those that follow it. The outbox sets it. */
  alone?: boolean | undefined
  /** As how many requests it keeps Redis busy. Default: its weight. */
  readonly size?: number | undefined
}

// Events that were read of the mailbox are acknowledged with every heartbeat, with the requests that follow from them, and when
// they are so many that Redis trims them: TRIM_EVERY in lua/kernel.lua.
const trimEvery = 64

/** The receiver of a sending's end. */
export interface Sender {
  readonly answered: (sending: Sending, raw: unknown) => void
  readonly failed: (sending: Sending, cause: unknown) => void
}

/** The batch that is under way, over all its sendings. */
export class Sending {
  readonly session: Session
  readonly batch: ReadonlyArray<Request>
  readonly number: number
  /** The last event of the mailbox that it acknowledges. */
  readonly read: number
  readonly header: string
  /** The requests of it that are sent. */
  requests: ReadonlyArray<Request>
  /** When the first attempt was made, by the monotonic clock. */
  begunAt = Number.NaN
  /** When the last one was, by the monotonic clock and by the wall clock. */
  sentAt = 0
  sentAtWall = 0
  attempt = 0
  /** How often the connection was lost with it. */
  losses = 0
  /** Whether a sending may have been executed without an answer. */
  uncertain = false
  /** The others, and why they are refused; without a reason, they are sent later. */
  readonly left = new Map<Request, RedisError | undefined>()
  readonly #sender: Sender

  constructor(sender: Sender, session: Session, batch: ReadonlyArray<Request>) {
    const { acknowledged, number, position, read } = session
    this.#sender = sender
    this.session = session
    this.batch = this.requests = batch
    this.number = number + 1
    const tells = read - acknowledged >= trimEvery || read > acknowledged && batch.some(({ verb }) => heard.has(verb))
    this.read = tells ? read : acknowledged
    this.header = ascii(tells ? `${number + 1} ${position}` : String(number + 1))
  }

  readonly resolve = (raw: unknown): void => this.#sender.answered(this, raw)

  readonly reject = (cause: unknown): void => this.#sender.failed(this, cause)
}

// A batch without the requests that others bring with them.
export const leadingOf = (batch: ReadonlyArray<Request>): ReadonlyArray<Request> => {
  const following = new Set(batch.flatMap((request) => request.following ?? []))
  return batch.filter((request) => !following.has(request))
}

// In bytes, of requests that may be larger than a server or gateway takes. A call that breaks the connection so many times in a row goes
// on without them, and each is sent alone then. One that breaks it alone, so many times, is refused.
const large = 32_768
const [mostLosses, mostAlone] = [2, 5]

const bytesOf = (requests: ReadonlyArray<Request>): number =>
  requests.reduce((sum, { args }) => args.reduce<number>((bytes, arg) => bytes + String(arg).length, sum), 0)

/** From now on, it is sent without what may be too large. */
export const lighten = (sending: Sending): void => {
  const { left, requests } = sending
  const leading = leadingOf(requests)
  if (leading.length === 1) return refuse(sending, leading[0]!)
  const parts = leading.map((request) => [request, ...request.following ?? []])
  const most = Math.max(...parts.map(bytesOf))
  // Many small ones can be too much together, too.
  const later = most >= large
    ? parts.filter((part) => bytesOf(part) >= Math.max(large, most / 4))
    : parts.slice(parts.length >> 1)
  for (const part of later) {
    part[0]!.alone = most >= large
    for (const request of part) left.set(request, undefined)
  }
  sending.losses = 0
  sending.requests = requests.filter((request) => !left.has(request))
}

/** It was not executed: what is over is not sent with it again. Answers how to tell the callers. */
export const omit = (sending: Sending, cause: RedisError): ReadonlyArray<() => void> => {
  const { left } = sending
  const ends: Array<() => void> = []
  for (const leader of leadingOf(sending.requests)) {
    const end = leader.lapses?.()
    if (leader.cancelled !== true && end === undefined) continue
    if (end !== undefined) ends.push(end)
    for (const request of [leader, ...leader.following ?? []]) left.set(request, cause)
  }
  sending.requests = sending.requests.filter((request) => !left.has(request))
  return ends
}

export const isTooMuch = (sending: Sending, { reason }: RedisError): boolean => {
  const { requests } = sending
  if (requests.length === 0) return false
  if (reason._tag === "RequestTooLarge") return true
  if (reason._tag !== "ConnectionLost" || bytesOf(requests) < large) return false
  return ++sending.losses >= (leadingOf(requests).length === 1 ? mostAlone : mostLosses)
}

// What follows it goes first, if the request can do without.
const refuse = (sending: Sending, leader: Request): void => {
  const { following = [], whole } = leader
  const canBeAlone = whole !== true && sending.requests.length > 1 && bytesOf(following) >= bytesOf([leader])
  const error = new RedisError({ reason: new RequestTooLarge({ command: "FCALL" }) })
  sending.requests = canBeAlone ? [leader] : []
  for (const request of canBeAlone ? following : [leader, ...following]) sending.left.set(request, error)
}
