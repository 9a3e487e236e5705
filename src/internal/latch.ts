/**
 * The client's half of the latch actor: what a countdown latch and a gate have in common. A membership hears of every
 * opening, so that waiting costs Redis nothing.
 */
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { type CoordinatorError, coordinatorError } from "./actor/errors.ts"
import { membership, millis, type Place } from "./hold/held.ts"
import type { WaitTimeout } from "./hold/loss.ts"

/** It exists with another count. */
export interface Mismatch {
  readonly existing: number
}

interface State {
  readonly left: number
  readonly opened: number
  readonly resets: number
  readonly epoch: number
}

const stateOf = ([_total, left, opened, resets, epoch]: ReadonlyArray<unknown>): State => ({
  left: Number(left),
  opened: Number(opened),
  resets: Number(resets),
  epoch: Number(epoch)
})

export class Latch<E> {
  readonly place: Place
  readonly total: number
  readonly keep: number

  readonly #fail: (reason: CoordinatorError | Mismatch) => E
  readonly #waiting = new Set<(result: Effect.Effect<void>) => void>()
  // What was counted here since the last reset, to be counted again if Redis forgets it.
  readonly #counted = new Map<string, { readonly by: number; readonly resets: number }>()
  // What is still to be counted again: tried again whenever the latch is looked at.
  readonly #owed = new Map<string, number>()
  #closed = false
  #state: State = { left: 0, opened: 0, resets: 0, epoch: 0 }

  constructor(place: Place, total: number, keep: Duration.Input, fail: (reason: CoordinatorError | Mismatch) => E) {
    this.place = place
    this.total = total
    this.keep = millis(keep, "keep")
    this.#fail = fail
  }

  /** Has it open for as long as the scope is. */
  join(): Effect.Effect<this, E, Scope.Scope> {
    const observation = {
      observe: (state: ReadonlyArray<unknown>) => this.#observe(stateOf(state)),
      closed: () => this.#close()
    }
    const left = Effect.addFinalizer(() => Effect.sync(() => this.#close()))
    const joined = Effect.flatMap(
      membership(
        this.place,
        "latch.join",
        this.total,
        undefined,
        (error: CoordinatorError | WaitTimeout) => this.#fail(error as CoordinatorError),
        { observation, details: [this.total, this.keep] }
      ),
      ([, outcome]) =>
        outcome[0] === "mismatch" ? Effect.fail(this.#fail({ existing: outcome[1] })) : Effect.succeed(this)
    )
    return Effect.andThen(left, joined)
  }

  // Nobody would tell who waits here any more.
  #close(): void {
    this.#closed = true
    for (const end of [...this.#waiting]) end(Effect.interrupt)
  }

  #observe(next: State): void {
    const known = this.#state
    if (next.epoch === known.epoch) {
      // A reply can be older than an event that came before it.
      if (next.opened + next.resets < known.opened + known.resets) return
    } else if (next.epoch < known.epoch) {
      return
    }
    this.#state = next
    for (const [id, { resets }] of this.#counted) {
      if (next.epoch === known.epoch && resets < next.resets) this.#counted.delete(id)
    }
    if (next.epoch !== known.epoch && known.epoch !== 0) {
      // Redis has forgotten it: what was counted is counted again, by the same ids, and what was open is opened.
      if (known.left === 0) this.#owed.set("open", this.total)
      else for (const [id, { by }] of this.#counted) this.#owed.set(id, by)
    } else if (next.resets > known.resets) {
      this.#owed.clear()
    }
    this.#restore()
    if (next.left === 0 || next.epoch === known.epoch && next.opened > known.opened) {
      for (const end of [...this.#waiting]) end(Effect.void)
    }
  }

  #restore(): void {
    for (const [id, by] of this.#owed) {
      this.#owed.delete(id)
      this.#request(id, by, () => {}, (error) => {
        this.#owed.set(id, by)
        this.place.partition.kernel.log("Warn", "a latch could not be restored yet", error as Error)
      })
    }
  }

  #request(
    id: string,
    by: number,
    done: (left: number) => void,
    failed: (error: CoordinatorError | Mismatch) => void
  ): void {
    this.place.partition.request({
      verb: "latch.count",
      key: this.place.key,
      args: [id, by, this.total, this.keep],
      settle: (reply) => {
        if (reply[0] === "mismatch") return failed({ existing: reply[1] })
        const [, ...state] = reply
        const { left, resets } = stateOf(state)
        // Before the state is looked at, which may be that of another epoch.
        if (left > 0) this.#counted.set(id, { by, resets })
        this.#observe(stateOf(state))
        done(left)
      },
      fail: failed
    })
  }

  /** Passes at once when it is open, and otherwise when it is opened, also if it is reset right after; or is interrupted. */
  readonly await: Effect.Effect<void> = Effect.callback((resume) => {
    if (this.#state.left === 0) return resume(Effect.void)
    if (this.#closed) return resume(Effect.interrupt)
    const end = (result: Effect.Effect<void>) => {
      this.#waiting.delete(end)
      resume(result)
    }
    this.#waiting.add(end)
    return Effect.sync(() => this.#waiting.delete(end))
  })

  /** Counts down, once for each id; answers what is left. */
  count(by: number, id: string = this.place.partition.kernel.uniqueId()): Effect.Effect<number, E> {
    return Effect.callback((resume) =>
      this.#request(
        id,
        by,
        (left) => resume(Effect.succeed(left)),
        (error) => resume(Effect.fail(this.#fail(error)))
      )
    )
  }

  get reset(): Effect.Effect<void, E> {
    return Effect.callback((resume) =>
      this.place.partition.request({
        verb: "latch.reset",
        key: this.place.key,
        args: [this.total, this.keep],
        settle: (reply) => {
          if (reply[0] === "mismatch") return resume(Effect.fail(this.#fail({ existing: reply[1] })))
          this.#observe(stateOf(reply.slice(1)))
          resume(Effect.void)
        },
        fail: (error) => resume(Effect.fail(this.#fail(error)))
      })
    )
  }

  /** What is left now, by Redis's word. */
  get left(): Effect.Effect<number, E> {
    const { key, partition } = this.place
    return Effect.map(
      Effect.tryPromise({
        try: () => partition.kernel.inspect(partition, { verb: "latch.state", key, args: [] }),
        catch: (cause) => this.#fail(coordinatorError(cause))
      }),
      // Not there for a moment after Redis has lost its data.
      (reply) => reply[0] === "missing" ? this.total : reply[1]
    )
  }
}
