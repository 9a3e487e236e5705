/** The offers of this process to a shard, as fibers wait for them: single ones, and many with one call. */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { Io } from "../io.ts"
import { fail, OfferUncertain, OutcomeUnknown, type QueueError, QueueFull } from "./errors.ts"
import type { Asker, Offered, Offerer, Wish } from "./offering.ts"

/** How many jobs `offerAll` encodes ahead of Redis, and together. */
export const mostAhead = 2048

/** For how many milliseconds it encodes them before the event loop goes on. */
export const longestTurn = 20

/** The jobs that were stored, of an array with holes for the others. */
export const storedOf = (offered: ReadonlyArray<Offered>): QueueFull["stored"] =>
  offered.flatMap((one, at) => [{ at, ...one }])

/** Bounds a wait. When the time is over, `late` decides, with the failure for that. */
export type Bound = (
  self: Effect.Effect<Offered, QueueError>,
  late: (timeout: Effect.Effect<never, QueueError>) => Effect.Effect<Offered, QueueError>
) => Effect.Effect<Offered, QueueError>

export class Offers {
  readonly #offerer: Offerer
  readonly #io: Io
  readonly #queue: { readonly name: string; readonly namespace: string }

  constructor(offerer: Offerer, io: Io, queue: { readonly name: string; readonly namespace: string }) {
    this.#offerer = offerer
    this.#io = io
    this.#queue = queue
  }

