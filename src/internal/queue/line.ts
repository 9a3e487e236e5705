/** The jobs of a process that wait until they can be offered to a shard, in order. */

/** On whose behalf jobs wait. */
export interface Owner {
  /** How many of its jobs wait. */
  waiting: number
  /** It wants none of them any more. */
  gone?: boolean
}

export class Line<J extends { readonly asker: Owner }> {
  #jobs: Array<J> = []
  #head = 0
  // Of owners that are gone. They stay for now: removing single ones would walk the line each time.
  #unwanted = 0
  // So many at its head have come back.
  #returned = 0
  #length = 0
  /** How many owners have jobs in it. */
  owners = 0

  get length(): number {
    return this.#length
  }

  get first(): J | undefined {
    while (this.#jobs[this.#head]?.asker.gone === true) {
      this.#unwanted--
      this.#skip()
    }
    return this.#jobs[this.#head]
  }

  push(job: J): void {
    if (job.asker.gone === true) return
    this.#jobs.push(job)
    this.#enter(job)
  }

  /** Takes the first one out. */
  shift(): void {
    const { first } = this
    if (first === undefined) return
    this.#skip()
    this.#leave(first)
    this.#compact()
  }

  /** Jobs that were taken out come back: behind others that have come back, and in front of those that were never taken out. */
  giveBack(jobs: ReadonlyArray<J>): void {
    const wanted = jobs.filter(({ asker }) => asker.gone !== true)
    this.#jobs.splice(this.#head + this.#returned, 0, ...wanted)
    this.#returned += wanted.length
    for (const job of wanted) this.#enter(job)
  }

  /** All have come back that were taken out. */
  settle(): void {
    this.#returned = 0
  }

  /** An owner wants its jobs no more. Answers how many waited. */
  drop(owner: Owner): number {
    owner.gone = true
    const { waiting } = owner
    if (waiting === 0) return 0
    owner.waiting = 0
    this.owners--
    this.#length -= waiting
    this.#unwanted += waiting
    this.#compact()
    return waiting
  }

  /** Takes out all of a kind. */
  take(isWanted: (job: J) => boolean): ReadonlyArray<J> {
    const taken = this.#jobs.slice(this.#head).filter((job) => job.asker.gone !== true && isWanted(job))
    for (const job of taken) this.#leave(job)
    if (taken.length > 0) this.#keep((job) => !isWanted(job))
    return taken
  }

  #enter({ asker }: J): void {
    this.#length++
    if (asker.waiting === 0) this.owners++
    asker.waiting++
  }

  #leave({ asker }: J): void {
    this.#length--
    asker.waiting--
    if (asker.waiting === 0) this.owners--
  }

  #skip(): void {
    this.#head++
    if (this.#returned > 0) this.#returned--
  }

  // At least half of them at once, so that what stays is moved once.
  #compact(): void {
    if ((this.#head + this.#unwanted) * 2 > this.#jobs.length) this.#keep(() => true)
  }

  #keep(stays: (job: J) => boolean): void {
    const kept = (from: number, to?: number) =>
      this.#jobs.slice(from, to).filter((job) => job.asker.gone !== true && stays(job))
    const split = this.#head + this.#returned
    const returned = kept(this.#head, split)
    this.#jobs = [...returned, ...kept(split)]
    this.#returned = returned.length
    this.#head = this.#unwanted = 0
  }
}
