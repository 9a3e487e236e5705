/** Additions to a counter that are summed up here: one request for all that come within a bound, and one under way. */

import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import { describe } from "../hold/loss.ts"
import type { Place } from "../hold/place.ts"
import type { Timer } from "../io.ts"

export interface SumsOptions<E> {
  readonly place: Place
  /** In milliseconds; 0 for none. */
  readonly timeToLive: number
  /** How long an addition waits for others, in milliseconds. */
  readonly bound: number
  readonly fail: (error: CoordinatorError) => E
  readonly exceeded: (by: number, value: number) => E
}

interface Flush<E> {
  /** Of the sum that has to be in Redis. */
  readonly number: number
  readonly resume: (result: Effect.Effect<void, E>) => void
}

// A request that was refused, for the load or a missing permission, is made again after this time, in ms.
const pause = 1000

export class Sums<E> {
  readonly #options: SumsOptions<E>
  // Redis adds each number of a source once, in any session.
  readonly #source: string
  #number = 0
  #sum = 0
  #sending = 0
  #isSending = false
  #timer: Timer | undefined = undefined
  // The bound of the first addition that was not sent is over.
  #isDue = false
  #closed = false
  // Nothing is added any more.
  #isOver = false
  // While it is being closed: how long it waits, by the clock of the kernel.
  #until = Number.POSITIVE_INFINITY
  // Nothing waits for what is being sent any more, and if the coordinator was closed, it is not made again.
  #end: E | undefined = undefined
  #refusal: E | undefined = undefined
  #flushes: Array<Flush<E>> = []

  constructor(options: SumsOptions<E>) {
    this.#options = options
    this.#source = options.place.space.kernel.uniqueId()
  }

  get pending(): number {
    return this.#sum + this.#sending
  }

  add(by: number): void {
    const { kind, name, namespace } = this.#options.place
    if (this.#isOver) {
      throw new Error(
        `The scope of these additions to ${describe(kind, name, namespace)} is closed: nothing sends them`
      )
    }
    const sum = this.#sum + by
    // Both parts are exact; the rest goes with the next sum.
    if (!Number.isSafeInteger(sum)) throw new RangeError("additions that wait to be sent must be exact in sum")
    this.#sum = sum
    this.#timer ??= this.#options.place.space.kernel.io.after(this.#options.bound, () => {
      this.#isDue = true
      this.#send()
    })
  }

  // A sum that is due while another is under way goes when that is answered.
  #send(): void {
    if (this.#isSending) return
    this.#timer?.cancel()
    this.#timer = undefined
    this.#isDue = false
    if (this.#sum === 0) return this.#settle()
    this.#isSending = true
    this.#number++
    this.#sending = this.#sum
    this.#sum = 0
    this.#request()
  }

  // Bound to no session, it goes to the next one when its own is lost.
  #request(): void {
    const { place: { channel, key, kind, name, space: { kernel } }, timeToLive } = this.#options
    channel.outbox.request<"counter.add">({
      verb: "counter.add",
      key,
      args: [this.#sending, timeToLive, this.#source, this.#number],
      urgent: true,
      settle: (reply) => {
        if (reply[0] === "exceeds") {
          this.#refusal = this.#options.exceeded(this.#sending, reply[1])
          const what = describe(kind, name, kernel.settings.namespace)
          kernel.hooks.log("Error", `additions to ${what} were dropped`, this.#refusal)
        }
        this.#sent()
      },
      fail: (error) => {
        const what = describe(kind, name, kernel.settings.namespace)
        if (kernel.isClosing()) {
          kernel.hooks.log("Error", `additions of ${this.pending} to ${what} may be lost`, error)
          return this.#fail(error)
        }
        kernel.hooks.log("Warn", `additions to ${what} are sent again in a moment`, error)
        if (kernel.io.now() + pause > this.#until) this.#fail(error)
        kernel.io.after(pause, () => this.#request())
      },
      expire: (error) => {
        if (Number.isFinite(this.#until)) this.#fail(error)
      }
    })
  }

  #sent(): void {
    this.#isSending = false
    this.#sending = 0
    this.#settle()
    if (this.#closed || this.#isDue || this.#flushes.length > 0) this.#send()
  }

  // Between two sums.
  #settle(): void {
    // A flush waits for the next sum, which has nothing left to send if its additions cancel out.
    const done = this.#sum === 0 ? this.#number + 1 : this.#number
    const refusal = this.#refusal
    const settled = this.#flushes.filter(({ number }) => number <= done)
    this.#flushes = this.#flushes.filter(({ number }) => number > done)
    if (settled.length > 0) this.#refusal = undefined
    for (const { resume } of settled) resume(refusal === undefined ? Effect.void : Effect.fail(refusal))
  }

  #fail(error: CoordinatorError): void {
    this.#closed = true
    const end = this.#options.fail(error)
    this.#end = end
    for (const { resume } of this.#flushes.splice(0)) resume(Effect.fail(end))
  }

  readonly flush: Effect.Effect<void, E> = Effect.callback((resume) => {
    if (this.#end !== undefined) return resume(Effect.fail(this.#end))
    const number = this.#number + (this.#sum === 0 ? 0 : 1)
    const flush: Flush<E> = { number, resume }
    this.#flushes.push(flush)
    this.#send()
    return Effect.sync(() => {
      this.#flushes = this.#flushes.filter((other) => other !== flush)
    })
  })

  /**
   * Sends the rest, waits for it for no longer than a request may take, and has Redis forget the source. A sum that Redis has not
   * answered by then goes on for as long as the coordinator is open.
   */
  readonly close: Effect.Effect<void> = Effect.suspend(() => {
    const { place: { channel, key, space: { kernel } } } = this.#options
    this.#isOver = true
    this.#timer?.cancel()
    const patience = channel.patience()
    if (patience === 0) {
      this.#closed = true
      this.#send()
      return Effect.void
    }
    this.#until = kernel.io.now() + patience
    const late = Effect.callback<void>((resume) => {
      const timer = kernel.io.after(patience, () => {
        this.#closed = true
        this.#send()
        resume(Effect.void)
      })
      return Effect.sync(timer.cancel)
    })
    const ended = Effect.andThen(
      Effect.ignore(this.flush),
      Effect.callback<void>((resume) => {
        this.#closed = true
        if (this.#number === 0 || this.#end !== undefined || kernel.isClosing()) return resume(Effect.void)
        const done = () => resume(Effect.void)
        channel.outbox.request<"counter.forget">({
          verb: "counter.forget",
          key,
          args: [this.#source],
          urgent: true,
          settle: done,
          fail: done,
          expire: done
        })
      })
    )
    // Otherwise the answers expire together with those of others.
    return patience < kernel.settings.requestTimeout ? Effect.raceFirst(ended, late) : ended
  })
}
