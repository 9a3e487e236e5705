/**
 * A worker: the actor hands it as many jobs as it has credit for. What it has not acknowledged goes to other workers when its
 * session ends, so a lost session interrupts its handlers. Plain callbacks: this is the hot path.
 */

import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { CoordinatorError, CoordinatorReason } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Session } from "../actor/session.ts"
import { join } from "../hold/acquire.ts"
import { guarded } from "../hold/guard.ts"
import type { WaitTimeout } from "../hold/loss.ts"
import type { Membership } from "../hold/membership.ts"
import type { Place } from "../hold/place.ts"
import { Acknowledging } from "./acknowledging.ts"
import { Job, type Raw, Task } from "./job.ts"

/** What becomes of a job after an attempt. */
export type Verdict =
  | { readonly tag: "done" }
  | { readonly tag: "retry"; readonly delay: number }
  | { readonly tag: "bury"; readonly reason: "failed" | "undecodable"; readonly message: string }

/** Runs one attempt, and decides what follows. */
export interface Handling<R> {
  readonly attempt: (task: Task) => Effect.Effect<unknown, unknown, R>
  /** Of an attempt that has failed. */
  readonly judge: (task: Task, exit: Exit.Failure<unknown, unknown>) => Effect.Effect<Verdict>
}

const done: Verdict = { tag: "done" }

// So many jobs begin before what the ones before them have come to is sent: then Redis works while this process does.
const slice = 32

const ignore = () => {}

