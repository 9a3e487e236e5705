/** The order in which a worker begins the jobs of its deliveries. */
import { assert, describe, it } from "@effect/vitest"
import { type Io, live } from "../src/internal/io.ts"
import { Deliveries } from "../src/internal/queue/deliveries.ts"
import type { Raw } from "../src/internal/queue/job.ts"

/** Jobs by their numbers, which are their tokens too; turns of the event loop pass one at a time. */
const worker = () => {
  const later: Array<() => void> = []
  const timers: Array<() => void> = []
  const state = { served: false, empty: 0, now: 0, millis: 0, begun: [] as Array<number> }
  const io: Io = {
    ...live,
    now: () => state.now,
    defer: (f) => void later.push(f),
    after: (_, f) => {
      timers.push(f)
      return { cancel: () => {} }
    }
  }
  const deliveries = new Deliveries(io, {
    isServed: () => state.served,
    begin: (_, token) => {
      state.begun.push(token)
      state.now += state.millis
    },
    empty: () => void state.empty++
  })
  return {
    state,
    deliveries,
    add: (from: number, to: number, number: number) =>
      deliveries.add(
        Array.from({ length: to - from + 1 }, (_, at) => [`n${from + at}`] as unknown as Raw),
        from,
        number
      ),
    /** The end of this turn. */
    turn: () => {
      for (const f of later.splice(0)) f()
    },
    /** The next one. */
    timer: () => {
      for (const f of timers.splice(0)) f()
    }
  }
}

const numbers = (from: number, to: number) => Array.from({ length: to - from + 1 }, (_, at) => from + at)

describe("deliveries to a worker", () => {
  it("begin in two halves while Redis has nothing to do", () => {
    const { add, state, turn } = worker()
    add(1, 51, 1)
    assert.deepStrictEqual(state.begun, numbers(1, 26))
    assert.strictEqual(state.empty, 0)
    turn()
    assert.deepStrictEqual(state.begun, numbers(1, 51))
    assert.strictEqual(state.empty, 1)
  })

  it("begin at once while a request is under way, and if they are few", () => {
    const { add, state, turn } = worker()
    add(1, 31, 1)
    assert.deepStrictEqual(state.begun, numbers(1, 31))
    state.served = true
    add(32, 500, 2)
    turn()
    assert.deepStrictEqual(state.begun, numbers(1, 500))
    assert.strictEqual(state.empty, 2)
  })

  it("go on in the next turn of the event loop when this one has been long", () => {
    const { add, state, timer, turn } = worker()
    state.millis = 4
    state.served = true
    add(1, 7, 1)
    assert.deepStrictEqual(state.begun, numbers(1, 3))
    turn()
    assert.deepStrictEqual(state.begun, numbers(1, 3))
    timer()
    assert.deepStrictEqual(state.begun, numbers(1, 6))
    timer()
    assert.deepStrictEqual(state.begun, numbers(1, 7))
    assert.strictEqual(state.empty, 1)
  })

  it("keep their order when another one comes between two halves", () => {
    const { add, state, turn } = worker()
    add(1, 40, 1)
    add(41, 60, 2)
    assert.deepStrictEqual(state.begun, numbers(1, 20))
    turn()
    assert.deepStrictEqual(state.begun, numbers(1, 60))
    add(61, 100, 3)
    assert.deepStrictEqual(state.begun, numbers(1, 80))
  })

  it("do not begin any more once an answer includes them, or the session is lost", () => {
    const { add, deliveries, state, turn } = worker()
    add(1, 40, 1)
    deliveries.counted(1)
    add(1, 40, 1)
    turn()
    assert.deepStrictEqual(state.begun, numbers(1, 20))
    add(41, 80, 2)
    deliveries.clear()
    turn()
    assert.deepStrictEqual(state.begun, [...numbers(1, 20), ...numbers(41, 60)])
    add(81, 81, 3)
    assert.deepStrictEqual(state.begun.at(-1), 81)
  })
})
