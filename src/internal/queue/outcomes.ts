/** Waits for the outcomes of jobs: as a member of the queue, which is told of those that it has asked for. */

import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Place } from "../hold/place.ts"

/** As the actor keeps it, or as the worker has encoded it. */
export type Outcome =
  | readonly [tag: "success" | "failure", value: unknown]
  | readonly [tag: "failed" | "undecodable" | "discarded", error: string]
  | readonly [tag: "crashed" | "cancelled" | "expired" | "dropped" | "skipped"]
  /** No such job is known, or its outcome is not kept. */
  | readonly [tag: "missing"]

interface Waiter {
  /** The id that was asked for. */
  readonly name: string
  /** The job's own id, when it is known. */
  job: string | undefined
  readonly settle: (outcome: Outcome) => void
  readonly fail: (error: CoordinatorError) => void
}

export class Outcomes {
  readonly #place: Place
  readonly #waiters = new Set<Waiter>()
  // Outcomes that came while it was asked for some: the mailbox can be faster than an answer.
  readonly #early = new Map<unknown, Outcome>()
  #unanswered = 0
  #id: string | undefined = undefined

  constructor(place: Place) {
    this.#place = place
  }

  told([, job, outcome]: ReadonlyArray<unknown>): void {
    if (this.#unanswered > 0) this.#early.set(job, outcome as Outcome)
    for (const waiter of [...this.#waiters]) if (waiter.job === job) this.#settle(waiter, outcome as Outcome)
  }

  /** The membership is joined, perhaps again: news of meanwhile, and the callers that Redis knew, may be lost. */
  rejoined(): void {
    for (const waiter of this.#waiters) if (waiter.job !== undefined) this.#ask(waiter)
  }

  closed(): void {
    for (const waiter of [...this.#waiters]) {
      this.#waiters.delete(waiter)
      waiter.fail(this.#place.channel.closedError())
    }
  }

  joined(id: string): void {
    this.#id = id
  }

  /** The outcome of a job, when there is one. While Redis is away, it waits. */
  await(name: string): Effect.Effect<Outcome, CoordinatorError> {
    return Effect.callback((resume) => {
      const { channel, space: { kernel } } = this.#place
      if (kernel.isClosing()) return resume(Effect.fail(channel.closedError()))
      const waiter: Waiter = {
        name,
        job: undefined,
        settle: (outcome) => resume(Effect.succeed(outcome)),
        fail: (error) => resume(Effect.fail(error))
      }
      this.#waiters.add(waiter)
      this.#ask(waiter)
      return Effect.sync(() => void this.#waiters.delete(waiter))
    })
  }

  #settle(waiter: Waiter, outcome: Outcome): void {
    this.#waiters.delete(waiter)
    waiter.settle(outcome)
  }

  #ask(waiter: Waiter): void {
    const { channel, key } = this.#place
    const answered = () => {
      if (--this.#unanswered === 0) this.#early.clear()
    }
    this.#unanswered++
    channel.outbox.request<"queue.watch">({
      verb: "queue.watch",
      key,
      args: [this.#id!, waiter.name],
      settle: (reply) => {
        const early = reply[0] === "watching" ? this.#early.get(reply[1]) : undefined
        answered()
        if (!this.#waiters.has(waiter)) return
        if (early !== undefined) this.#settle(waiter, early)
        else if (reply[0] === "watching") waiter.job = reply[1]
        else this.#settle(waiter, reply[0] === "outcome" ? reply[2] as Outcome : ["missing"])
      },
      fail: (error) => {
        answered()
        if (this.#waiters.delete(waiter)) waiter.fail(error)
      }
    })
  }
}
