/**
 * Does the work that is due in a partition: it releases the claims of dead sessions, and rings the alarms of resources. Any
 * coordinator may do it; doing it twice changes nothing, and the next one finds work that is left undone.
 */

import type { Io, Timer } from "../io.ts"
import { RedisError } from "../redis/errors.ts"
import type { Log } from "./hooks.ts"
import { describe, resourceOf } from "./keys.ts"
import { isTransient, type Next, type Reply, type Transport } from "./transport.ts"
import type { Message } from "./wire.ts"

// Of requests that another coordinator makes when this one does not.
const maxAttempts = 10
// The partition has something to do at once, and what that is could not be done: not more often than this, in ms.
const shortestPause = 20

const renewal: Message = { verb: "session.renew", args: [] }

const owning = (session: string): Message => ({ verb: "session.owned", args: [session] })

const inheriting = (session: string, key: string | undefined): Message =>
  key === undefined ? owning(session) : { verb: "session.inherit", key, args: [session] }

export class Reaper {
  readonly #transport: Transport
  readonly #io: Io
  readonly #prefix: string
  readonly #log: Log
  readonly #isWanted: () => boolean
  readonly #wanted: () => string | undefined
  readonly #running = new Map<string, Promise<void>>()
  #timer: Timer | undefined = undefined
  #at = Number.POSITIVE_INFINITY
  #closed = false

  constructor(
    transport: Transport,
    io: Io,
    prefix: string,
    log: Log,
    /** Whether a claim of this process waits for something that the end of a session may bring. */
    isWanted: () => boolean,
    /** The key of a resource that such a claim is about, if any does. */
    wanted: () => string | undefined
  ) {
    this.#transport = transport
    this.#io = io
    this.#prefix = prefix
    this.#log = log
    this.#isWanted = isWanted
    this.#wanted = wanted
  }

  /** As `ask`, and again when the connection was lost meanwhile. */
  async insist(messages: ReadonlyArray<Message>): Promise<ReadonlyArray<Reply>> {
    const address = this.#transport.addressOf(this.#prefix, "")
    for (let attempt = 0;; attempt++) {
      const sentAt = this.#io.now()
      try {
        const { next, replies } = await this.#transport.ask(address, messages)
        if (next !== undefined) this.expect(next, sentAt)
        return replies
      } catch (cause) {
        if (!(cause instanceof RedisError) || !isTransient(cause) || attempt === maxAttempts || this.#closed) {
          throw cause
        }
        await this.#transport.backoff(attempt, cause)
      }
    }
  }

  /**
   * The partition has something to do, by the answer to a call that was sent at that time. The next call is taken to be as
   * long on its way as that one was. If it comes too early, Redis says by how much.
   */
  expect({ ending, millis }: Next, sentAt: number): void {
    if (this.#closed || millis < 0 || millis > 0 && !this.#isWanted()) return
    // The first coordinator does the work, and the others find nothing to do; so they do not come at once.
    const at = Math.max(this.#io.now(), sentAt + millis) + this.#io.random() / 4
    if (this.#timer !== undefined) {
      if (this.#at <= at) return
      this.#timer.cancel()
    }
    this.#at = at
    // Claims of this process wait for that time, and the partition has nothing to do before.
    this.#timer = this.#io.exactly(at - this.#io.now(), () => {
      this.#timer = undefined
      this.#at = Number.POSITIVE_INFINITY
      void this.tick(ending)
    })
  }

  /**
   * Does what is due now. Ends when it is done, or when it cannot be. What a session owned that is expected to have ended is asked in
   * the same call.
   */
  tick(ending?: string): Promise<void> {
    return this.#once("", async () => {
      const messages = ending === undefined ? [renewal] : [renewal, inheriting(ending, this.#wanted())]
      const [reply, owned] = await this.insist(messages)
      if (reply![0] !== "renewed") return
      const reaping = ending && this.reap(ending, owned)
      await Promise.all([reaping, this.handle(reply![2])])
    })
  }

  /** As `tick`, but not for longer than a request: the caller that waits for the answer has a deadline. */
  tickInTime(): Promise<void> {
    return Promise.race([this.tick(), this.#transport.sleep(this.#transport.requestTimeout)])
  }

  /** Does the due work that the answer to a renewal names. */
  async handle(due: ReadonlyArray<string>): Promise<void> {
    if (due.length === 0 || this.#closed) return
    await Promise.all(due.map((member) => member.startsWith("@") ? this.#ring(member.slice(1)) : this.reap(member)))
    // There may be more than one answer names.
    if (due.length >= mostNamed) this.expect({ millis: shortestPause, ending: undefined }, this.#io.now())
  }

  /**
   * Releases what a dead session owned, a part at a time: its resources have to be declared as keys, so they are read first. `known` is
   * the answer to that, if it was asked.
   */
  reap(session: string, known?: Reply): Promise<void> {
    return this.#once(session, async () => {
      // What could not be released there is released one by one.
      for (let next = known?.[0] === "failed" ? undefined : known;; next = undefined) {
        const owned = next ?? (await this.insist([owning(session)]))[0]!
        if (owned[0] !== "owns") return
        const entries = owned[1] as ReadonlyArray<string>
        const replies = await this.insist(
          entries.map((entry) => ({
            verb: "session.reap",
            key: this.#keyIn(entry),
            args: [session, entry]
          }))
        )
        if (replies.some((reply) => reply[0] === "reaped")) continue
        const failed = entries.filter((_, at) => replies[at]![0] === "failed")
        if (failed.length > 0) {
          const names = failed.slice(0, 3).map((entry) => {
            const { kind, name, namespace } = resourceOf(this.#keyIn(entry))
            return describe(kind, name, namespace)
          })
          this.#log(
            "Warn",
            `${failed.length} holds and waits of session ${session}, which has ended, could not be released: ` +
              names.join(", ")
          )
        }
        return
      }
    })
  }

  // An entry of a session, as the actor lists it, ends with the kind and the name of the resource.
  #keyIn(entry: string): string {
    return this.#prefix + entry.slice(entry.indexOf(":") + 1)
  }

  #ring(resource: string): Promise<void> {
    return this.#once(`@${resource}`, async () => {
      await this.insist([{ verb: "alarm.ring", key: this.#prefix + resource, args: [] }])
    })
  }

  #once(what: string, run: () => Promise<void>): Promise<void> {
    let running = this.#running.get(what)
    if (running === undefined) {
      running = run().catch((cause) => {
        this.#log("Debug", `what is due in ${this.#prefix} could not be done`, cause)
      }).finally(() => this.#running.delete(what))
      this.#running.set(what, running)
    }
    return running
  }

  /** Work that is due at once is done: there may be no other coordinator that would. */
  async finish(): Promise<void> {
    for (let turn = 0; turn < maxAttempts; turn++) {
      await Promise.all(this.#running.values())
      if (this.#at - this.#io.now() > shortestPause) return
      this.#timer?.cancel()
      this.#timer = undefined
      this.#at = Number.POSITIVE_INFINITY
      await this.tick()
    }
  }

  close(): void {
    this.#closed = true
    this.#timer?.cancel()
  }
}

// As many as one renewal names: REAP_SESSIONS in lua/kernel.lua.
const mostNamed = 16
