/** Progress, log and checkpoint of a job: all that its handler sets until the request is sent goes with one request. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Request } from "../actor/sending.ts"
import type { Session } from "../actor/session.ts"

// Of lua/QueueNotes.lua: Redis keeps no more of a log.
const mostLines = 100

// Of a line: as JSON it has to fit into the log, which Redis bounds.
const mostText = 2048

/** Called with whether it was stored: it was not if the job is not the worker's any more. */
export type Stored = (stored: boolean, error?: CoordinatorError) => void

/** A job that a worker has, and the last request with what its handler keeps. */
export interface Noted {
  readonly key: string
  noting: Noting | undefined
}

/** The end of a request: without an error, it was answered, or is moot. */
type Answered = (self: Noting, error?: CoordinatorError) => void

export class Noting implements Request<"queue.note"> {
  readonly verb = "queue.note"
  readonly key: string
  readonly session: Session
  readonly urgent = true
  readonly task: Noted
  progress = ""
  checkpoint = ""
  queued: boolean | undefined = undefined
  cancelled = false
  /** Until it is asked, it takes in more: behind another one, or while Redis refuses it. */
  state: "gathering" | "asked" | "refused" | "over" = "gathering"
  /** It is asked again after some time. */
  isRetried = false
  readonly #worker: string
  readonly #lines: Array<string> = []
  readonly #stored: Array<Stored> = []
  readonly #answered: Answered
  #args: [id: string, job: string, progress: string, checkpoint: string, lines: string] | undefined = undefined

  constructor(key: string, worker: string, task: Noted, session: Session, answered: Answered) {
    this.key = key
    this.session = session
    this.task = task
    this.#worker = worker
    this.#answered = answered
  }

  /** The request has not been sent, and can take in more. */
  get open(): boolean {
    return this.#args === undefined && this.state !== "over"
  }

  log(line: string): void {
    this.#lines.push(JSON.stringify(line.slice(0, mostText).toWellFormed()))
    if (this.#lines.length > mostLines) this.#lines.shift()
  }

  tell(stored: Stored): void {
    this.#stored.push(stored)
  }

  // Made when it is sent, and the same each time.
  get args(): [id: string, job: string, progress: string, checkpoint: string, lines: string] {
    return this.#args ??= [this.#worker, this.task.key, this.progress, this.checkpoint, this.#lines.join("\n")]
  }

  /** Redis has not executed it. */
  refused(): void {
    this.state = "refused"
    this.#args = undefined
  }

  /** Redis has not executed the one before it: the data of that one goes with this one, which is newer. */
  join(before: Noting): void {
    before.state = "over"
    this.progress ||= before.progress
    this.checkpoint ||= before.checkpoint
    this.#lines.unshift(...before.#lines)
    this.#lines.splice(0, this.#lines.length - mostLines)
    this.#stored.unshift(...before.#stored)
  }

  over(stored: boolean, error?: CoordinatorError): void {
    this.state = "over"
    for (const told of this.#stored.splice(0)) told(stored, error)
  }

  settle([tag]: readonly [tag: "noted" | "missing"]): void {
    this.over(tag === "noted")
    this.#answered(this)
  }

  moot(): void {
    this.over(false)
    this.#answered(this)
  }

  readonly fail = (error: CoordinatorError): void => this.#answered(this, error)
}
