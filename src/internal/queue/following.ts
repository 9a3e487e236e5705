/** Follows the progress of jobs, as a member of the queue: the actor tells a member of the jobs that it asked for. */

import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Queue from "effect/Queue"
import * as Stream from "effect/Stream"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Place } from "../hold/place.ts"

interface Follower {
  /** The id that was asked for. */
  readonly name: string
  /** The job's own id, when it is known. */
  job: string | undefined
  /** Of the newest progress: an event that comes later may be older. */
  token: number
  readonly next: (value: unknown) => void
  readonly end: () => void
  readonly fail: (error: CoordinatorError) => void
}

type Event =
  | readonly [tag: "progress", job: string, token: number, value: unknown]
  | readonly [tag: "over", job: string]

const ignore = () => {}

export class Following {
  readonly #place: Place
  readonly #followers = new Set<Follower>()
  // Events that came while it was asked for some: the mailbox can be faster than an answer.
  #early: Array<Event> = []
  #unanswered = 0
  #id: string | undefined = undefined

  constructor(place: Place) {
    this.#place = place
  }

  joined(id: string): void {
    this.#id = id
  }

  told(event: Event): void {
    if (this.#unanswered > 0) this.#early.push(event)
    for (const follower of [...this.#followers]) this.#tell(follower, event)
  }

  /** The membership is joined, perhaps again: news of meanwhile, and the followers that Redis knew, may be lost. */
  rejoined(): void {
    for (const follower of this.#followers) if (follower.job !== undefined) this.#ask(follower)
  }

  closed(): void {
    for (const follower of [...this.#followers]) {
      this.#followers.delete(follower)
      follower.fail(this.#place.channel.closedError())
    }
  }

  #tell(follower: Follower, event: Event): void {
    if (follower.job !== event[1]) return
    if (event[0] === "over") {
      this.#followers.delete(follower)
      return follower.end()
    }
    const [, , token, value] = event
    if (token <= follower.token) return
    follower.token = token
    follower.next(value)
  }

  #ask(follower: Follower): void {
    const { channel, key } = this.#place
    this.#unanswered++
    const answered = (): ReadonlyArray<Event> => {
      const early = this.#early
      if (--this.#unanswered === 0) this.#early = []
      return early
    }
    channel.outbox.request<"queue.follow">({
      verb: "queue.follow",
      key,
      args: [this.#id!, follower.name],
      settle: (reply) => {
        const early = answered()
        if (!this.#followers.has(follower)) {
          if (reply[0] === "following") this.#leave(reply[1])
          return
        }
        if (reply[0] === "missing") {
          this.#followers.delete(follower)
          return follower.end()
        }
        const [, job, token, values] = reply
        follower.job = job
        for (const value of values as ReadonlyArray<unknown>) this.#tell(follower, ["progress", job, token, value])
        for (const event of early) this.#tell(follower, event)
      },
      fail: (error) => {
        answered()
        if (this.#followers.delete(follower)) follower.fail(error)
      }
    })
  }

  // Nothing here follows the job any more. When the session is over, Redis tells it of nothing.
  #leave(job: string): void {
    for (const follower of this.#followers) if (follower.job === job || follower.job === undefined) return
    const { channel, key } = this.#place
    if (channel.session === undefined) return
    channel.outbox.request<"queue.unfollow">({
      verb: "queue.unfollow",
      key,
      args: [this.#id!, job],
      session: channel.session,
      moot: ignore,
      settle: ignore,
      fail: ignore
    })
  }

  /** The progress of a job, and each change of it. Only the latest change waits for a slow consumer. */
  progress<E>(name: string, fail: (error: CoordinatorError) => E): Stream.Stream<unknown, E> {
    const opened = Effect.map(Queue.sliding<unknown, E | Cause.Done>(1), (queue) => {
      const follower: Follower = {
        name,
        job: undefined,
        token: 0,
        next: (value) => void Queue.offerUnsafe(queue, value),
        end: () => void Queue.endUnsafe(queue),
        fail: (error) => void Queue.failCauseUnsafe(queue, Cause.fail(fail(error)))
      }
      const { channel, space: { kernel } } = this.#place
      if (kernel.isClosing()) follower.fail(channel.closedError())
      else {
        this.#followers.add(follower)
        this.#ask(follower)
      }
      return { follower, queue }
    })
    const closed = (follower: Follower) =>
      Effect.sync(() => {
        if (this.#followers.delete(follower) && follower.job !== undefined) this.#leave(follower.job)
      })
    return Stream.unwrap(
      Effect.map(
        Effect.acquireRelease(opened, ({ follower }) => closed(follower)),
        ({ queue }) => Stream.fromQueue(queue)
      )
    )
  }
}
