/**
 * Whether a history of concurrent operations can be explained by the same operations one after another: the checker of
 * Wing and Gong, with Lowe's memory of what was tried.
 *
 * **Guarantees**
 *
 * - Sound and complete for the model given: a history is refused only if no order explains it.
 * - An operation without an answer (its process was killed, or its outcome is unknown) may have happened at any time
 *   after it was asked, or never.
 *
 * **Gotchas**
 *
 * - The search is exponential in how many operations overlap, and one without an answer overlaps all that come later. Check each key by
 *   itself; with five processes on a key ten thousand operations take a fraction of a second. Where order alone decides, an invariant is
 *   cheaper.
 * - An `end` before its `start`, or a time that is no number, is a defect (`RangeError`).
 *
 * **Example** (A lock)
 *
 * ```ts
 * import { Linearizability } from "lockstep/testing"
 *
 * const history = [
 *   { input: "take", start: 1, end: 2 },
 *   { input: "take", start: 3, end: 4 },
 *   { input: "give", start: 5, end: 6 }
 * ] as const
 *
 * const result = Linearizability.check(
 *   { initial: false, step: (held, input) => input === "take" ? (held ? undefined : true) : (held ? false : undefined) },
 *   history
 * )
 * // { _tag: "NotLinearizable", ... }
 * ```
 *
 * @since 0.1.0
 */

import { hash } from "node:crypto"

/**
 * One operation. Times are of one clock; `end` is left out when there was no answer.
 *
 * @category models
 * @since 0.1.0
 */
export interface Operation<Input> {
  /** The request, and its answer if the model wants to know. */
  readonly input: Input
  readonly start: number
  readonly end?: number | undefined
}

/**
 * The effect of the operations when they come one after another.
 *
 * @category models
 * @since 0.1.0
 */
export interface Model<State, Input> {
  readonly initial: State
  /** The state after it, or `undefined` when it cannot have happened, or not with this answer. */
  readonly step: (state: State, input: Input) => State | undefined
  /** Distinguishes states. Default: their type and text. States that are objects need a `key`. */
  readonly key?: ((state: State) => string) | undefined
}

/**
 * @category models
 * @since 0.1.0
 */
export type Result<Input> =
  | { readonly _tag: "Linearizable" }
  | {
    readonly _tag: "NotLinearizable"
    /** The operation that no order explains, given those that overlap it or came before. */
    readonly stuck: Operation<Input>
    /** The operations under way when it was answered: the part of the history to look at. */
    readonly around: ReadonlyArray<Operation<Input>>
  }
  /** The search was stopped: overlapping operations are too many. */
  | { readonly _tag: "Unknown" }

interface Entry<Input> {
  readonly operation: Operation<Input>
  /** Number of the operation: those with an answer come first, in the order of their beginnings. */
  readonly index: number
  /** The entry of its answer, for that of a question which had one. */
  answer: Entry<Input> | undefined
  readonly asks: boolean
  previous: Entry<Input> | undefined
  next: Entry<Input> | undefined
}

const unlink = <Input>(entry: Entry<Input>): void => {
  entry.previous!.next = entry.next
  if (entry.next !== undefined) entry.next.previous = entry.previous
}

const relink = <Input>(entry: Entry<Input>): void => {
  entry.previous!.next = entry
  if (entry.next !== undefined) entry.next.previous = entry
}

const entryOf = <Input>(operation: Operation<Input>, index: number, asks: boolean): Entry<Input> => ({
  operation,
  index,
  answer: undefined,
  asks,
  previous: undefined,
  next: undefined
})

/** Entries in a list, behind a head. */
const linked = <Input>(entries: ReadonlyArray<Entry<Input>>): Entry<Input> => {
  const head = entryOf({ input: undefined as Input, start: 0 }, -1, true)
  let last = head
  for (const entry of entries) {
    entry.previous = last
    last = last.next = entry
  }
  return head
}

