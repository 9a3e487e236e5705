/**
 * A member of a durable group: the actor delivers as many events to it as it has credit for, in each shard. Events that it
 * has not acknowledged go to the other members when its session ends, so a lost session interrupts its handlers.
 */

import * as Effect from "effect/Effect"
import { identity } from "effect/Function"
import * as Scope from "effect/Scope"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Argument } from "../hold/claim.ts"
import { describe } from "../hold/loss.ts"
import type { Place } from "../hold/place.ts"
import { request } from "../hold/request.ts"
import * as work from "../work/member.ts"
import { again, fail, OrderMismatch, TooManyGroups, type TopicError } from "./errors.ts"
import { beginning, compareIds, type Element, type Gap, gap, type Raw } from "./event.ts"
import type { Parts } from "./parts.ts"
import type { Shard } from "./shard.ts"

/** The notice to a member about events that it misses, in one session. Redis counts them until it acknowledges that. */
interface Told {
  /** Negative if that is not known. */
  readonly missed: number
  readonly number: number
}

/** An event that a member has to handle, or a gap. */
export class Delivery<A> {
  readonly element: Element<A>
  /** Of an event. */
  readonly raw: Raw | undefined
  /** It was acknowledged or returned, or the session that it was delivered to is lost. */
  over = false
  lost = false
  #observers: Array<() => void> = []
  readonly #member: Member<A>
  readonly #told: Told | undefined

  constructor(element: Element<A>, raw: Raw | undefined, member: Member<A>, told?: Told) {
    this.element = element
    this.raw = raw
    this.#member = member
    this.#told = told
  }

  /** Calls back when its session is lost. Returns the unsubscription. */
  onLoss(f: () => void): () => void {
    if (this.lost) f()
    else this.#observers.push(f)
    return () => {
      this.#observers = this.#observers.filter((observer) => observer !== f)
    }
  }

  /** Its handler runs, until the answer is called. */
  run(): () => void {
    return this.#member.run()
  }

  lose(): void {
    this.over = true
    this.lost = true
    for (const f of this.#observers.splice(0)) f()
  }

  /** It was handled. `done` is called when Redis knows, or when that cannot be known. */
  acknowledge(done: (error: CoordinatorError | undefined) => void): void {
    if (this.raw === undefined) this.#member.dismiss(this)
    if (this.#told !== undefined) return this.#close(this.#told, done)
    this.#end(done, (member, raw) => member.say("topic.ack", raw, (own, index) => [own, index, raw.id, raw.key], done))
  }

  /** It could not be handled: it is delivered again in so many milliseconds. A gap is, when the member has left. */
  giveBack(delay: number, done: (error: CoordinatorError | undefined) => void): void {
    this.#end(done, (member, raw) => member.say("topic.retry", raw, (own, index) => [own, index, raw.id, delay], done))
  }

  #end(done: (error: undefined) => void, tell: (member: Member<A>, raw: Raw) => void): void {
    if (this.over || this.raw === undefined) return done(undefined)
    this.over = true
    this.#member.forget(this)
    tell(this.#member, this.raw)
  }

  #close(told: Told, done: (error: CoordinatorError | undefined) => void): void {
    if (this.over) return done(undefined)
    this.over = true
    this.#member.close(told, done)
  }
}

type Item = readonly [
  id: string,
  attempt: number,
  body: string,
  key: string,
  publisher: string,
  trace: string,
  crashes?: number
]
type Items = ReadonlyArray<
  | Item
  | readonly ["gap", missed: number, number: number]
  | readonly ["missed", missed: number, number: number]
  | readonly ["drained", epoch: number]
  | readonly ["unsent", id: string]
>

export interface GroupSettings {
  readonly group: string
  /** The id behind which a new group begins; "" for the next event. */
  readonly from: (shard: number) => string
  readonly ordered: boolean
  readonly credit: number
}

/** This process as a member of a group, in one shard. */
class Member<A> extends work.Member {
  readonly #decode: (raw: Raw) => Element<A>
  readonly #deliver: (deliveries: ReadonlyArray<Delivery<A>>) => void
  readonly #working = new Map<string, Delivery<A>>()
  // The attempts of events that this member has acknowledged or returned; Redis may not know yet.
  readonly #told = new Map<string, number>()
  #joined = false
  #index = ""
  // It had events in hand when its session was lost: their handlers may not have ended.
  #isEnding = false
  #running = 0
  // The number of deliveries that the last answer included: a delivery among these that comes later is old.
  #counted = 0
  // The largest number of a delivery.
  #heard = 0
  // The last event that was delivered: a group that has to be made again begins behind it.
  #last: string | undefined = undefined
  // Distinguishes the group that it has joined from one that is made again. Redis has lost the state of the former one.
  #made = 0
  // The gaps that it has not acknowledged, as far as Redis has confirmed that.
  #gaps = new Set<Told>()
  // Deliveries of gaps that were not acknowledged here.
  readonly #missing = new Set<Delivery<A>>()
  // The events that it had not acknowledged when the session was lost.
  #events: ReadonlyArray<string> = []
  /** Nothing of before this epoch is left for the group in this shard. */
  drained = 0
  /** The epoch that the group has begun in this shard, or has been asked to begin. */
  begun = 0
  readonly #onDrained: () => void

