/**
 * The changes that this process observes of a resource that sends its members every change: one membership, however
 * many listen.
 */

import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Queue from "effect/Queue"
import * as Stream from "effect/Stream"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Kernel } from "../actor/kernel.ts"
import { Membership, type Observer } from "../hold/membership.ts"
import type { Place } from "../hold/place.ts"
import type { Timer } from "../io.ts"

/** A state of the resource. */
export interface State {
  /** The token of the change, or as of which the state was answered. */
  readonly change: number
}

export interface WatchOptions<S extends State> {
  readonly place: Place
  readonly verb: "sharedRef.join" | "counter.join"
  readonly parse: (told: ReadonlyArray<unknown>) => S
  readonly isSame: (a: S, b: S) => boolean
  /** It can change by itself: the alarms of the partition are this process's business. */
  readonly expires: boolean
}

/**
 * A state as a subscriber receives it, and how many before it were dropped since the last one, because the subscriber
 * was slow.
 */
export interface Heard<S> {
  readonly state: S
  readonly missed: number
}

interface Subscriber<S> {
  last: S | undefined
  epoch: number
  /** It came later than others, and Redis has not answered yet what it is told first: the states that came meanwhile. */
  early: Array<S> | undefined
  readonly next: (state: S) => void
  readonly fail: (error: CoordinatorError) => void
}

// Of a kernel, by the hash of the resource: those that have a membership.
const active = new WeakMap<Kernel, Map<string, Watch<any>>>()

/** How long a membership is kept that only cached reads use, since the last one. */
const idleMillis = 60_000

const ignore = () => {}

const none: ReadonlyArray<never> = []

export class Watch<S extends State> implements Observer {
  readonly #options: WatchOptions<S>
  readonly #subscribers = new Set<Subscriber<S>>()
  #member: Membership | undefined = undefined
  #unwatch = ignore
  /** The newest state that was received in this session. */
  latest: S | undefined = undefined
  // Changes of another session are not to be compared: Redis may have lost its data in between.
  #epoch = 0
  #idle: Timer | undefined = undefined
  #used = false
  // How old the newest state can be, by both clocks. Asked once in a turn of the event loop: that costs more than all the rest.
  #age: number | undefined = undefined

  private constructor(options: WatchOptions<S>) {
    this.#options = options
  }

  /** The one of the resource that has a membership, or a new one. */
  static of<S extends State>(options: WatchOptions<S>): Watch<S> {
    return Watch.active<S>(options.place) ?? new Watch(options)
  }

  /** The one of the resource that has a membership. */
  static active<S extends State>({ key, space: { kernel } }: Place): Watch<S> | undefined {
    return active.get(kernel)?.get(key) as Watch<S> | undefined
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Membership
  // -------------------------------------------------------------------------------------------------------------------

  #open(): void {
    if (this.#member !== undefined) return
    const { expires, place, verb } = this.#options
    const { key, partition, space: { kernel }, tenancy } = place
    let watches = active.get(kernel)
    if (watches === undefined) active.set(kernel, watches = new Map())
    watches.set(key, this)
    if (expires) this.#unwatch = partition.watch()
    const member = new Membership(kernel.nextId(), { place, verb, args: () => [] }, tenancy, this)
    this.#member = member
    member.settle = (outcome) => {
      if (outcome[0] === "failed") this.#fail(outcome[1])
    }
    tenancy.take(member)
  }

  #close(): void {
    const { key, space: { kernel } } = this.#options.place
    this.#member = undefined
    this.latest = undefined
    this.#unwatch()
    this.#unwatch = ignore
    this.#idle?.cancel()
    this.#idle = undefined
    active.get(kernel)?.delete(key)
  }

  #leaveIfUnused(): void {
    const member = this.#member
    if (member === undefined || this.#subscribers.size > 0 || this.#idle !== undefined) return
    this.#close()
    this.#options.place.tenancy.release(member, ignore)
  }

  #fail(error: CoordinatorError): void {
    this.#close()
    const subscribers = [...this.#subscribers]
    this.#subscribers.clear()
    for (const { fail } of subscribers) fail(error)
  }

