/**
 * The slots of a process that works on several shards: each has some of them, as the credit of its worker. A shard that has
 * jobs and no credit here says so. It gets slots of idle shards, or a fair share of the slots of busy shards.
 */

/** The worker of one shard. */
export interface Seat {
  /** How many jobs of its shard it runs at a time. */
  readonly size: number
  /** How many of these slots have no job, as far as it knows. */
  readonly free: number
  /** Runs so many jobs at a time from now on. */
  readonly resize: (size: number) => void
  /** Returns up to so many free slots, and then says how many they were. */
  readonly shed: (count: number, shed: (count: number) => void) => void
}

export class Slots {
  readonly #seats: Array<Seat> = []
  // Seats whose shards have jobs and no slot for them, in the order of their news.
  readonly #wanting = new Set<Seat>()
  // Seats that were asked to shed slots, and have not answered.
  readonly #asked = new Set<Seat>()
  #size: number

  constructor(size: number) {
    this.#size = size
  }

  /** All slots, also slots that were shed and have no seat yet. */
  get size(): number {
    return this.#size
  }

  add(seat: Seat): void {
    this.#seats.push(seat)
  }

  /** Has so many slots from now on. Jobs that run go on. */
  resize(size: number): void {
    for (; this.#size < size; this.#size++) this.#give(least([...this.#wanting, ...this.#seats]), 1)
    for (; this.#size > size; this.#size--) {
      const most = this.#seats.reduce((most, one) =>
        one.free > most.free || one.free === most.free && one.size > most.size ? one : most
      )
      most.resize(most.size - 1)
    }
  }

  /** The session of a worker is lost: its shard says again what it wants. */
  forget(seat: Seat): void {
    this.#wanting.delete(seat)
  }

  // Of a shard, while so many have something to do. With fewer slots than that, none keeps one for longer than a job.
  #share(busy: number): number {
    return this.#size < busy ? 0 : Math.ceil(this.#size / busy)
  }

  /** Whether a slot that is free again stays with its shard. If not, another one has got it. */
  keeps(seat: Seat): boolean {
    const others = this.#wanting.size - (this.#wanting.has(seat) ? 1 : 0)
    if (others === 0 || seat.size <= this.#share(others + 1)) {
      // Its shard says so again when it has more jobs than that.
      this.#wanting.delete(seat)
      return true
    }
    this.#give(least([...this.#wanting].filter((one) => one !== seat)), 1)
    return false
  }

  /** The shard has jobs, and no credit here. */
  want(seat: Seat): void {
    this.#wanting.delete(seat)
    this.#wanting.add(seat)
    this.#find(seat)
  }

  #give(seat: Seat, count: number): void {
    // Its shard says so again if that was too little.
    this.#wanting.delete(seat)
    seat.resize(seat.size + count)
  }

  /** Slots may be free: an answer has come that brought no job for them. */
  look(): void {
    for (const seat of [...this.#wanting]) if (this.#wanting.has(seat)) this.#find(seat)
  }

  // The free slots of shards that want none are idle.
  #find(seat: Seat): void {
    const donor = this.#seats.reduce<Seat | undefined>(
      (best, one) =>
        one === seat || one.free <= (best?.free ?? 0) || this.#wanting.has(one) || this.#asked.has(one) ? best : one,
      undefined
    )
    if (donor === undefined) return
    this.#asked.add(donor)
    const most = Math.max(1, this.#share(this.#wanting.size) - seat.size)
    donor.shed(Math.min(donor.free, most), (count) => {
      this.#asked.delete(donor)
      // The slots were not free any more: their jobs are on the way here.
      if (count === 0) return
      const [first] = this.#wanting.has(seat) ? [seat] : this.#wanting
      this.#give(first ?? donor, count)
      this.look()
    })
  }
}

// The first seat of the smallest size.
const least = (seats: ReadonlyArray<Seat>): Seat => seats.reduce((least, one) => one.size < least.size ? one : least)
