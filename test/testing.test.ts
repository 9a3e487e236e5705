/** `lockstep/testing`: the checker against brute force, and histories that outlive their process. */
import { assert, it } from "@effect/vitest"
import { Effect, Stream } from "effect"
import * as fc from "fast-check"
import * as fs from "node:fs"
import * as path from "node:path"
import { pathToFileURL } from "node:url"
import { framer } from "../src/internal/testing/resp.ts"
import { workspace } from "../src/internal/testing/workspace.ts"
import { History, Linearizability, Process } from "../src/testing.ts"
import { runs } from "./support/effort.ts"
import { exclusive, fifo, linearizable, type Run, tokens } from "./torture/checks.ts"
import { conducted, flowName, planOf } from "./torture/flows.ts"
import type { Hold } from "./torture/history.ts"

type Input = readonly ["take" | "give" | "busy", number]

/** A semaphore of two. */
const model: Linearizability.Model<number, Input> = {
  initial: 0,
  step: (taken, [op, weight]) => {
    const after = op === "take" ? taken + weight : op === "give" ? taken - weight : taken
    return after < 0 || after > 2 || op === "busy" && taken === 0 ? undefined : after
  }
}

/** Tries every order. */
const brute = (operations: ReadonlyArray<Linearizability.Operation<Input>>): boolean => {
  const search = (state: number, left: ReadonlyArray<Linearizability.Operation<Input>>): boolean => {
    if (left.every(({ end }) => end === undefined)) return true
    const earliest = Math.min(...left.map(({ end }) => end ?? Number.POSITIVE_INFINITY))
    return left.some((one) => {
      if (one.start > earliest) return false
      const next = model.step(state, one.input)
      return next !== undefined && search(next, left.filter((other) => other !== one))
    })
  }
  return search(0, operations)
}

const operation: fc.Arbitrary<Linearizability.Operation<Input>> = fc.record({
  input: fc.tuple(
    fc.constantFrom("take" as const, "take" as const, "give" as const, "busy" as const),
    fc.integer({ min: 1, max: 2 })
  ),
  start: fc.integer({ min: 0, max: 20 }),
  length: fc.option(fc.integer({ min: 0, max: 8 }), { freq: 6, nil: undefined })
}).map(({ input, length, start }) => ({ input, start, end: length === undefined ? undefined : start + length }))

it("the search agrees with trying every order", () => {
  let refused = 0
  fc.assert(
    fc.property(fc.array(operation, { maxLength: 7 }), (operations) => {
      const found = Linearizability.check(model, operations)
      assert.strictEqual(found._tag === "Linearizable", brute(operations))
      if (found._tag === "NotLinearizable") refused++
    }),
    { numRuns: runs(2000) }
  )
  assert.isAbove(refused, 500)
})

it("the search needs a key for states that are objects", () => {
  const counting = {
    initial: { count: 0 },
    step: ({ count }: { readonly count: number }, input: number) => input === count ? { count: count + 1 } : undefined
  }
  const history = [{ input: 0, start: 0, end: 3 }, { input: 1, start: 1, end: 2 }]
  assert.throws(() => Linearizability.check(counting, history), RangeError, /key/)
  const keyed = { ...counting, key: ({ count }: { readonly count: number }) => String(count) }
  assert.strictEqual(Linearizability.check(keyed, history)._tag, "Linearizable")
})

it("the search distinguishes states by their types, and refuses times and bounds that are none", () => {
  const register: Linearizability.Model<string | number, readonly ["write" | "read", string | number]> = {
    initial: 0,
    step: (state, [verb, value]) => verb === "write" ? value : value === state ? state : undefined
  }
  const history = (...values: ReadonlyArray<string | number>) => [
    { input: ["write", "1"] as const, start: 0, end: 9 },
    { input: ["write", 1] as const, start: 0, end: 9 },
    ...values.map((value, at) => ({ input: ["read", value] as const, start: 10 + 2 * at, end: 11 + 2 * at }))
  ]
  assert.strictEqual(Linearizability.check(register, history(1, 1))._tag, "Linearizable")
  assert.strictEqual(Linearizability.check(register, history("1", "1"))._tag, "Linearizable")
  assert.strictEqual(Linearizability.check(register, history("1", 1))._tag, "NotLinearizable")
  const noTimes: ReadonlyArray<{ readonly start: unknown; readonly end?: unknown }> = [
    { start: 2, end: 1 },
    { start: Number.NaN },
    { start: 1, end: Number.NaN },
    { start: -1, end: null },
    { start: null, end: 1 },
    { start: "1", end: "2" },
    { start: 1n, end: 2n }
  ]
  for (const times of noTimes) {
    assert.throws(
      () => Linearizability.check(register, [{ input: ["read", 0], ...times as { start: number } }]),
      RangeError
    )
  }
  for (const maxSteps of [0, -1, Number.NaN]) {
    assert.throws(() => Linearizability.check(register, [], { maxSteps }), RangeError)
  }
})

