/** What locks, read-write locks and semaphores ask for. */

import type { Acquire } from "../hold/acquire.ts"
import { patience } from "../hold/kept.ts"
import type { Place } from "../hold/place.ts"

/** To take a weight from a semaphore, now or in its turn. Its process may keep what is cached when it has released it. */
export const taking = <E, A>(
  place: Place,
  weight: number,
  capacity: number,
  wait: boolean,
  { fail, options, refuse }: Pick<Acquire<E, A>, "fail" | "options" | "refuse">
): Acquire<E, A> => {
  const { cached = false, release = "awaited" } = options ?? {}
  if (release !== "awaited" && release !== "background") {
    throw new RangeError(`\`release\` must be "awaited" or "background", not ${JSON.stringify(release)}`)
  }
  return {
    fail,
    options,
    refuse,
    place,
    verb: "semaphore.take",
    args: (anyway, again) => [weight, capacity, howOf(place, cached, !wait, anyway, again)],
    leave: "semaphore.release",
    cached,
    patience: wait ? undefined : patience,
    background: release === "background",
    weight,
    question: !wait
  }
}

// In milliseconds: longer than anything is kept. With a shorter lease, a process keeps nothing.
const shortestLease = 1000

/** To take a lock. */
export const locking = <E, A>(acquiring: Acquire<E, A>): Acquire<E, A> => ({
  ...acquiring,
  verb: "lock.take",
  args: argsOfLock,
  leave: "lock.release"
})

// One function for all locks: a hold keeps its claim.
function argsOfLock(this: Acquire<unknown, unknown>, anyway: boolean, again: boolean): [string] {
  const { cached, place, question } = this
  return [howOf(place, cached === true, question === true, anyway, again)]
}

const howOf = (
  { channel, key, tenancy }: Place,
  isCached: boolean,
  question: boolean,
  anyway: boolean,
  again: boolean
): string => {
  const keeps = isCached && channel.lease >= shortestLease && tenancy.kept.isReused(key)
  return `${question ? anyway ? "2" : "0" : "1"}${keeps ? "k" : ""}${again ? "a" : ""}`
}
