/** A worker: the actor delivers as many jobs to it as it has credit for. Plain callbacks: this is the hot path. */

import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import type { CoordinatorError, CoordinatorReason } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Session } from "../actor/session.ts"
import type { Verb } from "../actor/transport.ts"
import { describe, type WaitTimeout } from "../hold/loss.ts"
import type { Place } from "../hold/place.ts"
import { request } from "../hold/request.ts"
import { Member } from "../work/member.ts"
import { Acknowledging } from "./acknowledging.ts"
import { Attempts, type Trade, type Verdict } from "./attempts.ts"
import { type Crew, Team } from "./crew.ts"
import { Deliveries } from "./deliveries.ts"
import { type Raw, Task } from "./job.ts"
import { Notes } from "./notes.ts"
import { type Seat, Slots } from "./slots.ts"
import type { Deque } from "./stealing.ts"

/** The common part of all workers of a crew. */
export interface Employment<R> extends Trade<R> {
  /** Of the process, if its workers have one. */
  readonly deque?: Deque | undefined
  /** Its callers have the jobs, and go on when the session is lost. */
  readonly lends?: boolean | undefined
}

// Most of them are done by then, and never come.
const mostCancelled = 1024

class Worker<R> extends Member implements Crew, Seat {
  readonly #attempts: Attempts<R>
  readonly #working = new Map<string, Task>()
  // Handlers that have not ended, whether their jobs are still theirs or not.
  #running = 0
  // How many jobs it runs at a time, and the number that the actor has received for that in this session. More may run while it
  // shrinks.
  #size: number
  #told = 0
  // The session in which the actor was asked for jobs, and for how many.
  #asked: Session | undefined = undefined
  #credit = 0
  // The session in which another size is on its way to the actor.
  #adjusting: Session | undefined = undefined
  // Slots that have become free since then, and before the answer.
  #owed = 0
  #stopping = false
  #retired = false
  // Its jobs return to the queue, as its handlers were interrupted.
  #quitted = false
  readonly #deliveries: Deliveries
  readonly #notes: Notes
  // Jobs that were cancelled before they came here.
  readonly #cancelled = new Set<string>()
  // Cancelled jobs of this session whose handlers have not ended: until then they keep their slots.
  readonly #ending = new Map<string, Task>()
  #last: Acknowledging | undefined = undefined
  readonly #unanswered = new Set<Acknowledging>()
  // Jobs whose outcome was sent by itself, and is not answered.
  readonly #settling = new Set<string>()
  readonly #listeners = new Set<() => void>()
  // Of all shards.
  readonly #places: ReadonlyArray<Place>
  readonly #shard: number
  // The slots that the workers of all shards share.
  readonly #slots: Slots | undefined
  readonly #deque: Deque | undefined
  readonly #lends: boolean

