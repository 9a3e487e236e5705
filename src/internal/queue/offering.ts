/** Offers jobs: those of one turn of the event loop share a request, which is numbered so that they are stored once. */

import { type CoordinatorError, isFinal } from "../actor/errors.ts"
import type { Request } from "../actor/sending.ts"
import { overloaded } from "../actor/transport.ts"
import type { Place } from "../hold/place.ts"
import type { Failure } from "./errors.ts"
import { Line, type Owner } from "./line.ts"
import { nameOf } from "./naming.ts"

export type Level = "u" | "h" | "n" | "l"

/** The stored data of a job. `more` has the options besides its body, as `queue.offer` in lua/QueueOffers.lua reads them. */
export interface Wish {
  readonly body: string
  /** The first letter of its id: the stream and the level of the job. */
  readonly letter: string
  readonly more: string
  /** The texts that `more` names, which stand behind the body. */
  readonly texts: string
  /** The jobs that it runs after. */
  readonly after?: ReadonlyArray<string>
}

/** The result of an offer. */
export interface Offered {
  readonly id: string
  /**
   * A job with the same `id`, or the same `id` of `dedupe`, was there already, so the new job was not stored. `id` is that of the
   * former job, which may have the new payload now: see `dedupe`.
   */
  readonly duplicate: boolean
}

/** Told of the results of jobs, by their places from `from` on. Undefined: they are stored, and their ids are lost. */
export interface Asker extends Owner {
  readonly offered: (at: number, offered: Offered | undefined) => void
  /** The queue is full, so a job was not stored. */
  readonly full: () => void
  /** A job was not stored, because nothing is known of this job before it. */
  readonly unknown: (before: string) => void
  readonly failed: (error: Failure) => void
  /** Its job was not stored, as it has to wait, and the asker wants that no more. */
  readonly left?: () => void
  /** Its job waits for room. It may be told so several times. */
  readonly waits?: () => void
}

// Instead of an id, of jobs that were not stored: the queue is full, or a job before them is not known.
const [full, waits, unknown] = [0, 2, 3]

interface Item {
  wish: Wish
  readonly asker: Asker
  readonly at: number
  /** When `wish` said how long its delay and its time to expire are, in milliseconds. */
  since: number
  /** The actor has said that it has to wait for room. */
  isForRoom: boolean
}

// The work of one request is bounded, for Redis and for this process, and its size for servers and gateways. In jobs, and in characters of
// their bodies.
const mostJobs = 512
const mostText = 1 << 18

// In milliseconds: while Redis refuses it, a process tries to leave the line so often.
const mostHeldUp = 500

// To look for a job costs Redis as much as to store so many characters.
const perBefore = 256

const weightOf = ({ wish: { after, body } }: Item): number =>
  after === undefined ? body.length : body.length + after.length * perBefore

// The delay and the time to expire of a job begin with its offer, so each try of the offer has what is left of them. Behind the letters d
// and e, a wish has no other numbers.
const afterWait = (wish: Wish, millis: number): Wish => {
  const more = wish.more.replace(/([de])(\d+)/g, (_, letter, time) => `${letter}${Math.max(0, time - millis)}`)
  return more === wish.more ? wish : { ...wish, more }
}

type Reply = readonly ["offered", stamp: number, first: number, known: unknown] | readonly ["late"]

/** Jobs as `queue.offer` reads them. */
export const packed = (items: ReadonlyArray<{ readonly wish: Wish }>): [values: string, shapes: string] => {
  let values = ""
  let shapes = ""
  for (const { wish: { body, more, texts } } of items) {
    values += body
    if (texts !== "") values += texts
    shapes += `${Buffer.byteLength(body)}${more} `
  }
  return [values, shapes]
}

/** What has become of an offer. */
interface Outcome {
  /** The jobs that wait for room, if it was answered at all. */
  readonly waiting?: ReadonlyArray<Item>
  /** These stand in the line for that. */
  readonly entered: boolean
  /** It was not answered in time. */
  readonly late?: CoordinatorError
}

