/** The workers of a process at one queue: one for each of its shards. */

import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import type { CoordinatorError, CoordinatorReason } from "../actor/errors.ts"
import type { WaitTimeout } from "../hold/loss.ts"
import type { Slots } from "./slots.ts"

export interface Crew {
  /** How many jobs it runs at a time. */
  readonly size: number
  /** Handlers that have not ended, without handlers whose slot has gone to another job. */
  readonly running: number
  /** It has a session, so jobs can be delivered to it. */
  readonly ready: boolean
  /**
   * Calls the listener when jobs have come, when Redis knows the end of the last one, and with a new session. Answers how to end
   * that.
   */
  readonly listen: (listener: () => void) => () => void
  /** Works for as long as the scope is open. */
  readonly work: <E>(
    closed: () => void,
    fail: (error: CoordinatorReason | WaitTimeout) => E
  ) => Effect.Effect<void, E, Scope.Scope>
  /** Runs so many jobs at a time from now on. Handlers that run are not interrupted. */
  readonly resize: (size: number) => void
  /** Whether no job waits, and none is here or on its way. If jobs wait, listeners are called when none does any more. */
  readonly nothingWaits: Effect.Effect<boolean, CoordinatorError>
  /** Begins no more jobs. */
  readonly halt: () => void
  /** Begins no more jobs, and is given none. */
  readonly retire: () => void
  /**
   * Takes no more jobs, and lets handlers finish. After that many milliseconds, the other handlers are interrupted, and their
   * jobs return to the queue. Ends when all handlers have ended, and Redis knows of those that have finished, or has been away
   * for `requestTimeout`. A second call can make it end earlier.
   */
  readonly stop: (grace: number) => Effect.Effect<void>
}

/** The workers of several shards, which share their slots. */
export class Team implements Crew {
  readonly #slots: Slots
  readonly #workers: ReadonlyArray<Crew>

  constructor(slots: Slots, workers: ReadonlyArray<Crew>) {
    this.#slots = slots
    this.#workers = workers
  }

  get size(): number {
    return this.#slots.size
  }

  get running(): number {
    return this.#workers.reduce((sum, { running }) => sum + running, 0)
  }

  get ready(): boolean {
    return this.#workers.some(({ ready }) => ready)
  }

  readonly listen = (listener: () => void): () => void => {
    const ends = this.#workers.map((worker) => worker.listen(listener))
    return () => {
      for (const end of ends) end()
    }
  }

  work<E>(
    closed: () => void,
    fail: (error: CoordinatorReason | WaitTimeout) => E
  ): Effect.Effect<void, E, Scope.Scope> {
    return this.#each((worker) => worker.work(closed, fail))
  }

  resize(size: number): void {
    this.#slots.resize(size)
  }

  get nothingWaits(): Effect.Effect<boolean, CoordinatorError> {
    return Effect.map(
      Effect.forEach(this.#workers, (worker) => worker.nothingWaits, { concurrency: "unbounded" }),
      (answers) => answers.every((nothing) => nothing)
    )
  }

  halt(): void {
    for (const worker of this.#workers) worker.halt()
  }

  retire(): void {
    for (const worker of this.#workers) worker.retire()
  }

  stop(grace: number): Effect.Effect<void> {
    return this.#each((worker) => worker.stop(grace))
  }

  #each<E, R>(use: (worker: Crew) => Effect.Effect<void, E, R>): Effect.Effect<void, E, R> {
    return Effect.forEach(this.#workers, use, { concurrency: "unbounded", discard: true })
  }
}
