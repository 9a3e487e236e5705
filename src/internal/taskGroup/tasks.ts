/**
 * The client's half of the task group actor: the state of the group as its member receives it, and the results of this
 * process, which it restores if Redis forgets them. Results are JSON text here.
 */

import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { type CoordinatorError, isAway } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import { join } from "../hold/acquire.ts"
import { followingOf, type Publications } from "../hold/following.ts"
import type { Hold } from "../hold/hold.ts"
import { describe } from "../hold/loss.ts"
import type { Membership } from "../hold/membership.ts"
import type { Place } from "../hold/place.ts"
import { memberQuestion, request } from "../hold/request.ts"
import { Superseded } from "../hold/superseded.ts"
import { whileAway } from "../work/patience.ts"

export type Status = "running" | "done" | "failed" | "lost"

export interface State {
  /** 0 if no member has said. */
  readonly expected: number
  /** How many were registered in the round before Redis forgot some of them. */
  readonly least: number
  readonly running: number
  readonly done: number
  readonly failed: number
  readonly lost: number
  /** 0 before it is known. */
  readonly round: number
  /** Increases with every change. */
  readonly version: number
  /** That the group belongs to; empty for none. */
  readonly run: string
  readonly changed: { readonly shard: string; readonly status: Status } | undefined
}

const fields = 9

const stateOf = (raw: ReadonlyArray<unknown>): State => {
  const [expected = 0, least = 0, running = 0, done = 0, failed = 0, lost = 0, round = 0, version = 0] =
    raw as ReadonlyArray<number>
  const [run = "", shard, status] = raw.slice(fields - 1) as [run?: string, shard?: string, status?: Status]
  const changed = shard === undefined || status === undefined ? undefined : { shard, status }
  return { expected, least, running, done, failed, lost, round, version, run, changed }
}

export const registeredIn = ({ done, failed, lost, running }: State): number => running + done + failed + lost

export const isComplete = (state: State): boolean =>
  state.done === registeredIn(state) && state.done >= Math.max(1, state.expected, state.least)

/** Some of the shards. */
export interface Page {
  readonly state: State
  /** Where the next page begins; 0 if there is none. */
  readonly next: number
  readonly shards: ReadonlyArray<readonly [shard: string, status: Status, value: unknown, about: unknown]>
}

/** A shard that this process has registered, and how that has ended. */
export interface Registration {
  readonly hold: Hold
  readonly shard: string
  readonly round: number
  status: Status
  value: string
}

// In bytes of results, about: so much of a restoration is on its way at a time. Redis does nothing else while it takes them in.
const mostRestored = 1_048_576

/** How a group is opened. */
export interface Opening {
  /** 0 if this member does not say. */
  readonly shards: number
  readonly onMismatch: "fail" | "keep" | "resize"
  readonly timeToLive: number
  /** Empty for none. */
  readonly run: string
  readonly fresh: boolean
}

export class Tasks {
  readonly place: Place
  readonly opening: Opening
  state: State = stateOf([])
  closed = false
  member: Membership | undefined = undefined
  /** How many times the state was received, and a session lost. */
  heard = 0
  losses = 0
  /** Called each time. */
  readonly waiting = new Set<() => void>()
  /** Called with every change, in order; without one, at the end. */
  readonly streams = new Set<(state: State | undefined) => void>()

  readonly #mine = new Map<string, Registration>()
  // Of a former session: those that are sent when the state is received, and when there is room for more.
  readonly #unstored = new Set<Registration>()
  readonly #due = new Set<Registration>()
  #restoring = 0
  // When it has decided about `timeToLive`; 0: now.
  #decided = 0

  constructor(place: Place, opening: Opening) {
    this.place = place
    this.opening = opening
  }

  /** The subject that its errors name. */
  get about(): { readonly name: string; readonly namespace: string } {
    const { name, space: { kernel } } = this.place
    return { name, namespace: kernel.settings.namespace }
  }

  /** Whether another run has begun than that which the group was opened with. */
  isOver({ round, run }: State): boolean {
    return this.opening.run !== "" && round > 0 && run !== this.opening.run
  }

  /** Why a request of the former run fails. */
  superseded(current: string): Superseded {
    return new Superseded({ ...this.about, kind: this.place.kind, run: this.opening.run, current })
  }

