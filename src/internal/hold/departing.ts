/** The last word about a claim whose wait is over. */

import * as Effect from "effect/Effect"
import type { CoordinatorReason } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Verb } from "../actor/transport.ts"
import type { Timer } from "../io.ts"
import type { Entry, Outcome } from "./claim.ts"
import type { Place } from "./place.ts"

export type Settled = Exclude<Outcome, readonly ["failed", ...any]>

export interface Departure<V extends Verb = Verb> {
  readonly verb: V
  /** Behind the id. */
  readonly args: ReadonlyArray<string>
  /** The answer about the claim: that its wait is over, what came before that, or that an event follows. */
  told(id: string, reply: Requests[V]["reply"]): "departed" | "later" | ReadonlyArray<unknown>
}

const ignore = () => {}

/** Called once, with the outcome of a request. */
export const onSettled = <E>(
  entry: Entry,
  fail: (error: CoordinatorReason) => E,
  told: (result: Effect.Effect<Settled, E>) => void
): void => {
  entry.settle = (outcome) => {
    // A hold must not keep the effects of its request.
    entry.settle = ignore
    told(outcome[0] === "failed" ? Effect.fail(fail(outcome[1].reason)) : Effect.succeed(outcome))
  }
}

// While Redis does not answer, this much longer than its time a wait can last, in milliseconds.
const mostGrace = 1000

/**
 * The process of the claim received no outcome before the wait was over, so it asks for the last word. If the connection, or the session,
 * is replaced at this moment, or while the event is still to come that the answer has announced, the next one asks.
 */
export const departing = <E>(
  { channel, key, space: { kernel: { io } }, tenancy }: Place,
  entry: Entry,
  departure: Departure,
  timeout: Effect.Effect<never, E>,
  fail: (error: CoordinatorReason) => E
): Effect.Effect<Settled, E> =>
  Effect.callback((resume) => {
    const patience = Math.min(mostGrace, channel.patience())
    // Redis has never heard of it, or has been away for long.
    if (entry.session === undefined || patience === 0) return resume(timeout)
    let isOver = false
    let grace: Timer | undefined
    const finish = () => {
      isOver = true
      grace?.cancel()
      entry.repeated = undefined
    }
    const end = (result: Effect.Effect<Settled, E>) => {
      finish()
      resume(result)
    }
    const over = () => end(timeout)
    onSettled(entry, fail, end)
    // Behind the claims, which ask in the next session first.
    const again = () => {
      entry.repeated = undefined
      grace ??= io.after(patience, over)
      void channel.opened().then(ask, over)
    }
    const ask = () => {
      const { session } = channel
      if (isOver) return
      if (session === undefined) return again()
      channel.outbox.request({
        verb: departure.verb,
        key,
        args: [entry.id, ...departure.args] as never,
        session,
        urgent: true,
        moot: again,
        fail: over,
        expire: over,
        settle: (reply) => {
          if (isOver) return
          const told = departure.told(entry.id, reply)
          if (told === "departed") return over()
          if (told !== "later") return tenancy.heard(session, told)
          grace?.cancel()
          grace = undefined
          entry.repeated = again
        }
      })
    }
    grace = io.after(patience, over)
    if (entry.session.lost === undefined) ask()
    else again()
    return Effect.sync(finish)
  })
