/** The data that handlers keep of the jobs of a worker: one request of a job is under way at a time. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Session } from "../actor/session.ts"
import type { Place } from "../hold/place.ts"
import { type Noted, Noting } from "./noting.ts"

/** The part of the worker that they need. */
export interface Owner {
  readonly place: Place
  /** Of the worker, as the actor knows it. */
  readonly id: () => string
  /** As long as it can be trusted. */
  readonly session: () => Session | undefined
  /** Whether the worker has the job still. */
  readonly has: (task: Noted) => boolean
  /** Redis has refused a request: it is made again later, or is over. */
  readonly again: (
    session: Session,
    error: CoordinatorError,
    send: () => void,
    over: (error: CoordinatorError | undefined) => void
  ) => void
}

export class Notes {
  readonly #owner: Owner

  constructor(owner: Owner) {
    this.#owner = owner
  }

  /**
   * The request that takes in what the handler of a job keeps now. Progress, log and checkpoint share one until it is sent. The next one
   * waits for its answer: Redis may refuse it, and would execute it behind newer ones then.
   */
  readonly of = (task: Noted): Noting | undefined => {
    const { has, id, place, session: trusted } = this.#owner
    const session = trusted()
    if (session === undefined || !has(task)) return undefined
    const before = task.noting
    if (before?.open === true) {
      if (before.state === "refused") this.#ask(before)
      return before
    }
    const noting = task.noting = new Noting(place.key, id(), task, session, this.#noted)
    if (before === undefined || before.state === "over") this.#ask(noting)
    return noting
  }

  /** All that was kept is sent before what has become of the job. */
  send({ noting }: Noted): void {
    if (noting?.state === "gathering" || noting?.state === "refused") this.#ask(noting)
  }

  #ask(noting: Noting): void {
    noting.state = "asked"
    this.#owner.place.channel.outbox.request(noting)
  }

  readonly #noted = (noting: Noting, error: CoordinatorError | undefined): void => {
    const { task } = noting
    const last = task.noting!
    const isOwn = this.#owner.has(task)
    if (error === undefined) {
      if (last.state !== "gathering") return
      return isOwn ? this.#ask(last) : last.over(false)
    }
    // Its handler has ended. A later attempt here must not receive the values that this one has set.
    if (!isOwn) return noting.over(false)
    if (last !== noting) {
      last.join(noting)
      return this.#ask(last)
    }
    noting.refused()
    this.#askAgain(noting, error)
  }

  #askAgain(noting: Noting, error: CoordinatorError): void {
    if (noting.isRetried) return
    noting.isRetried = true
    const again = () => {
      noting.isRetried = false
      if (noting.state === "refused") this.#ask(noting)
    }
    this.#owner.again(noting.session, error, again, (error) => noting.over(false, error))
  }
}
