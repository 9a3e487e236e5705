/** Where the things of a coordinator live, and the coordinator as a service. */

import * as Context from "effect/Context"
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Schedule from "effect/Schedule"
import type * as Stream from "effect/Stream"
import type { Channel } from "../actor/channel.ts"
import type { Kernel, Partition } from "../actor/kernel.ts"
import { checkName } from "../actor/keys.ts"
import type { LossReason, Phase } from "../actor/session.ts"
import { millisIn } from "../io.ts"
import type { Kind, Resource } from "./claim.ts"
import { Recent } from "./recent.ts"
import { Tenancy } from "./tenancy.ts"

export interface SessionInfo {
  readonly partition: number
  readonly id: string | undefined
  readonly state: Phase
  readonly lease: Duration.Duration
  /** Holds, waits and memberships of this process under it. */
  readonly claims: number
}

export interface SessionTransition {
  readonly partition: number
  readonly id: string | undefined
  readonly from: Phase
  readonly to: Phase
  /** Why, when `to` is `lost`; see `Lease.LeaseLost`. */
  readonly reason: LossReason | undefined
}

export class Coordinator extends Context.Service<Coordinator, {
  readonly namespace: string
  readonly name: string
  /** How long a hold outlives the process that held it, at most. */
  readonly lease: Duration.Duration
  readonly margin: Duration.Duration
  /** The sessions of all partitions in use. */
  readonly sessions: Effect.Effect<ReadonlyArray<SessionInfo>>
  /** Transitions from now on. A subscriber that falls more than 16 per partition behind misses the oldest. */
  readonly changes: Stream.Stream<SessionTransition>
}>()("lockstep/Coordinator") {}

/** The runtime behind a coordinator, and what holds for everything that is made with it. */
export interface Space {
  readonly kernel: Kernel
  readonly places: Places
  readonly wait: Duration.Duration | undefined
  readonly maxHold: Duration.Duration | undefined
}

// Of each kind. A place is some hundred bytes.
const mostPlaces = 1024

/** The places that were named last: a name that is used again and again is checked and hashed once. */
export class Places {
  readonly #kinds = new Map<Kind, Recent<Place>>()

  get(kind: Kind, name: string): Place | undefined {
    return this.#kinds.get(kind)?.get(name)
  }

  add(place: Place): Place {
    const { kind, name } = place
    let places = this.#kinds.get(kind)
    if (places === undefined) this.#kinds.set(kind, places = new Recent(mostPlaces))
    return places.add(name, place)
  }
}

const spaces = new WeakMap<object, Space>()

export const register = (coordinator: object, space: Space): void => {
  spaces.set(coordinator, space)
}

/** The runtime behind a `Coordinator` service. */
export const spaceOf = (coordinator: object): Space => {
  const space = spaces.get(coordinator)
  if (space === undefined) throw new TypeError("This Coordinator was not made by lockstep/Coordinator")
  return space
}

/** A resource with a checked name, and where it lives. */
export interface Place extends Resource {
  readonly space: Space
  readonly partition: Partition
  readonly channel: Channel
  readonly tenancy: Tenancy
}

/** The channel to a partition, under the coordinator's lease or one of so many milliseconds. */
export const channelAt = ({ kernel }: Space, index: number, lease: number = kernel.settings.lease): Channel => {
  const partition = kernel.partitionAt(index)
  return kernel.channel(partition, lease, (made) => new Tenancy(kernel, partition, made))
}

/**
 * Where a resource lives, reached under the coordinator's lease or one of another length. Its name decides about the
 * partition, unless it is to be where others are.
 */
export const placeOf = (
  space: Space,
  kind: Kind,
  name: string,
  what: string,
  lease: Duration.Input | undefined = undefined,
  colocate: string | undefined = undefined
): Place => {
  const isUsual = lease === undefined && colocate === undefined
  const known = isUsual ? space.places.get(kind, name) : undefined
  if (known !== undefined) return known
  const partition = space.kernel.partitionFor(colocate ?? checkName(name, what))
  const place = placeIn(space, partition, kind, checkName(name, what), lease)
  return isUsual ? space.places.add(place) : place
}

/** As `placeOf`, in any partition. */
export const placeIn = (
  space: Space,
  partition: Partition,
  kind: Kind,
  name: string,
  lease: Duration.Input | undefined
): Place => {
  const channel = channelAt(space, partition.index, lease === undefined ? undefined : checkLease(lease))
  return {
    space,
    partition,
    channel,
    tenancy: channel.tenant as Tenancy,
    kind,
    name,
    key: `${partition.prefix}${kind}:${name}`,
    home: space.kernel.home,
    namespace: space.kernel.settings.namespace
  }
}