  readonly observe = (told: ReadonlyArray<unknown>): void => {
    const state = this.#options.parse(told)
    // The answer comes through the mailbox, behind the changes that are under way.
    if (state.change < 0) return
    this.learn(state)
    for (const subscriber of this.#subscribers) this.#tell(subscriber, state)
  }

  readonly lost = (): void => {
    this.#epoch++
    this.latest = undefined
  }

  readonly closed = (): void => this.#fail(this.#options.place.channel.closedError())

  // -------------------------------------------------------------------------------------------------------------------
  // Cache
  // -------------------------------------------------------------------------------------------------------------------

  /** A state that this process knows before it comes with the mailbox: from a request of the session. */
  learn(state: S): void {
    // Otherwise it may be of a former session, and Redis may have forgotten it.
    if (this.#member?.state !== "held") return
    if (this.latest === undefined || state.change >= this.latest.change) this.latest = state
  }

  /** From now on it is kept, until it was not asked for a while. */
  keep(): void {
    this.#open()
    this.#used = true
    if (this.#member !== undefined && this.#idle === undefined) this.#expect()
  }

  #expect(): void {
    this.#idle = this.#options.place.space.kernel.io.after(idleMillis, () => {
      this.#idle = undefined
      if (this.#used) this.#expect()
      else this.#leaveIfUnused()
      this.#used = false
    })
  }

  /** The newest state, unless something may have changed so many milliseconds ago without an event so far. */
  fresh(maxAge: number): S | undefined {
    const member = this.#member
    const latest = this.latest
    if (latest === undefined || member === undefined || member.state !== "held") return undefined
    const session = member.session!
    if (session.lost !== undefined) return undefined
    if (this.#age === undefined) {
      const { io } = this.#options.place.space.kernel
      // The monotonic clock stands still while the machine is suspended, and the wall clock may be set.
      this.#age = Math.max(io.now() - session.heardAt, io.wall() - session.heardAtWall)
      this.#used = true
      io.defer(() => {
        this.#age = undefined
      })
    }
    return this.#age < maxAge ? latest : undefined
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Subscribe
  // -------------------------------------------------------------------------------------------------------------------

  #tell(subscriber: Subscriber<S>, state: S): void {
    const { early, epoch, last } = subscriber
    if (early !== undefined) return void early.push(state)
    if (last !== undefined && epoch === this.#epoch && state.change <= last.change) return
    subscriber.last = state
    subscriber.epoch = this.#epoch
    if (last === undefined || !this.#options.isSame(last, state)) subscriber.next(state)
  }

  #subscribe(subscriber: Subscriber<S>): void {
    this.#subscribers.add(subscriber)
    if (this.#member === undefined) this.#open()
    else this.#ask(this.#member, subscriber)
  }

  // The newest state that was received can be outdated: what is under way may be older than this subscription.
  #ask(member: Membership, subscriber: Subscriber<S>): void {
    const { place: { channel, key }, verb } = this.#options
    const { session } = channel
    // A session that comes later asks for all.
    if (session === undefined) return
    subscriber.early = []
    channel.outbox.request<"sharedRef.join" | "counter.join">({
      verb,
      key,
      args: [member.id],
      session,
      urgent: true,
      moot: () => {
        subscriber.early = undefined
      },
      settle: ([, ...told]) => {
        const early = subscriber.early ?? none
        subscriber.early = undefined
        const state = this.#options.parse(told)
        this.#tell(subscriber, { ...state, change: Math.abs(state.change) })
        // The mailbox can be faster than this reply. Of these states, and of those that come later, some are older.
        for (const state of early) this.#tell(subscriber, state)
      },
      fail: (error) => {
        this.#subscribers.delete(subscriber)
        subscriber.fail(error)
      }
    })
  }

  /** The present state, and then every change. So many wait for a slow subscriber; then the oldest is dropped, and counted. */
  static changes<S extends State, E>(
    watch: () => Watch<S>,
    buffer: number,
    fail: (error: CoordinatorError) => E
  ): Stream.Stream<Heard<S>, E> {
    return Stream.unwrap(
      Effect.map(
        Effect.acquireRelease(
          Effect.map(Queue.sliding<readonly [number: number, state: S], E | Cause.Done>(buffer), (queue) => {
            const self = watch()
            let number = 0
            const subscriber: Subscriber<S> = {
              last: undefined,
              epoch: 0,
              early: undefined,
              next: (state) => void Queue.offerUnsafe(queue, [++number, state]),
              fail: (error) => void Queue.failCauseUnsafe(queue, Cause.fail(fail(error)))
            }
            self.#subscribe(subscriber)
            return { queue, self, subscriber }
          }),
          ({ self, subscriber }) =>
            // It leaves in the background: Redis may not answer.
            Effect.sync(() => {
              self.#subscribers.delete(subscriber)
              self.#leaveIfUnused()
            })
        ),
        ({ queue }) => {
          let heard = 0
          return Stream.map(Stream.fromQueue(queue), ([number, state]) => {
            const missed = number - heard - 1
            heard = number
            return { state, missed }
          })
        }
      )
    )
  }
}
