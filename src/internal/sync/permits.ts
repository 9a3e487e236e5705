/** The requests of locks, read-write locks and semaphores. */

import { type Acquire, releases } from "../hold/acquire.ts"
import { patience } from "../hold/kept.ts"
import { oneOf, type Place } from "../hold/place.ts"

type Asked<E, A> = Pick<Acquire<E, A>, "fail" | "options" | "refuse">

const acquiring = <E, A>(
  requests: Pick<Acquire<E, A>, "verb" | "args" | "leave">,
  place: Place,
  weight: number,
  wait: boolean,
  { fail, options, refuse }: Asked<E, A>
): Acquire<E, A> => ({
  fail,
  options,
  refuse,
  place,
  verb: requests.verb,
  args: requests.args,
  leave: requests.leave,
  cached: options?.cached === true,
  patience: wait ? undefined : patience,
  background: oneOf(options?.release ?? "awaited", "release", releases) === "background",
  weight,
  question: !wait
})

/** To take a weight from a semaphore, now or in its turn. Its process may keep what is cached when it has released it. */
export const taking = <E, A>(
  place: Place,
  weight: number,
  capacity: number,
  wait: boolean,
  asked: Asked<E, A>
): Acquire<E, A> => {
  const cached = asked.options?.cached === true
  const args = (anyway: boolean, again: boolean) => [weight, capacity, howOf(place, cached, !wait, anyway, again)]
  return acquiring({ verb: "semaphore.take", args, leave: "semaphore.release" }, place, weight, wait, asked)
}

/** To take a lock. */
export const locking = <E, A>(place: Place, wait: boolean, asked: Asked<E, A>): Acquire<E, A> =>
  acquiring(ofLocks, place, 1, wait, asked)

// One function for all locks: a hold keeps its claim.
function argsOfLock(this: Acquire<unknown, unknown>, anyway: boolean, again: boolean): [string] {
  const { cached, place, question } = this
  return [howOf(place, cached === true, question === true, anyway, again)]
}

const ofLocks = { verb: "lock.take", args: argsOfLock, leave: "lock.release" } as const

const howOf = (
  { channel, key, tenancy }: Place,
  isCached: boolean,
  question: boolean,
  anyway: boolean,
  again: boolean
): string => {
  const keeps = isCached && tenancy.kept.isWorthKeeping(key, channel.lease)
  return `${question ? anyway ? "2" : "0" : "1"}${keeps ? "k" : ""}${again ? "a" : ""}`
}