it("the search is fast enough for many operations without an answer", () => {
  const register: Linearizability.Model<number, readonly ["write" | "read", number]> = {
    initial: 0,
    step: (state, [verb, value]) => verb === "write" ? value : value === state ? state : undefined
  }
  const operations: Array<Linearizability.Operation<readonly ["write" | "read", number]>> = []
  for (let at = 0; at < 2000; at++) {
    const start = at * 10
    // Of each hundred writes one has no answer: every second of these is read.
    operations.push({ input: ["write", at], start, end: at % 100 === 0 ? undefined : start + 4 })
    const isUnread = at % 100 === 0 && at % 200 !== 0
    operations.push({ input: ["read", isUnread ? at - 1 : at], start: start + 5, end: start + 9 })
  }
  const began = performance.now()
  assert.strictEqual(Linearizability.check(register, operations)._tag, "Linearizable")
  assert.isBelow(performance.now() - began, 2000)
})

it("the search is fast enough for ten thousand operations of five processes", () => {
  const operations: Array<Linearizability.Operation<Input>> = []
  for (let at = 0; at < 5000; at++) {
    // Each asks long before it is granted, as four others do.
    operations.push({ input: ["take", 2], start: at * 10 - 45, end: at * 10 + 3 })
    operations.push({ input: ["give", 2], start: at * 10 + 4, end: at * 10 + 12 })
  }
  const began = performance.now()
  assert.strictEqual(Linearizability.check(model, operations)._tag, "Linearizable")
  const broken = operations.toSpliced(6001, 1)
  assert.strictEqual(Linearizability.check(model, broken)._tag, "NotLinearizable")
  assert.isBelow(performance.now() - began, 10_000)
})

it.live("the search remembers many states with long keys", () =>
  Effect.gen(function*() {
    const child = yield* Process.spawn(new URL("./support/programs/overlapping.ts", import.meta.url), {
      nodeArgs: ["--max-old-space-size=100"]
    })
    yield* child.exit
    assert.deepStrictEqual(child.received, [{ result: "Unknown" }])
  }).pipe(Effect.scoped), 30_000)

const run: Run = { lease: 2e6, forgets: [], disturbed: new Map(), lost: new Map() }

const hold = (from: Partial<Hold> & { readonly asked: number }): Hold => ({
  client: "a",
  id: "1",
  kind: "lock",
  key: "k",
  weight: 1,
  wait: true,
  saw: undefined,
  repeated: false,
  entered: from.asked + 10,
  token: from.asked,
  steps: [from.asked + 20],
  told: [],
  refused: undefined,
  left: from.asked + 30,
  ended: from.asked + 40,
  outcome: "released",
  ...from
})

const found = (anomalies: ReadonlyArray<{ readonly check: string }>) => anomalies.map(({ check }) => check)

it("the checks accept what is fine", () => {
  const holds = [hold({ asked: 0 }), hold({ asked: 25, entered: 45, token: 35, steps: [50], left: 55, ended: 60 })]
  assert.deepStrictEqual(
    found([...tokens(holds), ...exclusive(holds, 1, run), ...fifo(holds, run), ...linearizable(holds, 1, run)]),
    []
  )
})

