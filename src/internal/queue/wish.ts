/** What a producer asks for, as the actor reads it. */

import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import { checkName } from "../actor/keys.ts"
import { millis } from "../hold/place.ts"
import type { Level, Wish } from "./offering.ts"

/**
 * The levels of priority, the highest first.
 *
 * @category models
 * @since 0.1.0
 */
export type Priority = "urgent" | "high" | "normal" | "low"

/** @internal */
export interface OfferOptions {
  /** How long to wait before the job can begin. */
  readonly delay?: Duration.Input | undefined
  /** When the job can begin, instead of a `delay`. */
  readonly at?: DateTime.DateTime.Input | undefined
  /** Jobs of a higher level begin first, but for one in eight. Default `normal`. */
  readonly priority?: Priority | undefined
  /**
   * The job begins before all others of its level that wait: of several such jobs, the one that was offered last. One in eight
   * jobs is another one, so none starves. Not with a `delay` or an `at`. Default false.
   */
  readonly lifo?: boolean | undefined
  /**
   * A second offer with the same id stores nothing, whichever process makes it: while the job is not done, and for the queue's
   * `retention` after that. Up to 512 bytes.
   */
  readonly id?: string | undefined
  /** How often it is attempted at most. Default: that of the worker. */
  readonly attempts?: number | undefined
  /** How long an attempt may run; then it is interrupted, and has failed. Default: that of the worker. */
  readonly timeout?: Duration.Input | undefined
  /** Whether its outcome is kept when it is done, for the queue's `retention`: see `result`. Default false. */
  readonly result?: boolean | undefined
  /** How long after the offer an attempt may begin; then the job is removed. Default: for ever. */
  readonly expires?: Duration.Input | undefined
}

const letters: { readonly [priority in Priority]: Level } = { urgent: "u", high: "h", normal: "n", low: "l" }

export const levels: ReadonlyArray<Priority> = ["urgent", "high", "normal", "low"]

const plain = { level: "n", held: false, more: "", texts: "" } as const

// Ids of this shape are the actor's own.
const isOwn = (id: string): boolean => /^[uhnl]\d+-\d+$/i.test(id)

const delayOf = ({ at, delay }: OfferOptions): string => {
  if (at !== undefined) {
    if (delay !== undefined) throw new RangeError("delay and at cannot both be set")
    return `w${DateTime.toEpochMillis(DateTime.makeUnsafe(at))}`
  }
  if (delay === undefined || Duration.toMillis(Duration.fromInputUnsafe(delay)) === 0) return ""
  return `d${millis(delay, "delay")}`
}

/** When a job is to begin: in so many milliseconds, or at that time. */
export const timeOf = (
  { at, delay }: Pick<OfferOptions, "at" | "delay">
): [relative: boolean, millis: number] => {
  if ((at === undefined) === (delay === undefined)) throw new RangeError("one of delay and at must be set")
  return delay === undefined
    ? [false, DateTime.toEpochMillis(DateTime.makeUnsafe(at!))]
    : [true, millis(delay, "delay")]
}

/** The body is JSON. Of the options, those that make no sense are defects. */
export const wishOf = (body: string, options: OfferOptions | undefined, trace: string): Wish => {
  if (options === undefined && trace === "") return { body, ...plain }
  const { attempts, expires, id, lifo = false, priority = "normal", result = false, timeout } = options ?? {}
  const level = letters[priority]
  if (level === undefined) throw new RangeError(`priority must be one of ${levels.join(", ")}`)
  const delay = options === undefined ? "" : delayOf(options)
  let more = level === "n" ? delay : level + delay
  let texts = ""
  if (lifo) {
    if (delay !== "") throw new RangeError("lifo and a delay cannot both be set")
    more += "f"
  }
  if (attempts !== undefined) more += `a${whole(attempts, "attempts", 1000)}`
  if (timeout !== undefined) more += `t${millis(timeout, "timeout")}`
  if (expires !== undefined) more += `e${millis(expires, "expires")}`
  if (result) more += "r"
  if (id !== undefined) {
    if (isOwn(checkName(id, "id"))) throw new RangeError("id must not look like one that the queue has made")
    more += `i${Buffer.byteLength(id)}`
    texts += id
  }
  if (trace !== "") {
    more += `x${trace.length}`
    texts += trace
  }
  return { body, level, held: lifo || delay !== "", more, texts }
}

export const whole = (value: number, what: string, most: number): number => {
  if (!Number.isInteger(value) || value < 1 || value > most) {
    throw new RangeError(`${what} must be a whole number from 1 to ${most}`)
  }
  return value
}