const checkLease = (input: Duration.Input): number => {
  const lease = Math.ceil(Duration.toMillis(duration(input, "lease")))
  if (!(lease >= 100 && lease <= 43_200_000)) throw new RangeError("lease must be from 100 to 43200000 milliseconds")
  return lease
}

export const duration = (input: Duration.Input, what: string): Duration.Duration => {
  const parsed = Option.getOrThrowWith(
    Duration.fromInput(input),
    () => new RangeError(`${what} must be a duration`)
  )
  if (!(Duration.toMillis(parsed) > 0)) throw new RangeError(`${what} must be longer than zero`)
  return parsed
}

// Some 30,000 years, in milliseconds: a duration that begins now ends at a time that a date can have.
const longest = 1e15

/** As whole milliseconds from 0 on, and not more than dates can count, however long it is. */
export const millisOf = (self: Duration.Duration): number =>
  Math.max(0, Math.min(Math.ceil(Duration.toMillis(self)), longest))

/** As whole milliseconds, where it ends. */
export const millis = (input: Duration.Input, what: string): number => {
  const parsed = duration(input, what)
  if (!Duration.isFinite(parsed)) throw new RangeError(`${what} must be finite`)
  return millisOf(parsed)
}

/** As `millis`; undefined for ever. */
export const millisOrEndless = (input: Duration.Input, what: string): number | undefined => {
  const parsed = duration(input, what)
  return Duration.isFinite(parsed) ? millisOf(parsed) : undefined
}

/** Whether a duration is as good as none. */
export const isNone = (input: Duration.Input): boolean => millisIn(input) === 0

/** As `millis`; 0 is allowed. */
export const millisFromNone = (input: Duration.Input, what: string): number => isNone(input) ? 0 : millis(input, what)

/** 0 for ever. */
export const lasting = (input: Duration.Input, what: string): number => {
  const parsed = duration(input, what)
  return Duration.isFinite(parsed) ? millis(parsed, what) : 0
}

/** A time, in milliseconds since 1970, and none before that. */
export const instant = (input: DateTime.DateTime.Input, what: string): number => {
  const time = Option.getOrThrowWith(DateTime.make(input), () => new RangeError(`${what} must be a time`))
  return Math.max(0, Math.ceil(DateTime.toEpochMillis(time)))
}

/** One of a few words. */
export const oneOf = <const A extends string>(value: A, what: string, among: ReadonlyArray<A>): A => {
  if (!among.includes(value)) throw new RangeError(`${what} must be one of ${among.join(", ")}`)
  return value
}

/** `true` or `false`: any other value would be one of them by accident. */
export const flag = (value: boolean, what: string): boolean => {
  if (typeof value !== "boolean") throw new RangeError(`${what} must be true or false`)
  return value
}

/** A function, if there is one. */
export const callback = <F>(value: F | undefined, what: string): F | undefined => {
  if (value !== undefined && typeof value !== "function") throw new RangeError(`${what} must be a function`)
  return value
}

/** The meaning of a word. */
export const choice = <const Word extends string, A>(
  table: { readonly [word in Word]: A },
  word: Word,
  what: string
): A => {
  oneOf(word, what, Object.keys(table) as Array<Word>)
  return table[word]
}

/** A schedule, or what makes one of something. */
export const scheduleOf = <S>(schedule: S): S => {
  if (!Schedule.isSchedule(schedule) && typeof schedule !== "function") throw new RangeError("retry must be a Schedule")
  return schedule
}

/** How a number of permits, parties or the like is chosen, where others have another one. */
export const mismatchPolicies = ["fail", "keep", "resize"] as const

/** The same, where only an expired session may have it open. */
export const firmly = { fail: "firm", keep: "kept", resize: "resize" } as const

/** A fencing token, as a lease has one. */
export const tokenOf = ({ token }: { readonly token: number }): number => {
  if (!Number.isSafeInteger(token) || token < 0) {
    throw new RangeError("token must be a whole number from 0 to 2 ** 53 - 1")
  }
  return token
}

export const whole = (value: number, what: string, most: number): number => {
  if (!Number.isInteger(value) || value < 1 || value > most) {
    throw new RangeError(`${what} must be a whole number from 1 to ${most}`)
  }
  return value
}
