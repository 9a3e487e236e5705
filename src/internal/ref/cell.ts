/** The client's half of the shared-ref actor. */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import type * as Schema from "effect/Schema"
import * as Stream from "effect/Stream"
import type { CoordinatorError, CoordinatorReason } from "../actor/errors.ts"
import { keyOf } from "../actor/keys.ts"
import type { Requests } from "../actor/lua.ts"
import type { Request } from "../actor/sending.ts"
import { foreign } from "../actor/transport.ts"
import { followingOf, type Outbox, publicationsOf } from "../hold/following.ts"
import { isKnownLost, isOver, type Lease } from "../hold/hold.ts"
import { type InvalidPayload, type Payload, payload } from "../hold/payload.ts"
import { type Place, tokenOf } from "../hold/place.ts"
import { read, request } from "../hold/request.ts"
import { StaleToken, WriteUncertain } from "../hold/unwritten.ts"
import { type State, Watch } from "./watch.ts"

export type Reason = CoordinatorReason | InvalidPayload | StaleToken | WriteUncertain

export interface Versioned<out A> {
  readonly value: A
  readonly version: number
}

export interface CellOptions<A, E> {
  readonly place: Place
  readonly schema: Schema.Codec<A, any>
  readonly initial: A
  /** In milliseconds; 0 for none. */
  readonly timeToLive: number
  /** Refs of one partition can change together. */
  readonly colocate: string | undefined
  readonly fail: (reason: Reason) => E
}

/** As members receive it: the value is parsed, and not decoded. */
interface Told extends State {
  readonly version: number
  readonly value: unknown
}

/** A value that is to be decoded when it is needed. */
export interface Raw {
  readonly version: number
  readonly parse: () => unknown
}

/** A value as it is written, and what is executed with that. */
export interface Written {
  readonly json: string
  readonly following: Following
}

export type Following = ReadonlyArray<Request> | undefined

type WriteVerb =
  | "sharedRef.commit"
  | "sharedRef.compareAndSet"
  | "sharedRef.delete"
  | "sharedRef.fence"
  | "sharedRef.set"
  | "sharedRef.update"

const toldOf = ([change, version, value]: ReadonlyArray<unknown>): Told => ({
  change: Number(change),
  version: Number(version),
  value
})

// "<version> <until> <JSON>"; absent, it has version 0.
const rawOf = (text: string | null): Raw => {
  if (text === null) return { version: 0, parse: () => null }
  const first = text.indexOf(" ")
  return {
    version: first > 0 ? Number(text.slice(0, first)) : Number.NaN,
    parse: () => JSON.parse(text.slice(text.indexOf(" ", first + 1) + 1))
  }
}

const uncertain = () => ["uncertain"] as const

// No token: this process knows by itself that its lease is lost.
const unseen = 0

export class Cell<A, E> {
  readonly place: Place
  readonly colocate: string | undefined
  readonly options: CellOptions<A, E>
  readonly #payload: Payload<A>
  readonly #valueKey: string
  readonly #what: string
  // The value that was decoded last, and as a result: a version has one value.
  #decoded: Versioned<A>
  #exit: Exit.Exit<A>
  // The version that this process has seen or written last: an update tries that first.
  last: Raw | undefined = undefined
  #watch: Watch<Told> | undefined = undefined

