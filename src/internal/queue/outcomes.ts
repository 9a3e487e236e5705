/** Waits for the outcomes of jobs. */

import * as Effect from "effect/Effect"
import type { Requests } from "../actor/lua.ts"
import type { Place } from "../hold/place.ts"
import { type Caller, Callers } from "./callers.ts"
import type { Failure } from "./errors.ts"

/** As the actor keeps it, or as the worker has encoded it. */
export type Outcome =
  | readonly [tag: "success" | "failure", value: unknown]
  | readonly [tag: "failed" | "undecodable" | "discarded", error: string]
  | readonly [tag: "crashed" | "cancelled" | "expired" | "dropped" | "skipped"]
  /** No such job is known, or its outcome is not kept. */
  | readonly [tag: "missing"]

interface Waiter extends Caller {
  readonly settle: (outcome: Outcome) => void
}

type News = readonly [tag: "outcome", job: string, outcome: Outcome]

export class Outcomes extends Callers<Waiter, News, "queue.watch"> {
  constructor(place: Place) {
    super(place, "queue.watch")
  }

  /** The outcome of a job, when there is one. While Redis is away, it waits. `urgent`: see `Callers`. */
  await(name: string, urgent: boolean): Effect.Effect<Outcome, Failure> {
    return Effect.callback((resume) => {
      const waiter: Waiter = {
        name,
        job: undefined,
        settle: (outcome) => resume(Effect.succeed(outcome)),
        fail: (error) => resume(Effect.fail(error))
      }
      this.add(waiter, urgent)
      return Effect.sync(() => void this.remove(waiter))
    })
  }

  protected tell(waiter: Waiter, [, job, outcome]: News): void {
    if (waiter.job === job) this.#settle(waiter, outcome)
  }

  protected answered(waiter: Waiter, reply: Requests["queue.watch"]["reply"], early: ReadonlyArray<News>): void {
    if (!this.callers.has(waiter)) return
    if (reply[0] === "missing") return this.#settle(waiter, ["missing"])
    if (reply[0] === "outcome") return this.#settle(waiter, reply[2] as Outcome)
    waiter.job = reply[1]
    for (const news of early) this.tell(waiter, news)
  }

  #settle(waiter: Waiter, outcome: Outcome): void {
    this.remove(waiter)
    waiter.settle(outcome)
  }
}
