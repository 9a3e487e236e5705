/** Follows the progress of jobs. */

import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Queue from "effect/Queue"
import * as Stream from "effect/Stream"
import type { Requests } from "../actor/lua.ts"
import type { Place } from "../hold/place.ts"
import { type Caller, Callers } from "./callers.ts"
import type { Failure } from "./errors.ts"

interface Follower extends Caller {
  /** Of the newest progress: news that come later may be older. */
  token: number
  readonly next: (value: unknown) => void
  readonly end: () => void
}

type News =
  | readonly [tag: "progress", job: string, token: number, value: unknown]
  | readonly [tag: "over", job: string]

const ignore = () => {}

export class Following extends Callers<Follower, News, "queue.follow"> {
  constructor(place: Place) {
    super(place, "queue.follow")
  }

  protected tell(follower: Follower, news: News): void {
    if (follower.job !== news[1]) return
    if (news[0] === "over") return this.#end(follower)
    const [, , token, value] = news
    if (token <= follower.token) return
    follower.token = token
    follower.next(value)
  }

  protected answered(follower: Follower, reply: Requests["queue.follow"]["reply"], early: ReadonlyArray<News>): void {
    if (!this.callers.has(follower)) {
      if (reply[0] === "following") this.#leave(reply[1])
      return
    }
    if (reply[0] === "missing") return this.#end(follower)
    const [, job, token, values] = reply
    follower.job = job
    for (const value of values as ReadonlyArray<unknown>) this.tell(follower, ["progress", job, token, value])
    for (const news of early) this.tell(follower, news)
  }

  #end(follower: Follower): void {
    this.remove(follower)
    follower.end()
  }

  // Nothing here follows the job any more. When the session is over, Redis sends it nothing.
  #leave(job: string): void {
    for (const follower of this.callers) if (follower.job === job || follower.job === undefined) return
    const { channel, key } = this.place
    if (channel.session === undefined) return
    channel.outbox.request<"queue.unfollow">({
      verb: "queue.unfollow",
      key,
      args: [this.id, job],
      session: channel.session,
      moot: ignore,
      settle: ignore,
      fail: ignore
    })
  }

  /** The progress of a job, and each change of it. Only the latest change waits for a slow consumer. */
  progress<E>(name: string, fail: (error: Failure) => E): Stream.Stream<unknown, E> {
    const opened = Effect.map(Queue.sliding<unknown, E | Cause.Done>(1), (queue) => {
      const follower: Follower = {
        name,
        job: undefined,
        token: 0,
        next: (value) => void Queue.offerUnsafe(queue, value),
        end: () => void Queue.endUnsafe(queue),
        fail: (error) => void Queue.failCauseUnsafe(queue, Cause.fail(fail(error)))
      }
      this.add(follower, false)
      return { follower, queue }
    })
    const closed = (follower: Follower) =>
      Effect.sync(() => {
        if (this.remove(follower) && follower.job !== undefined) this.#leave(follower.job)
      })
    return Stream.unwrap(
      Effect.map(
        Effect.acquireRelease(opened, ({ follower }) => closed(follower)),
        ({ queue }) => Stream.fromQueue(queue)
      )
    )
  }
}