  constructor(options: CellOptions<A, E>) {
    const { initial, place, schema } = options
    this.place = place
    this.colocate = options.colocate
    this.options = options
    this.#payload = payload(schema, place)
    this.#valueKey = keyOf(place.key, "value")
    this.#what = `The value of shared ref ${JSON.stringify(place.name)}`
    this.#decoded = { version: 0, value: initial }
    this.#exit = Exit.succeed(initial)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Values
  // -------------------------------------------------------------------------------------------------------------------

  readonly #failed = ({ reason }: CoordinatorError): E => this.options.fail(reason)

  #encode(value: A): Effect.Effect<string, E> {
    return Effect.mapError(this.#payload.encode(value, this.#what), this.options.fail)
  }

  /** The data of a write. `tag` is that of the reply to the write. */
  prepare(value: A, outbox: Outbox<A>, tag = "set"): Effect.Effect<Written, E> {
    const encoded = this.#encode(value)
    if (outbox.length === 0) return Effect.map(encoded, (json) => ({ json, following: undefined }))
    return Effect.flatMap(
      encoded,
      (json) => Effect.map(this.#following(value, outbox, tag), (following) => ({ json, following }))
    )
  }

  #following(value: A, outbox: Outbox<A>, tag: string): Effect.Effect<Following> {
    if (outbox.length === 0) return Effect.succeed(undefined)
    return Effect.map(publicationsOf(outbox, value), (publications) => followingOf(this.place, publications, tag))
  }

  decode({ parse, version }: Raw): Effect.Effect<Versioned<A>, E> {
    if (version === this.#decoded.version) return Effect.succeed(this.#decoded)
    if (version === 0) return Effect.succeed({ version, value: this.options.initial })
    return Effect.suspend(() => {
      let json: unknown
      try {
        json = parse()
      } catch {
        return this.#foreign()
      }
      return Effect.mapBoth(this.#payload.decode(json, this.#what), {
        onFailure: this.options.fail,
        onSuccess: (value) => {
          this.#exit = Exit.succeed(value)
          return this.#decoded = { version, value }
        }
      })
    })
  }

  /** The version that an update tries first: the one that was seen last, though it may be outdated. */
  get guess(): Effect.Effect<Versioned<A>, E> | undefined {
    const told = Watch.active<Told>(this.place)?.latest
    const last = this.last
    const newest = told !== undefined && told.version >= (last?.version ?? 0) ? fromTold(told) : last
    return newest &&
      Effect.matchEffect(this.decode(newest), { onFailure: () => this.versioned, onSuccess: Effect.succeed })
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Read
  // -------------------------------------------------------------------------------------------------------------------

  /** By Redis's word. */
  get versioned(): Effect.Effect<Versioned<A>, E> {
    return this.#read((raw) => this.decode(raw))
  }

  /** That of a value which no schema may fit any more, too. */
  get version(): Effect.Effect<number, E> {
    return this.#read(({ version }) => Effect.succeed(version))
  }

  #read<B>(use: (raw: Raw) => Effect.Effect<B, E>): Effect.Effect<B, E> {
    return Effect.matchEffect(read(this.place, this.#valueKey), {
      onFailure: (error) => Effect.fail(this.#failed(error)),
      onSuccess: (text) => {
        const raw = rawOf(text)
        return Number.isSafeInteger(raw.version) ? use(this.last = raw) : this.#foreign()
      }
    })
  }

  #foreign(): Effect.Effect<never, E> {
    return Effect.fail(this.#failed(foreign("sharedRef.get", this.place.key)))
  }

  /** The value that was received last, if nothing can have changed since so many milliseconds; else by Redis's word. */
  cached(maxAge: number): Effect.Effect<A, E> {
    return Effect.suspend(() => {
      const told = (this.#watch ?? Watch.active<Told>(this.place))?.fresh(maxAge)
      if (told === undefined) {
        this.#watch = this.#watching()
        this.#watch.keep()
        return Effect.map(this.versioned, ({ value }) => value)
      }
      if (told.version === this.#decoded.version) return this.#exit
      return Effect.map(this.decode(fromTold(told)), ({ value }) => value)
    })
  }

  readonly #watching = (): Watch<Told> =>
    this.#watch = Watch.of<Told>({
      place: this.place,
      verb: "sharedRef.join",
      parse: toldOf,
      isSame: (a, b) => a.version === b.version,
      expires: this.options.timeToLive > 0
    })

  versions(buffer: number): Stream.Stream<Versioned<A> & { readonly missed: number }, E> {
    return Stream.mapEffect(
      Watch.changes(this.#watching, buffer, this.#failed),
      ({ missed, state }) => Effect.map(this.decode(fromTold(state)), (versioned) => ({ ...versioned, missed }))
    )
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Write
  // -------------------------------------------------------------------------------------------------------------------

  // A second time it could undo what others have written since, so no other session repeats it.
  write<V extends WriteVerb>(
    verb: V,
    args: Requests[V]["args"],
    answered?: (reply: Requests[V]["reply"]) => void,
    { following, lapsed, others }: {
      readonly others?: ReadonlyArray<string>
      readonly following?: Following
      readonly lapsed?: () => Requests[V]["reply"] | undefined
    } = {}
  ): Effect.Effect<Requests[V]["reply"], E> {
    const { name, kind, space: { kernel: { settings: { namespace } } } } = this.place
    const asked = request<V, Requests[V]["reply"] | readonly ["uncertain"]>(this.place, verb, args, {
      moot: uncertain,
      answered,
      lapsed,
      others,
      following
    })
    return Effect.matchEffect(asked, {
      onFailure: (error) => Effect.fail(this.#failed(error)),
      onSuccess: (reply) =>
        reply[0] === "uncertain"
          ? Effect.fail(this.options.fail(new WriteUncertain({ kind, name, namespace })))
          : Effect.succeed(reply as Requests[V]["reply"])
    })
  }

  // In order with the events of the session.
  wrote(version: number, json: string): void {
    this.last = { version, parse: () => JSON.parse(json) }
    Watch.active<Told>(this.place)?.learn({ change: version, version, value: JSON.parse(json) })
  }

  #set(value: A, outbox: Outbox<A>, former: boolean): Effect.Effect<Requests["sharedRef.set"]["reply"], E> {
    return Effect.flatMap(this.prepare(value, outbox, former ? "replaced" : "set"), ({ following, json }) => {
      const args = [json, this.options.timeToLive, former] as [string, number, boolean]
      return this.write("sharedRef.set", args, (reply) => this.wrote(reply[1], json), { following })
    })
  }

  set(value: A, outbox: Outbox<A>): Effect.Effect<void, E> {
    return Effect.asVoid(this.#set(value, outbox, false))
  }

  getAndSet(value: A, outbox: Outbox<A>): Effect.Effect<A, E> {
    return Effect.flatMap(this.#set(value, outbox, true), (reply) => {
      if (reply[0] !== "replaced") return Effect.die(new Error("a ref did not answer its former value"))
      const [, , version, former] = reply
      return Effect.map(this.decode({ version, parse: () => former }), ({ value }) => value)
    })
  }

  setFenced(lease: Pick<Lease, "key" | "kind" | "token">, value: A, outbox: Outbox<A>): Effect.Effect<void, E> {
    return Effect.flatMap(this.prepare(value, outbox), ({ following, json }) => {
      const { key, kind } = lease
      const token = tokenOf(lease)
      if (isKnownLost(lease)) return this.#stale(token, unseen)
      const lapsed = () => isOver(lease) ? ["fenced", unseen] as const : undefined
      const args = [json, this.options.timeToLive, `${kind}:${key}`, token] as [string, number, string, number]
      return Effect.flatMap(
        this.write("sharedRef.fence", args, (reply) => {
          if (reply[0] === "set") this.wrote(reply[1], json)
        }, { following, lapsed }),
        ([tag, seen]) => tag === "set" ? Effect.void : this.#stale(token, seen)
      )
    })
  }

  #stale(token: number, seen: number): Effect.Effect<never, E> {
    const { kind, name, namespace } = this.place
    const about = { kind, name, namespace, token, seen: seen === unseen ? undefined : seen }
    return Effect.fail(this.options.fail(new StaleToken(about)))
  }

  /** Its value is the initial one then. */
  delete(outbox: Outbox<A>): Effect.Effect<boolean, E> {
    const following = Effect.suspend(() => this.#following(this.options.initial, outbox, "deleted"))
    return Effect.flatMap(following, (following) =>
      Effect.map(
        this.write(
          "sharedRef.delete",
          [],
          ([, change]) => {
            this.last = undefined
            Watch.active<Told>(this.place)?.learn({ change, version: 0, value: null })
          },
          { following }
        ),
        ([tag]) => tag === "deleted"
      ))
  }

  /** Answers what stands there instead, if that is another version. */
  replace(expected: number, { following, json }: Written): Effect.Effect<Raw | undefined, E> {
    return Effect.map(
      this.write("sharedRef.compareAndSet", [String(expected), json, this.options.timeToLive], (reply) => {
        if (reply[0] === "set") this.wrote(reply[1], json)
      }, { following }),
      (reply) => reply[0] === "set" ? undefined : this.present(reply)
    )
  }

  present([, version, value]: readonly ["conflict", number, unknown]): Raw {
    return this.last = { version, parse: () => value }
  }

  compareAndSet(expected: number, value: A, outbox: Outbox<A>): Effect.Effect<boolean, E> {
    return Effect.flatMap(
      this.prepare(value, outbox),
      (written) => Effect.map(this.replace(expected, written), (present) => present === undefined)
    )
  }

  /** Reads, and writes what the effect has made of that, if it has made something; again when it was outdated meanwhile. */
  modifyEffect<B, E2, R>(
    f: (value: A) => Effect.Effect<readonly [B, Option.Option<A>], E2, R>,
    outbox: Outbox<A>
  ): Effect.Effect<B, E | E2, R> {
    const attempt = ({ value, version }: Versioned<A>): Effect.Effect<B, E | E2, R> =>
      Effect.flatMap(Effect.suspend(() => f(value)), ([result, next]) => {
        if (Option.isNone(next)) return Effect.succeed(result)
        return Effect.flatMap(this.prepare(next.value, outbox), (written) =>
          Effect.flatMap(
            this.replace(version, written),
            (present): Effect.Effect<B, E | E2, R> =>
              present === undefined ? Effect.succeed(result) : Effect.flatMap(this.decode(present), attempt)
          ))
      })
    return Effect.flatMap(this.versioned, attempt)
  }
}

const fromTold = ({ value, version }: Told): Raw => ({ version, parse: () => value })

export const together = (some: Following, more: Following): Following =>
  some === undefined || more === undefined ? some ?? more : [...some, ...more]
