/**
 * The client's half of the latch actor: the common part of a countdown latch and a latch. A membership observes every opening,
 * so that waiting costs Redis nothing.
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import type { CoordinatorError, CoordinatorReason } from "../actor/errors.ts"
import { checkName } from "../actor/keys.ts"
import type { Requests } from "../actor/lua.ts"
import { join, within } from "../hold/acquire.ts"
import { describe, type WaitTimeout } from "../hold/loss.ts"
import { millis, type Place } from "../hold/place.ts"
import { memberQuestion, request } from "../hold/request.ts"
import { spanned } from "../hold/span.ts"
import { Superseded } from "../hold/superseded.ts"

export interface Settings<E> {
  readonly place: Place
  /** Of the module, for spans. */
  readonly module: string
  readonly total: number
  /** It is open from the start, if it has to be created. */
  readonly open: boolean
  readonly timeToLive: Duration.Input
  readonly run: string | undefined
  readonly fresh: boolean
  readonly onMismatch: "fail" | "keep" | "resize"
  readonly fail: (reason: CoordinatorReason | WaitTimeout | Superseded) => E
  readonly mismatch: (existing: number) => E
}

interface State {
  readonly total: number
  readonly remaining: number
  readonly passes: number
  readonly resets: number
  readonly changes: number
  readonly epoch: number
  readonly run: string
}

const fields = 7

const stateOf = ([total, remaining, passes, resets, changes, epoch, run]: ReadonlyArray<unknown>): State => ({
  total: Number(total),
  remaining: Number(remaining),
  passes: Number(passes),
  resets: Number(resets),
  changes: Number(changes),
  epoch: Number(epoch),
  run: String(run)
})

/** A count on its way: under an id of the user's, or under a number of this member's. */
interface Count {
  readonly id: string | undefined
  readonly number: number
  readonly by: number
}

// Of counts without an id. Redis loses no more than the counts of the last moments.
const mostRemembered = 4096

/** The counts of this process since the last reset: by id, the last ones that have none, and the sum of those before. */
class Counted {
  readonly #named = new Map<string, Count>()
  readonly #unnamed = new Map<number, Count>()
  #before = 0

