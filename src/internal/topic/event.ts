/** Events as their readers see them, and what stands in their place where there is none. */

import * as DateTime from "effect/DateTime"
import type { Entry } from "../actor/reader.ts"
import type { InvalidPayload } from "../hold/payload.ts"
import type { Place } from "../hold/place.ts"

export interface Origin {
  /** Where it stands in its topic: pass it to `subscribe` to go on behind it. */
  readonly id: string
  /** When Redis took it in. */
  readonly time: DateTime.Utc
  /** Events of a key keep their order. */
  readonly key: string | undefined
  /** The name of the coordinator that has published it. */
  readonly publisher: string
  /** How often it was delivered to a group, this time included, but for members that left while they had it; 1 for a subscriber. */
  readonly attempt: number
  /** How often the session of a member has ended while it had the event; 0 for a subscriber. */
  readonly crashes: number
  /** The W3C `traceparent` of the span that has published it. */
  readonly trace: string | undefined
}

export interface Event<out A> extends Origin {
  readonly _tag: "Event"
  readonly value: A
}

export interface Undecodable extends Origin {
  readonly _tag: "Undecodable"
  /** The JSON text that was published. */
  readonly body: string
  readonly error: InvalidPayload
}

export interface Gap {
  readonly _tag: "Gap"
  readonly topic: string
  readonly namespace: string
  /**
   * - `trimmed`: retention has removed events before they were read.
   * - `lost`: Redis has lost events that it had acknowledged.
   * - `overflow`: the subscriber was too slow for its buffer, and its strategy is not to be waited for.
   */
  readonly reason: "trimmed" | "lost" | "overflow"
  /** How many events are missing, where that is known. */
  readonly missed: number | undefined
}

export type Element<A> = Event<A> | Undecodable | Gap

/** An event as the actor keeps it. */
export interface Raw {
  readonly id: string
  readonly body: string
  readonly key: string
  readonly publisher: string
  readonly trace: string
  readonly attempt: number
  readonly crashes: number
}

/** Where a reader stands: the id of the last event, and its number if that is known. */
export interface Cursor {
  readonly id: string
  readonly number: number | undefined
}

/** Where a reader begins. */
export interface Start extends Cursor {
  /** Events of before this time, in milliseconds, are none of its. */
  readonly since?: number | undefined
  /** It had read events that Redis has lost. */
  readonly lost?: boolean | undefined
}

export const numberOf = (id: string): number => Number(id.slice(id.indexOf("-") + 1))

export const timeOf = (id: string): number => Number(id.slice(0, id.indexOf("-")))

export const cursorAt = (id: string): Cursor => ({ id, number: numberOf(id) })

/** Before an event. */
export const before = (id: string): Cursor => cursorAt(`${timeOf(id)}-${numberOf(id) - 1}`)

/** Before the first event that a stream has ever had. */
export const beginning = cursorAt("0-0")

/** Of the shards, when it was stored. */
export const epochOf = ([, fields]: Entry): number => {
  const first = fields[0]!
  const at = first.indexOf(".")
  return at === -1 || at > first.indexOf(" ") ? 0 : Number.parseInt(first.slice(at + 1), 10)
}

/** Negative if the first one comes before the second. */
export const compareIds = (a: string, b: string): number => timeOf(a) - timeOf(b) || numberOf(a) - numberOf(b)

export const rawOf = ([id, fields]: Entry): Raw => {
  const first = fields[0]!
  const publisher = first.slice(first.indexOf(" ") + 1)
  const raw = { id, body: fields[1]!, key: "", publisher, trace: "", attempt: 1, crashes: 0 }
  for (let at = 2; at < fields.length; at += 2) {
    if (fields[at] === "k") raw.key = fields[at + 1]!
    else if (fields[at] === "t") raw.trace = fields[at + 1]!
  }
  return raw
}

abstract class Delivered implements Origin {
  readonly #raw: Raw
  readonly id: string

  constructor(raw: Raw, id: string) {
    this.#raw = raw
    this.id = id
  }

  get time(): DateTime.Utc {
    return DateTime.makeUnsafe(timeOf(this.#raw.id))
  }

  get key(): string | undefined {
    return this.#raw.key === "" ? undefined : this.#raw.key
  }

  get publisher(): string {
    return this.#raw.publisher
  }

  get attempt(): number {
    return this.#raw.attempt
  }

  get crashes(): number {
    return this.#raw.crashes
  }

  get trace(): string | undefined {
    return this.#raw.trace === "" ? undefined : this.#raw.trace
  }
}

export class DeliveredEvent<out A> extends Delivered implements Event<A> {
  readonly _tag = "Event"
  readonly value: A

  constructor(raw: Raw, id: string, value: A) {
    super(raw, id)
    this.value = value
  }
}

export class DeliveredUndecodable extends Delivered implements Undecodable {
  readonly _tag = "Undecodable"
  readonly body: string
  readonly error: InvalidPayload

  constructor(raw: Raw, id: string, error: InvalidPayload) {
    super(raw, id)
    this.body = raw.body
    this.error = error
  }
}

export const gap = (
  { name, namespace }: Place,
  reason: Gap["reason"],
  missed: number | undefined
): Gap => ({
  _tag: "Gap",
  topic: name,
  namespace,
  reason,
  missed
})