it("the checks find two holders at once, and distinguish that from what Redis forgot", () => {
  const holds = [hold({ asked: 0, left: 100, ended: 110 }), hold({ asked: 5, entered: 60, left: 90, ended: 95 })]
  assert.deepStrictEqual(found(exclusive(holds, 1, run)), ["exclusive"])
  assert.deepStrictEqual(found(exclusive(holds, 2, run)), [])
  assert.deepStrictEqual(found(exclusive(holds, 1, { ...run, forgets: [{ from: 50, to: 70 }] })), [])
  assert.deepStrictEqual(found(linearizable(holds, 1, run)), ["linearizable"])
})

it("many that wait for the same time, and share, are judged in no time", () => {
  const tally = { exposures: [], undecided: 0 }
  // Five at a time.
  const holds = Array.from({ length: 100 }, (_, at) => {
    const entered = 1000 + Math.floor(at / 5) * 20
    return hold({ asked: at, entered, steps: [entered + 10], left: entered + 10, ended: entered + 19 })
  })
  assert.deepStrictEqual(found(linearizable(holds, 5, { ...run, tally })), [])
  assert.deepStrictEqual(found(linearizable(holds, 4, { ...run, tally })), ["linearizable"])
  assert.strictEqual(tally.undecided, 0)
})

it("the checks forgive one late step after a loss, and no second one", () => {
  const next = hold({ asked: 5, entered: 60, steps: [70], left: 90, ended: 95 })
  const late = (steps: Array<number>) => hold({ asked: 0, steps, left: undefined, ended: 100, outcome: "lost expired" })
  assert.deepStrictEqual(found(exclusive([late([20, 80]), next], 1, run)), [])
  assert.deepStrictEqual(found(exclusive([late([20, 80, 85]), next], 1, run)), ["exclusive"])
})

it("the checks find tokens that are given twice, or fall", () => {
  assert.deepStrictEqual(found(tokens([hold({ asked: 0, token: 7 }), hold({ asked: 5, token: 7 })])), ["tokens"])
  assert.deepStrictEqual(found(tokens([hold({ asked: 0, token: 7 }), hold({ asked: 50, token: 6 })])), ["tokens"])
})

it("the checks find a waiter that is overtaken", () => {
  const early = hold({ asked: 0, entered: 2e6, token: 9 })
  const late = hold({ asked: 1e6, entered: 1.5e6, token: 8 })
  assert.deepStrictEqual(found(fifo([early, late], run)), ["fifo"])
  assert.deepStrictEqual(found(fifo([early, late], { ...run, disturbed: new Map([["a", [{ from: 0, to: 1 }]]]) })), [])
  // It waited for other shares, and was inside before that one was taken again.
  assert.deepStrictEqual(found(fifo([{ ...early, entered: 0.9e6 }, late], run)), [])
})

it("the checks excuse a node that has failed unseen, when all its workers can have been lost", () => {
  const isChain = (id: string) => planOf(id).every(({ after }, at) => at === 0 || after.join() === `${at - 1},fail`)
  const id = Array.from({ length: 1000 }, (_, at) => `run ${at}`).find(isChain)!
  const told = [["awaits", id], ["result", id, "failed", "0", "crashed"], [
    "states",
    id,
    "failed",
    ...planOf(id).map(() => "failed")
  ]]
  const awaited = (outcome: string) =>
    hold({
      asked: 5e6,
      kind: "flow await",
      key: flowName,
      told: told.map((what) => ({ at: 9e6, what: what.map((word) => word === "crashed" ? outcome : word) }))
    })
  const lost = (count: number): Run => ({
    ...run,
    expired: Array.from({ length: count }, () => ({ from: 8e6, to: 8e6 }))
  })
  assert.deepStrictEqual(found(conducted([awaited("crashed")], lost(3))), [])
  assert.deepStrictEqual(found(conducted([awaited("crashed")], lost(2))), ["states"])
  assert.deepStrictEqual(found(conducted([awaited("failed")], lost(3))), ["states"])
})

