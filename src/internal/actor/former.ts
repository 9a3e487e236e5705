/** The sessions of a channel that are over, or may never have begun. Redis may still know them, so they are ended. */

import type { Office } from "./office.ts"
import type { Reaper } from "./reaper.ts"

export class Former {
  readonly #office: Office
  readonly #prefix: string
  readonly #reaper: Reaper
  // When each may be ended, by the monotonic clock.
  readonly #sessions = new Map<string, number>()

  constructor(office: Office, prefix: string, reaper: Reaper) {
    this.#office = office
    this.#prefix = prefix
    this.#reaper = reaper
  }

  /**
   * The next session ends this one. Ended at once, a session with holds would cost their finalizers the margin: the next
   * waiter would be granted. So it is ended when the margin has passed.
   */
  add(id: string, margin?: number): void {
    const { io, transport } = this.#office
    this.#sessions.set(id, margin === undefined ? 0 : io.now() + margin)
    if (margin !== undefined) void transport.sleep(margin + 1).then(() => this.#retire())
  }

  /** Ends one that has nothing. */
  end(id: string): void {
    this.add(id)
    void this.#retire()
  }

  /** Those that may be ended now. Few at a time: the others expire by themselves. */
  due(): ReadonlyArray<string> {
    const now = this.#office.io.now()
    return [...this.#sessions].filter(([, at]) => at <= now).map(([id]) => id).slice(-32)
  }

  /** The opening of a session has ended them. */
  replaced(ids: ReadonlyArray<string>): void {
    for (const id of ids) {
      this.#sessions.delete(id)
      void this.#reaper.reap(id)
    }
  }

  /** So that no waiter has to wait for their deadlines. */
  async #retire(): Promise<void> {
    await Promise.all(
      this.due().map(async (id) => {
        try {
          await this.#end(id, false)
        } catch (cause) {
          // The next session does it, or it expires.
          this.#office.hooks.log("Debug", `former session ${id} with ${this.#prefix} could not be ended`, cause)
        }
      })
    )
  }

  async #end(id: string, closed: boolean): Promise<void> {
    await this.#reaper.insist([{ verb: "session.end", args: [id, closed] }])
    this.#sessions.delete(id)
    await this.#reaper.reap(id)
  }

  /** When finalizers under sessions that were lost a moment ago have had their time. */
  calm(): Promise<void> {
    const { io, transport } = this.#office
    const left = Math.max(0, ...this.#sessions.values()) - io.now()
    return left > 0 ? transport.sleep(left) : Promise.resolve()
  }

  /** Ends all of them, and the last one, because the coordinator is closed. */
  async close(last: string | undefined): Promise<void> {
    const ids = [...this.#sessions.keys()]
    if (last !== undefined) ids.push(last)
    await Promise.all(ids.map((id) => this.#end(id, true)))
  }
}
