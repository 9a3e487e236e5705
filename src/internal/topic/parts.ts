/**
 * The shards of a topic, as this process knows them. It joins them, and takes part in each change of their number: all are
 * sealed, the first one before the others, and then opened. A process that observes a change brings it to its end.
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Scope from "effect/Scope"
import * as Semaphore from "effect/Semaphore"
import type { CoordinatorError } from "../actor/errors.ts"
import { join } from "../hold/acquire.ts"
import { describe } from "../hold/loss.ts"
import { type Place, placeIn, type Space } from "../hold/place.ts"
import { request } from "../hold/request.ts"
import type { Io } from "../io.ts"
import { again, fail, failing, type TopicError } from "./errors.ts"
import type { Element, Raw } from "./event.ts"
import { type Kept, type Report, Shard, shardsOf } from "./shard.ts"

export interface Home {
  readonly space: Space
  readonly name: string
  /** The partition of the first shard. */
  readonly first: number
  readonly lease: Duration.Input | undefined
}

/** How the topic is kept. */
type Limits = Kept extends readonly [number, ...infer Rest] ? Readonly<Rest> : never

type Group = readonly [name: string, ordered: number]

interface Sealed extends Report {
  /** A process has named the number of shards. */
  readonly isNamed: boolean
  readonly groups: ReadonlyArray<Group>
}

/** A number of shards that there was; ids that were published then are known for a while. */
export interface Former {
  readonly shards: number
  readonly until: number
}

type Setting = Pick<Report, "epoch" | "shards">

/** Whether all are in that epoch, and know of the same number of shards. */
const isSame = (reports: ReadonlyArray<Setting>, { epoch, shards }: Setting): boolean =>
  reports.every((report) => report.epoch === epoch && report.shards === shards)

/** Finalizers that are added to the scope stay there if all of it succeeds. */
const whole = <A, E>(scope: Scope.Scope, use: (own: Scope.Scope) => Effect.Effect<A, E>): Effect.Effect<A, E> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(Scope.fork(scope), (own) =>
      Effect.onExit(
        restore(use(own)),
        (exit) => Exit.isSuccess(exit) ? Effect.void : Scope.close(own, exit)
      ))
  )

/** The name of an event among all shards. */
export const nameOf = (shard: number, id: string): string => shard === 0 ? id : `${shard}:${id}`

export class Parts<A> {
  /** Of every shard that ever had events. */
  readonly all: Array<Shard<A>> = []
  /** The number of changes so far. */
  epoch = 0
  /** So many of them take in events now. */
  shards = 1
  former: ReadonlyArray<Former> = []
  /** Called after every change, when all shards are open. */
  readonly followers = new Set<() => void>()
  readonly #home: Home
  readonly #decode: (shard: number) => (raw: Raw) => Element<A>
  readonly #one = Semaphore.makeUnsafe(1)
  // As was decided last, as far as this process knows.
  #kept: Kept | undefined = undefined
  #scope: Scope.Scope | undefined = undefined
  #following = 0

  constructor(home: Home, decode: (shard: number) => (raw: Raw) => Element<A>) {
    this.#home = home
    this.#decode = decode
  }

  get io(): Io {
    return this.#home.space.kernel.io
  }

  /** Whether it is not known yet what the shards are. */
  get isChanging(): boolean {
    return this.#following > 0
  }

  placeAt(shard: number): Place {
    const { first, lease, name, space } = this.#home
    const { kernel } = space
    return placeIn(space, kernel.partitionAt((first + shard) % kernel.settings.partitions), "topic", name, lease)
  }

