/** What locks, read-write locks and semaphores ask for. */

import type { Acquire } from "./hold/acquire.ts"
import type { Place } from "./hold/place.ts"

/** To take a weight from a semaphore, now or in its turn. */
export const taking = <E, A>(
  place: Place,
  weight: number,
  capacity: number,
  wait: boolean,
  { fail, options, refuse }: Pick<Acquire<E, A>, "fail" | "options" | "refuse">
): Acquire<E, A> => {
  const { release = "awaited" } = options ?? {}
  if (release !== "awaited" && release !== "background") {
    throw new RangeError(`\`release\` must be "awaited" or "background", not ${JSON.stringify(release)}`)
  }
  return {
    fail,
    options,
    refuse,
    place,
    verb: "semaphore.take",
    args: (anyway, again) => [weight, capacity, `${wait ? "1" : anyway ? "2" : "0"}${again ? "a" : ""}`],
    leave: "semaphore.release",
    background: release === "background",
    weight,
    question: !wait
  }
}

// In milliseconds: the actor reckons that a process which dies has kept a lock for less.
const shortestLease = 1000

/** To take a lock, which its process may keep when it has released it. */
export const locking = <E, A>(acquiring: Acquire<E, A>, isCached: boolean): Acquire<E, A> => ({
  ...acquiring,
  verb: "lock.take",
  args: argsOfLock,
  leave: "lock.release",
  returns: "lock.return",
  cached: isCached
})

// One function for all locks: a hold keeps its claim.
function argsOfLock(this: Acquire<unknown, unknown>, anyway: boolean, again: boolean): [string] {
  const { cached, place: { channel, key, tenancy }, question } = this
  const wait = question !== true ? "1" : anyway ? "2" : "0"
  const keeps = cached === true && channel.lease >= shortestLease && tenancy.kept.isReused(key)
  return [`${wait}${keeps ? "k" : ""}${again ? "a" : ""}`]
}