  constructor(
    { decode, place }: Shard<A>,
    deliver: (deliveries: ReadonlyArray<Delivery<A>>) => void,
    onDrained: () => void
  ) {
    super(place)
    this.#decode = decode
    this.#deliver = deliver
    this.#onDrained = onDrained
  }

  /** Behind which event the group begins, if it has to be made: one that Redis has lost goes on where it was. */
  from(first: string): string {
    return this.#last ?? (this.#joined ? "0" : first)
  }

  /** Which group it was a member of, and the events of that which it has in hand. */
  get known(): readonly [made: number, events: string] {
    return [this.#made, [...new Set([...this.#events, ...this.#working.keys()])].sort(compareIds).join(" ")]
  }

  protected take(change: ReadonlyArray<unknown>): void {
    if (change[0] === "deliver") {
      const count = Number(change[1])
      if (count <= this.#counted) return
      // Events that come with a reply can overtake the mailbox.
      this.#heard = Math.max(count, this.#heard)
      return this.#takeAll(change[2] as Items)
    }
    const [index, counted, drained, begun, made, items] = change as readonly [
      string,
      number,
      number,
      number,
      number,
      Items
    ]
    // Unacknowledged events of other members, or events to be redelivered, may be among the lost ones.
    const isAnother = this.#joined && made !== this.#made
    this.#joined = true
    this.#made = made
    this.#events = []
    this.#index = index
    this.#counted = counted
    // It is less than before if Redis has lost the shard.
    this.begun = begun
    if (isAnother) {
      this.#heard = 0
      this.#gaps = new Set()
      this.#deliver([this.#gapOf(gap(this.place, "lost", undefined), undefined)])
    }
    this.#takeAll(items)
    // An answer can come after a later delivery.
    this.#drain(this.#heard <= counted ? drained : Math.max(drained, this.drained))
  }

  #drain(epoch: number): void {
    this.drained = epoch
    this.#onDrained()
  }

  #takeAll(items: Items): void {
    const deliveries: Array<Delivery<A>> = []
    for (const item of items) {
      if (item[0] === "gap") {
        this.#miss({ missed: Number(item[1]), number: Number(item[2]) }, deliveries)
      } else if (item[0] === "missed") {
        this.#missAll({ missed: Number(item[1]), number: Number(item[2]) }, deliveries)
      } else if (item[0] === "drained") {
        this.#drain(Math.max(Number(item[1]), this.drained))
      } else if (item[0] === "unsent") {
        this.#giveBack(String(item[1]))
      } else {
        this.#take(item as Item, deliveries)
      }
    }
    this.#deliver(deliveries)
  }

