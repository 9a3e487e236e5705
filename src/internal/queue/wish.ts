/** The wishes of a producer for a job, as the actor reads them. */

import type * as Context from "effect/Context"
import type * as DateTime from "effect/DateTime"
import type * as Duration from "effect/Duration"
import type * as Schedule from "effect/Schedule"
import { checkName } from "../actor/keys.ts"
import { choice, instant, isNone, millis, millisFromNone, whole } from "../hold/place.ts"
import { delaysOf } from "./delays.ts"
import { ownOf } from "./naming.ts"
import type { Level, Wish } from "./offering.ts"

/**
 * The levels of priority, the highest first.
 *
 * @category models
 * @since 0.1.0
 */
export type Priority = "urgent" | "high" | "normal" | "low"

/**
 * Whether the outcome of a job is kept. `true` keeps it for the queue's `retention`, an object for a time of its own from the end
 * of the job on.
 *
 * @category models
 * @since 0.1.0
 */
export type ResultOption = boolean | {
  readonly timeToLive: Duration.Input
}

/** @internal */
export interface OfferOptions {
  /** How long to wait after the offer before the job can begin. The time in which the offer waits for room counts. */
  readonly delay?: Duration.Input | undefined
  /** When the job can begin, instead of a `delay`. */
  readonly at?: DateTime.DateTime.Input | undefined
  /** Jobs of a higher level begin first, but for one in eight, which is the oldest of the others. Default `normal`. */
  readonly priority?: Priority | undefined
  /**
   * The job begins before all waiting jobs of its level: of several such jobs, the newest first. One of eight jobs is another one, so
   * no job starves. Not with a `delay`, an `at` or a `group`. Default false.
   */
  readonly lifo?: boolean | undefined
  /**
   * A second offer with the same id stores nothing, whichever process makes it. This lasts while the job is not done, and for the
   * queue's `retention` after that, or as long as its result is known. 1 to 512 bytes. Ids that look like the queue's own, as
   * `2026-11` or `n1700-3`, are a `RangeError`.
   */
  readonly id?: string | undefined
  /**
   * Whether the job is stored beside others with the same `id` of `dedupe`, whichever process offers them. Not with an `id`.
   *
   * - `simple`: no job is stored while another one is not done.
   * - `throttle`: at most one job is stored in each `window`, which begins with its offer.
   * - `debounce`: the job begins when no other was offered for a `window`, with the payload of the last offer. While it runs, another
   *   job may begin.
   * - `keepLast`: a waiting job gets the payload of the last offer. While a job runs, or waits for a retry, only the last of the
   *   later offers is kept. It begins when the first job is done or a dead letter.
   *
   * A job that gets the payload of another keeps all other options. `debounce` and `keepLast` go with no `delay`, `at` or `lifo`.
   */
  readonly dedupe?: {
    /** Up to 512 bytes. */
    readonly id: string
    /** Default `simple`. */
    readonly mode?: "simple" | "throttle" | "debounce" | "keepLast" | undefined
    /** Of `throttle` and `debounce`, which need one. That of `throttle` is up to the queue's `retention`. */
    readonly window?: Duration.Input | undefined
  } | undefined
  /** How often it is attempted at most. Default: that of the worker. */
  readonly attempts?: number | undefined
  /**
   * When it is attempted again after a failure: as long as the schedule goes on, and up to `attempts`. If neither the job nor its
   * worker says how often, that is 65 at most. A schedule is code, so it is stepped when the job is offered, as if each attempt
   * failed at once. Its first 64 delays are stored with the job, and the last of these is repeated if the schedule goes on. It
   * has to step synchronously. It sees neither errors nor the times of the attempts. Where it depends on these, as a calendar
   * does, use the `retry` of the worker or the queue. Default: that of the worker.
   */
  readonly retry?: Schedule.Schedule<unknown> | undefined
  /** How long a handler may run; then it is interrupted, and has failed. Not of a job that is taken. Default: that of the worker. */
  readonly timeout?: Duration.Input | undefined
  /**
   * Whether its outcome is kept when it is done, and for how long: see `result`. Its `id` is known at least as long. Default: that of the
   * queue.
   */
  readonly result?: ResultOption | undefined
  /**
   * How long after the offer an attempt may begin; then the job is removed, also while the queue is paused or has no worker. An
   * active job goes on, and is removed if it returns to the queue. The time in which the offer waits for room counts. That of a
   * follow-up begins when it is stored: when its handler's job is done, or, in another queue, with its delivery. Default: for ever.
   */
  readonly expires?: Duration.Input | undefined
  /**
   * The group that it belongs to: of each group, jobs begin in order and only so many at a time, see `groups` of the queue. Up to
   * 512 bytes. Default: none.
   */
  readonly group?: string | undefined
  /**
   * The ids of jobs of this queue that have to end first: the job is `blocked` until then, and stored at once. Up to 1,000, all
   * in one shard. A job that has ended already is known if it had `result`, as long as that is kept. Otherwise the offer fails
   * with `OutcomeUnknown`, and nothing is stored. Blocked jobs do not count for `limits.length`, and are stored though the queue
   * is full. Not with a `delay`, an `at` or `lifo`, nor with `debounce` or `keepLast`, nor for `followUp`. Default: none.
   */
  readonly after?: ReadonlyArray<string> | undefined
  /**
   * The effect on the job when a job of `after` ends without a success: a dead letter, or cancelled, skipped, expired or dropped.
   * With `fail`, the default, it is a dead letter itself. With `skip`, it is removed, and its outcome is `skipped`. With
   * `continue`, it runs all the same. A job that fails or is skipped has not succeeded for the jobs after it.
   */
  readonly onFailure?: "fail" | "skip" | "continue" | undefined
}