  #full(offered: ReadonlyArray<Offered>): QueueError {
    return fail(new QueueFull({ ...this.#queue, stored: storedOf(offered) }))
  }

  get #uncertain(): QueueError {
    return fail(new OfferUncertain(this.#queue))
  }

  #unknown(id: string): QueueError {
    return fail(new OutcomeUnknown({ ...this.#queue, id }))
  }

  #askerOf(resume: (result: Effect.Effect<Offered, QueueError>) => void, waits?: () => void): Asker {
    return {
      waiting: 0,
      ...waits && { waits },
      offered: (_, offered) => resume(offered === undefined ? Effect.fail(this.#uncertain) : Effect.succeed(offered)),
      full: () => resume(Effect.fail(this.#full([]))),
      unknown: (before) => resume(Effect.fail(this.#unknown(before))),
      failed: ({ reason }) => resume(Effect.fail(fail(reason)))
    }
  }

  /** `late` receives a job that Redis stored, or found, after the caller was interrupted. `waits` hears that the job waits for room. */
  one(wish: Wish, late?: (offered: Offered) => void, waits?: () => void): Effect.Effect<Offered, QueueError> {
    return Effect.callback((resume) => {
      const asker = this.#askerOf(resume, waits)
      const telling: Asker = late === undefined ? asker : {
        ...asker,
        offered: (at, offered) => {
          if (offered !== undefined && telling.gone === true) late(offered)
          else asker.offered(at, offered)
        }
      }
      this.#offerer.offer(wish, telling, 0)
      return Effect.sync(() => this.#offerer.withdraw(telling))
    })
  }

  /** Within a bound. A job that is under way when the time is over may be stored, so the answer about it is waited for. */
  oneWithin(wish: Wish, bound: Bound): Effect.Effect<Offered, QueueError> {
    return Effect.suspend(() => {
      let settled: Effect.Effect<Offered, QueueError> | "left" | undefined
      let tell = () => {}
      const settle = (result: Effect.Effect<Offered, QueueError> | "left") => {
        settled = result
        tell()
      }
      const asker: Asker = { ...this.#askerOf(settle), left: () => settle("left") }
      const asked = Effect.callback<Offered, QueueError>((resume) => {
        tell = () => resume(settled as Effect.Effect<Offered, QueueError>)
        this.#offerer.offer(wish, asker, 0)
        return Effect.sync(() => {
          tell = () => {}
          if (this.#offerer.withdraw(asker) > 0) settle("left")
        })
      })
      return bound(asked, (timeout) =>
        Effect.callback((resume) => {
          tell = () => resume(settled === "left" ? timeout : settled!)
          if (settled !== undefined) tell()
        }))
    })
  }

  /** Of jobs that come one after the other, until there is none. */
  each(next: () => Exit.Exit<Wish, QueueError> | undefined): Effect.Effect<ReadonlyArray<Offered>, QueueError> {
    return Effect.callback((resume) => {
      const asker = this.#each(next, resume)
      return Effect.sync(() => this.#offerer.withdraw(asker))
    })
  }

  // Jobs are encoded while Redis works on those before them.
  #each(
    next: () => Exit.Exit<Wish, QueueError> | undefined,
    resume: (result: Effect.Effect<ReadonlyArray<Offered>, QueueError>) => void
  ): Asker {
    const io = this.#io
    const results: Array<Offered> = []
    let [asked, answered, over, refused] = [0, 0, false, false]
    const end = (result: Effect.Effect<ReadonlyArray<Offered>, QueueError>) => {
      over = true
      resume(result)
      // Where it has failed, jobs may still wait to be offered.
      this.#offerer.withdraw(asker)
    }
    const count = () => {
      answered++
      if (answered < asked) return
      if (refused) end(Effect.fail(this.#full(results)))
      else if (encoder.ended) end(Effect.succeed(results))
    }
    const asker: Asker = {
      waiting: 0,
      offered: (at: number, offered: Offered | undefined) => {
        if (over) return
        if (offered === undefined) return end(Effect.fail(this.#uncertain))
        results[at] = offered
        count()
        if (!over && asked - answered === mostAhead / 2) io.defer(() => io.defer(feed))
      },
      // The error names the jobs that are stored, so it waits for the answers about all that were sent. No other job is sent.
      full: () => {
        if (over) return
        refused = true
        asked -= this.#offerer.withdraw(asker)
        count()
      },
      unknown: (before) => {
        if (!over) end(Effect.fail(this.#unknown(before)))
      },
      failed: ({ reason }) => {
        if (!over) end(Effect.fail(fail(reason)))
      }
    }
    const isOver = () => over || asker.gone === true
    const feed = () => {
      if (isOver() || encoder.ended) return
      try {
        const encoded = encoder.encode(mostAhead - asked + answered)
        if (encoded === undefined) return
        if (Exit.isFailure(encoded)) return end(Effect.failCause(encoded.cause))
        for (const wish of encoded.value) {
          // The others are refused with one of them.
          if (isOver()) return
          this.#offerer.offer(wish, asker, asked++)
        }
        if (!over && encoder.ended && answered === asked) end(Effect.succeed(results))
      } catch (cause) {
        end(Effect.die(cause))
      }
    }
    const encoder = encoderOf(io, next, feed)
    feed()
    return asker
  }
}

/** Lets the event loop go on while it encodes many jobs: then it answers `undefined`, and calls `again` in a later turn. */
const encoderOf = (io: Io, next: () => Exit.Exit<Wish, QueueError> | undefined, again: () => void) => {
  // One that does not fit has none of those stored that are encoded with it.
  let wishes: Array<Wish> = []
  let ended = false
  return {
    /** Whether all jobs are encoded. */
    get ended() {
      return ended
    },
    /** The next jobs, so many at most. */
    encode: (room: number): Exit.Exit<ReadonlyArray<Wish>, QueueError> | undefined => {
      const until = io.now() + longestTurn
      while (wishes.length < room) {
        const wish = next()
        ended = wish === undefined
        if (wish === undefined) break
        if (Exit.isFailure(wish)) return Exit.failCause(wish.cause)
        wishes.push(wish.value)
        if (io.now() > until && wishes.length < room) {
          io.after(0, again)
          return undefined
        }
      }
      const encoded = wishes
      wishes = []
      return Exit.succeed(encoded)
    }
  }
}
