/** Progress, log and checkpoint of a job: all that its handler sets until the request is sent goes with one request. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Request } from "../actor/outbox.ts"
import type { Session } from "../actor/session.ts"

// Of lua/QueueNotes.lua: Redis keeps no more of a log.
const mostLines = 100

// Of a line: as JSON it has to fit into the log, which Redis bounds.
const mostText = 2048

/** Told whether it was stored: it was not if the job is not the worker's any more. */
export type Stored = (stored: boolean, error?: CoordinatorError) => void

export class Noting implements Request<"queue.note"> {
  readonly verb = "queue.note"
  readonly key: string
  readonly session: Session
  readonly urgent = true
  progress = ""
  checkpoint = ""
  queued: boolean | undefined = undefined
  cancelled = false
  readonly #worker: string
  readonly #job: string
  readonly #lines: Array<string> = []
  readonly #stored: Array<Stored> = []
  readonly #refused: (self: Noting, error: CoordinatorError) => void
  #args: [id: string, job: string, progress: string, checkpoint: string, lines: string] | undefined = undefined

  constructor(
    key: string,
    worker: string,
    job: string,
    session: Session,
    refused: (self: Noting, error: CoordinatorError) => void
  ) {
    this.key = key
    this.session = session
    this.#worker = worker
    this.#job = job
    this.#refused = refused
  }

  /** The request has not been sent, and can take in more. */
  get open(): boolean {
    return this.#args === undefined
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
    return this.#args ??= [this.#worker, this.#job, this.progress, this.checkpoint, this.#lines.join("\n")]
  }

  over(stored: boolean, error?: CoordinatorError): void {
    for (const told of this.#stored.splice(0)) told(stored, error)
  }

  settle([tag]: readonly [tag: "noted" | "missing"]): void {
    this.over(tag === "noted")
  }

  moot(): void {
    this.over(false)
  }

  readonly fail = (error: CoordinatorError): void => this.#refused(this, error)
}