  constructor(
    { context, deque, handling, lends = false, overrun }: Employment<R>,
    places: ReadonlyArray<Place>,
    size: number,
    shard: number,
    slots?: Slots
  ) {
    super(places[shard]!)
    this.#places = places
    const { kernel } = this.place.space
    this.#attempts = new Attempts(kernel, { context, handling, overrun }, this.#settle)
    this.#deliveries = new Deliveries(kernel.io, {
      isServed: () => this.#unanswered.size > 0,
      begin: (raw, token, delivery) => this.#begin(raw, token, delivery),
      empty: () => this.#notify()
    })
    this.#notes = new Notes({
      place: this.place,
      id: () => this.id,
      session: () => this.trusted,
      has: (task) => this.#working.get(task.key) === task,
      again: (session, error, send, over) => this.again(session, error, send, over)
    })
    this.#deque = deque
    this.#lends = lends
    this.#size = size
    this.#shard = shard
    this.#slots = slots
    slots?.add(this)
  }

  get running(): number {
    return this.#running
  }

  get size(): number {
    return this.#size
  }

  get ready(): boolean {
    return this.trusted !== undefined
  }

  listen(listener: () => void): () => void {
    this.#listeners.add(listener)
    return () => void this.#listeners.delete(listener)
  }

  #notify(): void {
    if (this.#listeners.size > 0) { for (const listener of [...this.#listeners]) listener() }
    this.calm()
  }

  work<E>(
    closed: () => void,
    fail: (error: CoordinatorReason | WaitTimeout) => E
  ): Effect.Effect<void, E, Scope.Scope> {
    const args = () => {
      const { session } = this.place.channel
      if (this.#asked !== session) {
        this.#asked = session
        this.#owed = 0
        this.#told = this.#size
        // Below 0 if fewer jobs are wanted than handlers of former sessions still run.
        this.#credit = this.#size - this.#running
      }
      return [this.#stopping ? 0 : this.#credit]
    }
    const deque = this.#deque
    if (deque === undefined) return Effect.asVoid(this.join({ verb: "queue.work", args, closed, fail }))
    const joined = this.join({ verb: "queue.employ", args: () => [...args(), ...deque.args], closed, fail })
    // The offers of the first handler go there already.
    const counted = Effect.acquireRelease(Effect.sync(() => deque.workers++), () => Effect.sync(() => deque.workers--))
    return Effect.asVoid(Effect.andThen(counted, joined))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Jobs that come
  // -------------------------------------------------------------------------------------------------------------------

  protected take(change: ReadonlyArray<unknown>): void {
    if (change[0] === "deliver") {
      const [, sent, token, jobs] = change as readonly [string, number, number, ReadonlyArray<Raw>]
      this.#deliveries.add(jobs, token, sent)
    } else if (change[0] === "more") {
      if (!this.#stopping) this.#slots?.want(this)
    } else if (change[0] === "drained") {
      this.#notify()
    } else if (change[0] === "cancel") {
      this.#cancel(String(change[1]))
    } else {
      const [sent, token, jobs, cancelled] = change as readonly [
        number,
        number,
        ReadonlyArray<Raw>,
        ReadonlyArray<string>
      ]
      this.#deliveries.counted(sent)
      for (; this.#owed > 0; this.#owed--) this.#send(undefined)
      this.#adjust()
      // It may have asked before it began to stop.
      if (this.#retired) this.tell("queue.credit", [this.id, 0, true], ignore)
      const told = new Set(this.#settling)
      for (const { jobs } of this.#unanswered) for (const job of jobs) told.add(job)
      const found = new Set(jobs.map(([key]) => key))
      // Their deliveries are lost, or come too late.
      for (const key of cancelled) {
        if (this.#working.has(key) || this.#ending.has(key) || told.has(key)) continue
        this.#cancelled.delete(key)
        this.#send(key)
      }
      // Cancelled, and the event of that is lost.
      for (const task of [...this.#working.values()]) {
        if (task.delivery <= sent && !found.has(task.key)) this.#abandon(task)
      }
      for (const [at, raw] of jobs.entries()) {
        // A handler that was interrupted may be at its end: the job returns to the queue behind that.
        if (this.#working.has(raw[0]) || this.#ending.has(raw[0]) || told.has(raw[0])) continue
        this.#begin(raw, token + at, sent)
      }
      this.#notify()
      this.#slots?.look()
    }
  }

  #begin(raw: Raw, token: number, delivery: number): void {
    const session = this.trusted
    if (session === undefined) return
    const [key] = raw
    // It was on its way when the worker began to stop, which can take long. That is no attempt.
    if (this.#stopping) return this.#end("queue.retry", key, () => [this.id, key, 0, false, 0], 0)
    if (this.#cancelled.size > 0 && this.#cancelled.delete(key)) return this.#send(key)
    const task = new Task(this.#places, this.#shard, raw, token, delivery, this.#notes.of)
    this.#working.set(task.key, task)
    this.#running++
    this.place.space.kernel.hooks.metrics.delivered(task.attempt)
    this.#attempts.begin(task, session)
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
    this.#ending.set(task.key, task)
    if (task.fiber !== undefined) this.#attempts.interrupt(task)
  }

  protected lose(): void {
    this.#slots?.forget(this)
    this.#deliveries.clear()
    this.#cancelled.clear()
    this.#settling.clear()
    const { hooks, isClosing, settings: { namespace } } = this.place.space.kernel
    for (const task of [...this.#working.values()]) {
      if (this.#lends && !isClosing()) {
        hooks.metrics.overrun(1)
        const what = `job ${task.id} of ${describe("queue", task.queue, namespace)}`
        hooks.log(
          "Warn",
          `the session under which ${what} was taken was lost: another process may receive the job meanwhile`
        )
      }
      this.#abandon(task)
    }
    // Others have them, or will.
    this.#ending.clear()
  }

  protected isBusy(): boolean {
    return this.#running > 0
  }

  // -------------------------------------------------------------------------------------------------------------------
  // What they come to
  // -------------------------------------------------------------------------------------------------------------------

  readonly #settle = (task: Task, verdict: Verdict): void => {
    this.#running--
    // The same job may have come again in another session.
    const isEnding = this.#ending.get(task.key) === task
    if (isEnding) this.#ending.delete(task.key)
    if (!task.over) {
      this.#working.delete(task.key)
      this.#conclude(task, verdict)
    } else if (!this.#quitted && this.#asked === this.place.channel.session) {
      // The slot of a job that was taken away.
      if (this.session === undefined) this.#owed++
      else this.#send(isEnding ? task.key : undefined)
    }
    if (this.#running === 0) this.#notify()
  }

  // How many jobs the worker takes after one has ended.
  #next(): number {
    if (this.#stopping) return 0
    if (this.#slots === undefined || this.#slots.keeps(this)) return 1
    this.#size--
    this.#told--
    return 0
  }

  #conclude(task: Task, verdict: Verdict): void {
    task.concluded = true
    const { deduped = "", given = "", key, life, noting } = task
    this.#notes.send(task)
    switch (verdict.tag) {
      case "done": {
        const { outcome } = verdict
        if (task.followers !== undefined) {
          const { following } = task
          return this.#end(
            "queue.complete",
            key,
            (take) => [this.id, key, given, deduped, outcome, life, take, ...following]
          )
        }
        return given === "" && deduped === "" && outcome === "" && noting === undefined
          ? this.#send(key)
          : this.#end("queue.finish", key, (take) => [this.id, key, given, deduped, outcome, life, take])
      }
      case "retry":
        return this.#end("queue.retry", key, (take) => [this.id, key, verdict.delay, verdict.attempted, take])
      case "bury": {
        const { message, outcome, reason } = verdict
        this.place.space.kernel.hooks.metrics.buried()
        return this.#end("queue.bury", key, (take) => [this.id, key, reason, message, outcome, take])
      }
    }
  }

  // Acknowledges a job that is done, or was cancelled; or only takes another one.
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
    last.take += this.#next()
  }

  readonly #acknowledged = (request: Acknowledging, error: CoordinatorError | undefined): void => {
    const over = () => {
      this.#unanswered.delete(request)
      this.#answered()
    }
    if (error === undefined) over()
    else this.again(request.session, error, () => this.place.channel.outbox.request(request), over)
  }

  // Until that is answered, the job may seem to be in hand. A job whose end is larger than what Redis takes has failed.
  #end<V extends Verb>(verb: V, job: string, argsOf: (take: number) => Requests[V]["args"], take = this.#next()): void {
    this.#settling.add(job)
    const over = () => {
      this.#settling.delete(job)
      this.#answered()
    }
    this.tell(verb, argsOf(take), (error) => {
      if (error?.reason._tag !== "RequestTooLarge") return over()
      const { name, namespace, space: { kernel: { hooks } } } = this.place
      const text = `its end could not be stored: ${error.message}`
      hooks.log("Error", `job ${job} of ${describe("queue", name, namespace)} has failed: ${text}`)
      hooks.metrics.buried()
      this.tell("queue.bury", [this.id, job, "failed", text, JSON.stringify(["failed", text]), take], over)
    })
  }

  // The actor knows of the end of a job, which it may have seen in hand until now.
  #answered(): void {
    this.#slots?.look()
    if (this.#running === 0) this.#notify()
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Size
  // -------------------------------------------------------------------------------------------------------------------

  resize(size: number): void {
    this.#size = size
    this.#adjust()
  }

  // With a negative credit, as many jobs have to end before it gets another one. One change at a time: Redis may refuse a request
  // for a while, and executes it behind later ones then.
  #adjust(): void {
    const change = this.#size - this.#told
    const session = this.trusted
    if (change === 0 || this.#stopping || session === undefined || this.#adjusting === session) return
    this.#told = this.#size
    this.#adjusting = session
    this.tell("queue.credit", [this.id, change, false], () => {
      if (this.#adjusting === session) this.#adjusting = undefined
      this.#adjust()
      this.#slots?.look()
    })
  }

  get free(): number {
    const { session } = this.place.channel
    // It has asked the actor for so many, and may receive jobs for all of them with the answer.
    if (this.session === undefined && session !== undefined && session === this.#asked) return 0
    return Math.max(0, this.#size - this.#running)
  }

  shed(count: number, shed: (count: number) => void): void {
    const session = this.trusted
    const { channel, key } = this.place
    // The actor will receive its size when there is a session again.
    if (session === undefined) {
      this.#size -= count
      return shed(count)
    }
    const end = (count: number) => {
      this.#size -= count
      this.#told -= count
      shed(count)
    }
    const send = (): void =>
      channel.outbox.request<"queue.shed">({
        verb: "queue.shed",
        key,
        args: [this.id, count],
        session,
        moot: () => shed(0),
        settle: (reply) => reply[0] === "shed" ? end(reply[1]) : shed(0),
        fail: (error) => this.again(session, error, send, () => shed(0))
      })
    send()
  }

  get nothingWaits(): Effect.Effect<boolean, CoordinatorError> {
    return Effect.suspend(() => {
      const session = this.trusted
      if (session === undefined || this.#running > 0) return Effect.succeed(false)
      const asked = request(this.place, "queue.drained", [this.id], { session, moot: () => undefined })
      return Effect.map(asked, (reply) => reply?.[1] === true)
    })
  }

  // -------------------------------------------------------------------------------------------------------------------
  // End
  // -------------------------------------------------------------------------------------------------------------------

  /** Begins no more jobs. */
  halt(): void {
    this.#stopping = true
  }

  /** Begins no more jobs, and is given none. */
  retire(): void {
    this.halt()
    if (this.#retired) return
    this.#retired = true
    // Without a session the actor has given it nothing, and may never have known it.
    if (this.trusted !== undefined) this.tell("queue.credit", [this.id, 0, true], ignore)
  }

  /**
   * Takes no more jobs, and lets handlers finish. After that many milliseconds, the other handlers are interrupted, and their
   * jobs return to the queue. Ends when all handlers have ended, and Redis knows of those that have finished, or has been away
   * for `requestTimeout`. A second call can make it end earlier.
   */
  stop(grace: number): Effect.Effect<void> {
    return Effect.callback((resume) => {
      const { channel, space: { kernel: { io } } } = this.place
      this.retire()
      let timer = grace === 0 ? undefined : io.after(grace, () => this.#quit())
      let waits = false
      const leave = () => {
        off()
        timer?.cancel()
        this.left = true
        resume(Effect.void)
      }
      const ended = () => {
        if (this.#running > 0) return
        this.#quit()
        if (this.#unanswered.size + this.#settling.size === 0) return leave()
        if (waits) return
        waits = true
        timer?.cancel()
        timer = io.after(channel.patience(), leave)
        this.hurry()
      }
      const off = this.listen(ended)
      if (grace === 0) this.#quit()
      ended()
    })
  }

  #quit(): void {
    this.#quitted = true
    for (const task of [...this.#working.values()]) this.#abandon(task)
  }
}

const ignore = () => {}

/** Workers for all shards, which run so many jobs at a time together. */
export const crewOf = <R>(employment: Employment<R>, places: ReadonlyArray<Place>, size: number): Crew => {
  if (places.length === 1) return new Worker(employment, places, size, 0)
  const slots = new Slots(size)
  // Processes with fewer slots than shards begin at different shards.
  const from = Math.floor(places[0]!.space.kernel.io.random() * places.length)
  const workers = places.map((_, shard) => {
    const rank = (shard + from) % places.length
    const own = Math.floor(size / places.length) + (rank < size % places.length ? 1 : 0)
    return new Worker(employment, places, own, shard, slots)
  })
  return new Team(slots, workers)
}
