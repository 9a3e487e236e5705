/** How a queue works, as its actor receives it. */

import { choice, lasting, millis, whole } from "../hold/place.ts"
import type { Options } from "./api.ts"

/** How long the outcome of a job is kept, and its id is known. */
export const retained = "10 minutes"

const overflows = { wait: 0, fail: 1, dropOldest: 2 } as const

type Limits = NonNullable<Options<any>["limits"]>

// How many jobs at a time, how many milliseconds between two of them, and how many of these may be saved up.
const limitArgs = ({ concurrency, rate }: Limits, what: string) => {
  const interval = rate === undefined ? 0 : millis(rate.interval, `${what}.rate.interval`)
  return [
    concurrency === undefined ? 0 : whole(concurrency, `${what}.concurrency`, 2 ** 31),
    rate === undefined ? 0 : interval / whole(rate.jobs, `${what}.rate.jobs`, 1_000_000),
    interval
  ] as const
}

/** Each shard has a share of at least one job in each limit. */
export const checkShares = ({ concurrency, length, rate }: Limits, shards: number): void => {
  for (const [what, limit] of Object.entries({ concurrency, length, "rate.jobs": rate?.jobs })) {
    if (limit !== undefined && limit < shards) {
      throw new RangeError(`limits.${what} must not be less than the number of shards, ${shards}`)
    }
  }
}

export const joinArgs = (
  { groups: { concurrency = 1, rate } = {}, letters = {}, limits = {}, retention = retained }: Options<any, any, any>
) => {
  const { length, onFull = "wait" } = limits
  const { age = "7 days", crashes = 3, length: kept = 10_000 } = letters
  return [
    ...limitArgs(limits, "limits"),
    millis(retention, "retention"),
    whole(kept, "letters.length", 1_000_000),
    lasting(age, "letters.age"),
    whole(crashes, "letters.crashes", 1000),
    length === undefined ? 0 : whole(length, "limits.length", 2 ** 31),
    choice(overflows, onFull, "limits.onFull"),
    ...limitArgs({ concurrency, rate }, "groups")
  ] as const
}
