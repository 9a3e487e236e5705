/** A worker: the actor hands it as many jobs as it has credit for. Plain callbacks: this is the hot path. */

import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Scope from "effect/Scope"
import type { CoordinatorError, CoordinatorReason } from "../actor/errors.ts"
import type { Session } from "../actor/session.ts"
import { guarded } from "../hold/guard.ts"
import type { WaitTimeout } from "../hold/loss.ts"
import type { Place } from "../hold/place.ts"
import { Member } from "../work/member.ts"
import { Acknowledging } from "./acknowledging.ts"
import { Job, type Raw, Task } from "./job.ts"

/** What becomes of a job after an attempt. */
export type Verdict =
  | { readonly tag: "done"; readonly outcome: string }
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
  /** Of an attempt that has failed. */
  readonly judge: (task: Task, exit: Exit.Failure<unknown, unknown>) => Effect.Effect<Verdict>
}

const done: Verdict = { tag: "done", outcome: "" }

// So many jobs begin before what the ones before them have come to is sent: then Redis works while this process does.
const slice = 32

// Most of them are done by then, and never come.
const mostCancelled = 1024

const ignore = () => {}

export class Worker<R> extends Member {
  readonly #handling: Handling<R>
  readonly #context: Context.Context<R>
  readonly #concurrency: number
  readonly #working = new Map<string, Task>()
  // Handlers that have not ended, whether their jobs are still theirs or not.
  #running = 0
  // The session in which the actor was told how many jobs it takes.
  #asked: Session | undefined = undefined
  // Slots that have become free since then, and before the answer.
  #owed = 0
  #stopping = false
  // The number of deliveries that the last answer included: a delivery among these that comes later is old.
  #counted = 0
  // Jobs that were cancelled before they came here.
  readonly #cancelled = new Set<string>()
  #last: Acknowledging | undefined = undefined
  readonly #unanswered = new Set<Acknowledging>()
  // Jobs whose outcome was sent by itself, and is not answered.
  readonly #told = new Set<string>()
  #idle: () => void = ignore

  constructor(place: Place, concurrency: number, context: Context.Context<R>, handling: Handling<R>) {
    super(place)
    this.#concurrency = concurrency
    this.#context = context
    this.#handling = handling
  }

