/**
 * Opens the sessions of a channel, and has them refused where a namespace would be divided in two ways: see lua/sessions.lua.
 */

import { MissingPermission, RedisError, UnsupportedServer } from "../redis/errors.ts"
import { CoordinatorError, Incompatible } from "./errors.ts"
import type { Former } from "./former.ts"
import { prefixOf } from "./keys.ts"
import { library, protocol, type Requests } from "./lua.ts"
import type { Office } from "./office.ts"
import type { Reaper } from "./reaper.ts"
import { coordinatorError, failed, isTransient } from "./transport.ts"

type Failed = readonly ["failed", detail: string]

type OpenReply = Requests["session.open"]["reply"] | Failed

type Found<Tag extends string> = Extract<OpenReply, readonly [Tag, ...any]>

export interface OpenerOptions {
  readonly office: Office
  readonly index: number
  readonly prefix: string
  readonly lease: number
  readonly reaper: Reaper
  readonly former: Former
}

/** The owner of a session that is opened. */
export interface Opened {
  /** Whether its sessions decide whether the coordinator may have others. */
  readonly isFirst: () => boolean
  /** There is a session, which was asked for at that time. */
  readonly begin: (id: string, position: string, identity: string, sentAt: number, sentAtWall: number) => void
  /** No session can be had. */
  readonly refuse: (refusal: CoordinatorError) => void
  /** Redis is away, and is asked again. */
  readonly unreachable: (cause: RedisError) => void
  readonly closedError: () => CoordinatorError
}

// The partition was not found vacant.
const never = -1

export class Opener {
  readonly #options: OpenerOptions
  readonly #opened: Opened
  #asking: Promise<unknown> | undefined = undefined
  // Redis has forgotten a session, and may have forgotten others.
  #doubtful = false

  constructor(options: OpenerOptions, opened: Opened) {
    this.#options = options
    this.#opened = opened
  }

  /** Redis has forgotten a session of this channel. */
  doubt(): void {
    this.#doubtful = true
  }

  /** When the last request for a session has come to something. */
  async asked(): Promise<void> {
    await this.#asking?.catch(ignore)
  }

  /** Asks until a session is open, or refused. */
  async run(): Promise<void> {
    const { former, office: { io, isClosed, newSession, transport }, prefix } = this.#options
    let vacant = never
    for (let attempt = 0; !isClosed(); attempt++) {
      // An id for each attempt: one whose reply was lost may have begun its lease long before the next is sent.
      const id = newSession()
      try {
        await this.#admitted()
        if (isClosed()) break
        const sentAt = io.now()
        const sentAtWall = io.wall()
        const replaced = former.due()
        const asking = transport.ask(transport.addressOf(prefix, ""), [this.#hello(id, replaced, vacant)])
        this.#asking = asking
        const reply = (await asking).replies[0] as OpenReply
        if (isClosed()) return former.add(id)
        if (reply[0] === "vacant") {
          vacant = await this.#settle(reply)
          continue
        }
        if (reply[0] !== "opened") return this.#opened.refuse(this.#refusal(reply))
        this.#opened.begin(id, reply[1], reply[4], sentAt, sentAtWall)
        former.replaced(replaced)
        if (reply[2] !== "") void this.#unload(reply[2].split(" "))
        this.#adopted(reply[3])
        return
      } catch (cause) {
        if (!(cause instanceof RedisError) || !isTransient(cause)) return this.#opened.refuse(coordinatorError(cause))
        if (cause.executed === "unknown") former.add(id)
        this.#opened.unreachable(cause)
        await transport.backoff(attempt, cause)
      }
    }
    this.#opened.refuse(this.#opened.closedError())
  }

  #hello(id: string, replaced: ReadonlyArray<string>, vacant: number) {
    const { index, lease, office: { about, settings } } = this.#options
    // One partition is enough to know which libraries are in use, and every coordinator opens this one.
    const used = index === 0 ? library : ""
    return {
      verb: "session.open",
      args: [id, replaced.join(" "), lease, protocol, settings.partitions, about, used, vacant]
    }
  }

  // A server that has forgotten a session here may also have forgotten the one that decides.
  async #admitted(): Promise<void> {
    if (this.#opened.isFirst()) return
    const first = this.#options.office.first()
    if (first.isTrusted() && !this.#doubtful) return
    await first.opened(this.#opened.unreachable)
    this.#doubtful = false
  }

  // Has partitions adopt the settings of this coordinator. Answers as what a session can be opened then.
  async #settle([, opened, former]: Found<"vacant">): Promise<number> {
    const { office: { settings: { namespace, partitions }, transport }, prefix } = this.#options
    const isFirst = this.#opened.isFirst()
    const prefixes = isFirst
      ? Array.from({ length: Math.max(former, partitions) - 1 }, (_, at) => prefixOf(namespace, at + 1))
      : [prefix]
    await Promise.all(prefixes.map(async (one) => {
      const message = { verb: "session.settle", args: [protocol, partitions] }
      const { replies } = await transport.ask(transport.addressOf(one, ""), [message])
      const reply = replies[0] as Requests["session.settle"]["reply"] | Failed
      if (reply[0] !== "settled") throw this.#refusal(reply)
    }))
    return isFirst ? opened : never
  }

  #refusal(reply: Found<"mismatch" | "denied" | "lacking"> | Failed): CoordinatorError {
    const { namespace, partitions } = this.#options.office.settings
    switch (reply[0]) {
      case "denied":
        return new CoordinatorError({ reason: new MissingPermission({ command: reply[1] }) })
      case "lacking": {
        const detail = `it has no command ${reply[1]}, which an operator may have renamed (\`rename-command\`)`
        return new CoordinatorError({ reason: new UnsupportedServer({ detail }) })
      }
      case "mismatch":
        return new CoordinatorError({
          reason: new Incompatible({
            namespace,
            protocol: reply[1],
            partitions: reply[2],
            expectedProtocol: protocol,
            expectedPartitions: partitions
          })
        })
      case "failed":
        return failed("session.open", reply[1])
    }
  }

  // One partition is enough to say it.
  #adopted(former: number): void {
    const { index, office: { hooks, settings: { namespace, partitions } } } = this.#options
    if (index !== 0 || former === partitions) return
    hooks.log(
      "Warn",
      `the namespace "${namespace}" had ${former} partitions and has ${partitions} now: what was stored before, such as jobs, ` +
        "events and values, is not found unless the number is set back"
    )
  }

  async #unload(names: ReadonlyArray<string>): Promise<void> {
    const { office: { hooks, transport }, reaper } = this.#options
    try {
      const gone = await transport.unload(names)
      if (gone.length > 0) await reaper.insist([{ verb: "session.unloaded", args: [gone.join(" ")] }])
      if (gone.length === names.length) return
      const kept = names.filter((name) => !gone.includes(name))
      hooks.log("Debug", `unused function libraries stay in Redis: ${kept.join(" ")}`)
    } catch (cause) {
      hooks.log("Debug", `unused function libraries stay known in Redis: ${names.join(" ")}`, cause)
    }
  }
}

const ignore = () => {}