  // It was purged before this member received it, or does not fit into the answer that says that the member has it.
  #giveBack(id: string): void {
    if (this.#working.has(id) || this.#told.has(id)) return
    this.tell("topic.retry", [this.id, this.#index, id, -1], () => {})
  }

  #miss(told: Told, deliveries: Array<Delivery<A>>): void {
    const { missed } = told
    this.#gaps.add(told)
    if (missed > 0) this.place.space.kernel.hooks.metrics.missed(missed)
    const element = missed < 0 ? gap(this.place, "lost", undefined) : gap(this.place, "trimmed", missed)
    deliveries.push(this.#gapOf(element, told))
  }

  #gapOf(element: Gap, told: Told | undefined): Delivery<A> {
    const delivery = new Delivery<A>(element, undefined, this, told)
    this.#missing.add(delivery)
    return delivery
  }

  // The answer to a repeated question counts those that it was notified of already. Later ones can have come before the
  // answer.
  #missAll({ missed, number }: Told, deliveries: Array<Delivery<A>>): void {
    const known = [...this.#gaps].filter((told) => told.number <= number)
    if (missed < 0) {
      if (known.every((told) => told.missed >= 0)) this.#miss({ missed, number }, deliveries)
      return
    }
    const rest = known.reduce((rest, told) => rest - told.missed, missed)
    if (rest > 0) this.#miss({ missed: rest, number }, deliveries)
  }

  #take([id, attempt, body, key, publisher, trace, crashes = 0]: Item, deliveries: Array<Delivery<A>>): void {
    // The answer to a repeated question includes these events too. A later attempt can come before the reply to an earlier
    // acknowledgement.
    if (this.#working.has(id) || attempt <= (this.#told.get(id) ?? 0)) return
    const raw = { id, attempt, crashes, body, key, publisher, trace }
    const delivery = new Delivery(this.#decode(raw), raw, this)
    this.#working.set(id, delivery)
    this.place.space.kernel.hooks.metrics.delivered(attempt)
    this.#last = id
    deliveries.push(delivery)
  }

  forget(delivery: Delivery<A>): void {
    this.#working.delete(delivery.raw!.id)
  }

  dismiss(gap: Delivery<A>): void {
    this.#missing.delete(gap)
  }

  protected override isEnding(): boolean {
    return this.#isEnding
  }

  protected isBusy(): boolean {
    return this.#running > 0
  }

  run(): () => void {
    this.#running++
    return () => {
      this.#running--
      this.calm()
    }
  }

  protected lose(): void {
    this.#isEnding = this.#working.size > 0
    const lost = [...this.#working.values(), ...this.#missing]
    // The group can be lost together with the session, and with it what was pending.
    this.#events = [...this.#events, ...this.#working.keys(), ...this.#told.keys()]
    this.#working.clear()
    this.#missing.clear()
    this.#told.clear()
    this.#gaps = new Set()
    this.#heard = 0
    this.drained = 0
    for (const delivery of lost) delivery.lose()
  }

  /** Its unacknowledged events go to other members: an acknowledgement that comes later would be for theirs. */
  leave(): void {
    this.left = true
    this.lose()
  }

  /** A gap was handled. One of a former session is another member's. */
  close(told: Told, done: (error: CoordinatorError | undefined) => void): void {
    const gaps = this.#gaps
    if (!gaps.has(told)) return done(undefined)
    this.tell("topic.ack", [this.id, this.#index, String(told.missed), ""], (error) => {
      gaps.delete(told)
      done(error)
    })
  }

  say<V extends "topic.ack" | "topic.retry">(
    verb: V,
    { attempt, id }: Raw,
    argsOf: (own: string, index: string) => Requests[V]["args"],
    done: (error: CoordinatorError | undefined) => void
  ): void {
    if (this.trusted === undefined) return done(undefined)
    this.#told.set(id, attempt)
    this.tell(verb, argsOf(this.id, this.#index), (error) => {
      // It is moot when the session is lost, and Redis may not know it then.
      if (this.trusted !== undefined && this.#told.get(id) === attempt) this.#told.delete(id)
      done(error)
    })
  }
}

/** Becomes a member in every shard, also in those that are added, for as long as the scope is open. */
export const joinGroup = <A>(
  parts: Parts<A>,
  settings: GroupSettings,
  deliver: (deliveries: ReadonlyArray<Delivery<A>>) => void,
  options: {
    readonly closed: () => void
    /** It could not become a member in a shard that was added. */
    readonly failed: (error: TopicError) => void
  }
): Effect.Effect<void, TopicError, Scope.Scope> =>
  Effect.flatMap(Effect.scope, (scope) => {
    const members: Array<Member<A>> = []
    const turn = turnOf(parts, settings.group, members)
    const joinFrom = (
      from: (shard: number) => string,
      insist: (self: Effect.Effect<void, TopicError, Scope.Scope>) => Effect.Effect<void, TopicError, Scope.Scope>
    ): Effect.Effect<void, TopicError> => {
      const added = parts.all.slice(members.length)
      const first = members.length
      for (const shard of added) members.push(new Member(shard, deliver, turn))
      return Scope.provide(
        Effect.forEach(added, ({ place }, at) => {
          const member = members[first + at]!
          return insist(joinShard(place, settings.group, member, () => [
            settings.group,
            member.from(from(first + at)),
            settings.credit,
            settings.ordered,
            ...member.known
          ], options.closed))
        }, { discard: true, concurrency: "unbounded" }),
        scope
      )
    }
    const changed = () => {
      turn()
      if (members.length === parts.all.length) return
      // Events that were published there before it knew of them are for the group too, and it misses those of them that
      // were removed.
      parts.io.run(Effect.forkIn(
        joinFrom(() => beginning.id, Effect.retry(again)).pipe(
          Effect.catch((error) => Effect.sync(() => options.failed(error)))
        ),
        scope
      ))
    }
    return Effect.andThen(
      Effect.acquireRelease(
        Effect.sync(() => void parts.followers.add(changed)),
        () => Effect.sync(() => void parts.followers.delete(changed))
      ),
      joinFrom(settings.from, identity)
    )
  })

const joinShard = <A>(
  { name, space: { kernel } }: Place,
  group: string,
  member: Member<A>,
  args: () => ReadonlyArray<Argument>,
  closed: () => void
): Effect.Effect<void, TopicError, Scope.Scope> =>
  Effect.flatMap(member.join({ verb: "topic.consume", args, closed, fail }), (outcome) => {
    if (outcome[0] === "granted") return Effect.addFinalizer(() => Effect.sync(() => member.leave()))
    const about = { name, namespace: kernel.settings.namespace, group }
    return Effect.fail(fail(outcome[0] === "full" ? new TooManyGroups(about) : new OrderMismatch(about)))
  })

/** Lets an ordered group begin an epoch when nothing of before it is left in any shard. */
const turnOf = <A>(parts: Parts<A>, group: string, members: ReadonlyArray<Member<A>>) => (): void => {
  if (parts.isChanging || members.length < parts.all.length) return
  const epoch = Math.min(parts.epoch, ...members.map(({ drained }) => drained))
  for (const [at, member] of members.entries()) {
    if (member.begun >= epoch) continue
    member.begun = epoch
    const { place } = parts.all[at]!
    const { name, namespace, space: { kernel } } = place
    const what = `group ${JSON.stringify(group)} of ${describe("topic", name, namespace)}`
    kernel.io.run(
      request(place, "topic.begin", [group, epoch], { waits: true }).pipe(
        Effect.retry(again),
        Effect.catch((error) => Effect.sync(() => kernel.hooks.log("Debug", `${what} could not begin an epoch`, error)))
      )
    )
  }
}