/** A subscriber is notified of the end of a job, by an errand: see errands.ts. */
export interface Subscriber {
  /** The name of the errands. */
  readonly errands: string
  /** The receiver's reference to the job. */
  readonly reference: string
}

const letters: { readonly [priority in Priority]: Level } = { urgent: "u", high: "h", normal: "n", low: "l" }

export const levels: ReadonlyArray<Priority> = ["urgent", "high", "normal", "low"]

// Of jobs of groups.
const grouped: { readonly [level in Level]: string } = { u: "V", h: "I", n: "O", l: "M" }

/** Of a job, by its own id. */
export const levelOf = (job: string): Priority => levels["uhnlviom".indexOf(job[0]!.toLowerCase()) % 4]!

const plain = { letter: "n", more: "", texts: "" } as const

const delayOf = ({ at, delay }: OfferOptions): string => {
  if (at !== undefined) {
    if (delay !== undefined) throw new RangeError("delay and at cannot both be set")
    return `w${instant(at, "at")}`
  }
  return delay === undefined || isNone(delay) ? "" : `d${millis(delay, "delay")}`
}

/** When a job is to begin: in so many milliseconds, or at that time. */
export const timeOf = (
  { at, delay }: Pick<OfferOptions, "at" | "delay">
): [relative: boolean, millis: number] => {
  if ((at === undefined) === (delay === undefined)) throw new RangeError("one of delay and at must be set")
  return delay === undefined
    ? [false, instant(at!, "at")]
    : [true, millisFromNone(delay, "delay")]
}

const modes = { simple: "s", throttle: "t", debounce: "d", keepLast: "k" } as const

// The id behind the letter of its mode, and the window.
const dedupeOf = (
  { at, dedupe, delay, id, lifo }: OfferOptions,
  retention: number
): readonly [text: string, window: string] => {
  if (dedupe === undefined) return ["", ""]
  if (dedupe === null) throw new RangeError("dedupe must be { id, mode, window }")
  const { mode = "simple", window } = dedupe
  const letter = choice(modes, mode, "dedupe.mode")
  if (id !== undefined) throw new RangeError("id and dedupe cannot both be set")
  const text = letter + checkName(dedupe.id, "dedupe.id")
  if ((mode === "debounce" || mode === "keepLast") && (delay !== undefined || at !== undefined || lifo === true)) {
    throw new RangeError(`dedupe.mode ${mode} goes with no delay, at or lifo`)
  }
  if (mode === "simple" || mode === "keepLast") {
    if (window !== undefined) throw new RangeError(`dedupe.mode ${mode} has no window`)
    return [text, ""]
  }
  if (window === undefined) throw new RangeError(`dedupe.mode ${mode} needs a window`)
  const length = millis(window, "dedupe.window")
  if (mode === "throttle" && length > retention) {
    throw new RangeError("dedupe.window must not be longer than the queue's retention")
  }
  return [text, `v${length}`]
}

const policies = { fail: "f", skip: "s", continue: "c" } as const

const mostBefore = 1000

/** The ids of the jobs that a job runs after. */
export const afterOf = ({ after = [] }: OfferOptions): ReadonlyArray<string> => {
  if (!Array.isArray(after)) throw new RangeError("after must be an array of the ids of jobs")
  return after
}

