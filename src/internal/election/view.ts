/** An election as every process sees it: the leader, the candidates, and the changes. */

import * as Cause from "effect/Cause"
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as PubSub from "effect/PubSub"
import * as RcRef from "effect/RcRef"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import type * as Take from "effect/Take"
import type { CoordinatorReason } from "../actor/errors.ts"
import { join } from "../hold/acquire.ts"
import { type Process, processOf } from "../hold/holders.ts"
import type { Observer } from "../hold/membership.ts"
import type { InvalidPayload, Payload } from "../hold/payload.ts"
import type { Place } from "../hold/place.ts"
import { question } from "../hold/request.ts"
import { untilClosed } from "./callbacks.ts"

/** A process that leads, or waits to lead. */
export interface Candidate<A> extends Process {
  /** Of this candidature: another campaign of the same process has another. */
  readonly id: string
  readonly value: A
}

/** The process that leads. */
export interface Info<A> extends Candidate<A> {
  /** Larger than all terms before it: the fencing token. */
  readonly term: number
  /** By the clock of Redis, in whole seconds. */
  readonly since: DateTime.Utc
}

export type ViewFailure = CoordinatorReason | InvalidPayload

/** As an actor sends it: the id is empty while there is no leader. */
type State = readonly [change: number, term: string, id: string, since: number, about: unknown, value: unknown]

export class View<A, E> {
  readonly #place: Place
  readonly #codec: Payload<A>
  readonly #fail: (error: ViewFailure) => E
  readonly #changes: RcRef.RcRef<PubSub.PubSub<Take.Take<State, E>>, E>

  constructor(
    place: Place,
    codec: Payload<A>,
    fail: (error: ViewFailure) => E,
    changes: RcRef.RcRef<PubSub.PubSub<Take.Take<State, E>>, E>
  ) {
    this.#place = place
    this.#codec = codec
    this.#fail = fail
    this.#changes = changes
  }

  get leader(): Effect.Effect<Option.Option<Info<A>>, E> {
    return question(this.#place, "election.state", []).pipe(
      Effect.mapError(({ reason }) => this.#fail(reason)),
      Effect.flatMap(([, ...state]) => this.#info(state))
    )
  }

  get candidates(): Effect.Effect<ReadonlyArray<Candidate<A>>, E> {
    return question(this.#place, "election.candidates", []).pipe(
      Effect.mapError(({ reason }) => this.#fail(reason)),
      Effect.flatMap(([, candidates]) =>
        Effect.forEach(
          candidates as ReadonlyArray<readonly [id: string, about: unknown, value: unknown]>,
          ([id, about, value]) => this.#candidate(id, about, value)
        )
      )
    )
  }

  get changes(): Stream.Stream<Option.Option<Info<A>>, E> {
    const changes = Effect.map(RcRef.get(this.#changes), Stream.fromPubSubTake)
    // A ref interrupts a subscriber that comes after its scope is closed.
    const ended = Effect.catchCauseIf(changes, Cause.hasInterruptsOnly, () => Effect.succeed(Stream.empty))
    return Stream.unwrap(ended).pipe(Stream.mapEffect((state) => this.#info(state)))
  }

  #candidate(id: string, about: unknown, value: unknown): Effect.Effect<Candidate<A>, E> {
    return Effect.mapBoth(this.#codec.decode(value, valueOf(this.#place)), {
      onFailure: this.#fail,
      onSuccess: (decoded) => ({ id, ...processOf(about), value: decoded })
    })
  }

  #info([, term, id, since, about, value]: State): Effect.Effect<Option.Option<Info<A>>, E> {
    if (id === "") return Effect.succeedNone
    return Effect.map(
      this.#candidate(id, about, value),
      (candidate) => Option.some({ ...candidate, term: Number(term), since: DateTime.makeUnsafe(since * 1000) })
    )
  }
}

export const valueOf = ({ name }: Place): string => `The value of a candidate of election ${JSON.stringify(name)}`

/** The view of this process's observers: one membership, however many they are. */
export const view = <A, E>(
  place: Place,
  codec: Payload<A>,
  fail: (error: ViewFailure) => E
): Effect.Effect<View<A, E>, never, Scope.Scope> =>
  Effect.map(
    RcRef.make({ acquire: observing(place, fail) }),
    (changes) => new View(place, codec, fail, changes)
  )

const observing = Effect.fnUntraced(function*<E>(place: Place, fail: (error: ViewFailure) => E) {
  const seen = yield* untilClosed<State, E>({ replay: 1 })
  const inOrder = new InOrder(
    (state) => PubSub.publishUnsafe(seen, [state]),
    () => PubSub.publishUnsafe(seen, Exit.fail(fail(place.channel.closedError().reason)))
  )
  yield* join(place, { verb: "election.observe", args: () => [], waits: true, verified: true, observer: inOrder, fail })
  // The end of a leader's lease has to be noticed when it comes, and not some time later.
  yield* Effect.acquireRelease(Effect.sync(() => place.partition.watch()), (off) => Effect.sync(off))
  return seen
})

/** Every change once, in order: a change can be sent twice, and an answer can come behind a later change. */
class InOrder implements Observer {
  #last = 0
  // Redis may have lost its data, and its clock may be behind the one that has numbered the changes so far.
  #anew = false
  readonly #publish: (state: State) => void
  readonly closed: () => void

  constructor(publish: (state: State) => void, closed: () => void) {
    this.#publish = publish
    this.closed = closed
  }

  readonly observe = (told: ReadonlyArray<unknown>): void => {
    const state = told as unknown as State
    const [change] = state
    // 0: the answer comes through the mailbox.
    if (change === 0 || change === this.#last || change < this.#last && !this.#anew) return
    this.#last = change
    this.#anew = false
    this.#publish(state)
  }

  readonly lost = (): void => {
    this.#anew = true
  }
}
