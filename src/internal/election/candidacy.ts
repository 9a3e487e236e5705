/** An election object as a candidate: its terms, and how they end. */

import * as Effect from "effect/Effect"
import * as PubSub from "effect/PubSub"
import * as Stream from "effect/Stream"
import { surrender } from "../hold/acquire.ts"
import type { Hold } from "../hold/hold.ts"
import type { Place } from "../hold/place.ts"
import { type Callbacks, calling, type Transition, untilClosed } from "./callbacks.ts"

export class Candidacy {
  readonly transitions: Stream.Stream<Transition>
  readonly #place: Place
  readonly #tell: (transition: Transition) => void
  // Several fibers can lead one after the other, and the former one may still be ending.
  readonly #terms = new Set<Hold>()
  #closed = false

  constructor(place: Place, transitions: Stream.Stream<Transition>, tell: (transition: Transition) => void) {
    this.#place = place
    this.transitions = transitions
    this.#tell = tell
  }

  /** A term begins. Answers what is to be called when its effect has ended. */
  readonly begin = (term: Hold): () => void => {
    this.#terms.add(term)
    this.#tell({ _tag: "Acquired", lease: term })
    // It was waited for in a scope of its own, which may stay open.
    if (this.#closed) void this.#place.space.kernel.io.run(surrender(this.#place, [term], "closed"))
    const lost = () => this.#tell({ _tag: "Lost", lease: term, reason: term.loss ?? "resigned" })
    term.onLoss(lost)
    return () => {
      this.#terms.delete(term)
      term.offLoss(lost)
      if (term.loss === undefined) lost()
    }
  }

  /** The term that it believes to lead in. */
  get term(): Hold | undefined {
    for (const term of this.#terms) {
      term.session?.expireIfDue()
      if (term.active) return term
    }
    return undefined
  }

  get resign(): Effect.Effect<void> {
    return this.#end("resigned")
  }

  get close(): Effect.Effect<void> {
    return Effect.suspend(() => {
      this.#closed = true
      return this.#end("closed")
    })
  }

  #end(reason: "resigned" | "closed"): Effect.Effect<void> {
    return Effect.suspend(() => {
      const { channel, key, tenancy } = this.#place
      // A leadership that is kept is between two terms.
      if (!tenancy.kept.surrenderResting(key)) return surrender(this.#place, [...this.#terms], reason)
      return Effect.promise(() => channel.settled())
    })
  }
}

/** For as long as the scope is open: then its terms end, and their observers are notified before they end. */
export const candidacy = Effect.fnUntraced(function*<R>(place: Place, callbacks: Callbacks<R>) {
  const transitions = yield* untilClosed<Transition>()
  const call = yield* calling(place, callbacks)
  const made = new Candidacy(place, Stream.fromPubSubTake(transitions), (transition) => {
    PubSub.publishUnsafe(transitions, [transition])
    call(transition)
  })
  yield* Effect.addFinalizer(() => made.close)
  return made
})
