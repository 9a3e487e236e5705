/**
 * A slot of a cluster that moves to another server, key by key. Until that has all of them, Redis answers as during a migration:
 * requests about keys that the first server has are executed there, requests about others by the second one, and requests about
 * keys of both are refused.
 */

import { fail, Unavailable } from "../redis/errors.ts"

/** Executes a command without any of this. */
type Run = (command: string, ...args: ReadonlyArray<string>) => Promise<unknown>

/** Executes what was asked for. While a slot leaves its server, `leaving` is what the keys of that begin with. */
type Execute<A> = (leaving: string) => Promise<A>

// The keys of the other server are kept under names of their own.
const [there, aside] = ["there:", "aside:"]

const unique = (keys: ReadonlyArray<string>): ReadonlyArray<string> => [...new Set(keys)]

export class Migration {
  /** What its keys begin with. */
  readonly slot: string
  readonly #run: Run

  constructor(slot: string, run: Run) {
    this.slot = slot
    this.#run = run
  }

  // Redis lists them in no order.
  async #keys(behind = ""): Promise<ReadonlyArray<string>> {
    const keys = await this.#run("KEYS", "*") as ReadonlyArray<string>
    const start = behind + this.slot
    return keys.filter((key) => key.startsWith(start)).map((key) => key.slice(behind.length)).sort()
  }

  async #rename(keys: ReadonlyArray<string>, from: string, to: string): Promise<void> {
    for (const key of keys) await this.#run("RENAME", from + key, to + key)
  }

  /** Moves some of its keys. */
  async move(isMoved: (key: string) => boolean): Promise<void> {
    await this.#rename((await this.#keys()).filter((key) => isMoved(key)), "", there)
  }

  /** Moves all that are left. */
  async finish(): Promise<void> {
    await this.#rename(await this.#keys(there), there, "")
  }

  /** The result of an order about these keys. */
  async execute<A>(keys: ReadonlyArray<string>, execute: Execute<A>): Promise<A> {
    const own = unique(keys.filter((key) => key.startsWith(this.slot)))
    if (own.length === 0) return await execute("")
    if (await this.#run("EXISTS", ...own) === own.length) return await execute(this.slot)
    const moved = await this.#run("EXISTS", ...own.map((key) => there + key))
    if (own.length > 1 && moved !== own.length) throw fail(new Unavailable({ code: "TRYAGAIN" }))
    return await this.#there(execute)
  }

  async #there<A>(execute: Execute<A>): Promise<A> {
    await this.#rename(await this.#keys(), "", aside)
    await this.#rename(await this.#keys(there), there, "")
    try {
      return await execute("")
    } finally {
      await this.#rename(await this.#keys(), "", there)
      await this.#rename(await this.#keys(aside), aside, "")
    }
  }
}
