/** Updates of one ref in one process: those that wait for the write that is under way are made by the next one, all at once. */

import type * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { Outbox } from "../hold/following.ts"
import { type Cell, type Reason, together, type Versioned, type Written } from "./cell.ts"
import { Turns } from "./turns.ts"

/** A function of the value, and the caller that waits for its result. */
interface Change<A, E> {
  readonly f: (value: A) => readonly [unknown, A]
  readonly outbox: Outbox<A>
  /** Of the caller: its span, and what else events are made with. */
  readonly context: Context.Context<never>
  readonly resume: (result: Effect.Effect<any, E>) => void
}

export class Updates<A, E> {
  readonly #cell: Cell<A, E>
  readonly #turns: Turns<E>
  #changes: Array<Change<A, E>> = []
  #changing = false
  // Those that are being made, and whether they were written.
  #inHand: ReadonlyArray<Change<A, E>> = []
  #written = false
  // So many of the next ones are made by themselves.
  #single = 0

  constructor(cell: Cell<A, E>) {
    this.#cell = cell
    this.#turns = new Turns(cell.place, (reason) => cell.options.fail(reason as Reason))
  }

  modify<B>(f: (value: A) => readonly [B, A], outbox: Outbox<A>): Effect.Effect<B, E> {
    return Effect.withFiber(({ context }) =>
      Effect.callback<B, E>((resume) => {
        const change: Change<A, E> = { f, outbox, context, resume }
        this.#changes.push(change)
        if (!this.#changing) this.#begin()
        return Effect.sync(() => {
          this.#changes = this.#changes.filter((other) => other !== change)
        })
      })
    )
  }

  #begin(): void {
    this.#changing = true
    const { io } = this.#cell.place.space.kernel
    io.defer(() => io.run(this.#change()).addObserver((exit) => this.#ended(exit)))
  }

  // What users do can end the fiber that does it for them all: it may interrupt that fiber, or be no effect.
  #ended(exit: Exit.Exit<void>): void {
    const changes = this.#inHand
    this.#inHand = []
    if (Exit.isFailure(exit)) {
      this.#turns.rest()
      this.#turns.end()
      if (changes.length > 1 && !this.#written) {
        // One of them is to blame.
        this.#changes.unshift(...changes)
        this.#single = changes.length
      } else {
        for (const { resume } of changes) resume(exit)
      }
    }
    this.#changing = false
    if (this.#changes.length > 0) this.#begin()
  }

  #change(): Effect.Effect<void> {
    return Effect.gen({ self: this }, function*() {
      while (this.#changes.length > 0) {
        const changes = this.#inHand = this.#changes.splice(0, this.#most)
        this.#written = false
        this.#turns.begin()
        yield* Effect.catchCause(
          this.#commit(changes),
          (cause) =>
            Effect.sync(() => {
              this.#turns.rest()
              this.#turns.end()
              for (const { resume } of changes) resume(Effect.failCause(cause))
            })
        )
        this.#inHand = []
      }
    })
  }

  /** So many are made at once. */
  get #most(): number {
    if (this.#single > 0) {
      this.#single--
      return 1
    }
    // Requests that follow a write are in the same call, which must not take long.
    const { maxBatch } = this.#cell.place.space.kernel.settings
    return this.#changes.some(({ outbox }) => outbox.length > 0) ? maxBatch : this.#changes.length
  }

  #update(base: number, { following, json }: Written) {
    const turns = this.#turns
    this.#written = true
    const more = this.#changes.length > 0 || turns.isLively
    const id = turns.present?.id ?? ""
    return this.#cell.write(
      "sharedRef.update",
      [id, String(base), json, this.#cell.options.timeToLive, more],
      (reply) => {
        if (reply[0] === "set") this.#cell.wrote(reply[1], json)
        if (reply[0] === "taken" || reply[0] === "set" && !reply[2]) turns.over()
      },
      { following }
    )
  }

  // Applies all, one after the other, and writes the result.
  #commit(changes: ReadonlyArray<Change<A, E>>): Effect.Effect<void, E> {
    const turns = this.#turns
    return Effect.gen({ self: this }, function*() {
      let base: Versioned<A> | undefined
      // The result of a function for an outdated value says nothing.
      let verified = true
      if (turns.present !== undefined || !turns.isContended) {
        const guess = this.#cell.guess
        verified = guess === undefined
        base = yield* (guess ?? this.#cell.versioned)
      }
      for (let conflicts = 0;;) {
        if (base === undefined) {
          const [version, value] = (yield* turns.next).payload as readonly [number, unknown]
          base = yield* this.#cell.decode(this.#cell.last = { version, parse: () => value })
          verified = true
        }
        const { failed, made, written } = yield* this.#apply(base.value, changes)
        if (failed.length > 0 && !verified) {
          const { version } = base
          base = yield* this.#cell.versioned
          verified = true
          if (base.version !== version) continue
        }
        const reply = written === undefined ? undefined : yield* this.#update(base.version, written)
        if (reply === undefined || reply[0] === "set") {
          turns.rest()
          // A fiber may go on at once, and ask for its next update.
          for (const [resume, result] of [...failed, ...made]) resume(result)
          return
        }
        verified = true
        base = reply[0] === "conflict" && (turns.present !== undefined || ++conflicts < 2)
          ? yield* this.#cell.decode(this.#cell.present(reply))
          : undefined
      }
    })
  }

  #apply(value: A, changes: ReadonlyArray<Change<A, E>>) {
    type Result = readonly [resume: Change<A, E>["resume"], result: Effect.Effect<unknown, E>]
    return Effect.gen({ self: this }, function*() {
      const made: Array<Result> = []
      const failed: Array<Result> = []
      // The last value, and what follows each of them.
      let written: Written | undefined
      let present = value
      for (const { context, f, outbox, resume } of changes) {
        const exit = yield* Effect.exit(
          Effect.suspend(() => {
            const [result, next] = f(present)
            const written = this.#cell.prepare(next, outbox)
            return Effect.map(
              outbox.length === 0 ? written : Effect.provideContext(written, context),
              (written) => ({ result, next, written })
            )
          })
        )
        if (Exit.isFailure(exit)) {
          failed.push([resume, exit])
        } else {
          const { following, json } = exit.value.written
          written = { json, following: together(written?.following, following) }
          present = exit.value.next
          made.push([resume, Effect.succeed(exit.value.result)])
        }
      }
      return { made, failed, written }
    })
  }
}