  /** Works for as long as the scope is open. */
  work<E>(
    closed: () => void,
    fail: (error: CoordinatorReason | WaitTimeout) => E
  ): Effect.Effect<void, E, Scope.Scope> {
    const args = () => {
      const { session } = this.place.channel
      if (this.#asked !== session) this.#owed = 0
      this.#asked = session
      return [this.#stopping ? 0 : Math.max(0, this.#concurrency - this.#running)]
    }
    return Effect.asVoid(this.join({ verb: "queue.work", args, closed, fail }))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Jobs that come
  // -------------------------------------------------------------------------------------------------------------------

  protected take(change: ReadonlyArray<unknown>): void {
    if (change[0] === "deliver") {
      const [, sent, token, jobs] = change as readonly [string, number, number, ReadonlyArray<Raw>]
      if (sent > this.#counted) this.#beginAll(jobs, token, sent, 0)
    } else if (change[0] === "cancel") {
      this.#cancel(String(change[1]))
    } else {
      const [sent, token, jobs] = change as readonly [number, number, ReadonlyArray<Raw>]
      this.#counted = sent
      for (; this.#owed > 0; this.#owed--) this.#send(undefined)
      const told = new Set(this.#told)
      for (const { jobs } of this.#unanswered) for (const job of jobs) told.add(job)
      const found = new Set(jobs.map(([key]) => key))
      // Cancelled, and the news of that are lost.
      for (const task of [...this.#working.values()]) {
        if (task.delivery <= sent && !found.has(task.key)) this.#abandon(task)
      }
      for (const [at, raw] of jobs.entries()) {
        if (!this.#working.has(raw[0]) && !told.has(raw[0])) this.#begin(raw, token + at, sent)
      }
    }
  }

  #beginAll(jobs: ReadonlyArray<Raw>, token: number, delivery: number, from: number): void {
    const { session } = this
    const to = Math.min(jobs.length, from + slice)
    for (let at = from; at < to; at++) this.#begin(jobs[at]!, token + at, delivery)
    if (to === jobs.length) return
    this.place.space.kernel.io.defer(() => {
      if (session === this.session) this.#beginAll(jobs, token, delivery, to)
    })
  }

  #begin(raw: Raw, token: number, delivery: number): void {
    const session = this.trusted
    // A job that comes while the worker stops goes back as it leaves.
    if (session === undefined || this.#stopping) return
    if (this.#cancelled.size > 0 && this.#cancelled.delete(raw[0])) return this.#send(undefined)
    const task = new Task(this.place.name, raw, token, delivery)
    this.#working.set(task.key, task)
    this.#running++
    this.place.space.kernel.hooks.metrics.delivered(task.attempt)
    const context = Context.add(guarded(this.#context, session) as Context.Context<R>, Job, task)
    const fiber = Effect.runForkWith(context)(this.#handling.attempt(task))
    const exit = fiber.pollUnsafe()
    if (exit !== undefined) return this.#ended(task, exit)
    task.fiber = fiber
    fiber.addObserver((exit) => this.#ended(task, exit))
    // It was lost or cancelled in its first steps.
    if (task.over) fiber.interruptUnsafe()
  }

  #cancel(key: string): void {
    const task = this.#working.get(key)
    if (task !== undefined) return this.#abandon(task)
    this.#cancelled.add(key)
    if (this.#cancelled.size > mostCancelled) this.#cancelled.delete(this.#cancelled.values().next().value!)
  }

  #abandon(task: Task): void {
    task.over = true
    this.#working.delete(task.key)
    task.fiber?.interruptUnsafe()
  }

  protected lose(): void {
    this.#cancelled.clear()
    this.#told.clear()
    for (const task of [...this.#working.values()]) this.#abandon(task)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // What they come to
  // -------------------------------------------------------------------------------------------------------------------

  #ended(task: Task, exit: Exit.Exit<unknown, unknown>): void {
    if (task.over) return this.#settle(task, done)
    if (Exit.isSuccess(exit)) {
      return this.#settle(task, task.isKept ? { tag: "done", outcome: exit.value as string } : done)
    }
    const judged = Effect.runForkWith(this.#context)(this.#handling.judge(task, exit))
    judged.addObserver((exit) =>
      this.#settle(
        task,
        Exit.isSuccess(exit)
          ? exit.value
          : { tag: "bury", reason: "failed", message: String(exit.cause), outcome: "[\"failed\",\"\"]" }
      )
    )
  }

  #settle(task: Task, verdict: Verdict): void {
    this.#running--
    if (!task.over) {
      this.#working.delete(task.key)
      this.#conclude(task, verdict)
    } else if (this.#asked === this.place.channel.session) {
      // The slot of a job that was taken away.
      if (this.session === undefined) this.#owed++
      else this.#send(undefined)
    }
    if (this.#running === 0) this.#idle()
  }

  get #take(): number {
    return this.#stopping ? 0 : 1
  }

  #conclude(task: Task, verdict: Verdict): void {
    const { given, key } = task
    switch (verdict.tag) {
      case "done":
        return given === undefined && verdict.outcome === ""
          ? this.#send(key)
          : this.#tell(
            key,
            (told) => this.tell("queue.finish", [this.id, key, given ?? "", verdict.outcome, this.#take], told)
          )
      case "retry":
        return this.#tell(
          key,
          (told) => this.tell("queue.retry", [this.id, key, verdict.delay, verdict.attempted, this.#take], told)
        )
      case "bury":
        this.place.space.kernel.hooks.metrics.buried()
        return this.#tell(
          key,
          (told) =>
            this.tell("queue.bury", [this.id, key, verdict.reason, verdict.message, verdict.outcome, this.#take], told)
        )
    }
  }

  // Acknowledges a job, or only takes another one.
  #send(job: string | undefined): void {
    const session = this.trusted
    if (session === undefined) return
    const { channel, key } = this.place
    let last = this.#last
    if (last === undefined || !last.open || last.session !== session) {
      last = this.#last = new Acknowledging(key, this.id, session, this.#acknowledged)
      this.#unanswered.add(last)
      channel.outbox.request(last)
    }
    if (job !== undefined) last.jobs.push(job)
    last.take += this.#take
  }

  readonly #acknowledged = (request: Acknowledging, error: CoordinatorError | undefined): void => {
    const over = () => void this.#unanswered.delete(request)
    if (error === undefined) over()
    else this.again(request.session, error, () => this.place.channel.outbox.request(request), over)
  }

  // Until that is answered, the job may seem to be in hand.
  #tell(job: string, tell: (told: () => void) => void): void {
    this.#told.add(job)
    tell(() => void this.#told.delete(job))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // End
  // -------------------------------------------------------------------------------------------------------------------

  /** Begins no more jobs. */
  halt(): void {
    this.#stopping = true
  }

  /** Takes no more jobs, and lets handlers finish. What is left after that many milliseconds is interrupted. */
  stop(grace: number): Effect.Effect<void> {
    return Effect.suspend(() => {
      this.halt()
      this.tell("queue.credit", [this.id, 0, true], ignore)
      return Effect.andThen(
        this.#running === 0 || grace === 0 ? Effect.void : this.#within(grace),
        Effect.suspend(() => {
          this.left = true
          for (const task of [...this.#working.values()]) this.#abandon(task)
          return this.#ending
        })
      )
    })
  }

  get #ending(): Effect.Effect<void> {
    return Effect.callback((resume) => {
      if (this.#running === 0) return resume(Effect.void)
      this.#idle = () => resume(Effect.void)
    })
  }

  #within(grace: number): Effect.Effect<void> {
    const { io } = this.place.space.kernel
    return Effect.callback((resume) => {
      const timer = io.after(grace, () => resume(Effect.void))
      this.#idle = () => {
        timer.cancel()
        resume(Effect.void)
      }
    })
  }
}