type OfferArgs = [values: string, shapes: string, node: string, number: number]

class Offer implements Request<"queue.offer"> {
  readonly verb: "queue.offer"
  readonly key: string
  readonly items: Array<Item> = []
  readonly urgent: boolean
  text = 0
  askedAt: number | undefined = undefined
  queued: boolean | undefined = undefined
  cancelled = false
  sent: readonly [at: number, wall: number] | undefined = undefined
  readonly #shard: number
  readonly #node: string
  readonly #number: number
  readonly #known: { readonly knownFor: number }
  // As which member it asks, if its jobs may wait for room.
  readonly #member: string | undefined
  #answered: ((outcome: Outcome) => void) | undefined
  #args: OfferArgs | undefined = undefined

  constructor(
    key: string,
    shard: number,
    node: string,
    number: number,
    known: { readonly knownFor: number },
    member: string | undefined,
    urgent: boolean,
    answered: (outcome: Outcome) => void
  ) {
    // Both have the same replies.
    this.verb = (member === undefined ? "queue.offer" : "queue.enter") as "queue.offer"
    this.#member = member
    this.key = key
    this.#known = known
    this.#shard = shard
    this.#node = node
    this.#number = number
    this.urgent = urgent
    this.#answered = answered
  }

  add(item: Item): void {
    this.items.push(item)
    this.text += weightOf(item)
  }

