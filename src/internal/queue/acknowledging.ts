/** Acknowledges jobs: those that are done in one turn of the event loop share a request. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Request } from "../actor/sending.ts"
import type { Session } from "../actor/session.ts"

// Of one request, for Redis's sake.
const mostJobs = 512

/** Jobs that are done, and how many the worker takes instead. */
export class Acknowledging implements Request<"queue.done"> {
  readonly verb = "queue.done"
  readonly key: string
  readonly session: Session
  readonly urgent = true
  readonly jobs: Array<string> = []
  take = 0
  queued: boolean | undefined = undefined
  cancelled = false
  readonly #worker: string
  readonly #settled: (self: Acknowledging, error: CoordinatorError | undefined) => void
  #args: [id: string, jobs: string, take: number] | undefined = undefined

  constructor(
    key: string,
    worker: string,
    session: Session,
    settled: (self: Acknowledging, error: CoordinatorError | undefined) => void
  ) {
    this.key = key
    this.session = session
    this.#worker = worker
    this.#settled = settled
  }

  /** It can take in another job: it has not been sent. */
  get open(): boolean {
    return this.#args === undefined && this.jobs.length < mostJobs
  }

  get size(): number {
    return this.jobs.length + this.take
  }

  // Made when it is sent, and the same each time.
  get args(): [id: string, jobs: string, take: number] {
    return this.#args ??= [this.#worker, parted(this.jobs), this.take]
  }

  settle(): void {
    this.#settled(this, undefined)
  }

  moot(): void {
    this.#settled(this, undefined)
  }

  readonly fail = (error: CoordinatorError): void => this.#settled(this, error)
}

// Their ids behind the letter of their stream.
const parted = (jobs: ReadonlyArray<string>): string => {
  let text = ""
  let letter = ""
  for (const job of jobs) {
    if (job[0] !== letter) {
      letter = job[0]!
      text += `${letter} `
    }
    text += `${job.slice(1)} `
  }
  return text
}