  /**
   * Joins the topic for as long as the scope is open, gives it so many shards, if that is said, and these limits, if it is to
   * decide about them.
   */
  open(limits: Limits, decides: boolean, wanted: number | undefined): Effect.Effect<void, TopicError, Scope.Scope> {
    return Effect.flatMap(Effect.scope, (scope) => whole(scope, (own) => this.#open(limits, decides, wanted, own)))
  }

  #open(
    limits: Limits,
    decides: boolean,
    wanted: number | undefined,
    scope: Scope.Scope
  ): Effect.Effect<void, TopicError> {
    return Effect.gen({ self: this }, function*() {
      this.#kept = [decides ? -1 : 0, ...limits]
      yield* this.#widen(1, wanted ?? 0, scope)
      const { epoch, former, kept, shards, width } = this.all[0]!.report!
      // Another process may decide later; then the limits are not to change back when this one joins again.
      this.#kept = kept
      this.epoch = epoch
      this.shards = shards
      this.#remember(former)
      yield* this.#widen(width, shards, scope)
      this.#scope = scope
      const isOne = isSame(this.all.map(({ report }) => report!), { epoch, shards })
      const isOpen = this.all.every(({ report }) => report!.isOpen && report!.width <= this.all.length)
      if (!isOne || !isOpen || wanted !== undefined && wanted !== shards) {
        yield* this.#settle(wanted)
      }
    })
  }

  // Those that are missing are joined, and are there together.
  #widen(width: number, shards: number, scope: Scope.Scope): Effect.Effect<void, TopicError> {
    const from = this.all.length
    const added = (own: Scope.Scope) =>
      Effect.forEach(Array.from({ length: Math.max(0, width - from) }), (_, at) => {
        const shard = new Shard(this.placeAt(from + at), this.#decode(from + at), this.#heard)
        const { feed, observer, place } = shard
        const joined = Effect.andThen(
          Effect.acquireRelease(Effect.sync(() => feed.open()), () => Effect.sync(() => feed.close())),
          join(place, {
            verb: "topic.join",
            args: () => [...this.#kept!, this.#scope === undefined ? shards : this.shards],
            observer,
            fail
          })
        )
        return Effect.as(Scope.provide(joined, own), shard)
      }, { concurrency: "unbounded" })
    return Effect.map(whole(scope, added), (shards) => void this.all.push(...shards))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Changes
  // -------------------------------------------------------------------------------------------------------------------

  readonly #heard = (epoch: number, shards = this.shards): void => {
    if (!isSame([{ epoch, shards }], this)) this.follow()
  }

  /** A shard is in another epoch: brings all of them to the last one. */
  follow(): void {
    if (this.#scope === undefined || this.#following > 1) return
    this.#following++
    const { kernel } = this.#home.space
    kernel.io.run(Effect.forkIn(
      Effect.onExit(Effect.retry(this.#settle(undefined), again), (exit) =>
        Effect.sync(() => {
          this.#following--
          if (Exit.isSuccess(exit)) { for (const changed of [...this.followers]) changed() }
          else if (!Exit.hasInterrupts(exit) && !kernel.isClosing()) {
            kernel.hooks.log(
              "Error",
              `the shards of ${describe("topic", this.#home.name, kernel.settings.namespace)} are not known`,
              exit.cause
            )
          }
        })),
      this.#scope
    ))
  }

  /** Brings all shards to the newest epoch, and to one with that number of shards, unless it was so meanwhile. */
  #settle(wanted: number | undefined): Effect.Effect<void, TopicError> {
    const settled = Effect.gen({ self: this }, function*() {
      let missing = wanted
      let isTorn = false
      for (;;) {
        const next: Setting = !isTorn && (missing === undefined || missing === this.shards)
          ? { epoch: this.epoch, shards: this.shards }
          : { epoch: this.epoch + 1, shards: missing ?? this.shards }
        // The first one decides, so that two processes that want other numbers do not meet half-way.
        const first = yield* this.#seal(0, { ...next, width: this.all.length })
        if (first.shards === missing) missing = undefined
        const found = yield* this.#sealAll(first)
        // In one epoch, the first one decides, unless it was lost and made again by a process that names no number.
        const last = found.reduce((last, report) =>
          report.epoch > last.epoch || report.epoch === last.epoch && !last.isNamed ? report : last
        )
        const width = Math.max(...found.map(({ width }) => width))
        // A shard that is added is kept as the others are.
        for (const { kept } of found) if (kept[0] > this.#kept![0]) this.#kept = kept
        yield* this.#widen(width, last.shards, this.#scope!)
        this.epoch = last.epoch
        this.shards = last.shards
        this.#remember(last.former)
        // Otherwise one has lost its data, or there was another change meanwhile. Two epochs of the same number, one of before the
        // loss, end with the next epoch.
        const isOne = isSame(found, last)
        isTorn = !isOne && found.every(({ epoch }) => epoch === last.epoch)
        if (isOne && found.length === width && (yield* this.#openAll(found)) && missing === undefined) return
      }
    })
    return this.#one.withPermit(failing(settled))
  }

  #seal(
    at: number,
    { epoch, shards, width }: Pick<Report, "epoch" | "shards" | "width">
  ): Effect.Effect<Sealed, CoordinatorError> {
    return Effect.map(
      request(this.placeAt(at), "topic.seal", [epoch, shards, width], { waits: true }),
      ([, epoch, shards, width, open, former, groups, kept]) => ({
        epoch,
        shards: shardsOf(shards),
        isNamed: shards > 0,
        width,
        isOpen: open === 1,
        former,
        kept: kept as Kept,
        groups: groups as ReadonlyArray<Group>
      })
    )
  }

  #sealAll(first: Sealed): Effect.Effect<ReadonlyArray<Sealed>, CoordinatorError> {
    return Effect.map(
      Effect.forEach(Array.from({ length: first.width - 1 }), (_, at) => this.#seal(at + 1, first), {
        concurrency: "unbounded"
      }),
      (others) => [first, ...others]
    )
  }

  // Answers whether all are in the epoch still.
  #openAll(sealed: ReadonlyArray<Sealed>): Effect.Effect<boolean, CoordinatorError> {
    const { epoch } = sealed[0]!
    const groups = JSON.stringify([...new Map(sealed.flatMap(({ groups }) => groups))])
    return Effect.map(
      Effect.forEach(sealed, ({ isOpen }, at) =>
        isOpen
          ? Effect.succeed(epoch)
          : Effect.map(request(this.placeAt(at), "topic.open", [epoch, groups], { waits: true }), ([, now]) => now), {
        concurrency: "unbounded"
      }),
      (epochs) => epochs.every((now) => now === epoch)
    )
  }

  #remember(former: unknown): void {
    const now = this.#home.space.kernel.io.now()
    this.former = (former as ReadonlyArray<readonly [number, number]>).map(([shards, left]) => ({
      shards,
      until: now + left
    }))
  }
}
