/** Recurring jobs: the actor counts intervals by itself, and members give it the ticks of calendars. */

import * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Cron from "effect/Cron"
import * as DateTime from "effect/DateTime"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Option from "effect/Option"
import type * as Stream from "effect/Stream"
import { type CoordinatorError, isFinal } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import { describe } from "../hold/loss.ts"
import { oneOf, type Place } from "../hold/place.ts"
import { question, request } from "../hold/request.ts"
import type { Codec } from "../work/codec.ts"
import { longestTurn, Turns } from "../work/turn.ts"
import { decodeTimes, encodeTimes, everyOf, knownTimes, type Missed, runsOf, ticksOf, timesOf } from "./calendar.ts"
import { paged, pageSize } from "./paging.ts"
import { type OfferOptions, wishOf } from "./wish.ts"

/** @internal */
export interface ScheduleOptions extends Pick<OfferOptions, "priority" | "attempts" | "timeout" | "expires"> {
  /**
   * The policy for ticks that were due while no process was alive, or while the queue was paused: one job is offered for all of
   * them (`once`, the default), none (`skip`), or one for each, up to the newest 100 (`all`). A tick was missed if it is more
   * than a minute late, or if the next one is due as well.
   */
  readonly missed?: Missed | undefined
}

/** A schedule as it is now. */
export interface Scheduled<out A> {
  readonly name: string
  /** Undefined if this process does not know their time zone. */
  readonly times: Cron.Cron | Duration.Duration | undefined
  readonly missed: "once" | "skip" | "all"
  /** `None` if it does not fit the schema of this process. */
  readonly payload: Option.Option<A>
  /** When the next job is offered; undefined while that is being computed. */
  readonly next: DateTime.Utc | undefined
  /** The tick of the last job. */
  readonly last: DateTime.Utc | undefined
}

type Tuple = readonly [
  name: string,
  times: unknown,
  missed: Missed,
  body: unknown,
  last: number,
  ran: number,
  next: number
]

type Short = readonly [name: string, version: number, last: number, now: number, missed: Missed, times: unknown]

const mostRuns = 1000

const ignore = () => {}

const timeOf = (millis: number) => millis === 0 ? undefined : DateTime.makeUnsafe(millis)

const scheduledOf = <A>({ decodeParsed }: Codec<A>, [name, times, missed, body, , ran, next]: Tuple): Scheduled<A> => ({
  name,
  times: knownTimes(times),
  missed,
  payload: Exit.getSuccess(decodeParsed(body)),
  next: timeOf(next),
  last: timeOf(ran)
})

export class Schedules {
  readonly #place: Place
  #id = ""
  #left = false
  #unwatch: (() => void) | undefined = undefined
  // Schedules that need ticks, by name. After an outage, it can take seconds to compute all of them.
  readonly #needing = new Map<string, Short>()
  #busyFor = 0
  #deferred = false

  constructor(place: Place) {
    this.#place = place
  }

  /** That a schedule needs ticks. */
  told(change: ReadonlyArray<unknown>): void {
    this.#need(change.slice(1) as unknown as Short)
  }

  joined(id: string): void {
    this.#id = id
  }

  leave(): void {
    this.#left = true
    this.#unwatch?.()
  }