it("the checks excuse a handler that was begun on a cancelled job, when its news can be late", () => {
  const id = "run 0"
  const cancelled = hold({
    asked: 5e6,
    kind: "flow await",
    key: flowName,
    told: [["awaits", id], ["result", id, "cancelled"]].map((what) => ({ at: 9e6, what }))
  })
  const begun = (change: Partial<Hold>) =>
    hold({
      asked: 9.5e6,
      ended: 9.6e6,
      kind: "flow handle",
      key: flowName,
      told: [{ at: 9.5e6, what: ["handles", id, 0, "node", "job", 6000] }],
      ...change
    })
  const started = hold({ asked: 1e6, kind: "flow start", key: flowName, told: [{ at: 1e6, what: ["starts", id] }] })
  const judged = (change: Partial<Hold>, disturbed: Run["disturbed"] = new Map()) =>
    found(conducted([started, cancelled, begun(change)], { ...run, disturbed }))
  assert.deepStrictEqual(judged({}), ["early"])
  assert.deepStrictEqual(judged({ outcome: "interrupted" }), [])
  assert.deepStrictEqual(judged({ asked: 9.1e6, ended: 9.15e6 }), [])
  assert.deepStrictEqual(judged({ client: "b" }, new Map([["a", [{ from: 8e6, to: 9e6 }]]])), ["early"])
  assert.deepStrictEqual(judged({ client: "a" }, new Map([["a", [{ from: 8e6, to: 9e6 }]]])), [])
})

it("a free lock that was found busy has no explanation", () => {
  const busy = hold({
    asked: 100,
    entered: undefined,
    token: undefined,
    steps: [],
    told: [],
    left: undefined,
    outcome: "busy",
    ended: 110
  })
  assert.deepStrictEqual(found(linearizable([hold({ asked: 0 }), busy], 1, run)), ["linearizable"])
  assert.deepStrictEqual(found(linearizable([hold({ asked: 90 }), busy], 1, run)), [])
})

const values = [
  "+OK\r\n",
  "-ERR no\r\n",
  ":1\r\n",
  "_\r\n",
  "$-1\r\n",
  "*-1\r\n",
  "*0\r\n",
  "$0\r\n\r\n",
  "$7\r\n\r\n$9\r\n:\r\n",
  "*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
  "%1\r\n+a\r\n~2\r\n:1\r\n:2\r\n",
  ">3\r\n$7\r\nmessage\r\n$1\r\nb\r\n$1\r\nc\r\n",
  "|1\r\n+ttl\r\n:3\r\n$1\r\na\r\n",
  "=7\r\ntxt:a\r\n\r\n",
  `$300\r\n${"é".repeat(150)}\r\n`
]

it("the proxy cuts a connection into values, wherever chunks end", () => {
  const lengths = fc.array(fc.integer({ min: 1, max: 30 }), { minLength: 1, maxLength: 100 })
  fc.assert(
    fc.property(fc.array(fc.constantFrom(...values), { maxLength: 20 }), lengths, (sent, lengths) => {
      const bytes = Buffer.from(sent.join(""))
      const cut = framer()
      const frames: Array<Buffer> = []
      for (let at = 0, turn = 0; at < bytes.length; turn++) {
        const end = at + lengths[turn % lengths.length]!
        frames.push(...cut(bytes.subarray(at, end)))
        at = end
      }
      assert.deepStrictEqual(frames.map(String), sent)
    }),
    { numRuns: runs(500) }
  )
})

it("the proxy cuts large values in time that grows with their size", () => {
  const size = 30e6
  const bulk = Buffer.concat([Buffer.from(`$${size}\r\n`), Buffer.alloc(size), Buffer.from("\r\n")])
  const list = Buffer.from(`*300000\r\n${"$1\r\na\r\n".repeat(300_000)}`)
  for (const bytes of [bulk, list]) {
    const cut = framer()
    const began = performance.now()
    const frames: Array<Buffer> = []
    for (let at = 0; at < bytes.length; at += 16_384) frames.push(...cut(bytes.subarray(at, at + 16_384)))
    assert.isBelow(performance.now() - began, 3000)
    assert.deepStrictEqual(frames.map(({ length }) => length), [bytes.length])
  }
})

