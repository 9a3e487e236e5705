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
 * - The search is exponential in how many operations overlap. Check each key by itself; with five processes on a key ten
 *   thousand operations take a fraction of a second. Where order alone decides, an invariant is cheaper.
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
  /** Distinguishes states. Default: `String`, which does not distinguish objects: with those, a `key` is needed. */
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

/** The requests and answers of a history in the order of time, behind a head. The operations are numbered, answered ones first. */
const linked = <Input>(answered: ReadonlyArray<Operation<Input>>, others: ReadonlyArray<Operation<Input>>) => {
  const events = [...answered, ...others].flatMap((operation, index) => {
    const shared = { operation, index, previous: undefined, next: undefined }
    const answer = operation.end === undefined ? undefined : { ...shared, asks: false, answer: undefined }
    const asked = { at: operation.start, entry: { ...shared, asks: true, answer } as Entry<Input> }
    return answer === undefined ? [asked] : [asked, { at: operation.end!, entry: answer as Entry<Input> }]
  })
  // At the same time, a request goes before an answer: they may overlap.
  events.sort((a, b) => a.at - b.at || Number(b.entry.asks) - Number(a.entry.asks))
  const head: Entry<Input> = {
    operation: { input: undefined as Input, start: 0 },
    index: -1,
    answer: undefined,
    asks: true,
    previous: undefined,
    next: undefined
  }
  let last = head
  for (const { entry } of events) {
    entry.previous = last
    last = last.next = entry
  }
  return head
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
  return String(state)
}

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
  const keyOf = model.key ?? textOf
  const byStart = [...operations].sort((a, b) => a.start - b.start)
  const answered = byStart.filter(({ end }) => end !== undefined)
  const others = byStart.filter(({ end }) => end === undefined)
  const head = linked(answered, others)
  const ordered = new Ordered(answered.length, others.length)
  const tried = new Set<string>()
  const chosen: Array<{ readonly entry: Entry<Input>; readonly state: State; readonly undo: () => void }> = []
  let waiting = answered.length
  let state = model.initial
  let entry = head.next
  let furthest: Entry<Input> | undefined
  let steps = 0
  // Whether the operation can be the next one, which has not been tried before.
  const choose = (entry: Entry<Input>): boolean => {
    const next = model.step(state, entry.operation.input)
    if (next === undefined) return false
    const undo = ordered.add(entry.index)
    const key = `${ordered.signature}|${keyOf(next)}`
    if (tried.has(key)) {
      undo()
      return false
    }
    tried.add(key)
    chosen.push({ entry, state, undo })
    state = next
    unlink(entry)
    if (entry.answer !== undefined) {
      unlink(entry.answer)
      waiting--
    }
    return true
  }
  while (waiting > 0) {
    if (++steps > (options?.maxSteps ?? 10_000_000)) return { _tag: "Unknown" }
    if (entry === undefined) throw new Error("an answer without a question")
    if (entry.asks) {
      entry = choose(entry) ? head.next : entry.next
      continue
    }
    // It has been answered, so it must have happened by now.
    if (furthest === undefined || entry.operation.end! > furthest.operation.end!) furthest = entry
    const back = chosen.pop()
    if (back === undefined) return refused(furthest.operation, operations)
    if (back.entry.answer !== undefined) {
      relink(back.entry.answer)
      waiting++
    }
    relink(back.entry)
    back.undo()
    state = back.state
    entry = back.entry.next
  }
  return { _tag: "Linearizable" }
}

const refused = <Input>(stuck: Operation<Input>, operations: ReadonlyArray<Operation<Input>>): Result<Input> => ({
  _tag: "NotLinearizable",
  stuck,
  around: operations.filter(({ end, start }) =>
    start <= stuck.end! && (end === undefined || end >= stuck.start - 3 * (stuck.end! - stuck.start))
  ).sort((a, b) => a.start - b.start).slice(-30)
})
