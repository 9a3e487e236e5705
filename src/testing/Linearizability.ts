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
  /** What was asked, and what was answered if the model wants to know. */
  readonly input: Input
  readonly start: number
  readonly end?: number | undefined
}

/**
 * What the operations do when they come one after another.
 *
 * @category models
 * @since 0.1.0
 */
export interface Model<State, Input> {
  readonly initial: State
  /** The state after it, or `undefined` when it cannot have happened, or not with this answer. */
  readonly step: (state: State, input: Input) => State | undefined
  /** Tells states apart. Default: `String`. */
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
    /** What was under way when it was answered: the part of the history to look at. */
    readonly around: ReadonlyArray<Operation<Input>>
  }
  /** The search was given up: overlapping operations are too many. */
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

/**
 * Searches for an order. Gives up after `maxSteps`, by default ten million.
 *
 * @category combinators
 * @since 0.1.0
 */
export const check = <State, Input>(
  model: Model<State, Input>,
  operations: ReadonlyArray<Operation<Input>>,
  options?: { readonly maxSteps?: number | undefined }
): Result<Input> => {
  const keyOf = model.key ?? String
  const byStart = [...operations].sort((a, b) => a.start - b.start)
  const answered = byStart.filter(({ end }) => end !== undefined)
  const numbered = [...answered, ...byStart.filter(({ end }) => end === undefined)]
  const events: Array<{ readonly at: number; readonly entry: Entry<Input> }> = []
  numbered.forEach((operation, index) => {
    const shared = { operation, index, previous: undefined, next: undefined }
    const answer = operation.end === undefined ? undefined : { ...shared, asks: false, answer: undefined }
    events.push({ at: operation.start, entry: { ...shared, asks: true, answer } })
    if (answer !== undefined) events.push({ at: operation.end!, entry: answer })
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

  const unlink = (entry: Entry<Input>): void => {
    entry.previous!.next = entry.next
    if (entry.next !== undefined) entry.next.previous = entry.previous
  }
  const relink = (entry: Entry<Input>): void => {
    entry.previous!.next = entry
    if (entry.next !== undefined) entry.next.previous = entry
  }

  const done = new Uint8Array(numbered.length)
  let low = 0
  let high = -1
  // What has been ordered: everything below `low`, and these. That is short, however long the history is.
  const signature = (): string => {
    const beyond: Array<number> = []
    for (let index = low; index <= Math.min(high, answered.length - 1); index++) {
      if (done[index] === 1) beyond.push(index)
    }
    for (let index = answered.length; index < numbered.length; index++) if (done[index] === 1) beyond.push(index)
    return `${low}:${beyond.join(",")}`
  }
  const settle = (): void => {
    while (low < answered.length && done[low] === 1) low++
  }

  const tried = new Set<string>()
  const chosen: Array<
    { readonly entry: Entry<Input>; readonly state: State; readonly low: number; readonly high: number }
  > = []
  let waiting = answered.length
  let state = model.initial
  let entry = head.next
  let furthest: Entry<Input> | undefined
  let steps = 0
  while (waiting > 0) {
    if (++steps > (options?.maxSteps ?? 10_000_000)) return { _tag: "Unknown" }
    if (entry === undefined) throw new Error("an answer without a question")
    if (entry.asks) {
      const next = model.step(state, entry.operation.input)
      if (next !== undefined) {
        const before = { entry, state, low, high }
        done[entry.index] = 1
        if (entry.index < answered.length) high = Math.max(high, entry.index)
        settle()
        const key = `${signature()}|${keyOf(next)}`
        if (!tried.has(key)) {
          tried.add(key)
          chosen.push(before)
          state = next
          unlink(entry)
          if (entry.answer !== undefined) {
            unlink(entry.answer)
            waiting--
          }
          entry = head.next
          continue
        }
        done[entry.index] = 0
        low = before.low
        high = before.high
      }
      entry = entry.next
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
    done[back.entry.index] = 0
    state = back.state
    low = back.low
    high = back.high
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
