/** Attempts at jobs: a handler runs for as long as it may, and others go on beside one that outlasts its interruption. */

import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { Kernel } from "../actor/kernel.ts"
import type { Session } from "../actor/session.ts"
import { guarded } from "../hold/guard.ts"
import { describe } from "../hold/loss.ts"
import { mostText, prettyOf, shortened } from "../text.ts"
import { Job, type Task } from "./job.ts"

/** The outcome of an attempt for its job. */
export type Verdict =
  | { readonly tag: "done"; readonly outcome: string }
  /** Without `attempted`, it has not been an attempt. */
  | { readonly tag: "retry"; readonly delay: number; readonly attempted: boolean }
  | {
    readonly tag: "bury"
    readonly reason: "failed" | "undecodable" | "discarded"
    readonly message: string
    readonly outcome: string
  }

/** Runs one attempt, and decides what follows. */
export interface Handling<R> {
  /** Succeeds with the outcome if that is kept, as JSON. */
  readonly attempt: (task: Task) => Effect.Effect<unknown, unknown, R>
  /** Of an attempt that has failed, after so many milliseconds. */
  readonly judge: (task: Task, exit: Exit.Failure<unknown, unknown>, lasted: number) => Effect.Effect<Verdict>
  /** How long an attempt may run. */
  readonly limit?: (task: Task) => Limit | undefined
}

export interface Limit {
  /** In milliseconds. */
  readonly timeout: number
  /** The exit of an attempt that was interrupted after that time. */
  readonly exit: () => Exit.Failure<unknown, unknown>
}

/** How a worker runs handlers. */
export interface Trade<R> {
  readonly context: Context.Context<R>
  readonly handling: Handling<R>
  /** For how many milliseconds a handler may go on after its interruption. */
  readonly overrun: number
}

const done: Verdict = { tag: "done", outcome: "" }

export class Attempts<R> {
  readonly #kernel: Kernel
  readonly #trade: Trade<R>
  readonly #settle: (task: Task, verdict: Verdict) => void

  constructor(kernel: Kernel, trade: Trade<R>, settle: (task: Task, verdict: Verdict) => void) {
    this.#kernel = kernel
    this.#trade = trade
    this.#settle = settle
  }

  begin(task: Task, session: Session): void {
    const { context, handling } = this.#trade
    task.begunAt = this.#kernel.io.now()
    const own = Context.add(guarded(context, session) as Context.Context<R>, Job, task)
    const fiber = Effect.runForkWith(own)(handling.attempt(task))
    const exit = fiber.pollUnsafe()
    if (exit !== undefined) return this.#ended(task, exit)
    task.fiber = fiber
    fiber.addObserver((exit) => {
      if (!task.replaced) this.#ended(task, exit)
    })
    // It was lost or cancelled in its first steps.
    if (task.over) return this.interrupt(task)
    const limit = handling.limit?.(task)
    if (limit === undefined) return
    task.timer = this.#kernel.io.after(limit.timeout, () => {
      task.late = limit.exit()
      this.interrupt(task)
    })
  }

  // A handler that does not end then would cost this process a slot for ever.
  interrupt(task: Task): void {
    if (task.interrupted) return
    const fiber = task.fiber!
    task.interrupted = true
    task.timer?.cancel()
    fiber.interruptUnsafe()
    if (fiber.pollUnsafe() !== undefined) return
    task.timer = this.#kernel.io.after(this.#trade.overrun, () => this.#replace(task))
  }

  #replace(task: Task): void {
    const { hooks, settings: { namespace } } = this.#kernel
    task.replaced = true
    hooks.metrics.overrun(1)
    hooks.log(
      "Warn",
      `the handler of job ${task.id} of ${
        describe("queue", task.queue, namespace)
      } goes on ${this.#trade.overrun} ms ` +
        `after its interruption, beside the job that gets its slot`
    )
    this.#ended(task, Exit.interrupt())
  }

  #ended(task: Task, exit: Exit.Exit<unknown, unknown>): void {
    task.timer?.cancel()
    if (task.over) return this.#settle(task, done)
    if (Exit.isSuccess(exit)) {
      return this.#settle(task, task.isKept ? { tag: "done", outcome: exit.value as string } : done)
    }
    const { context, handling } = this.#trade
    const failure = task.late ?? exit
    const judged = Effect.runForkWith(context)(
      Effect.suspend(() => handling.judge(task, failure, this.#kernel.io.now() - task.begunAt))
    )
    judged.addObserver((judgement) => {
      if (Exit.isSuccess(judgement)) return this.#settle(task, judgement.value)
      // Half of the text for each.
      const why = prettyOf(judgement.cause).slice(0, mostText / 2)
      const message = shortened(`${why}\n\nbehind the failure of the handler: ${prettyOf(failure.cause)}`)
      const outcome = task.isKept ? JSON.stringify(["failed", message]) : ""
      this.#settle(task, { tag: "bury", reason: "failed", message, outcome })
    })
  }
}