  add(count: Count): void {
    if (count.id !== undefined) {
      // The first one with an id has counted.
      if (!this.#named.has(count.id)) this.#named.set(count.id, count)
      return
    }
    this.#unnamed.set(count.number, count)
    if (this.#unnamed.size <= mostRemembered) return
    const [oldest] = this.#unnamed.values()
    this.#unnamed.delete(oldest!.number)
    this.#before += oldest!.by
  }

  /** Takes out what Redis may not know: each one under its number, in the order of these. */
  takeEach(): ReadonlyArray<Count> {
    const counts = [...this.#named.values(), ...this.#unnamed.values()]
    this.#named.clear()
    this.#unnamed.clear()
    return counts
  }

  /** Takes out all, of which Redis knows nothing: the counts without an id as one. */
  takeAll(number: () => number): ReadonlyArray<Count> {
    const named = [...this.#named.values()]
    const by = [...this.#unnamed.values()].reduce((sum, count) => sum + count.by, this.#before)
    this.clear()
    return by === 0 ? named : [...named, { id: undefined, by, number: number() }]
  }

  clear(): void {
    this.#named.clear()
    this.#unnamed.clear()
    this.#before = 0
  }
}

export class SharedLatch<E> {
  readonly place: Place
  readonly #settings: Settings<E>
  readonly #timeToLive: number
  readonly #run: string
  readonly #instance: string
  readonly #waiting = new Set<(result: Effect.Effect<void, E>) => void>()
  readonly #counted = new Counted()
  // The counts that Redis may have forgotten, by id or number: they are made again, and if that fails, with every event of the
  // latch.
  readonly #owed = new Map<string | number, Count>()
  // Those of them that are restored next, the last one first, and how many are under way.
  #next: Array<Count> = []
  #restoring = 0
  // One of these was restored.
  #goesOn = false
  #owesOpen = false
  #number = 0
  #closed = false
  // When it has decided about `timeToLive`; 0: now.
  #decided = 0
  // Redis may forget as much as it likes with the session: the next state from it is accepted, however old that is.
  #lost = false
  #superseded: Superseded | undefined = undefined
  #state: State

  constructor(settings: Settings<E>) {
    const { open, place, run, timeToLive, total } = settings
    this.place = place
    this.#settings = settings
    this.#timeToLive = millis(timeToLive, "timeToLive")
    this.#run = run === undefined ? "" : checkName(run, "run")
    this.#instance = place.space.kernel.uniqueId()
    this.#state = { total, remaining: open ? 0 : total, passes: 0, resets: 0, changes: 0, epoch: 0, run: "" }
  }

  /** Has it open for as long as the scope is. */
  join(): Effect.Effect<this, E, Scope.Scope> {
    const { fail, fresh, mismatch, onMismatch } = this.#settings
    const joined = Effect.flatMap(
      join(this.place, {
        verb: "latch.join",
        args: (anyway) => {
          // After a loss of the session, the latch is meant as this member knew it.
          const { epoch, remaining, resets, total } = this.#state
          const run = this.#superseded === undefined ? this.#run : ""
          const left = remaining === 0 ? 0 : total
          return [total, left, this.#timeToLive, this.#decided, run, onMismatch, fresh, epoch, resets, anyway]
        },
        observer: {
          observe: (state) => {
            // Another process may decide later, which stays so when this one joins again.
            if (state.length > fields) this.#decided ||= Number(state[fields])
            this.#observe(stateOf(state))
          },
          lost: () => void (this.#lost = true),
          closed: () => this.#close()
        },
        fail
      }),
      ([, outcome]) => outcome[0] === "mismatch" ? Effect.fail(mismatch(outcome[1])) : Effect.succeed(this)
    )
    return Effect.andThen(Effect.addFinalizer(() => Effect.sync(() => this.#close())), joined)
  }

  // A member that has left receives no event any more, so its waiters must not wait on.
  #close(): void {
    this.#closed = true
    this.#end(this.#left)
  }

  /** The result of a wait when this member has left: the end of its scope is no error, that of the coordinator is one. */
  get #left(): Effect.Effect<never, E> {
    const { channel, space: { kernel } } = this.place
    return kernel.isClosing() ? Effect.fail(this.#failed(channel.closedError())) : Effect.interrupt
  }

  #end(result: Effect.Effect<void, E>): void {
    for (const end of [...this.#waiting]) end(result)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // State
  // -------------------------------------------------------------------------------------------------------------------

  #observe(next: State): void {
    const known = this.#state
    const forgotten = known.epoch !== 0 && next.epoch !== known.epoch
    // A reply can be older than an event that came before it.
    if (!this.#lost && (next.epoch < known.epoch || !forgotten && next.changes < known.changes)) return
    const rejoined = this.#lost
    this.#lost = false
    this.#state = next
    // A superseded member follows, too: after a loss of data it may be the first to create the latch again.
    if (this.#superseded !== undefined) return
    if (this.#isForeign(next.run)) return void this.#supersede(next.run)
    if (next.resets > known.resets) {
      this.#settle()
    } else if (forgotten || rejoined) {
      // Redis may have gone back in this epoch, too: then it knows some of the numbers. In another epoch it knows none.
      const counts = forgotten ? this.#counted.takeAll(() => ++this.#number) : this.#counted.takeEach()
      for (const count of counts) this.#owe(count)
      this.#owesOpen ||= known.remaining === 0
    }
    // An open latch counts nothing.
    if (next.remaining === 0) this.#settle()
    this.#restore()
    if (next.remaining === 0 || !forgotten && next.passes > known.passes) this.#end(Effect.void)
  }

  #owe(count: Count): void {
    this.#owed.set(count.id ?? count.number, count)
  }

  // The counts before this moment do not matter any more.
  #settle(): void {
    this.#counted.clear()
    this.#owed.clear()
    this.#next = []
    this.#owesOpen = false
  }

  #isForeign(run: string): boolean {
    return this.#run !== "" && run !== "" && run !== this.#run
  }

  #supersede(current: string): E {
    const { kind, name, space: { kernel } } = this.place
    const { namespace } = kernel.settings
    const reason = this.#superseded ??= new Superseded({ kind, name, namespace, run: this.#run, current })
    this.#settle()
    const error = this.#settings.fail(reason)
    this.#end(Effect.fail(error))
    return error
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Restore
  // -------------------------------------------------------------------------------------------------------------------

  #restore(): void {
    if (this.#owesOpen) {
      this.#owesOpen = false
      this.#demand(
        "latch.open",
        (since) => [this.#state.total, this.#timeToLive, this.#run, since],
        (fine) => {
          if (!fine) this.#owesOpen = true
        }
      )
      return
    }
    // No more at a time than a batch has, so that other requests do not wait behind thousands.
    if (this.#restoring > 0) return
    if (this.#next.length === 0) {
      // Redis distinguishes numbers that arrive almost in order.
      this.#next = [...this.#owed.values()].sort((one, other) => other.number - one.number)
      this.#owed.clear()
    }
    const counts = this.#next.splice(-this.place.space.kernel.settings.maxBatch).reverse()
    this.#restoring = counts.length
    this.#goesOn = false
    for (const count of counts) {
      this.#demand("latch.count", (since) => this.#countArgs(count, since), (fine) => {
        if (!fine) this.#owe(count)
        this.#restored(fine)
      }, count)
    }
  }

  // A count that Redis has refused is not tried again at once, unless Redis takes others.
  #restored(fine: boolean): void {
    this.#goesOn ||= fine
    this.#restoring--
    if (this.#restoring === 0 && this.#goesOn) this.#restore()
  }

  // In the background, and for as long as it takes, unless the latch is reset meanwhile.
  #demand<V extends "latch.count" | "latch.open">(
    verb: V,
    argsOf: (since: string) => Requests[V]["args"],
    over: (fine: boolean) => void,
    count?: Count,
    since = String(this.#state.resets)
  ): void {
    const { channel, key, kind, name, space: { kernel } } = this.place
    channel.outbox.request<V>({
      verb,
      key,
      args: argsOf(since),
      urgent: true,
      settle: (reply) => {
        try {
          this.#answered(reply, count, since)
        } finally {
          over(true)
        }
      },
      moot: () => this.#demand(verb, argsOf, over, count, since),
      fail: (error) => {
        if (this.#state.resets > Number(since)) return over(true)
        over(false)
        const what = describe(kind, name, kernel.settings.namespace)
        kernel.hooks.log("Warn", `${what} could not be restored yet; the next change or count tries again`, error)
      }
    })
  }

  #countArgs({ by, id, number }: Count, since: string): Requests["latch.count"]["args"] {
    const count = id === undefined ? `n${this.#instance}` : `i${id}`
    return [count, number, by, this.#state.total, this.#timeToLive, this.#run, since]
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Requests
  // -------------------------------------------------------------------------------------------------------------------

  /**
   * Asks, and when the session is lost before the answer, asks again: with the number of resets that was known at first, so that
   * nothing is done in two rounds.
   */
  #ask<V extends "latch.count" | "latch.open" | "latch.reset">(
    verb: V,
    argsOf: (since: string) => Requests[V]["args"],
    count?: Count
  ): Effect.Effect<Requests[V]["reply"], CoordinatorError> {
    const since = String(this.#state.resets)
    const attempt = (repeated: string): Effect.Effect<Requests[V]["reply"], CoordinatorError> =>
      Effect.flatMap(
        request(this.place, verb, argsOf(repeated), {
          again: repeated !== "",
          answered: (reply) => this.#answered(reply, count, repeated),
          moot: () => undefined
        }),
        (reply) => reply === undefined ? attempt(since) : Effect.succeed(reply)
      )
    return attempt("")
  }

  #answered(
    reply: Requests["latch.count" | "latch.open" | "latch.reset" | "latch.release"]["reply"],
    asked?: Count,
    since = ""
  ): void {
    if (reply[0] === "superseded") return void this.#supersede(reply[1])
    const state = stateOf(reply.slice(reply[0] === "counted" ? 1 : 2))
    const count = since !== "" && state.resets > Number(since) ? undefined : asked
    const before = this.#state
    if (count !== undefined && state.epoch < before.epoch && !this.#lost) {
      // Counted in what Redis has forgotten since.
      this.#owe(count)
      return this.#restore()
    }
    this.#observe(state)
    // After what the former epoch has counted was set aside.
    if (count !== undefined && state.remaining > 0 && state.resets === this.#state.resets) {
      this.#counted.add(count)
    }
    // It was closed on purpose, also if it was open before Redis has forgotten it.
    if (reply[0] === "reset") this.#settle()
  }

  #failed(error: CoordinatorError): E {
    return this.#settings.fail(error.reason)
  }

  /** Counts down, once for each id; answers what remains. */
  count(by: number, id: string | undefined): Effect.Effect<number, E> {
    return Effect.suspend(() => {
      if (this.#superseded !== undefined) return Effect.fail(this.#settings.fail(this.#superseded))
      const count: Count = { id, by, number: id === undefined ? ++this.#number : 0 }
      return Effect.matchEffect(this.#ask("latch.count", (since) => this.#countArgs(count, since), count), {
        onFailure: (error) => Effect.fail(this.#failed(error)),
        onSuccess: (reply) =>
          reply[0] === "superseded" ? Effect.fail(this.#supersede(reply[1])) : Effect.succeed(reply[2])
      })
    })
  }

  #change(
    ask: (total: number, life: number, run: string) => Effect.Effect<
      Requests["latch.open" | "latch.release" | "latch.reset"]["reply"],
      CoordinatorError
    >
  ): Effect.Effect<boolean, E> {
    return Effect.suspend(() => {
      if (this.#superseded !== undefined) return Effect.fail(this.#settings.fail(this.#superseded))
      return Effect.matchEffect(ask(this.#state.total, this.#timeToLive, this.#run), {
        onFailure: (error) => Effect.fail(this.#failed(error)),
        onSuccess: (reply) =>
          reply[0] === "superseded" ? Effect.fail(this.#supersede(reply[1])) : Effect.succeed(reply[1])
      })
    })
  }

  /** Each answers whether it has changed the latch. */
  get open(): Effect.Effect<boolean, E> {
    return this.#change((...args) => this.#ask("latch.open", (since) => [...args, since]))
  }

  get release(): Effect.Effect<boolean, E> {
    return this.#change((...args) =>
      request(this.place, "latch.release", args, { answered: (reply) => this.#answered(reply) })
    )
  }

  get close(): Effect.Effect<boolean, E> {
    return this.#change((...args) => this.#ask("latch.reset", (since) => [...args, since, false]))
  }

  /** Everything is to be counted again, also if the latch is closed. */
  get reset(): Effect.Effect<void, E> {
    return Effect.asVoid(this.#change((...args) => this.#ask("latch.reset", (since) => [...args, since, true])))
  }

  /** The remaining count now, by Redis's word. */
  get remaining(): Effect.Effect<number, E> {
    return Effect.matchEffect(memberQuestion(this.place, "latch.state", []), {
      onFailure: (error) => Effect.fail(this.#failed(error)),
      onSuccess: (reply) => {
        // Missing for a moment after Redis has lost its data.
        if (reply[0] === "missing") return Effect.succeed(this.#state.total)
        return this.#isForeign(reply[2]) ? Effect.fail(this.#supersede(reply[2])) : Effect.succeed(reply[1])
      }
    })
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Wait
  // -------------------------------------------------------------------------------------------------------------------

  readonly #passing: Effect.Effect<void, E> = Effect.callback((resume) => {
    if (this.#superseded !== undefined) return resume(Effect.fail(this.#settings.fail(this.#superseded)))
    // Without a session it is not known whether it is still open.
    if (this.#state.remaining === 0 && !this.#lost) return resume(Effect.void)
    if (this.#closed) return resume(this.#left)
    const end = (result: Effect.Effect<void, E>) => {
      this.#waiting.delete(end)
      resume(result)
    }
    this.#waiting.add(end)
    return Effect.sync(() => this.#waiting.delete(end))
  })

  /** Passes at once when it is open, and otherwise with the next opening or release, also if it is reset right after. */
  readonly waitFor = (options?: { readonly wait?: Duration.Input | undefined }): Effect.Effect<void, E> =>
    Effect.withFiber((fiber) => {
      const { fail, module } = this.#settings
      const { kind, name, space } = this.place
      const wait = options?.wait ?? space.wait
      const passing = wait === undefined ? this.#passing : within(this.#passing, this.place, wait, fail)
      return spanned(fiber, passing, `lockstep.${module}.await`, kind, name)
    })
}
