/**
 * Callers that wait for events of jobs. The process asks as a member of the queue, again in each session, and the actor notifies
 * it of the jobs that it has asked for.
 */

import type { Requests } from "../actor/lua.ts"
import type { Place } from "../hold/place.ts"
import type { Failure } from "./errors.ts"

export interface Caller {
  /** The id that was asked for. */
  readonly name: string
  /** The job's own id, when it is known. */
  job: string | undefined
  readonly fail: (error: Failure) => void
}

type News = readonly [tag: string, job: string, ...rest: ReadonlyArray<unknown>]

interface Question {
  /** How many news came before it. */
  readonly from: number
  answered: boolean
}

type Verb = "queue.follow" | "queue.watch"

export abstract class Callers<C extends Caller, N extends News, V extends Verb> {
  protected readonly place: Place
  readonly #callers = new Set<C>()
  // They wait for the expiry of jobs, too.
  #unwatch: (() => void) | undefined = undefined
  readonly #verb: V
  // News that came while the actor was asked: the mailbox can be faster than an answer. They are kept from the oldest question on.
  #early: Array<N> = []
  // How many came before these.
  #dropped = 0
  // Questions: the oldest one that is under way stands behind so many that are answered.
  #asked: Array<Question> = []
  #answered = 0
  #id = ""
  // Why it takes no callers any more.
  #closed: Failure | undefined = undefined

  constructor(place: Place, verb: V) {
    this.place = place
    this.#verb = verb
  }

  protected get id(): string {
    return this.#id
  }

  protected get callers(): ReadonlySet<C> {
    return this.#callers
  }

  /** Answers whether it was there. */
  protected remove(caller: C): boolean {
    const removed = this.#callers.delete(caller)
    if (this.#callers.size === 0) {
      this.#unwatch?.()
      this.#unwatch = undefined
    }
    return removed
  }

  joined(id: string): void {
    this.#id = id
  }

  told(news: N): void {
    if (this.#asked.length > 0) this.#early.push(news)
    for (const caller of [...this.callers]) this.tell(caller, news)
  }

  /** The membership is joined, perhaps again: events of meanwhile, and the callers that Redis knew, may be lost. */
  rejoined(): void {
    for (const caller of this.callers) if (caller.job !== undefined) this.#ask(caller, true)
  }

  closed(error: Failure): void {
    this.#closed = error
    for (const caller of [...this.callers]) {
      this.remove(caller)
      caller.fail(error)
    }
  }

  /** Not every job is the caller's. */
  protected abstract tell(caller: C, news: N): void

  /** The actor has answered. `early` are the events that it has sent of any job since it was asked. */
  protected abstract answered(caller: C, reply: Requests[V]["reply"], early: ReadonlyArray<N>): void

  /** An urgent caller goes on with work that was accepted before, under any load. */
  protected add(caller: C, urgent: boolean): void {
    const { channel, space: { kernel } } = this.place
    const closed = kernel.isClosing() ? channel.closedError() : this.#closed
    if (closed !== undefined) return caller.fail(closed)
    this.#callers.add(caller)
    this.#unwatch ??= this.place.partition.expect()
    this.#ask(caller, urgent)
  }

  #ask(caller: C, urgent: boolean): void {
    const { channel, key } = this.place
    const question = { from: this.#dropped + this.#early.length, answered: false }
    this.#asked.push(question)
    const early = (): ReadonlyArray<N> => {
      const early = this.#early.slice(question.from - this.#dropped)
      question.answered = true
      this.#drop()
      return early
    }
    channel.outbox.request<V>({
      verb: this.#verb,
      key,
      args: [this.#id, caller.name],
      urgent,
      settle: (reply) => this.answered(caller, reply, early()),
      fail: (error) => {
        early()
        if (this.remove(caller)) caller.fail(error)
      }
    })
  }

  // At least half of them at once, so that what is kept is moved once.
  #drop(): void {
    while (this.#asked[this.#answered]?.answered === true) this.#answered++
    if (this.#answered * 2 >= this.#asked.length) {
      this.#asked = this.#asked.slice(this.#answered)
      this.#answered = 0
    }
    const oldest = this.#asked[this.#answered]
    const count = oldest === undefined ? this.#early.length : oldest.from - this.#dropped
    if (count * 2 < this.#early.length) return
    this.#early = this.#early.slice(count)
    this.#dropped += count
  }
}
