/** A simulated connection: a request of a process stays on its way until the world decides about it. */

import type { Io, Timer } from "../io.ts"
import type { Connection, NodeConnection } from "../redis/connection.ts"
import { ConnectionLost, fail, NotConnected, type RedisError, Timeout } from "../redis/errors.ts"
import { makeListeners } from "../redis/listeners.ts"
import type { Order } from "./server.ts"

/** A request on its way to Redis, or back. */
export interface Sending {
  readonly order: Order
  readonly resolve: (reply: unknown) => void
  readonly reject: (error: RedisError) => void
  readonly timer: Timer
  /** The streams that it waits for, if it does. */
  readonly streams: ReadonlyArray<string>
  /** It was executed, and waits for an entry since so many had been written. */
  blocked: number | undefined
  outcome: { readonly reply: unknown } | { readonly error: RedisError } | undefined
}

const nothing: ReadonlyArray<string> = []

/** The keys of a read that blocks. */
const streamsOf = (order: Order): ReadonlyArray<string> => {
  if (order.is === "call" || order.command !== "XREAD" || !order.args.includes("BLOCK")) return nothing
  const rest = order.args.slice(order.args.indexOf("STREAMS") + 1)
  return rest.slice(0, rest.length / 2).map(String)
}

/** The process of a connection. */
interface Owner {
  readonly name: string
  readonly io: Io
  readonly isPaused: () => boolean
  /** The connection breaks. */
  readonly onCut: (wire: Wire) => void
  readonly onClose: (wire: Wire) => void
}

export class Wire implements NodeConnection {
  readonly name: string
  readonly role: string
  readonly #owner: Owner
  /** In the order of sending. */
  sent: Array<Sending> = []
  /** In the order of their answers. */
  answered: Array<Sending> = []
  /** Requests get lost, and no answer comes. */
  deaf = false
  /** Replies get lost. */
  mute = false
  // Answered, and that was lost: their processes still wait.
  #unheard: Array<Sending> = []
  readonly #listeners = makeListeners()
  // The connection broke while its process was paused: these requests fail when that goes on.
  #lost: Array<Sending> | undefined = undefined

  constructor(role: string, owner: Owner) {
    this.role = role
    this.name = `${owner.name} ${role}`
    this.#owner = owner
  }

  readonly state = this.#listeners.state
  readonly isReady = () => this.#listeners.state() === "ready"
  readonly failure = () => undefined
  readonly onReady = this.#listeners.onReady
  readonly onDown = this.#listeners.onDown

  readonly send: Connection["send"] = (command, args, millis) => this.#send({ is: "command", command, args }, millis)

  readonly run: Connection["run"] = (command, script, call, millis, caller) =>
    void this.#send({ is: "call", command, script, call }, millis).then(caller.resolve, caller.reject)

  readonly read: NodeConnection["read"] = (args, millis, caller) =>
    void this.send("XREAD", args, millis).then(caller.resolve, caller.reject)

  #send(order: Order, millis: number): Promise<unknown> {
    if (!this.isReady()) return Promise.reject(fail(new NotConnected({ address: this.name, detail: undefined })))
    const { promise, reject, resolve } = Promise.withResolvers<unknown>()
    const timer = this.#owner.io.after(millis, () => {
      this.#forget(sending)
      reject(fail(new Timeout({ command: order.command })))
    })
    const sending: Sending = {
      order,
      resolve,
      reject,
      timer,
      streams: streamsOf(order),
      blocked: undefined,
      outcome: undefined
    }
    const queue = this.#lost ?? this.sent
    queue.push(sending)
    return promise
  }

  // Its deadline has passed. Redis may execute it all the same, and answer.
  #forget(sending: Sending): void {
    this.answered = this.answered.filter((one) => one !== sending)
  }

  /** Whether there is anything to connect to. */
  get isConnecting(): boolean {
    const state = this.state()
    return state === "connecting" || state === "reconnecting"
  }

  connected(): void {
    this.deaf = this.mute = false
    this.#listeners.up()
  }

  /** Redis has answered the first that was sent. */
  answer(outcome: Sending["outcome"]): void {
    const sending = this.sent.shift()!
    sending.outcome = outcome
    if (this.mute) this.#unheard.push(sending)
    else this.answered.push(sending)
  }

  /** The next answer arrives. */
  deliver(): void {
    const sending = this.answered.shift()!
    sending.timer.cancel()
    const { outcome } = sending
    if (outcome === undefined) return
    if ("error" in outcome) sending.reject(outcome.error)
    else sending.resolve(outcome.reply)
  }

  /** The requests that were sent, and may be executed after all when their connection is lost. Reads change nothing. */
  get underWay(): ReadonlyArray<Order> {
    return this.sent.filter(({ streams }) => streams.length === 0).map(({ order }) => order)
  }

  /** The connection breaks. Requests that were sent are lost, or come later. */
  cut(detail: string): void {
    if (!this.isReady() || this.#lost !== undefined) return
    this.#lost = [...this.#unheard, ...this.answered, ...this.sent]
    this.#owner.onCut(this)
    this.#unheard = []
    this.answered = []
    this.sent = []
    if (this.#owner.isPaused()) this.#owner.io.after(0, () => this.#notice(detail))
    else this.#notice(detail)
  }

  #notice(detail: string): void {
    const lost = this.#lost
    if (lost === undefined) return
    this.#lost = undefined
    const error = fail(new ConnectionLost({ address: this.name, detail }))
    for (const { reject, timer } of lost) {
      timer.cancel()
      reject(error)
    }
    this.#listeners.down(error)
  }

  readonly reset = (): void => this.cut("reset")

  readonly close = async (): Promise<void> => {
    this.cut("closed")
    this.#notice("closed")
    this.#listeners.close()
    this.#owner.onClose(this)
  }
}