export class Worker<R> {
  readonly #place: Place
  readonly #handling: Handling<R>
  readonly #context: Context.Context<R>
  readonly #concurrency: number
  readonly #working = new Map<string, Task>()
  // Handlers that have not ended, whether their jobs are still theirs or not.
  #running = 0
  #membership: Membership | undefined = undefined
  // What came before the membership was known here.
  #early: Array<() => void> = []
  #session: Session | undefined = undefined
  // The session in which the actor was told how many jobs it takes.
  #asked: Session | undefined = undefined
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
    this.#place = place
    this.#concurrency = concurrency
    this.#context = context
    this.#handling = handling
  }

  /** Works for as long as the scope is open. */
  join<E>(closed: () => void, fail: (error: CoordinatorReason | WaitTimeout) => E) {
    const { partition } = this.#place
    const watching = Effect.acquireRelease(Effect.sync(() => partition.watch()), (end) => Effect.sync(end))
    const joined = join(this.#place, {
      verb: "queue.work",
      args: () => {
        this.#asked = this.#place.channel.session
        return [this.#stopping ? 0 : Math.max(0, this.#concurrency - this.#running)]
      },
      observer: {
        observe: (change) => this.#observe(change),
        lost: () => this.#lose(),
        closed: () => {
          this.#lose()
          closed()
        }
      },
      fail
    })
    return Effect.andThen(
      watching,
      Effect.map(joined, ([membership]) => {
        this.#membership = membership
        for (const begin of this.#early.splice(0)) begin()
      })
    )
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Jobs that come
  // -------------------------------------------------------------------------------------------------------------------

  #observe(change: ReadonlyArray<unknown>): void {
    if (change[0] === "deliver") {
      const [, sent, token, jobs] = change as readonly [string, number, number, ReadonlyArray<Raw>]
      if (sent > this.#counted) this.#beginAll(jobs, token, 0)
    } else if (change[0] === "cancel") {
      this.#cancel(String(change[1]))
    } else {
      const [sent, token, jobs] = change as readonly [number, number, ReadonlyArray<Raw>]
      this.#session = this.#place.channel.session
      this.#counted = sent
      const told = new Set(this.#told)
      for (const { jobs } of this.#unanswered) for (const job of jobs) told.add(job)
      for (const [at, raw] of jobs.entries()) {
        if (!this.#working.has(raw[0]) && !told.has(raw[0])) this.#begin(raw, token + at)
      }
    }
  }

  #beginAll(jobs: ReadonlyArray<Raw>, token: number, from: number): void {
    if (this.#membership === undefined) return void this.#early.push(() => this.#beginAll(jobs, token, from))
    const session = this.#session
    const to = Math.min(jobs.length, from + slice)
    for (let at = from; at < to; at++) this.#begin(jobs[at]!, token + at)
    if (to === jobs.length) return
    this.#place.space.kernel.io.defer(() => {
      if (session === this.#session) this.#beginAll(jobs, token, to)
    })
  }

  #begin(raw: Raw, token: number): void {
    const session = this.#session
    // A job that comes while the worker stops goes back as it leaves.
    if (session === undefined || session.lost !== undefined || this.#stopping) return
    if (this.#cancelled.size > 0 && this.#cancelled.delete(raw[0])) return this.#send(undefined)
    const task = new Task(this.#place.name, raw, token)
    this.#working.set(task.key, task)
    this.#running++
    this.#place.space.kernel.hooks.metrics.delivered(task.attempt)
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
    if (this.#cancelled.size < 1000) this.#cancelled.add(key)
  }

  #abandon(task: Task): void {
    task.over = true
    this.#working.delete(task.key)
    task.fiber?.interruptUnsafe()
  }

  #lose(): void {
    this.#session = undefined
    this.#cancelled.clear()
    this.#told.clear()
    for (const task of [...this.#working.values()]) this.#abandon(task)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // What they come to
  // -------------------------------------------------------------------------------------------------------------------

  #ended(task: Task, exit: Exit.Exit<unknown, unknown>): void {
    if (task.over || Exit.isSuccess(exit)) return this.#settle(task, done)
    const judged = Effect.runForkWith(this.#context)(this.#handling.judge(task, exit))
    judged.addObserver((exit) =>
      this.#settle(
        task,
        Exit.isSuccess(exit) ? exit.value : { tag: "bury", reason: "failed", message: String(exit.cause) }
      )
    )
  }

  #settle(task: Task, verdict: Verdict): void {
    this.#running--
    if (!task.over) {
      this.#working.delete(task.key)
      this.#conclude(task, verdict)
    } else if (this.#asked === this.#place.channel.session) {
      // The slot of a job that was taken away.
      this.#send(undefined)
    }
    if (this.#running === 0) this.#idle()
  }

  get #take(): number {
    return this.#stopping ? 0 : 1
  }

  #conclude(task: Task, verdict: Verdict): void {
    const { given, key } = task
    const id = () => this.#membership!.id
    switch (verdict.tag) {
      case "done":
        return given === undefined
          ? this.#send(key)
          : this.#tell("queue.finish", key, () => [id(), key, given, this.#take])
      case "retry":
        return this.#tell("queue.retry", key, () => [id(), key, verdict.delay, true, this.#take])
      case "bury":
        this.#place.space.kernel.hooks.metrics.buried()
        return this.#tell("queue.bury", key, () => [id(), key, verdict.reason, verdict.message, this.#take])
    }
  }

  // Acknowledges a job, or only takes another one.
  #send(job: string | undefined): void {
    const { channel, key } = this.#place
    const session = channel.session
    if (session === undefined || this.#membership === undefined) return
    let last = this.#last
    if (last === undefined || !last.open || last.session !== session) {
      last = this.#last = new Acknowledging(key, this.#membership.id, session, this.#acknowledged)
      this.#unanswered.add(last)
      channel.outbox.request(last)
    }
    if (job !== undefined) last.jobs.push(job)
    last.take += this.#take
  }

  readonly #acknowledged = (request: Acknowledging, error: CoordinatorError | undefined): void => {
    const { channel, space: { kernel } } = this.#place
    if (error === undefined || error.reason._tag === "ActorDefect" || kernel.isClosing()) {
      this.#unanswered.delete(request)
      return
    }
    this.#again(request.session, () => channel.outbox.request(request), () => this.#unanswered.delete(request))
  }

  // The session lives on, and with it the claim of this worker: no other one would get the job.
  #again(session: Session, send: () => void, over: () => void): void {
    const { channel, space: { kernel } } = this.#place
    kernel.io.after(channel.lease / 3, () => session.lost === undefined && !kernel.isClosing() ? send() : over())
  }

  #tell<V extends "queue.finish" | "queue.retry" | "queue.bury" | "queue.credit">(
    verb: V,
    job: string | undefined,
    argsOf: () => Requests[V]["args"]
  ): void {
    const { channel, key } = this.#place
    const session = channel.session
    if (session === undefined || this.#membership === undefined) return
    const args = argsOf()
    const settled = () => void (job !== undefined && this.#told.delete(job))
    const send = (): void =>
      channel.outbox.request<V>({
        verb,
        key,
        args,
        session,
        urgent: true,
        moot: settled,
        settle: settled,
        fail: (error) => error.reason._tag === "ActorDefect" ? settled() : this.#again(session, send, settled)
      })
    if (job !== undefined) this.#told.add(job)
    send()
  }

  // -------------------------------------------------------------------------------------------------------------------
  // End
  // -------------------------------------------------------------------------------------------------------------------

  /** Takes no more jobs, and lets handlers finish. What is left after that many milliseconds is interrupted. */
  stop(grace: number): Effect.Effect<void> {
    return Effect.suspend(() => {
      this.#stopping = true
      this.#tell("queue.credit", undefined, () => [this.#membership!.id, 0, true])
      return Effect.andThen(
        this.#running === 0 || grace === 0 ? Effect.void : this.#within(grace),
        Effect.suspend(() => {
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
    const { io } = this.#place.space.kernel
    return Effect.callback((resume) => {
      const timer = io.after(grace, () => resume(Effect.void))
      this.#idle = () => {
        timer.cancel()
        resume(Effect.void)
      }
    })
  }
}