it.live("what was recorded outlives a SIGKILL", () =>
  Effect.gen(function*() {
    const { directory } = yield* workspace
    const file = path.join(directory, "history.jsonl")
    const child = yield* Process.spawn<{ readonly n: number }>(
      new URL("./support/programs/recorder.ts", import.meta.url),
      { argument: file }
    )
    const last = yield* child.waitFor(({ n }) => n >= 200)
    yield* child.kill9
    yield* child.exit
    const events = History.read<{ readonly n: number }>(file)
    assert.isAtLeast(events.length, last.n)
    assert.deepStrictEqual(events.map(({ n }) => n), Array.from({ length: events.length }, (_, at) => at + 1))
    assert.isTrue(events.every(({ at }, index) => index === 0 || at >= events[index - 1]!.at))
    assert.isAtMost(events.at(-1)!.at, History.now())
    // It was killed in the middle of an event, and is started again.
    fs.appendFileSync(file, "{\"at\":1,\"n\":")
    const { record } = yield* Effect.scoped(
      Effect.tap(History.recorder<{ readonly n: number }>(file), ({ record }) => Effect.sync(() => record({ n: 0 })))
    )
    assert.throws(() => record({ n: -1 }), /closed/)
    assert.deepStrictEqual(History.read<{ readonly n: number }>(file).map(({ n }) => n), [
      ...events.map(({ n }) => n),
      0
    ])
  }).pipe(Effect.scoped))

/** A program that can `emit`. */
const programOf = (source: string) =>
  Effect.map(workspace, ({ directory }) => {
    const file = path.join(directory, "program.mjs")
    const emitting = new URL("../src/testing/Program.ts", import.meta.url).href
    fs.writeFileSync(file, `import { emit } from ${JSON.stringify(emitting)}\n${source}`)
    return file
  })

it.live("a program prints what it likes beside its events", () =>
  Effect.gen(function*() {
    const file = yield* programOf(`
      console.log(JSON.stringify({ level: "info" }))
      process.stdout.write("prompt> ")
      emit({ n: 1 })
      emit([2])`)
    const child = yield* Process.spawn(file)
    yield* child.exit
    assert.deepStrictEqual(child.received, [{ n: 1 }, [2]])
    assert.strictEqual(yield* child.output, "{\"level\":\"info\"}\nprompt> ")
  }).pipe(Effect.scoped))

it.live("an event arrives whatever its texts contain, also behind the last line end", () =>
  Effect.gen(function*() {
    const events = ["a\u2028b", "a\u2029b", "a\r\nb", "\u001e", "é".repeat(70_000)].map((text) => ({ text }))
    const file = yield* programOf(`
      for (const event of ${JSON.stringify(events)}) emit(event)
      process.stdout.write("a last line\\rthat does not end")`)
    const child = yield* Process.spawn(file)
    yield* child.exit
    assert.deepStrictEqual(child.received, events)
    assert.strictEqual(yield* child.output, "a last line\rthat does not end\n")
  }).pipe(Effect.scoped))

it.live("a program has ended though one that it has started keeps its output open", () =>
  Effect.gen(function*() {
    const file = yield* programOf(`
      import { spawn } from "node:child_process"
      const { pid } = spawn("sleep", ["60"], { stdio: "inherit", detached: true })
      emit({ pid })
      process.stdout.write("a last line", () => process.exit(3))`)
    const child = yield* Process.spawn<{ readonly pid: number }>(file)
    const { pid } = yield* child.waitFor(() => true)
    yield* Effect.addFinalizer(() => Effect.sync(() => process.kill(pid, "SIGKILL")))
    const missing = yield* Effect.exit(child.waitFor(() => false, { timeout: "10 seconds" }))
    assert.include(String(missing), "ended (code 3")
    assert.deepStrictEqual(yield* child.exit, { code: 3, signal: null })
    assert.deepStrictEqual(yield* Stream.runCollect(child.events), [{ pid }])
    assert.strictEqual(yield* child.output, "a last line\n")
  }).pipe(Effect.scoped))

it.live("programs are started by their URL, as text too, wherever they are", () =>
  Effect.gen(function*() {
    const { directory } = yield* workspace
    const file = path.join(directory, "with space.mjs")
    fs.writeFileSync(file, "console.log(JSON.stringify({ event: { n: 1 } }))")
    for (const where of [pathToFileURL(file), pathToFileURL(file).href, path.relative(process.cwd(), file)]) {
      const child = yield* Process.spawn(where)
      assert.strictEqual((yield* child.exit).code, 0)
    }
  }).pipe(Effect.scoped))
