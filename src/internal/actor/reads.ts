/**
 * Reads plain keys of one partition, without a call of its actor. All reads in one turn of the event loop are one command, and a key
 * is in it once, however many read it.
 */

import type { CoordinatorError } from "./errors.ts"
import { guard } from "./hooks.ts"
import type { Office } from "./office.ts"
import type { Questions } from "./questions.ts"
import { coordinatorError } from "./transport.ts"

export interface Reading {
  readonly settle: (value: string | null) => void
  readonly fail: (error: CoordinatorError) => void
}

// A reply of thousands of values would hold up the others.
const mostKeys = 256

export class Reads {
  readonly #office: Office
  readonly #questions: Questions
  #asked = new Map<string, Array<Reading>>()

  constructor(office: Office, questions: Questions) {
    this.#office = office
    this.#questions = questions
  }

  /** While Redis is away it fails after the coordinator's `requestTimeout`. */
  read(key: string, reading: Reading): void {
    const refused = this.#questions.begin(key)
    if (refused !== undefined) return reading.fail(refused)
    const readings = this.#asked.get(key)
    if (readings !== undefined) return void readings.push(reading)
    if (this.#asked.size === 0) this.#office.io.defer(() => this.#flush())
    this.#asked.set(key, [reading])
  }

  #flush(): void {
    const asked = [...this.#asked]
    this.#asked = new Map()
    for (let at = 0; at < asked.length; at += mostKeys) void this.#send(asked.slice(at, at + mostKeys))
  }

  async #send(asked: ReadonlyArray<readonly [key: string, readings: ReadonlyArray<Reading>]>): Promise<void> {
    let found: ReadonlyArray<string | null>
    try {
      found = await this.#ask(asked.map(([key]) => key))
    } catch (cause) {
      for (const [key, readings] of asked) for (const { fail } of readings) fail(coordinatorError(cause, key))
      return
    } finally {
      this.#questions.end(asked.reduce((sum, [, { length }]) => sum + length, 0))
    }
    for (const [at, [key, readings]] of asked.entries()) {
      for (const { settle } of readings) guard(this.#office.hooks.log, `the value of ${key}`, () => settle(found[at]!))
    }
  }

  async #ask(keys: ReadonlyArray<string>): Promise<ReadonlyArray<string | null>> {
    const { refusal, settings: { requestTimeout }, transport } = this.#office
    const command = keys.length === 1 ? "GET" : "MGET"
    const reply = await transport.answered(
      keys[0]!,
      refusal,
      () => transport.commands.send(command, keys, requestTimeout)
    )
    return keys.length === 1 ? [reply as string | null] : reply as ReadonlyArray<string | null>
  }
}
