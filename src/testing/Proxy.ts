/**
 * A TCP proxy in front of a Redis server, with faults at command: those of a network, when a test wants them.
 *
 * It cuts the stream into RESP requests and replies, so that a fault can be aimed at one of them: before the server sees
 * it, after it was executed, or for good. With TLS it sees bytes only, and each chunk counts as one request.
 *
 * **Example** (A reply that is lost after the server has executed the request)
 *
 * ```ts
 * import { Effect } from "effect"
 * import { Proxy } from "lockstep/testing"
 *
 * const program = Effect.gen(function*() {
 *   const proxy = yield* Proxy.make({ port: 6379 })
 *   const arrived = yield* proxy.once((request) => request.name === "FCALL", "dropReply")
 *   // ... a program that connects to `proxy.url` ...
 *   const request = yield* arrived
 *   return request.args
 * })
 * ```
 *
 * @since 0.1.0
 */

import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import * as Semaphore from "effect/Semaphore"
import * as net from "node:net"
import { reservePort } from "../internal/testing/ports.ts"
import { framer, words } from "../internal/testing/resp.ts"

/**
 * One command on its way to the server.
 *
 * @category models
 * @since 0.1.0
 */
export interface Request {
  /** Upper case; empty when the bytes are not RESP, as with TLS. */
  readonly name: string
  readonly args: ReadonlyArray<string>
  readonly bytes: Buffer
  /** Counted from 1, over all connections. */
  readonly index: number
  /** Number of the connection, counted from 1. */
  readonly connection: number
}

const verdicts = ["pass", "drop", "dropReply", "garbleReply", "blackhole", "blackholeReply", "duplicate"] as const

/**
 * The fate of a request; any other word is a defect (`RangeError`):
 * - `pass`
 * - `drop`: it never reaches the server; the connection is reset
 * - `dropReply`: the server executes it; the connection is reset in place of the reply
 * - `garbleReply`: the server executes it; in place of the reply comes the error page of a gateway, which closes the connection
 * - `blackhole`: it never reaches the server; the connection stays open and silent from here on
 * - `blackholeReply`: the server executes it; the connection stays open and silent in place of the reply
 * - `duplicate`: the server executes it twice; the client gets the first reply
 *
 * @category models
 * @since 0.1.0
 */
export type Verdict = typeof verdicts[number]

/**
 * Decides what becomes of each request.
 *
 * @category models
 * @since 0.1.0
 */
export type Hook = (request: Request) => Verdict | Promise<Verdict>

/**
 * A request that waits in the proxy, and with it everything after it on that connection.
 *
 * @category models
 * @since 0.1.0
 */
export interface Held {
  /** Waits for its arrival. */
  readonly request: Effect.Effect<Request>
  /** Decides, now or before it arrives. */
  readonly release: (verdict?: Verdict) => Effect.Effect<void>
}

/**
 * @category models
 * @since 0.1.0
 */
export interface Proxy {
  readonly host: "127.0.0.1"
  readonly port: number
  readonly url: string
  /** The mode at the start; also ends `delay`. A connection that has been silent stays silent: it lost bytes. */
  readonly pass: Effect.Effect<void>
  /** Requests are executed, replies vanish; each connection is reset once a request of it has been executed. */
  readonly dropReplies: Effect.Effect<void>
  /** Half-open: connections, also new ones, stay open and carry nothing, also not that a side has closed. */
  readonly blackhole: Effect.Effect<void>
  /** New connections are refused. Open ones go on. */
  readonly refuse: Effect.Effect<void>
  /** New connections are accepted and closed at once, as by a load balancer without a server. Open ones go on. */
  readonly acceptThenClose: Effect.Effect<void>
  /** Resets all connections, silent ones included. */
  readonly closeAll: Effect.Effect<void>
  /** Holds back every request or reply for so many milliseconds (up to 2^31 - 1), in order. */
  readonly delay: (milliseconds: { readonly requests?: number; readonly replies?: number }) => Effect.Effect<void>
  /** Decides on each request for which nothing was arranged by `once` or `hold`. */
  readonly onRequest: (hook: Hook | undefined) => Effect.Effect<void>
  /** Arranges for the next request that satisfies `predicate`. The inner effect waits for it. */
  readonly once: (
    predicate: (request: Request) => boolean,
    verdict: Verdict
  ) => Effect.Effect<Effect.Effect<Request>>
  /** Stops the next request that satisfies `predicate` before it reaches the server. */
  readonly hold: (predicate: (request: Request) => boolean) => Effect.Effect<Held>
  /** Another server for connections made from now on. */
  readonly retarget: (port: number) => Effect.Effect<void>
  readonly counters: {
    /** Accepted so far. */
    readonly connections: number
    readonly open: number
    readonly requests: number
    readonly replies: number
    /** Requests of one command, by its name in upper case. */
    readonly of: (name: string) => number
  }
}

