/** Locks, permits and leaderships that this process keeps for a moment when it has released them, to take them again without asking Redis. */

import type { Session } from "../actor/session.ts"
import type { Io, Timer } from "../io.ts"
import type { Claim, Entry, Kind, Resource } from "./claim.ts"

// In milliseconds: longer than anything is kept. Under a shorter lease, a process keeps nothing.
const shortestLease = 1000

// In milliseconds. The process keeps what it takes again within `reuse`, for as long as each pause is shorter than that. It keeps
// none for `spared` after another process has asked for it.
const [reuse, spared] = [50, 1000]

// For how many milliseconds it is kept in all.
const most = 900

/** How long a claim that does not wait lets another process release what it keeps, in milliseconds. */
export const patience = 100

// These have one holder at a time.
const exclusive: ReadonlySet<Kind> = new Set<Kind>(["lock", "election"])

// A key that is forgotten here is only kept a little later.
const mostKeys = 1024

/** How long a lock, or permits, are in the hands of one process, for several holds one after the other. Redis sees one claim. */
export interface Stretch {
  readonly id: string
  readonly key: string
  readonly weight: number
  readonly brings: string | undefined
  readonly session: Session
  /** The token of the first hold, of the next one here, and the first one that is not of this stretch. */
  readonly first: number
  next: number
  readonly end: number
  /** When the first hold was granted, by the monotonic clock. */
  readonly since: number
  /** The hold that has released it, since when, if it is not in use. */
  resting: Entry | undefined
  restedAt: number
}

export class Kept {
  readonly #io: Io
  /** Releases a hold that rested to Redis. */
  readonly #giveBack: (hold: Entry, session: Session) => void
  readonly #byId = new Map<string, Stretch>()
  readonly #byKey = new Map<string, Array<Stretch>>()
  // From when on, for a moment, it counts as taken again.
  readonly #reusable = new Map<string, number>()
  #timer: Timer | undefined = undefined
  #timerAt = Number.POSITIVE_INFINITY

  constructor(io: Io, giveBack: (hold: Entry, session: Session) => void) {
    this.#io = io
    this.#giveBack = giveBack
  }

  get size(): number {
    return this.#byId.size
  }

  /** Whether it is taken again so soon, under a lease of that length, that it is worth keeping. */
  isWorthKeeping(key: string, lease: number): boolean {
    return lease >= shortestLease && this.#isReused(key)
  }