// The own ids of the jobs, or those of their producers, behind the letter of the policy.
const beforeOf = (options: OfferOptions): string => {
  const { at, dedupe, delay, lifo, onFailure = "fail" } = options
  const after = afterOf(options)
  const policy = choice(policies, onFailure, "onFailure")
  if (after.length === 0) return ""
  if (after.length > mostBefore) throw new RangeError(`after can name up to ${mostBefore} jobs: use a Flow for more`)
  if (delay !== undefined || at !== undefined || lifo === true) {
    throw new RangeError("after goes with no delay, at or lifo")
  }
  if (dedupe?.mode === "debounce" || dedupe?.mode === "keepLast") {
    throw new RangeError(`after and dedupe.mode ${dedupe.mode} cannot both be set`)
  }
  return policy + after.map((id) => {
    const own = ownOf(checkName(id, "after"))?.[1] ?? id
    return `${Buffer.byteLength(own)} ${own}`
  }).join("")
}

/** The letter of jobs whose outcome is kept, and for how many milliseconds if that is not the queue's retention. */
export const keptOf = (result: ResultOption = false): string => {
  if (typeof result === "boolean") return result ? "r" : ""
  if (typeof result !== "object" || result === null) throw new RangeError("result must be a boolean, or { timeToLive }")
  return `r${millis(result.timeToLive, "result.timeToLive")}`
}

/** Of a job whose caller waits: it asks for the outcome behind the offer, and again when it has lost its session. */
export const awaited = (result: ResultOption, lease: number): ResultOption =>
  typeof result !== "object" || result === null
    ? result
    : { timeToLive: Math.max(lease, millis(result.timeToLive, "result.timeToLive")) }

/** The deque that a job goes to, as `queue.offer` in lua/QueueOffers.lua reads it. */
export interface Aim {
  readonly more: string
  readonly text: string
}

/** Whose job it is. */
export interface Sender {
  /** The W3C `traceparent` of its span, or "". */
  readonly trace: string
  /** The services of its fiber. */
  readonly context: Context.Context<never>
}

/** The body is JSON. Contradictory options are defects. The retention of the queue is in milliseconds. */
export const wishOf = (
  body: string,
  options: OfferOptions | undefined,
  { context, trace }: Sender,
  retention: number,
  aim?: Aim,
  subscriber?: Subscriber
): Wish => {
  if (options === undefined && trace === "" && subscriber === undefined) {
    return aim === undefined ? { body, ...plain } : { body, letter: "N", more: aim.more, texts: aim.text }
  }
  const { attempts, expires, group, id, lifo = false, priority = "normal", result, retry, timeout } = options ?? {}
  const level = choice(letters, priority, "priority")
  const delay = options === undefined ? "" : delayOf(options)
  let more = level === "n" ? delay : level + delay
  let texts = ""
  const add = (field: string, text: string) => {
    more += `${field}${Buffer.byteLength(text)}`
    texts += text
  }
  if (lifo) {
    if (delay !== "") throw new RangeError("lifo and a delay cannot both be set")
    more += "f"
  }
  if (attempts !== undefined) more += `a${whole(attempts, "attempts", 1000)}`
  if (timeout !== undefined) more += `t${millis(timeout, "timeout")}`
  if (expires !== undefined) more += `e${millis(expires, "expires")}`
  more += keptOf(result) || (subscriber === undefined ? "" : "r")
  if (id !== undefined) {
    if (ownOf(checkName(id, "id")) !== undefined) {
      throw new RangeError("id must not look like one that the queue has made")
    }
    add("i", id)
  }
  if (retry !== undefined) add("z", delaysOf(retry, attempts ?? Number.POSITIVE_INFINITY, context))
  const [deduped, window] = options === undefined ? ["", ""] : dedupeOf(options, retention)
  if (deduped !== "") {
    more += window
    add("q", deduped)
  }
  if (trace !== "") add("x", trace)
  if (group !== undefined) {
    if (lifo) throw new RangeError("group and lifo cannot both be set: jobs of a group begin in order")
    add("g", checkName(group, "group"))
  }
  if (aim !== undefined) {
    more += aim.more
    texts += aim.text
  }
  const before = options === undefined ? "" : beforeOf(options)
  if (before !== "") add("p", before)
  if (subscriber !== undefined) {
    add("y", `${Buffer.byteLength(subscriber.errands)} ${subscriber.errands}${subscriber.reference}`)
  }
  const held = lifo || delay !== "" || deduped[0] === "d" || before !== "" || aim !== undefined
  const letter = group !== undefined ? grouped[level] : held ? level.toUpperCase() : level
  return before === "" ? { body, letter, more, texts } : { body, letter, more, texts, after: options!.after! }
}