  /** Has it open for as long as the scope is. Answers how many shards it has elsewhere if that is another number. */
  join<E>(fail: (error: CoordinatorError["reason"]) => E): Effect.Effect<number | undefined, E, Scope.Scope> {
    return Effect.andThen(
      Effect.addFinalizer(() => Effect.sync(() => this.#close())),
      Effect.map(
        join(this.place, {
          verb: "taskGroup.join",
          args: (anyway) => this.#joining(anyway),
          observer: {
            observe: (raw) => {
              // Another process may decide later, which stays so when this one joins again.
              if (raw.length === fields + 1) this.#decided ||= Number(raw[fields])
              this.#observe(stateOf(raw))
            },
            lost: () => this.#lost(),
            closed: () => this.#close()
          },
          fail
        }),
        ([member, outcome]) => {
          this.member = member
          return outcome[0] === "mismatch" ? outcome[1] : undefined
        }
      )
    )
  }

  // A member that joins again sends its state: Redis may have forgotten it.
  #joining(anyway: boolean) {
    const { fresh, onMismatch, run, shards, timeToLive } = this.opening
    const { expected, round, run: current } = this.state
    // A group that has gone on to another run than this member's is that run's.
    return round === 0
      ? [shards, onMismatch, timeToLive, this.#decided, run, fresh, anyway, 0, 0]
      : [expected, "keep", timeToLive, this.#decided, current || run, false, anyway, round, registeredIn(this.state)]
  }

  #observe(next: State): void {
    this.heard++
    // The answer to a question after lost events can be known already, or be ahead of events that come later.
    if (next.version > this.state.version) {
      const isNew = next.round !== this.state.round
      this.state = next
      if (isNew) { for (const registration of this.#mine.values()) this.#end(registration) }
      for (const see of this.streams) see(next)
    }
    this.#restore()
    for (const wake of [...this.waiting]) wake()
  }

  /** Registrations end with their round. */
  #end(registration: Registration): void {
    const { hold, round, shard, status } = registration
    if (round >= this.state.round) return
    if (this.#mine.get(shard) === registration) this.#mine.delete(shard)
    this.#forget(registration)
    if (status === "running") this.place.tenancy.revoke(hold)
  }

  #lost(): void {
    // Redis may forget as much as it likes with the session.
    this.state = { ...this.state, version: 0 }
    this.losses++
    this.#due.clear()
    for (const registration of this.#mine.values()) {
      this.#unstored.add(registration)
      if (registration.status === "running") registration.status = "lost"
    }
  }

  #close(): void {
    this.closed = true
    this.#mine.clear()
    this.#unstored.clear()
    this.#due.clear()
    for (const wake of [...this.waiting]) wake()
    for (const see of [...this.streams]) see(undefined)
  }

  /** The arguments of a registration. Asked a second time in one session, it must not be registered anew. */
  registering(shard: string): () => ReadonlyArray<string | boolean> {
    const { channel } = this.place
    let asked: unknown
    return () => {
      const again = asked !== undefined && asked === channel.session
      asked = channel.session
      return [shard, this.opening.run, again]
    }
  }

  registered(hold: Hold, shard: string): Registration {
    const round = Number(hold.payload[0])
    const registration: Registration = { hold, shard, round, status: "running", value: "" }
    const former = this.#mine.get(shard)
    if (former !== undefined) this.#forget(former)
    this.#mine.set(shard, registration)
    this.#end(registration)
    return registration
  }

  /** Answers whether it was accepted. Repeated in the next session if need be: the token makes it the same one. */
  submit(
    registration: Registration,
    fine: boolean,
    value: string,
    publish: Publications | undefined
  ): Effect.Effect<boolean, CoordinatorError> {
    const { hold, shard } = registration
    const submitted = request(this.place, "taskGroup.submit", [shard, String(hold.token), fine, value], {
      waits: true,
      following: followingOf(this.place, publish, "submitted"),
      answered: ([tag]) => {
        if (tag === "refused") return
        registration.status = fine ? "done" : "failed"
        registration.value = value
        // There is nothing left to hold.
        this.place.tenancy.release(hold, () => {})
      }
    })
    return Effect.map(submitted, ([tag]) => tag !== "refused")
  }

  #forget(registration: Registration): void {
    this.#unstored.delete(registration)
    this.#due.delete(registration)
  }

  // Requests that Redis refused are tried again whenever the state is received.
  #restore(): void {
    for (const registration of this.#unstored) this.#due.add(registration)
    this.#unstored.clear()
    this.#restoreSome()
  }

  #restoreSome(): void {
    for (const registration of this.#due) {
      const bytes = registration.value.length + 256
      if (this.#restoring > 0 && this.#restoring + bytes > mostRestored) return
      this.#due.delete(registration)
      this.#restoreOne(registration, bytes)
    }
  }

  #restoreOne(registration: Registration, bytes: number): void {
    const { channel, key, kind, name, namespace, space: { kernel } } = this.place
    const { hold, round, shard, status, value } = registration
    this.#restoring += bytes
    const again = () => {
      if (this.#mine.get(shard) === registration) this.#unstored.add(registration)
    }
    channel.outbox.request({
      verb: "taskGroup.restore",
      key,
      args: [shard, status, String(hold.token), value, round, this.opening.run],
      session: channel.session,
      moot: () => void (this.#restoring -= bytes),
      settle: ([tag]) => {
        this.#restoring -= bytes
        if (tag === "missing") again()
        this.#restoreSome()
      },
      fail: (error) => {
        this.#restoring -= bytes
        again()
        kernel.hooks.log(
          "Warn",
          `shard ${JSON.stringify(shard)} of ${describe(kind, name, namespace)} could not be restored yet`,
          error
        )
        this.#restoreSome()
      }
    })
  }

  /** Ends the round. */
  get reset(): Effect.Effect<Requests["taskGroup.reset"]["reply"], CoordinatorError> {
    return Effect.suspend(() =>
      request(this.place, "taskGroup.reset", [this.place.space.kernel.uniqueId(), this.opening.run])
    )
  }

  /** By Redis's word. Nothing if Redis has forgotten the group, until a member joins again. */
  read(from: number, wanted: string): Effect.Effect<Page | undefined, CoordinatorError> {
    return Effect.map(memberQuestion(this.place, "taskGroup.read", [from, wanted]), pageOf)
  }

  /** As `read`, for waiters: they ask again while Redis is away, since there may be no other event. Nothing if the group is closed. */
  readWaiting(from: number, wanted: string): Effect.Effect<Page | undefined, CoordinatorError> {
    return whileAway(this.read(from, wanted), () => !this.closed).pipe(
      Effect.catchIf(({ reason }) => isAway(reason), () => Effect.undefined)
    )
  }
}

const pageOf = (
  reply: Exclude<Requests["taskGroup.read"]["reply"], readonly ["stale"]>
): Page | undefined => {
  if (reply[0] === "missing") return undefined
  const [, ...rest] = reply
  const [next, shards] = rest.slice(fields) as [number, Page["shards"]]
  return { state: stateOf(rest.slice(0, fields)), next, shards }
}