  #isReused(key: string): boolean {
    const at = this.#reusable.get(key)
    if (at === undefined) return false
    const passed = this.#io.now() - at
    return passed >= 0 && passed <= reuse
  }

  // It is released to Redis.
  #released(key: string): void {
    const now = this.#io.now()
    if ((this.#reusable.get(key) ?? 0) <= now) this.#note(key, now)
  }

  #note(key: string, at: number): void {
    if (this.#reusable.size >= mostKeys && !this.#reusable.has(key)) this.#forgetReusable()
    this.#reusable.set(key, at)
  }

  // All but those that others are to have for a while.
  #forgetReusable(): void {
    const now = this.#io.now()
    for (const [key, at] of this.#reusable) if (at <= now) this.#reusable.delete(key)
  }

  /** Redis has granted it, with so many tokens from that one on. */
  begin(
    { claim: { brings, place: { key } }, id, weight }: Entry & { readonly weight: number },
    session: Session,
    token: number,
    tokens: number
  ): Stretch {
    const since = this.#io.now()
    const stretch = {
      id,
      key,
      weight,
      brings,
      session,
      first: token,
      next: token + 1,
      end: token + tokens,
      since,
      resting: undefined,
      restedAt: 0
    }
    this.#byId.set(id, stretch)
    const those = this.#byKey.get(key)
    if (those === undefined) this.#byKey.set(key, [stretch])
    else those.push(stretch)
    this.#arm(since + most)
    return stretch
  }

  /** One that is not in use, and that this claim can take over. */
  resting({ brings, place: { key } }: Claim, weight: number): Stretch | undefined {
    return this.#byKey.get(key)?.findLast((stretch) =>
      stretch.resting !== undefined && stretch.weight === weight && stretch.brings === brings
    )
  }

  has(key: string): boolean {
    return this.#byKey.has(key)
  }

  /**
   * For a hold that can take over nothing here. One that waits goes before those that would take it again. One that does not wait is
   * refused where the lock is in use here: then the answer is false.
   */
  makeWay({ key, kind }: Resource, waits: boolean): boolean {
    this.surrenderResting(key)
    if (!exclusive.has(kind) || !this.has(key)) return true
    if (!waits) return false
    this.surrenderKey(key)
    this.recalled(key)
    return true
  }

  #end({ id, key }: Stretch): void {
    if (!this.#byId.delete(id)) return
    const rest = this.#byKey.get(key)!.filter((other) => other.id !== id)
    if (rest.length === 0) this.#byKey.delete(key)
    else this.#byKey.set(key, rest)
  }

  /** It is not kept at the end of the hold that uses it. */
  cease(stretch: Stretch | undefined): void {
    if (stretch !== undefined) this.#end(stretch)
  }

  /** A lock that rests is released. One that is in use is released at its end, and not kept. */
  surrender(stretch: Stretch): void {
    const hold = stretch.resting
    this.#end(stretch)
    if (hold === undefined) return
    this.#released(stretch.key)
    this.#giveBack(hold, stretch.session)
  }

  surrenderAll(): void {
    for (const stretch of this.#all()) this.surrender(stretch)
  }

  /** Surrenders what is kept of this resource. */
  surrenderKey(key: string): void {
    for (const stretch of this.#byKey.get(key) ?? []) this.surrender(stretch)
  }

  /** Releases what rests of this resource. Answers whether anything did. */
  surrenderResting(key: string): boolean {
    const resting = this.#byKey.get(key)?.filter((stretch) => stretch.resting !== undefined) ?? []
    for (const stretch of resting) this.surrender(stretch)
    return resting.length > 0
  }

  /** Another process wants it. Answers false if this session does not keep it. */
  recall(id: string, session: Session): boolean {
    const stretch = this.#byId.get(id)
    if (stretch?.session !== session) return false
    this.surrender(stretch)
    this.recalled(stretch.key)
    return true
  }

  /** Others than this process are to have it for a while. */
  recalled(key: string): void {
    this.#note(key, this.#io.now() + spared)
  }

  /** It is not in use any more. Answers false if it is not kept, may not be, or has been for long enough: it is released to Redis. */
  rest(hold: Entry, mayBeKept: boolean): boolean {
    const now = this.#io.now()
    const stretch = this.#byId.get(hold.id)
    if (stretch === undefined || !mayBeKept || now - stretch.since >= most) {
      this.#released(hold.claim.place.key)
      if (stretch !== undefined) this.#end(stretch)
      return false
    }
    stretch.resting = hold
    stretch.restedAt = now
    this.#arm(now + reuse)
    return true
  }

  /** The token of the next hold here, if it may have one without asking. */
  next(stretch: Stretch): number | undefined {
    if (stretch.next === stretch.end || this.#io.now() - stretch.since >= most) return undefined
    stretch.resting = undefined
    return stretch.next++
  }

  #all(): ReadonlyArray<Stretch> {
    return [...this.#byId.values()]
  }

  clear(): void {
    this.#byId.clear()
    this.#byKey.clear()
    this.#timer?.cancel()
    this.#timer = undefined
    this.#timerAt = Number.POSITIVE_INFINITY
  }

  // One timer for all, which is not set anew for each release.
  #arm(at: number): void {
    if (this.#timerAt <= at) return
    this.#timer?.cancel()
    this.#timerAt = at
    this.#timer = this.#io.after(at - this.#io.now(), () => {
      this.#timerAt = Number.POSITIVE_INFINITY
      const now = this.#io.now()
      for (const stretch of this.#all()) {
        const { restedAt, resting, since } = stretch
        const end = resting === undefined ? since + most : restedAt + reuse
        if (end <= now) this.surrender(stretch)
        else this.#arm(end)
      }
    })
  }
}
