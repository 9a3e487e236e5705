/**
 * The client's half of the task group actor: how the group is, as its member hears of it, and what this process has done
 * in it, to be said again if Redis forgets it. What is submitted is JSON text here.
 */
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { RedisError } from "../Redis.ts"
import { type CoordinatorError, coordinatorError } from "./actor/errors.ts"
import type { Requests } from "./actor/lua.ts"
import { type Held, membership, type Place } from "./hold/held.ts"
import type { WaitTimeout } from "./hold/loss.ts"

/** As the actor writes it: registered and running, done, failed, lost. */
export type Status = "r" | "d" | "f" | "l"

export interface State {
  /** 0 if nobody has said. */
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
  readonly changed: { readonly shard: string; readonly status: Status } | undefined
}

const stateOf = (raw: ReadonlyArray<unknown>): State => {
  const [expected = 0, least = 0, running = 0, done = 0, failed = 0, lost = 0, round = 0, version = 0] =
    raw as ReadonlyArray<
      number
    >
  const [shard, status] = raw.slice(8) as [shard?: string, status?: Status]
  const changed = shard === undefined || status === undefined ? undefined : { shard, status }
  return { expected, least, running, done, failed, lost, round, version, changed }
}

export const registeredIn = ({ done, failed, lost, running }: State): number => running + done + failed + lost

export const isComplete = (state: State): boolean =>
  state.done === registeredIn(state) && state.done >= Math.max(1, state.expected, state.least)

/** Some of the shards. */
export interface Page {
  readonly state: State
  /** Where the next page begins; 0 if there is none. */
  readonly next: number
  readonly shards: ReadonlyArray<readonly [shard: string, status: Status, value: unknown]>
}

/** A shard that this process has registered, and how that has ended. */
export interface Registration {
  readonly held: Held
  readonly shard: string
  readonly round: number
  status: Status
  value: string
  /** Whether the session that there is now has left it in Redis. */
  stored: boolean
}

export class Tasks {
  readonly place: Place
  state: State = stateOf([])
  closed = false
  /** How often it was heard how the group is. */
  heard = 0
  /** Called each time. */
  readonly waiting = new Set<() => void>()
  /** Called with every change, in order; without one, at the end. */
  readonly streams = new Set<(state: State | undefined) => void>()

  readonly #mine = new Map<string, Registration>()
  readonly #shards: number
  readonly #keep: number

  constructor(place: Place, shards: number, keep: number) {
    this.place = place
    this.#shards = shards
    this.#keep = keep
  }

  /** Has it open for as long as the scope is. Answers how many shards others expect if it is not the same number. */
  join<E>(fail: (error: CoordinatorError) => E): Effect.Effect<number | undefined, E, Scope.Scope> {
    // Who joins again says what it knows: Redis may have forgotten it.
    const details = () => [this.#shards, this.#keep, this.state.round, registeredIn(this.state)]
    const observation = {
      observe: (raw: ReadonlyArray<unknown>) => this.#observe(stateOf(raw)),
      lost: () => this.#lost()
    }
    return Effect.andThen(
      Effect.addFinalizer(() => Effect.sync(() => this.#close())),
      Effect.map(
        membership(
          this.place,
          "tasks.join",
          0,
          undefined,
          (error: CoordinatorError | WaitTimeout) => fail(error as CoordinatorError),
          { observation, details }
        ),
        ([, outcome]) => outcome[0] === "mismatch" ? outcome[1] : undefined
      )
    )
  }

  #observe(next: State): void {
    this.heard++
    // What resync asked for can be known already.
    if (next.version > this.state.version) {
      this.state = next
      for (const registration of this.#mine.values()) this.#end(registration)
      for (const see of this.streams) see(next)
    }
    this.#restore()
    for (const wake of [...this.waiting]) wake()
  }

  /** A registration of a round that is over is over. */
  #end(registration: Registration): void {
    const { held, round, shard, status } = registration
    if (round >= this.state.round) return
    if (this.#mine.get(shard) === registration) this.#mine.delete(shard)
    if (status === "r") this.place.partition.claims.revoke(held.claim)
  }

  #lost(): void {
    // Redis may forget as much as it likes with the session.
    this.state = { ...this.state, version: 0 }
    for (const registration of this.#mine.values()) {
      registration.stored = false
      if (registration.status === "r") registration.status = "l"
    }
  }

  #close(): void {
    this.closed = true
    this.#mine.clear()
    for (const wake of [...this.waiting]) wake()
    for (const see of [...this.streams]) see(undefined)
  }

  registered(held: Held, shard: string): Registration {
    const round = Number(held.claim.payload[0])
    const registration: Registration = { held, shard, round, status: "r", value: "", stored: true }
    this.#mine.set(shard, registration)
    this.#end(registration)
    return registration
  }

  /** Says whether it was still wanted. */
  submit(
    registration: Registration,
    fine: boolean,
    value: string,
    done: (accepted: boolean) => void,
    fail: (error: CoordinatorError) => void
  ): void {
    const { held, shard } = registration
    // Repeated in the next session if need be: the token makes it the same one.
    this.place.partition.request({
      verb: "tasks.submit",
      key: this.place.key,
      args: [shard, String(held.token), fine, value],
      settle: ([tag]) => {
        if (tag === "submitted") {
          registration.status = fine ? "d" : "f"
          registration.value = value
          // There is nothing left to hold.
          this.place.partition.claims.release(held.claim, () => {})
        }
        done(tag === "submitted")
      },
      fail
    })
  }

  // What did not get there is tried again whenever the group is looked at.
  #restore(): void {
    const { key, partition } = this.place
    for (const registration of this.#mine.values()) {
      if (registration.stored) continue
      const { held, round, shard, status, value } = registration
      registration.stored = true
      partition.request({
        verb: "tasks.restore",
        key,
        args: [shard, status, String(held.token), value, round],
        session: partition.session,
        moot: () => {},
        settle: ([tag]) => {
          if (tag === "missing") registration.stored = false
        },
        fail: (error) => {
          registration.stored = false
          partition.kernel.log("Warn", "a shard could not be restored yet", error)
        }
      })
    }
  }

  /** Ends the round. Answers whether there was one. */
  reset(done: (found: boolean) => void, fail: (error: CoordinatorError) => void): void {
    this.place.partition.request({
      verb: "tasks.reset",
      key: this.place.key,
      args: [this.place.partition.kernel.uniqueId()],
      settle: ([tag]) => done(tag === "reset"),
      fail
    })
  }

  /** By Redis's word. Nothing if it has forgotten the group, until somebody joins again. */
  read(from: number, wanted: string): Effect.Effect<Page | undefined, CoordinatorError> {
    const { key, partition } = this.place
    return Effect.map(
      Effect.tryPromise({
        try: () => partition.kernel.inspect(partition, { verb: "tasks.read", key, args: [from, wanted] }),
        catch: coordinatorError
      }),
      pageOf
    )
  }

  /** As `read`, for who waits for the next word if Redis is out of reach. */
  readIfPossible(from: number, wanted: string): Effect.Effect<Page | undefined, CoordinatorError> {
    const { kernel } = this.place.partition
    const isPassing = ({ reason }: CoordinatorError) => reason instanceof RedisError && kernel.isTransient(reason)
    return Effect.catchIf(this.read(from, wanted), isPassing, () => Effect.undefined)
  }
}

const pageOf = (reply: Requests["tasks.read"]["reply"]): Page | undefined => {
  if (reply[0] === "missing") return undefined
  const [, ...rest] = reply
  return { state: stateOf(rest.slice(0, 8)), next: rest[8], shards: rest[9] as Page["shards"] }
}