type Mode = "pass" | "dropReplies" | "blackhole" | "refuse" | "acceptThenClose"

interface Rule {
  readonly predicate: (request: Request) => boolean
  readonly hook: Hook
}

interface State {
  target: number
  mode: Mode
  delays: { requests: number; replies: number }
  hook: Hook | undefined
  readonly rules: Array<Rule>
  readonly links: Set<Pair>
  readonly names: Map<string, number>
  connections: number
  requests: number
  replies: number
}

const subscription = /^[PS]?(UN)?SUBSCRIBE$/
const published = /^(p|s)?((un)?subscribe|message)$/

// A longer timer of Node fires at once.
const longest = 2 ** 31 - 1

const within = (value: number, what: string, least: number, most: number): number => {
  if (typeof value !== "number" || !(value >= least && value <= most)) {
    throw new RangeError(`${what} must be a number from ${least} to ${most}`)
  }
  return value
}

const portOf = (port: number): number => {
  if (!Number.isInteger(port)) throw new RangeError("port must be a whole number")
  return within(port, "port", 1, 65_535)
}

const verdictOf = (verdict: Verdict): Verdict => {
  if (!verdicts.includes(verdict)) {
    throw new RangeError(`a verdict must be one of ${verdicts.join(", ")}: not ${verdict}`)
  }
  return verdict
}

/** Runs tasks one after another. A task that throws fails the process: a test must not go on without its fault. */
const serial = () => {
  let tail: Promise<void> = Promise.resolve()
  return (task: () => void | Promise<void>) => {
    tail = tail.then(task)
  }
}

const judge = async (state: State, request: Request): Promise<Verdict> => {
  const at = state.rules.findIndex((rule) => rule.predicate(request))
  const [rule] = at < 0 ? [] : state.rules.splice(at, 1)
  return verdictOf(await (rule?.hook(request) ?? state.hook?.(request) ?? "pass"))
}

/** One connection of a client, and the one to the server behind it. */
class Pair {
  readonly #state: State
  readonly #client: net.Socket
  readonly #upstream: net.Socket | undefined
  readonly #connection: number
  readonly #waiting: Array<Exclude<Verdict, "drop" | "blackhole"> | "swallow"> = []
  readonly #requests = serial()
  readonly #replies = serial()
  // Each function ends the delay of a request or a reply that the proxy holds back.
  readonly #hurry = new Set<() => void>()
  // Whether it does not speak Redis's protocol, as with TLS.
  #opaque: boolean | undefined
  #silent: boolean
  #closed = false
  // In RESP3 a subscription is answered by pushes only, so that it has no place among the waiting.
  #subscribed = false
  #onPush: Verdict = "pass"

  constructor(state: State, client: net.Socket) {
    this.#state = state
    this.#client = client
    this.#connection = ++state.connections
    this.#upstream = state.mode === "blackhole" ? undefined : net.connect(state.target, "127.0.0.1")
    this.#silent = this.#upstream === undefined
    this.#listen()
  }

  silence(): void {
    this.#silent = true
  }

