/**
 * A share in the jobs or events that an actor delivers by credit: a worker of a queue, or a member of a group. Its
 * unacknowledged deliveries go to others when its session ends. Plain callbacks: this is the hot path.
 */

import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { type CoordinatorError, type CoordinatorReason, isFinal } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Session } from "../actor/session.ts"
import type { Verb } from "../actor/transport.ts"
import { join } from "../hold/acquire.ts"
import type { Argument, ClaimVerb, Outcome } from "../hold/claim.ts"
import type { Membership } from "../hold/membership.ts"
import type { Place } from "../hold/place.ts"

export interface Joining<E> {
  readonly verb: ClaimVerb
  readonly args: () => ReadonlyArray<Argument>
  /** The coordinator was closed, so no more will come. */
  readonly closed: () => void
  readonly fail: (error: CoordinatorReason) => E
}

export abstract class Member {
  protected readonly place: Place
  /** The session that it has joined in. */
  protected session: Session | undefined = undefined
  /** It takes nothing any more. */
  protected left = false
  #membership: Membership | undefined = undefined
  // The deliveries that came before the membership was known here.
  #early: Array<ReadonlyArray<unknown>> = []
  // Requests that Redis has refused, and that are made again later.
  readonly #refused = new Set<() => void>()
  #hurries = false
  readonly #onCalm: Array<() => void> = []

  constructor(place: Place) {
    this.place = place
  }

  /** Takes in a delivery, or the answer to joining: again and again in the same session, if news may have been lost. */
  protected abstract take(change: ReadonlyArray<unknown>): void

  /** The session is lost, and with it all that it has in hand. */
  protected abstract lose(): void

  /** Whether something goes on that it had in hand when its session was lost. */
  protected isEnding(): boolean {
    return this.isBusy()
  }

  /** Whether something runs on what it has in hand, or had: also on what it has lost. */
  protected abstract isBusy(): boolean

  /** To be called when nothing runs any more. */
  protected calm(): void {
    if (this.#onCalm.length > 0 && !this.isBusy()) { for (const ended of this.#onCalm.splice(0)) ended() }
  }

  readonly #ended = (): Promise<void> =>
    new Promise((resolve) => {
      this.#onCalm.push(resolve)
      this.calm()
    })

  /** As the actor knows it, in its session. */
  protected get id(): string {
    return this.#membership!.id
  }

  /** Is a member for as long as the scope is open. */
  join<E>({ args, closed, fail, verb }: Joining<E>): Effect.Effect<Outcome, E, Scope.Scope> {
    const { partition } = this.place
    // The end of another member's session is good for this one.
    const watching = Effect.acquireRelease(Effect.sync(() => partition.watch()), (end) => Effect.sync(end))
    const joined = join(this.place, {
      verb,
      args,
      observer: {
        observe: (change) => {
          if (this.#membership === undefined) this.#early.push(change)
          else this.#observe(change)
        },
        lost: () => this.#lost(),
        isEnding: () => this.isEnding(),
        closed: () => {
          this.#lost()
          closed()
        },
        ended: this.#ended
      },
      fail
    })
    return Effect.andThen(
      watching,
      Effect.map(joined, ([membership, outcome]) => {
        this.#membership = membership
        for (const change of this.#early.splice(0)) this.#observe(change)
        return outcome
      })
    )
  }

  #observe(change: ReadonlyArray<unknown>): void {
    this.session = this.place.channel.session
    if (this.session !== undefined) this.take(change)
  }

  #lost(): void {
    this.session = undefined
    this.#early = []
    this.lose()
  }

  /** The session, while its deliveries are its own. */
  protected get trusted(): Session | undefined {
    const { session } = this
    return session === undefined || session.lost !== undefined || this.left ? undefined : session
  }

  /** Says what has become of something that it has in hand. It is moot when the session is over: others have it then. */
  protected tell<V extends Verb>(
    verb: V,
    args: Requests[V]["args"],
    settled: (error: CoordinatorError | undefined) => void
  ): void {
    const session = this.trusted
    if (session === undefined) return settled(undefined)
    const { channel, key } = this.place
    const send = (): void =>
      channel.outbox.request<V>({
        verb,
        key,
        args,
        session,
        urgent: true,
        moot: () => settled(undefined),
        settle: () => settled(undefined),
        fail: (error) => this.again(session, error, send, settled)
      })
    send()
  }

  /** Redis has refused a request. The session lives on, and with it the claim: no other member would get what it has. */
  protected again(
    session: Session,
    error: CoordinatorError,
    send: () => void,
    settled: (error: CoordinatorError | undefined) => void
  ): void {
    const { channel, space: { kernel } } = this.place
    if (isFinal(error.reason) || kernel.isClosing()) return settled(error)
    const retry = () => {
      timer.cancel()
      this.#refused.delete(retry)
      if (session.lost !== undefined || this.left || kernel.isClosing()) settled(undefined)
      else send()
    }
    const timer = kernel.io.after(this.#hurries ? kernel.settings.requestTimeout / 10 : channel.retryPause, retry)
    this.#refused.add(retry)
  }

  /** It is about to leave: requests that Redis has refused are made again now, and more often. */
  protected hurry(): void {
    this.#hurries = true
    for (const retry of [...this.#refused]) retry()
  }
}
