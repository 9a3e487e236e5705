/** Shared refs by name, over the cells that read and write them. */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Stream from "effect/Stream"
import { checkName } from "../actor/keys.ts"
import { bounded, waitOf } from "../hold/acquire.ts"
import type { Outbox } from "../hold/following.ts"
import { duration, isNone, millis, placeOf, type Space } from "../hold/place.ts"
import { Recent } from "../hold/recent.ts"
import { spanning } from "../hold/span.ts"
import type { ChangesOptions, Options, SharedRef, UntilOptions } from "./api.ts"
import { Cell } from "./cell.ts"
import { fail, type SharedRefError } from "./errors.ts"
import { transaction } from "./transaction.ts"
import { Updates } from "./updates.ts"

// More versions than this wait for a slow subscriber only at the price of the oldest.
const mostBehind = 1024

// The cell of each ref, and what its writes publish.
type Inner = readonly [cell: Cell<any, SharedRefError>, outbox: Outbox<any>]

const inners = new WeakMap<object, Inner>()

const innerOf = (ref: SharedRef<any>): Inner => {
  const inner = inners.get(ref)
  if (inner === undefined) throw new TypeError("This SharedRef was not made by lockstep/SharedRef")
  return inner
}

// Of each coordinator, the refs that were named last, by their hash: programs that name the same one read and update it together.
const recent = new WeakMap<Space, Recent<Known>>()
const mostRecent = 1024

interface Known {
  readonly options: Options<any>
  readonly ref: SharedRef<any>
}

const isSame = (a: Options<any>, b: Options<any>): boolean =>
  a.schema === b.schema && Object.is(a.initial, b.initial) && a.timeToLive === b.timeToLive && a.colocate === b.colocate

/** The ref of that name. `what` says what the name is, for errors. */
export const of = <A>(space: Space, name: string, what: string, options: Options<A>): SharedRef<A> => {
  const { colocate, initial, schema, timeToLive } = options
  if (colocate !== undefined) checkName(colocate, "colocate")
  const place = placeOf(space, "sharedRef", name, what, undefined, colocate)
  let refs = recent.get(space)
  if (refs === undefined) recent.set(space, refs = new Recent(mostRecent))
  const known = refs.get(place.key)
  if (known !== undefined && isSame(known.options, options)) return known.ref
  const cell = new Cell<A, SharedRefError>({
    place,
    schema,
    initial,
    timeToLive: timeToLive === undefined ? 0 : millis(timeToLive, "timeToLive"),
    colocate,
    fail
  })
  const ref = withOutbox(cell, new Updates(cell), [])
  refs.add(place.key, { options, ref })
  return ref
}

// Verbs that write nothing.
const readingOf = <A>(cell: Cell<A, SharedRefError>) => {
  const { place, version, versioned } = cell
  const { settings: { lease } } = place.space.kernel
  const versions = (options?: ChangesOptions) => cell.versions(options?.conflate === true ? 1 : mostBehind)
  const changesWith = (options: ChangesOptions) => Stream.map(versions(options), ({ value }) => value)
  const changes = changesWith({})
  return {
    get: Effect.map(versioned, ({ value }) => value),
    versioned,
    version,
    cached: cell.cached(lease),
    cachedWithin: (maxAge: Duration.Input) =>
      Effect.suspend(() => {
        const age = isNone(maxAge) ? 0 : Duration.toMillis(duration(maxAge, "maxAge"))
        return cell.cached(Math.min(age, lease))
      }),
    changes,
    changesWith,
    versions,
    until: (predicate: (value: A) => boolean, options?: UntilOptions) => {
      const waiting = Effect.flatMap(
        Stream.runHead(Stream.filter(changes, predicate)),
        // Subscriptions end with an error only.
        Option.match({ onNone: () => Effect.interrupt, onSome: Effect.succeed })
      )
      return spanning(
        bounded(waiting, place, waitOf(place, options), fail),
        "lockstep.SharedRef.until",
        "sharedRef",
        place.name
      ) as Effect.Effect<any, SharedRefError>
    }
  }
}

const withOutbox = <A>(
  cell: Cell<A, SharedRefError>,
  updates: Updates<A, SharedRefError>,
  outbox: Outbox<A>
): SharedRef<A> => {
  const modify = <B>(f: (value: A) => readonly [B, A]) => updates.modify(f, outbox)
  const modifyEffect = <B, E, R>(f: (value: A) => Effect.Effect<readonly [B, Option.Option<A>], E, R>) =>
    cell.modifyEffect(f, outbox)
  const self: SharedRef<A> = {
    "~lockstep/SharedRef": "~lockstep/SharedRef",
    name: cell.place.name,
    ...readingOf(cell),
    publishing: (publish) => withOutbox(cell, updates, [...outbox, publish]),
    set: (value) => cell.set(value, outbox),
    getAndSet: (value) => cell.getAndSet(value, outbox),
    compareAndSet: (version, value) =>
      Effect.suspend(() => {
        if (!Number.isSafeInteger(version) || version < 0) {
          throw new RangeError("version must be a whole number from 0 on")
        }
        return cell.compareAndSet(version, value, outbox)
      }),
    setFenced: (lease, value) => cell.setFenced(lease, value, outbox),
    delete: cell.delete(outbox),
    update: (f) => modify((value) => [undefined, f(value)] as const),
    updateAndGet: (f) =>
      modify((value) => {
        const next = f(value)
        return [next, next]
      }),
    getAndUpdate: (f) => modify((value) => [value, f(value)]),
    modify,
    updateEffect: (f) =>
      modifyEffect((value) => Effect.map(f(value), (next) => [undefined, Option.some(next)] as const)),
    modifyEffect: (f) =>
      modifyEffect((value) => Effect.map(f(value), ([result, next]) => [result, Option.some(next)] as const))
  }
  inners.set(self, [cell, outbox])
  return self
}

/** As `modifyEffect`, and writes nothing if there is nothing to write. */
export const modifySomeEffect = <A, B, E, R>(
  ref: SharedRef<A>,
  f: (value: A) => Effect.Effect<readonly [B, Option.Option<A>], E, R>
): Effect.Effect<B, E | SharedRefError, R> =>
  Effect.suspend(() => {
    const [cell, outbox] = innerOf(ref)
    return cell.modifyEffect(f, outbox)
  })

// Each is a part of one call of Redis, which does nothing else meanwhile.
const mostTogether = 64

/** Changes refs together. They have to be in one partition. */
export const transacted = <B>(
  refs: ReadonlyArray<SharedRef<any>>,
  f: (values: ReadonlyArray<any>) => readonly [B, ReadonlyArray<any>]
): Effect.Effect<B, SharedRefError> =>
  Effect.suspend(() => {
    const inners = refs.map(innerOf)
    const all = inners.map(([cell]) => cell)
    const [first] = all
    if (first === undefined || all.length > mostTogether) throw new RangeError(`refs must be 1 to ${mostTogether}`)
    const { colocate, place: { partition } } = first
    if (new Set(all.map(({ place: { key } }) => key)).size < all.length) {
      throw new RangeError("refs must be different ones")
    }
    const apart = all.find((cell) => cell.place.partition !== partition || cell.colocate !== colocate)
    if (all.length > 1 && (colocate === undefined || apart !== undefined)) {
      throw new RangeError("refs of a transaction must have the same `colocate`, and be made with one coordinator")
    }
    return transaction(inners, f)
  })