  reset(): void {
    this.#leave()
    this.#client.resetAndDestroy()
    this.#upstream?.resetAndDestroy()
  }

  #leave(): void {
    this.#closed = true
    this.#state.links.delete(this)
    for (const hurry of this.#hurry) hurry()
  }

  #close(): void {
    if (this.#silent) return
    this.#leave()
    this.#client.destroySoon()
    this.#upstream?.destroySoon()
  }

  #listen(): void {
    const [client, upstream] = [this.#client, this.#upstream]
    const [cutRequests, cutReplies] = [framer(), framer()]
    client.setNoDelay(true)
    client.on("data", (chunk) => {
      this.#opaque ??= chunk[0] !== 0x2a
      const at = performance.now()
      for (const bytes of this.#opaque ? [chunk] : cutRequests(chunk)) this.#requests(() => this.#request(bytes, at))
    })
    // Data that was sent before the end still arrives, as on a network.
    client.on("close", () => this.#requests(() => this.#close()))
    client.on("error", () => undefined)
    upstream?.setNoDelay(true)
    upstream?.on("data", (chunk) => {
      const at = performance.now()
      for (const bytes of this.#opaque === true ? [chunk] : cutReplies(chunk)) {
        this.#replies(() => this.#reply(bytes, at))
      }
    })
    upstream?.on("close", () => this.#replies(() => this.#close()))
    upstream?.on("error", () => undefined)
  }

  get #isOver(): boolean {
    return this.#silent || this.#closed
  }

  /** Waits until a time, unless the connection is over before. */
  #arrival(at: number): Promise<void> | undefined {
    const wait = at - performance.now()
    if (this.#isOver || wait <= 0) return undefined
    const { promise, resolve } = Promise.withResolvers<void>()
    const hurry = () => {
      clearTimeout(timer)
      this.#hurry.delete(hurry)
      resolve()
    }
    const timer = setTimeout(hurry, wait)
    this.#hurry.add(hurry)
    return promise
  }

  async #request(bytes: Buffer, at: number): Promise<void> {
    const state = this.#state
    await this.#arrival(at + state.delays.requests)
    if (this.#isOver) return
    const args = this.#opaque === true ? [] : words(bytes)
    const name = (args[0] ?? "").toUpperCase()
    state.names.set(name, (state.names.get(name) ?? 0) + 1)
    const verdict = await judge(state, { name, args, bytes, index: ++state.requests, connection: this.#connection })
    if (this.#isOver) return
    if (verdict === "drop") return this.reset()
    if (verdict === "blackhole") return this.silence()
    const subscribes = subscription.test(name)
    if (subscribes) {
      this.#subscribed = true
      this.#onPush = verdict
    } else {
      this.#waiting.push(verdict)
    }
    this.#upstream?.write(bytes)
    if (verdict === "duplicate") {
      if (!subscribes) this.#waiting.push("swallow")
      this.#upstream?.write(bytes)
    }
  }

  async #reply(bytes: Buffer, at: number): Promise<void> {
    const state = this.#state
    await this.#arrival(at + state.delays.replies)
    if (this.#isOver) return
    const push = bytes[0] === 0x3e || this.#subscribed && bytes[0] === 0x2a && published.test(words(bytes)[0] ?? "")
    const verdict = push ? this.#onPush : this.#waiting.shift() ?? "pass"
    if (!push) state.replies++
    if (verdict === "dropReply") return this.reset()
    if (verdict === "blackholeReply") return this.silence()
    if (verdict === "garbleReply") {
      this.#client.write("HTTP/1.1 502 Bad Gateway\r\n\r\n")
      return this.#close()
    }
    if (state.mode === "dropReplies") return push ? undefined : this.reset()
    if (verdict !== "swallow") this.#client.write(bytes)
  }
}

const open = (state: State, port: number) =>
  new Promise<net.Server>((resolve, reject) => {
    const listener = net.createServer((client) => {
      if (state.mode === "acceptThenClose") client.destroy()
      else state.links.add(new Pair(state, client))
    })
    listener.once("error", reject)
    listener.listen(port, "127.0.0.1", () => resolve(listener))
  })

const intercept = (state: State, predicate: (request: Request) => boolean, decided: Verdict | undefined) =>
  Effect.gen(function*() {
    const arrived = yield* Deferred.make<Request>()
    const verdict = Promise.withResolvers<Verdict>()
    if (decided !== undefined) verdict.resolve(decided)
    state.rules.push({
      predicate,
      hook: (request) => {
        Deferred.doneUnsafe(arrived, Effect.succeed(request))
        return decided ?? verdict.promise
      }
    })
    return {
      request: Deferred.await(arrived),
      release: (verdictNow: Verdict = "pass") => Effect.sync(() => verdict.resolve(verdictOf(verdictNow)))
    }
  })

/** The port of a proxy, which is opened and closed by one change of the mode at a time. */
const listening = (state: State, port: number) =>
  Effect.gen(function*() {
    const turn = yield* Semaphore.make(1)
    let listener: net.Server | undefined = undefined
    let isOver = false
    const unlisten = () => {
      listener?.close()
      listener = undefined
    }
    const change = (self: () => void | Promise<void>) =>
      // A port that is being opened has to be known.
      turn.withPermit(Effect.uninterruptible(Effect.promise(async () => self())))
    return {
      enter: (mode: Mode) =>
        change(async () => {
          state.mode = mode
          if (mode === "blackhole") { for (const link of state.links) link.silence() }
          if (mode === "refuse" || isOver) unlisten()
          else listener ??= await open(state, port)
        }),
      end: change(() => {
        isOver = true
        unlisten()
      })
    }
  })

const stateOf = (target: number): State => ({
  target,
  mode: "pass",
  delays: { requests: 0, replies: 0 },
  hook: undefined,
  rules: [],
  links: new Set(),
  names: new Map(),
  connections: 0,
  requests: 0,
  replies: 0
})

const countersOf = (state: State): Proxy["counters"] => ({
  get connections() {
    return state.connections
  },
  get open() {
    return state.links.size
  },
  get requests() {
    return state.requests
  },
  get replies() {
    return state.replies
  },
  of: (name) => state.names.get(name) ?? 0
})

/**
 * Starts a proxy on a port of its own of 127.0.0.1, in front of another one; it is closed with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (target: { readonly port: number }): Effect.Effect<Proxy, never, Scope.Scope> =>
  Effect.gen(function*() {
    const state = stateOf(portOf(target.port))
    const port = yield* reservePort
    const { end, enter } = yield* listening(state, port)
    const closeAll = Effect.sync(() => {
      for (const link of Array.from(state.links)) link.reset()
    })
    yield* Effect.acquireRelease(enter("pass"), () => Effect.andThen(end, closeAll))
    return {
      host: "127.0.0.1",
      port,
      url: `redis://127.0.0.1:${port}`,
      pass: Effect.andThen(
        Effect.sync(() => {
          state.delays = { requests: 0, replies: 0 }
        }),
        enter("pass")
      ),
      dropReplies: enter("dropReplies"),
      blackhole: enter("blackhole"),
      refuse: enter("refuse"),
      acceptThenClose: enter("acceptThenClose"),
      closeAll,
      delay: ({ replies = 0, requests = 0 }) =>
        Effect.sync(() => {
          state.delays = {
            requests: within(requests, "requests", 0, longest),
            replies: within(replies, "replies", 0, longest)
          }
        }),
      onRequest: (hook) =>
        Effect.sync(() => {
          state.hook = hook
        }),
      once: (predicate, verdict) =>
        Effect.map(
          Effect.suspend(() => intercept(state, predicate, verdictOf(verdict))),
          ({ request }) => request
        ),
      hold: (predicate) => intercept(state, predicate, undefined),
      retarget: (port) =>
        Effect.sync(() => {
          state.target = portOf(port)
        }),
      counters: countersOf(state)
    }
  })