  /** Its jobs that were not sent yet are not wanted. Answers how many they are. */
  drop(asker: Asker): number {
    if (this.#args !== undefined || this.#answered === undefined) return 0
    const unwanted = this.items.filter((item) => item.asker === asker)
    for (const item of unwanted) {
      this.items.splice(this.items.indexOf(item), 1)
      this.text -= weightOf(item)
    }
    return unwanted.length
  }

  get knownFor(): number {
    return this.#known.knownFor
  }

  /** It can take in another job: it has not been sent, and has not failed. */
  get open(): boolean {
    return this.#args === undefined && this.#answered !== undefined && this.items.length < mostJobs &&
      this.text < mostText
  }

  fits(item: Item): boolean {
    return this.open && (this.items.length === 0 || this.text + weightOf(item) <= mostText)
  }

  // Made when it is sent, and the same each time.
  get args(): OfferArgs {
    if (this.#args !== undefined) return this.#args
    const args: OfferArgs = [...packed(this.items), this.#node, this.#number]
    return this.#args = this.#member === undefined ? args : [this.#member, ...args] as never
  }

  // Once: an answer may come to an offer that has failed because Redis was away. Its callers know that by then, and those that were
  // interrupted before may still want to know what became of their jobs.
  #over(): ((outcome: Omit<Outcome, "entered">) => void) | undefined {
    const answered = this.#answered
    this.#answered = undefined
    return answered && ((outcome) => answered({ ...outcome, entered: this.#member !== undefined }))
  }

  settle(reply: Reply): void {
    const answered = this.#over()
    const { items } = this
    if (reply[0] === "late") {
      answered?.({ waiting: [] })
      for (const { asker, at } of items) asker.offered(at, undefined)
      return
    }
    const [, stamp, first, list] = reply
    const known = list as ReadonlyArray<readonly [place: number, id: string | 0 | 2 | 3, more?: number]>
    answered?.({
      waiting: known.length === 0 ? [] : known.flatMap(([place, id]) => id === waits ? [items[place]!] : [])
    })
    let [next, number] = [0, first]
    for (let place = 0; place < items.length; place++) {
      const { asker, at, wish: { after, letter } } = items[place]!
      if (known[next]?.[0] === place) {
        const [, id, stored] = known[next++]!
        if (typeof id === "number") {
          if (id === full) asker.full()
          else if (id === unknown) asker.unknown(after![stored!]!)
          continue
        }
        if (stored !== undefined) number++
        asker.offered(at, { id: nameOf(this.#shard, id), duplicate: stored === undefined })
      } else {
        asker.offered(at, { id: nameOf(this.#shard, `${letter}${stamp}-${number++}`), duplicate: false })
      }
    }
  }

  readonly fail = (error: CoordinatorError): void => this.#end(error, {})

  #end(error: CoordinatorError, outcome: Omit<Outcome, "entered">): void {
    const answered = this.#over()
    if (answered === undefined) return
    answered(outcome)
    for (const { asker } of this.items) asker.failed(error)
  }

  late(error: CoordinatorError): void {
    this.cancelled = true
    this.#end(error, { late: error })
  }

  expire: ((error: CoordinatorError) => void) | undefined = expire
}

function expire(this: Offer, error: CoordinatorError): void {
  this.late(error)
}

export class Offerer {
  readonly place: Place
  readonly #shard: number
  readonly #node: string
  /** How long the actor knows the last number, in milliseconds. */
  knownFor: number
  // A number for each request, growing: a smaller one that comes later is a repetition.
  #number = 0
  // Of two requests at most, one is not sent: Redis knows the reply to the last one of a coordinator.
  #last: Offer | undefined = undefined
  #unanswered = 0
  readonly #line = new Line<Item>()
  // Jobs may wait for room: the process sends one request at a time, so its jobs keep their order.
  #enters = false
  // Jobs wait until the actor says that there is room.
  #parked = false
  // As far as this process knows, it stands in the line for room; and it is telling Redis that it leaves.
  #inLine = false
  #isLeaving = false
  // The actor has said so before an answer.
  #told = false
  #id: string | undefined = undefined
  // Room comes with the expiry of jobs, too.
  #unwatch: (() => void) | undefined = undefined
  // Why it takes no jobs any more.
  #closed: Failure | undefined = undefined

  constructor(place: Place, shard: number, knownFor: number) {
    this.place = place
    this.#shard = shard
    this.knownFor = knownFor
    this.#node = place.space.kernel.uniqueId()
  }

  /** An offer was not sent yet, and can take in another job. */
  get open(): boolean {
    return this.#last?.open === true
  }

  joined(id: string, enters: boolean): void {
    this.#id = id
    this.#enters = enters
  }

  offer(wish: Wish, asker: Asker, at: number): void {
    if (this.#closed !== undefined) return asker.failed(this.#closed)
    const item = { wish, asker, at, since: this.#now, isForRoom: false }
    if (this.#line.length === 0 && this.#takes(item)) return this.#put(item, false)
    const { owners } = this.#line
    // The first job of a call: the others have been accepted with it.
    const isTooMuch = at === 0 && !this.#parked && !this.#inLine &&
      owners >= this.place.space.kernel.settings.maxPending
    if (isTooMuch) return asker.failed(overloaded(owners, this.place.key))
    this.#line.push(item)
    if (this.#parked) asker.waits?.()
  }

  /** There is room: the actor has said so, or a new session has begun, which does not stand in the line yet. */
  enter(): void {
    // The answer may be behind the event.
    if (this.#unanswered > 0) this.#told = true
    else if (this.#isIdle) this.#leave()
    else {
      this.#parked = false
      this.#putAll()
    }
  }

  // Nothing waits any more, so the process must not hold up those behind it.
  #leave(): void {
    const { channel, key, space: { kernel } } = this.place
    const { session } = channel
    this.#parked = false
    // Its place ends with the session, or with the membership.
    if (session === undefined || this.#closed !== undefined || this.#isLeaving || kernel.isClosing()) return
    const over = () => {
      this.#isLeaving = this.#inLine = false
    }
    this.#isLeaving = true
    channel.outbox.request<"queue.pass">({
      verb: "queue.pass",
      key,
      args: [this.#id!],
      session,
      urgent: true,
      moot: over,
      settle: over,
      fail: ({ reason }) => {
        this.#isLeaving = false
        if (!isFinal(reason)) kernel.io.after(mostHeldUp, () => this.#leaveIfIdle())
      }
    })
  }

  // It may stand there for other jobs by then.
  #leaveIfIdle(): void {
    if (this.#inLine && this.#isIdle) this.#leave()
  }

  // In whole milliseconds, as the times of jobs.
  get #now(): number {
    return Math.round(this.place.space.kernel.io.now())
  }

  get #isIdle(): boolean {
    return this.#unanswered === 0 && this.#line.length === 0
  }

  // Whether jobs wait for room, or may have to.
  #watch(): void {
    if (this.#enters && !this.#isIdle) {
      this.#unwatch ??= this.place.partition.expect()
    } else {
      this.#unwatch?.()
      this.#unwatch = undefined
    }
  }

  /** Jobs of a caller that was interrupted, or refused, and that were not sent, are not wanted any more. Answers how many there were. */
  withdraw(asker: Asker): number {
    const dropped = this.#line.drop(asker) + (this.#last?.drop(asker) ?? 0)
    this.#watch()
    this.#leaveIfIdle()
    return dropped
  }

  /** The membership is joined, perhaps again. */
  rejoined(): void {
    if (this.#parked) this.enter()
  }

  closed(error: Failure): void {
    this.#closed = error
    this.#failAll(error)
  }

  #failAll(error: Failure, isMeant: (item: Item) => boolean = () => true): void {
    for (const { asker } of this.#line.take(isMeant)) asker.failed(error)
    this.#watch()
  }

  // It can send a job now, or refuse it.
  #takes(item: Item): boolean {
    if (this.#last?.fits(item) === true || this.place.space.kernel.isClosing()) return true
    return !this.#parked && this.#unanswered < (this.#enters ? 1 : 2)
  }

  // An urgent job has waited here: it was accepted before, whatever the load is now.
  #put(item: Item, urgent: boolean): void {
    const { channel, space: { kernel } } = this.place
    const last = this.#last
    if (last?.fits(item) === true) {
      last.add(item)
      // It waits for no others: Redis works on it while the next jobs are encoded.
      if (!last.open) channel.outbox.flush()
    } else if (kernel.isClosing()) {
      item.asker.failed(channel.closedError())
    } else {
      const offer = this.#make(urgent)
      offer.add(item)
      this.#send(offer)
    }
  }

  #make(urgent: boolean): Offer {
    const [shard, node, number] = [this.#shard, this.#node, ++this.#number]
    const member = this.#enters ? this.#id : undefined
    return new Offer(this.place.key, shard, node, number, this, member, urgent, this.#answered)
  }

  // The outbox may refuse it at once, so it has a job by then.
  #send(offer: Offer): void {
    this.#last = offer
    this.#unanswered++
    this.#watch()
    this.place.channel.outbox.request(offer)
  }

  readonly #answered = ({ entered, late, waiting }: Outcome): void => {
    this.#unanswered--
    if (waiting !== undefined && waiting.length > 0) {
      this.#enters = true
      for (const item of waiting) {
        item.isForRoom = true
        if (item.asker.gone === true) item.asker.left?.()
      }
      // One that was not sent yet has later jobs.
      this.#last = undefined
      this.#line.giveBack(waiting)
      this.#parked = entered && !this.#told
      this.#inLine ||= entered
    } else if (waiting !== undefined && entered) this.#inLine = false
    this.#told = false
    if (this.#unanswered === 0) this.#line.settle()
    if (this.#closed !== undefined) return this.#failAll(this.#closed)
    // What waited behind it was offered by then: it would wait as long for an answer of its own. Jobs that wait for room ask again.
    if (late !== undefined) this.#failAll(late, ({ isForRoom }) => !isForRoom)
    this.#putAll()
    this.#watch()
    this.#leaveIfIdle()
    // Last: an asker may withdraw its job.
    if (this.#parked) { for (const { asker } of waiting ?? []) if (asker.gone !== true) asker.waits?.() }
  }

  #putAll(): void {
    for (let { first } = this.#line; first !== undefined && this.#takes(first); { first } = this.#line) {
      this.#line.shift()
      const now = this.#now
      first.wish = afterWait(first.wish, now - first.since)
      first.since = now
      this.#put(first, true)
    }
  }
}