  /** There are schedules. A process that waits for nothing would be notified of alarms with its renewals only. */
  watch(): void {
    if (!this.#left) this.#unwatch ??= this.#place.partition.watch()
  }

  set(
    name: string,
    input: Cron.Cron | Duration.Input,
    body: string,
    { attempts, expires, missed = "once", priority, timeout }: ScheduleOptions
  ): Effect.Effect<void, CoordinatorError> {
    oneOf(missed, "missed", ["once", "skip", "all"])
    const times = timesOf(input)
    const spec = encodeTimes(times)
    // No others: a job of the actor's own can have no texts.
    const options = { attempts, expires, priority, timeout }
    const { more } = wishOf(body, options, { trace: "", context: Context.empty() }, 0)
    this.watch()
    const args = [this.#id, name, spec, more, body, everyOf(times), missed] as const
    const asked = request(this.#place, "queue.schedule", [...args], {
      // Also when the caller was interrupted: no other member would be notified.
      answered: (reply) => {
        if (reply[0] === "full" || !reply[4]) return
        this.#need([name, reply[1], reply[2], reply[3], missed, JSON.parse(spec)])
      }
    })
    return Effect.flatMap(asked, ([tag]) =>
      tag === "full"
        ? Effect.die(new RangeError(`queue ${JSON.stringify(this.#place.name)} has no room for more schedules`))
        : Effect.void)
  }

  // A newer notice of one schedule replaces the one before.
  #need(notice: Short): void {
    this.#needing.set(notice[0], notice)
    if (!this.#deferred) this.#giveAll()
  }

  #giveAll(): void {
    const { io, isClosing } = this.#place.space.kernel
    for (const [name, notice] of this.#needing) {
      if (this.#left || isClosing()) return this.#needing.clear()
      if (this.#busyFor >= longestTurn) return this.#defer()
      const since = io.now()
      this.#needing.delete(name)
      this.#give(notice)
      this.#busyFor += io.now() - since
    }
  }

  #defer(): void {
    this.#deferred = true
    this.#place.space.kernel.io.after(0, () => {
      this.#deferred = false
      this.#busyFor = 0
      this.#giveAll()
    })
  }

  #give([name, version, last, now, missed, spec]: Short): void {
    const { channel, key, name: queue, space: { kernel } } = this.#place
    const { hooks: { log }, io } = kernel
    const what = `the next ticks of schedule ${JSON.stringify(name)} of ${
      describe("queue", queue, kernel.settings.namespace)
    }`
    let ticks = ""
    try {
      const times = decodeTimes(spec)
      if (!Cron.isCron(times)) return
      ticks = ticksOf(times, last, now, missed).join(" ")
    } catch (cause) {
      // Another process may know the time zone.
      log("Error", `${what} could not be computed by this process`, cause)
    }
    const args: Requests["queue.ticks"]["args"] = [this.#id, name, version, last, ticks]
    const send = (): void => {
      if (this.#left || kernel.isClosing()) return
      channel.outbox.request<"queue.ticks">({
        verb: "queue.ticks",
        key,
        args,
        settle: ignore,
        fail: (error) => {
          if (this.#left || kernel.isClosing()) return
          if (isFinal(error.reason)) log("Error", `${what} could not be stored`, error)
          else io.after(channel.retryPause, send)
        }
      })
    }
    send()
  }

  remove(name: string): Effect.Effect<boolean, CoordinatorError> {
    return Effect.map(request(this.#place, "queue.unschedule", [name]), ([tag]) => tag === "removed")
  }

  all<A>(codec: Codec<A>): Stream.Stream<Scheduled<A>, CoordinatorError> {
    return paged(
      (behind) =>
        Effect.map(
          question(this.#place, "queue.schedules", [behind, pageSize]),
          ([, found]) => (found as ReadonlyArray<Tuple>).map((tuple) => scheduledOf(codec, tuple))
        ),
      ({ name }) => name
    )
  }

  runs(name: string, count: number): Effect.Effect<ReadonlyArray<DateTime.Utc>, CoordinatorError> {
    if (!Number.isInteger(count) || count < 1 || count > mostRuns) {
      throw new RangeError(`count must be a whole number from 1 to ${mostRuns}`)
    }
    return Effect.flatMap(question(this.#place, "queue.scheduled", [name]), (reply) => {
      if (reply[0] === "missing") return Effect.succeed([])
      const [, times, , , , , next] = reply[1] as Tuple
      return Effect.flatMap(Clock.currentTimeMillis, (now) => this.#taken(runsOf(decodeTimes(times), next, now), count))
    })
  }

  // Rare ticks can take seconds to find.
  #taken(runs: Iterator<number, void>, count: number): Effect.Effect<ReadonlyArray<DateTime.Utc>> {
    const turns = new Turns(this.#place.space.kernel.io)
    const taken: Array<DateTime.Utc> = []
    let ended = false
    turns.begin()
    return Effect.as(
      Effect.whileLoop({
        while: () => !ended && taken.length < count,
        body: () => turns.next,
        step: () => {
          const { done, value } = runs.next()
          if (done === true) ended = true
          else taken.push(DateTime.makeUnsafe(value))
        }
      }),
      taken
    )
  }
}
