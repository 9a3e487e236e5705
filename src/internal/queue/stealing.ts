/** The deque of a process: which jobs go there, and how workers with deques are seen. */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { checkName } from "../actor/keys.ts"
import { isNone } from "../hold/place.ts"
import type { QueueError } from "./errors.ts"
import type { Aim, OfferOptions } from "./wish.ts"

/** @internal */
export interface DealtOptions extends Omit<OfferOptions, "priority" | "lifo" | "group"> {
  /**
   * The worker whose deque it goes to, by its name. While there is no such worker, the job goes to any worker. Not with a `delay`,
   * an `at` or `after`.
   */
  readonly to?: string | undefined
  /**
   * Jobs with the same key go to the deque of the same worker, as long as that works. Of the keys, a worker that comes takes an even
   * share from all others, and those of a worker that leaves are shared among all others. Up to 512 bytes. Not with a `delay`, an `at`,
   * `after` or a `to`.
   */
  readonly key?: string | undefined
}

/** @internal */
export interface StealOptions {
  /** So many jobs of its deque are left to this worker while it lives: 0 to 2^31. Default 0. */
  readonly keep?: number | undefined
  /** How many jobs other workers steal of its deque at a time: 1 to 256. Default 256. */
  readonly most?: number | undefined
}

/** A worker of a queue with deques. */
export interface WorkerState {
  readonly name: string
  /** Jobs in its deque. */
  readonly waiting: number
  /** Jobs that it has in hand, with cancelled ones whose handlers have not ended. */
  readonly active: number
  /** Jobs of its deque that it has begun, but for the stolen ones. */
  readonly own: number
  /** Jobs that it stole, and has begun. */
  readonly stolen: number
  /** Jobs that it has begun which were in no deque. */
  readonly shared: number
  /** Jobs that other workers stole of its deque. */
  readonly lost: number
  /** How long it had no job in hand. */
  readonly idle: Duration.Duration
}

const between = (value: number, what: string, least: number, most: number): number => {
  if (!Number.isInteger(value) || value < least || value > most) {
    throw new RangeError(`${what} must be a whole number from ${least} to ${most}`)
  }
  return value
}

// FNV-1a, below the prime of lua/QueueStealing.lua.
const hashOf = (text: string): number => {
  let hash = 0x811c9dc5
  for (const byte of Buffer.from(text)) hash = Math.imul(hash ^ byte, 0x01000193)
  return (hash >>> 0) % 2147483647
}

const checkWorker = (name: string, what: string): string => {
  // The actor keeps names in lists.
  if (/\s/.test(checkName(name, what))) throw new RangeError(`${what} must not contain white space`)
  return name
}

const aimAt = (worker: string): Aim => ({ more: `o${Buffer.byteLength(worker)}`, text: worker })

/** The deque that all workers of a process at one queue have. */
export class Deque {
  readonly name: string
  /** The arguments of `queue.employ` behind the credit. */
  readonly args: [name: string, weight: number, keep: number, most: number]
  readonly #own: Aim
  /** How many workers of this process have it now. */
  workers = 0
  /** Has this process keep the deque while it takes no jobs. */
  standing: Effect.Effect<void, QueueError> = Effect.void

  constructor(name: string, { keep = 0, most = 256 }: StealOptions) {
    this.name = checkWorker(name, "worker")
    this.args = [name, hashOf(name), between(keep, "steal.keep", 0, 2 ** 31), between(most, "steal.most", 1, 256)]
    this.#own = aimAt(name)
  }

  /** Where a job goes that this process offers; undefined: to any worker. */
  aim(options: OfferOptions & DealtOptions | undefined): Aim | undefined {
    const own = this.workers > 0 ? this.#own : undefined
    if (options === undefined) return own
    const { after = [], at, dedupe, delay, group, key, lifo, priority, to } = options
    if (group !== undefined || lifo === true || priority !== undefined) {
      throw new RangeError("jobs of deques have no priority, lifo or group")
    }
    const later = dedupe?.mode === "debounce" || at !== undefined || after.length > 0 ||
      delay !== undefined && !isNone(delay)
    if (to === undefined && key === undefined) return later ? undefined : own
    if (to !== undefined && key !== undefined) throw new RangeError("to and key cannot both be set")
    if (later) throw new RangeError("to and key go with no delay, at, after or debounce: such a job goes to any worker")
    return to === undefined ? { more: `c${hashOf(checkName(key!, "key"))}`, text: "" } : aimAt(checkWorker(to, "to"))
  }
}

type Tuple = readonly [
  name: string,
  waiting: number,
  active: number,
  own: number,
  stolen: number,
  shared: number,
  lost: number,
  idle: number
]

export const workersOf = (found: unknown): ReadonlyArray<WorkerState> =>
  (found as ReadonlyArray<Tuple>).map(([name, waiting, active, own, stolen, shared, lost, idle]) => ({
    name,
    waiting,
    active,
    own,
    stolen,
    shared,
    lost,
    idle: Duration.millis(idle)
  }))