/** The questions and answers of operations in the order of time. */
const timed = <Input>(answered: ReadonlyArray<Operation<Input>>): ReadonlyArray<Entry<Input>> => {
  const events = answered.flatMap((operation, index) => {
    const [question, answer] = [entryOf(operation, index, true), entryOf(operation, index, false)]
    question.answer = answer
    return [{ at: operation.start, entry: question }, { at: operation.end!, entry: answer }]
  })
  // At the same time, a request goes before an answer: they may overlap.
  events.sort((a, b) => a.at - b.at || Number(b.entry.asks) - Number(a.entry.asks))
  return events.map(({ entry }) => entry)
}

/** Which operations have been ordered: everything below `low`, and some up to `high`. That is short, however long the history is. */
class Ordered {
  readonly #done: Uint8Array
  readonly #answered: number
  #low = 0
  #high = -1

  constructor(answered: number, others: number) {
    this.#done = new Uint8Array(answered + others)
    this.#answered = answered
  }

  /** Answers how to take it back. */
  add(index: number): () => void {
    const [low, high] = [this.#low, this.#high]
    this.#done[index] = 1
    if (index < this.#answered) this.#high = Math.max(high, index)
    while (this.#low < this.#answered && this.#done[this.#low] === 1) this.#low++
    return () => {
      this.#done[index] = 0
      this.#low = low
      this.#high = high
    }
  }

  get signature(): string {
    const beyond: Array<number> = []
    const end = Math.min(this.#high, this.#answered - 1)
    for (let index = this.#low; index <= end; index++) if (this.#done[index] === 1) beyond.push(index)
    for (let index = this.#answered; index < this.#done.length; index++) if (this.#done[index] === 1) beyond.push(index)
    return `${this.#low}:${beyond.join(",")}`
  }
}

const textOf = (state: unknown): string => {
  if (typeof state === "object" && state !== null) throw new RangeError("a model whose states are objects needs a key")
  return `${typeof state} ${String(state)}`
}

// A search may try ten million. A digest of so many bits has no collision.
const longestTried = 64

/** A text of which many can be kept: itself, or the digest of a long one. */
const digestOf = (text: string): string =>
  text.length <= longestTried ? text : hash("sha256", Buffer.from(text, "utf16le"), "binary")

/** One search for an order. */
class Search<State, Input> {
  /** Operations without an answer could have been chosen, but for the bound. */
  isCut = false
  /** The answer that no order has reached. */
  furthest: Operation<Input> | undefined = undefined
  readonly #model: Model<State, Input>
  // Those with an answer, and the others.
  readonly #answered: Entry<Input>
  readonly #others: Entry<Input>
  readonly #ordered: Ordered
  readonly #mostInRow: number
  readonly #tried = new Set<string>()
  readonly #chosen: Array<{
    readonly entry: Entry<Input>
    readonly state: State
    readonly row: number
    readonly undo: () => void
  }> = []
  #waiting: number
  #state: State
  // So many without an answer were chosen last.
  #row = 0

  constructor(
    model: Model<State, Input>,
    answered: ReadonlyArray<Operation<Input>>,
    others: ReadonlyArray<Operation<Input>>,
    /** So many without an answer are chosen in a row at most. */
    mostInRow: number
  ) {
    this.#model = model
    this.#answered = linked(timed(answered))
    this.#others = linked(others.map((operation, at) => entryOf(operation, answered.length + at, true)))
    this.#ordered = new Ordered(answered.length, others.length)
    this.#waiting = answered.length
    this.#state = model.initial
    this.#mostInRow = mostInRow
  }

  /** Whether there is an order, unless it may take no more steps. */
  run(mayStep: () => boolean): boolean | undefined {
    let candidate = this.#answered.next
    while (this.#waiting > 0) {
      if (!mayStep()) return undefined
      if (candidate === undefined) {
        const back = this.#takeBack()
        if (back === undefined) return false
        candidate = this.#after(back)
      } else {
        candidate = this.#choose(candidate) ? this.#answered.next : this.#after(candidate)
      }
    }
    return true
  }

  // First those with an answer, as far as they were asked before the first of these: that must have happened by then.
  #after({ next, operation }: Entry<Input>): Entry<Input> | undefined {
    if (operation.end === undefined) return this.#possible(next)
    return next!.asks ? next : this.#possible(this.#others.next)
  }

  #possible(entry: Entry<Input> | undefined): Entry<Input> | undefined {
    let answer = this.#answered.next!
    while (answer.asks) answer = answer.next!
    const { operation } = answer
    if (this.furthest === undefined || operation.end! > this.furthest.end!) this.furthest = operation
    if (entry === undefined || entry.operation.start > operation.end!) return undefined
    if (this.#row < this.#mostInRow) return entry
    this.isCut = true
    return undefined
  }

  // Whether the operation can be the next one, which has not been tried before.
  #choose(entry: Entry<Input>): boolean {
    const { key = textOf, step } = this.#model
    const next = step(this.#state, entry.operation.input)
    if (next === undefined) return false
    const undo = this.#ordered.add(entry.index)
    const row = entry.answer === undefined ? this.#row + 1 : 0
    const tried = digestOf(`${row} ${this.#ordered.signature}|${key(next)}`)
    if (this.#tried.has(tried)) {
      undo()
      return false
    }
    this.#tried.add(tried)
    this.#chosen.push({ entry, state: this.#state, row: this.#row, undo })
    this.#state = next
    this.#row = row
    unlink(entry)
    if (entry.answer !== undefined) {
      unlink(entry.answer)
      this.#waiting--
    }
    return true
  }

  #takeBack(): Entry<Input> | undefined {
    const back = this.#chosen.pop()
    if (back === undefined) return undefined
    const { entry, row, state, undo } = back
    if (entry.answer !== undefined) {
      relink(entry.answer)
      this.#waiting++
    }
    relink(entry)
    undo()
    this.#state = state
    this.#row = row
    return entry
  }
}

// One that is a text compares with others as a text, and `null` as 0.
const isTime = (time: unknown): boolean => typeof time === "number" && !Number.isNaN(time)

/**
 * Searches for an order. Stops after `maxSteps`, by default ten million.
 *
 * @category combinators
 * @since 0.1.0
 */
export const check = <State, Input>(
  model: Model<State, Input>,
  operations: ReadonlyArray<Operation<Input>>,
  options?: { readonly maxSteps?: number | undefined }
): Result<Input> => {
  for (const { end, start } of operations) {
    if (!isTime(start) || !(end === undefined ? Number.isFinite(start) : isTime(end) && start <= end)) {
      throw new RangeError(`an operation cannot be from ${start} to ${end}`)
    }
  }
  const byStart = [...operations].sort((a, b) => a.start - b.start)
  const answered = byStart.filter(({ end }) => end !== undefined)
  const others = byStart.filter(({ end }) => end === undefined)
  let left = options?.maxSteps ?? 10_000_000
  if (!(left >= 1)) throw new RangeError("maxSteps must be a number from 1 on")
  const mayStep = () => left-- > 0
  // Few of those without an answer explain most histories, and there are many orders of many.
  for (let mostInRow = 0;; mostInRow = Math.max(1, 2 * mostInRow)) {
    const search = new Search(model, answered, others, mostInRow)
    const found = search.run(mayStep)
    if (found === undefined) return { _tag: "Unknown" }
    if (found) return { _tag: "Linearizable" }
    if (!search.isCut) return refused(search.furthest!, operations)
  }
}

const refused = <Input>(stuck: Operation<Input>, operations: ReadonlyArray<Operation<Input>>): Result<Input> => ({
  _tag: "NotLinearizable",
  stuck,
  around: operations.filter(({ end, start }) =>
    start <= stuck.end! && (end === undefined || end >= stuck.start - 3 * (stuck.end! - stuck.start))
  ).sort((a, b) => a.start - b.start).slice(-30)
})
