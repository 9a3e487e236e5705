/**
 * The flow actor itself: runs of random graphs, whose conductors are played here. They deliver errands late and twice, and crash before
 * they acknowledge one. Or the queue is beside the run, and only its worker is played. What becomes of each node is compared with a
 * small model in memory.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { layoutOf, partsOf, type Spec } from "../src/internal/flow/graph.ts"
import { randomOf } from "../src/internal/simulation/choices.ts"
import { actor, client } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

type Policy = "f" | "s" | "c"
type State = "b" | "r" | "a" | "d" | "f" | "s" | "c" | "x"

interface Node {
  state: State
  open: number
  verdict: number
  generation: number
  readonly before: Array<number>
  readonly behind: Array<readonly [node: number, policy: Policy]>
  readonly undo: boolean
  /** The number of its next compensation, and whether the one before has failed, in a run that has not begun again since. */
  undoes: number
  undoFailed: boolean
}

/** What the actor is to do, at once and without bounds. */
class Model {
  stop = 0
  faults = 0
  order: Array<number> = []
  readonly nodes: ReadonlyArray<Node>
  readonly stops: boolean

  constructor(nodes: ReadonlyArray<Node>, stops: boolean) {
    this.nodes = nodes
    this.stops = stops
  }

  start(): void {
    for (const node of this.nodes.values()) if (node.state === "b" && node.open === 0) node.state = "r"
  }

  get unsettled(): number {
    return this.nodes.filter(({ state }) => "bra".includes(state)).length
  }

  end(at: number, generation: number, state: "d" | "f" | "c"): void {
    const node = this.nodes[at]!
    if (node.generation !== generation || node.state !== "r" && node.state !== "a") return
    const fatal = node.behind.length === 0 || node.behind.some(([, policy]) => policy === "f")
    if (state !== "d" && fatal && this.stop === 0) {
      this.faults++
      if (this.stops) this.cancel(1)
    }
    this.#settle(at, state)
  }

  cancel(why: number): void {
    if (this.unsettled === 0 || this.stop > 1 || this.stop >= why) return
    this.stop = why
    for (const node of this.nodes) if (node.state === "b") node.state = "c"
  }

  #settle(at: number, state: State): void {
    const node = this.nodes[at]!
    node.state = state
    if (state === "d" && node.undo) this.order.push(at)
    for (const [next, policy] of node.behind) {
      const behind = this.nodes[next]!
      if (behind.state !== "b") continue
      behind.open--
      const verdict = state === "d" || policy === "c" ? 0 : policy === "f" && state !== "s" ? 2 : 1
      behind.verdict = Math.max(behind.verdict, verdict)
      if (behind.open > 0) continue
      if (this.stop !== 0) behind.state = "c"
      else if (behind.verdict === 0) behind.state = "r"
      else this.#settle(next, behind.verdict === 1 ? "s" : "f")
    }
  }

  get outcome(): number {
    return this.stop === 2 ? 5 : this.faults > 0 ? 4 : 3
  }

  /** Those nodes are done again, and all behind them, which it answers; of the others, what is not done. */
  retry(named: ReadonlyArray<number> = []): ReadonlySet<number> {
    this.stop = this.faults = 0
    const again = new Set(named)
    for (const at of again) for (const [next] of this.nodes[at]!.behind) again.add(next)
    this.order = this.order.filter((at) => !again.has(at))
    for (const [at, node] of this.nodes.entries()) {
      if (node.state === "d" && !again.has(at)) {
        if (node.undoFailed) {
          this.order.push(at)
          Object.assign(node, { undoes: node.undoes + 1, undoFailed: false })
        }
        continue
      }
      Object.assign(node, { undoes: 1, undoFailed: false })
      Object.assign(node, { state: "b", open: 0, verdict: 0, generation: node.generation + 1 })
    }
    for (const node of this.nodes) {
      if (node.state !== "b") continue
      for (const [next] of node.behind) if (this.nodes[next]!.state === "b") this.nodes[next]!.open++
    }
    this.start()
    return again
  }
}

const graphOf = (size: number, density: number, next: () => number, undo: boolean): Array<Node> => {
  const nodes: Array<Node> = []
  for (let at = 0; at < size; at++) {
    const begun = { state: "b", open: 0, verdict: 0, generation: 0, undoes: 1, undoFailed: false } as const
    nodes.push({ ...begun, before: [], behind: [], undo: undo && next() < 0.5 })
    const wanted = at === 0 ? 0 : Math.floor(next() * density * Math.min(at, 40))
    const before = new Set(Array.from({ length: wanted }, () => Math.floor(next() * at)))
    for (const from of before) {
      nodes[at]!.before.push(from)
      nodes[from]!.behind.push([at, (["f", "s", "c"] as const)[Math.floor(next() * 3)]!])
    }
    nodes[at]!.open = before.size
  }
  return nodes
}

const specOf = ({ before, behind, undo }: Node, at: number): Spec => ({
  name: `n${at}`,
  queue: "q",
  options: "{}",
  payload: String(at),
  before: before.map((from) => from + 1),
  behind: behind.map(([to, policy]) => [to + 1, policy] as const),
  undo
})

const run = fc.record({
  size: fc.oneof(fc.integer({ min: 1, max: 12 }), fc.integer({ min: 12, max: 200 })),
  density: fc.constantFrom(0.05, 0.3, 1),
  failures: fc.constantFrom(0, 0.05, 0.3),
  stops: fc.boolean(),
  undo: fc.boolean(),
  cancelled: fc.constantFrom(0, 0, 0.02),
  retries: fc.integer({ min: 0, max: 2 }),
  replays: fc.integer({ min: 0, max: 2 }),
  beside: fc.boolean(),
  seed: fc.integer()
})

interface Job {
  readonly at: number
  readonly generation: number
  readonly undo: number
  live: boolean
  /** Its id in the queue that is beside the run. */
  readonly id?: string
}

const drive = async (
  redis: Parameters<typeof actor>[0],
  { beside, cancelled, density, failures, replays, retries, seed, size, stops, undo }: typeof run extends
    fc.Arbitrary<infer R> ? R
    : never
) => {
  const next = randomOf(seed)
  const one = <A>(all: ReadonlyArray<A>): A => all[Math.floor(next() * all.length)]!
  const namespace = freshNamespace()
  const { key, look, open, repeat, ring, send } = actor(redis, namespace, "flow:f/r")
  const prefix = `{${namespace}:00}:`
  await open("S")
  const queue = actor(redis, namespace, "queue:q")
  await queue.open("W")
  if (beside) {
    await queue.send("W", "queue.join", ["m", "1", 0, 0, 0, 600_000, 1000, 0, 3, 0, 2, 1, 0, 0, 1, 0])
    await queue.send("W", "queue.work", ["w", 1e9])
  }
  const nodes = graphOf(size, density, next, undo)
  const model = new Model(nodes, stops)
  const layout = layoutOf(nodes.map(specOf))
  const ask = async (verb: string, ...args: ReadonlyArray<string | number>) => {
    const reply = await send("S", verb, args)
    if (next() < 0.1) await repeat("S")
    return reply
  }
  const due = async () => Number(await redis.zscore(`${prefix}due`, "@flow:f/r") ?? Infinity) <= Date.now() + 1000
  const settle = async () => {
    while (await due()) await ring()
  }

  const begin = () => ask("flow.begin", "f", "null", layout.digest, size, 0, stops ? 1 : 0, 0, 600_000)
  assert.deepStrictEqual(await begin(), ["loading"])
  for (const part of partsOf(layout)) {
    assert.deepStrictEqual(await ask("flow.load", layout.digest, JSON.stringify(part)), ["loaded"])
  }
  await begin()
  const [, , stamp] = await ask("flow.start", layout.digest, layout.fields.length / 2)
  model.start()

  // Errands that are not acknowledged; and jobs, which have an id each, so that a second offer changes nothing.
  let pending: Array<ReadonlyArray<any>> = []
  let read = "-"
  const jobs = new Map<string, Job>()
  const undone: Array<number> = []
  let offered = "-"
  const receive = async () => {
    for (const [id, fields] of await redis.xrange(`${prefix}queue-normal:q`, offered, "+")) {
      offered = `(${id}`
      const [at, generation] = /^f\/r\/\d+\/(\d+)\/(\d+)$/.exec(fields[fields.indexOf("i") + 1]!)!.slice(1).map(Number)
      const node = nodes[at! - 1]!
      assert.deepStrictEqual([node.generation, fields[1]], [generation, String(at! - 1)])
      // It may have been cancelled already.
      assert.include(["r", "c"], node.state)
      if (node.state === "r") node.state = "a"
      jobs.set(`${at! - 1}/${generation}/`, {
        at: at! - 1,
        generation: generation!,
        undo: 0,
        live: true,
        id: `n${id}`
      })
    }
    for (const [id, fields] of await redis.xrange(`${prefix}errands-normal:f`, read, "+")) {
      read = `(${id}`
      pending.push(JSON.parse(fields[1]!))
    }
  }
  const stop = (id: string, state: "c") => {
    const job = jobs.get(id)
    if (job?.live === true) return end(job, state)
  }
  // What the actor receives with a job of the queue beside it, or later by an errand.
  const end = async (job: Job, state: "d" | "f" | "c") => {
    job.live = false
    if (job.id === undefined) return void pending.push(["ended", job, state])
    const given = `f/r/${stamp}/${job.at + 1}/${job.generation}`
    if (state === "c") await queue.send("W", "queue.cancel", [given])
    else if (state === "d") {
      await queue.send("W", "queue.finish", ["w", job.id, given, "", `["success",${job.at}]`, 0, 1])
    } else await queue.send("W", "queue.bury", ["w", job.id, "failed", "no", `["failed","no"]`, 1])
    model.end(job.at, job.generation, state)
    if (next() < 0.1) await queue.repeat("W")
  }
  const deliver = async (errand: ReadonlyArray<any>) => {
    const [tag] = errand
    if (tag === "ended") {
      const [, { at, generation, undo }, state] = errand
      const outcome = { d: "success", f: "failure", c: "cancelled" }[state as "d" | "f" | "c"]
      const text = JSON.stringify([outcome, at])
      await ask("flow.ended", stamp, String(at + 1), generation, undo, outcome, text, "")
      const node = nodes[at]!
      if (undo === 0) model.end(at, generation, state)
      else if (node.state === "d" && node.generation === generation && node.undoes === undo) {
        if (state === "d") node.state = "x"
        else node.undoFailed = true
      }
      return
    }
    const [, which, node, generation] = errand
    assert.deepStrictEqual(which, ["r", stamp])
    const at = node - 1
    const id = `${at}/${generation}/${tag === "undo" ? `undo${errand[6]}` : ""}`
    if (tag === "stop") return stop(`${at}/${generation}/`, "c")
    if (tag === "undo") {
      if (jobs.has(id)) return
      assert.strictEqual(errand[6], nodes[at]!.undoes)
      jobs.set(id, { at, generation, undo: errand[6], live: true })
      undone.push(at)
      assert.deepStrictEqual(errand[5], ["success", at])
      return
    }
    if (!jobs.has(id)) {
      assert.isFalse(beside)
      // It starts, and only now, and only once.
      assert.include(["r", "a", "c"], nodes[at]!.state)
      assert.strictEqual(nodes[at]!.generation, generation)
      assert.deepStrictEqual(errand.slice(4), [[`n${at}`, "q", {}], [at]])
      jobs.set(id, { at, generation, undo: 0, live: true })
    }
    const known = pending.length
    if (next() < 0.3) {
      // A conductor that repeats an errand asks first. The node does not count as begun for that.
      const [asked] = await ask("flow.begun", stamp, String(node), generation, "")
      const fits = nodes[at]!.generation === generation && "ra".includes(nodes[at]!.state)
      const stopping = nodes[at]!.state === "r" && model.stop !== 0
      assert.strictEqual(asked, fits ? stopping ? "stopping" : "active" : "over")
    }
    const [answer] = await ask("flow.begun", stamp, String(node), generation, "1")
    if (answer === "over") return
    assert.strictEqual(answer, model.stop === 0 ? "active" : "stopping")
    if (nodes[at]!.state === "r") nodes[at]!.state = "a"
    if (model.stop === 0) return
    await receive()
    assert.isTrue(pending.slice(known).some(([tag, , behind]) => tag === "stop" && behind === node), "it is removed")
  }

  // All graphs here fit one page.
  const nodesNow = async (): Promise<ReadonlyArray<readonly [about: unknown, state: State, generation: number]>> =>
    (await look("flow.status", [1]))[18]

  const check = async () => {
    await settle()
    await receive()
    const counts = [..."bradfscx"].map((state) => nodes.filter((node) => node.state === state).length)
    assert.deepStrictEqual((await look("flow.status", [1])).slice(4, 12), counts)
    assert.deepStrictEqual((await nodesNow()).map(([, state]) => state), nodes.map(({ state }) => state))
  }

  const finish = async () => {
    for (;;) {
      if (stops || cancelled > 0 || next() < 0.3) await settle()
      await receive()
      const live = [...jobs.entries()].filter(([, { live }]) => live)
      if (pending.length + live.length === 0) {
        if (!await due()) return
        continue
      }
      if (pending.length > 0 && (live.length === 0 || next() < 0.6)) {
        const errand = one(pending)
        await deliver(errand)
        // The conductor dies before it acknowledges the errand.
        if (next() > 0.15) pending = pending.filter((other) => other !== errand)
      } else {
        // Several of them with one call.
        const ending = new Set(Array.from({ length: 1 + Math.floor(next() * 8) }, () => one(live)[1]))
        await queue.together("W", [...ending].map((job) => () => end(job, next() < failures ? "f" : "d")))
      }
      if (next() < cancelled) {
        await settle()
        await ask("flow.cancel", "", 0)
        if (undone.length === 0) model.cancel(2)
      }
      if (next() < 0.03) await check()
      // While a run is compensated, that offers the compensation again.
      if (undone.length > 0 && next() < 0.1 && (await look("flow.status", [1]))[1] === 2) {
        assert.deepStrictEqual(await ask("flow.retry", `undo${next()}`, ""), ["stopping"])
      }
      if (model.unsettled > 0 && next() < 0.05) {
        const [tag, state] = await ask("flow.retry", `early${next()}`, JSON.stringify(["n0"]))
        assert.deepStrictEqual([tag, state], ["active", undefined])
      }
    }
  }

  const judge = async () => {
    await finish()
    // The cycle of retries ends with the last one.
    const [, state] = await look("flow.status", [1])
    assert.strictEqual(state, model.outcome)
    assert.isAbove(Number(await redis.pttl(key)), 0)
    await check()
    if (model.outcome !== 3) {
      const order = model.order.splice(0).toReversed()
      assert.deepStrictEqual(undone.splice(0), order)
    }
    return model.outcome
  }

  let outcome = await judge()
  for (let count = 0; count < retries && outcome !== 3; count++) {
    await ask("flow.retry", `retry${count}`, "")
    await ask("flow.retry", `retry${count}`, "")
    model.retry()
    outcome = await judge()
  }
  for (let count = 0; count < replays; count++) {
    assert.deepStrictEqual(await ask("flow.retry", "other", `["n0","none"]`), ["unknown", "none"])
    const named = [...new Set(Array.from({ length: 1 + Math.floor(next() * 3) }, () => Math.floor(next() * size)))]
    const names = JSON.stringify(named.map((at) => `n${at}`))
    await ask("flow.retry", `replay${count}`, names)
    await ask("flow.retry", `replay${count}`, names)
    const before = nodes.map(({ state }) => state)
    const again = model.retry(named)
    if (next() < 0.1) {
      // At once: those results are forgotten all the same. What was not done is perhaps left alone, and no node has to start any more.
      await ask("flow.cancel", "", 0)
      model.cancel(2)
      await settle()
      for (const [at, [, state, generation]] of (await nodesNow()).entries()) {
        const node = nodes[at]!
        const left = generation < node.generation
        assert.isTrue(left ? !again.has(at) && state === before[at] && state !== "d" : generation === node.generation)
        if (left || state === "c" && node.state === "r") Object.assign(node, { state, generation })
      }
    }
    outcome = await judge()
  }
  // Of each node and generation there was one job at most, and every node was started or has a reason.
  for (const [at, node] of nodes.entries()) {
    const started = jobs.has(`${at}/${node.generation}/`)
    if (node.state === "d" || node.state === "x") assert.isTrue([...jobs.keys()].some((id) => id.startsWith(`${at}/`)))
    if (node.state === "s") assert.isFalse(started)
  }
}

interface Begun {
  readonly redis: Parameters<typeof actor>[0]
  readonly keys: (session: string) => ReadonlyArray<string>
  readonly due: () => Promise<number>
  readonly send: (verb: string, ...args: ReadonlyArray<string | number>) => Promise<ReadonlyArray<any>>
  readonly end: (
    node: number,
    generation: number,
    tag: "success" | "failure",
    added?: ReadonlyArray<unknown>,
    compensated?: boolean
  ) => Promise<ReadonlyArray<any>>
  readonly state: () => Promise<number>
  readonly nodes: () => Promise<string>
}

layer(TestServer.layer, { excludeTestServices: true })("the flow actor", (it) => {
  it.effect(
    "starts every node once when the nodes before it have ended, or says why not",
    () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() => fc.assert(fc.asyncProperty(run, (one) => drive(redis, one)), { numRuns: runs(25) }))
      }),
    240_000
  )

  /** A run of nodes that stand alone, whose conductors are played by the test. */
  const begun = (self: (run: Begun) => Promise<void>, undo: ReadonlyArray<string> = [], deadline = 0) =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { keys, look, open, send } = actor(redis, freshNamespace(), "flow:f/r")
      yield* Effect.promise(async () => {
        await open("S")
        const spec = { queue: "q", options: "{}", payload: "0", before: [], behind: [] }
        const layout = layoutOf(["X", "P", "T"].map((name) => ({ ...spec, name, undo: undo.includes(name) })))
        await send("S", "flow.begin", ["f", "null", layout.digest, 3, 0, 1, deadline, 600_000])
        for (const part of partsOf(layout)) await send("S", "flow.load", [layout.digest, JSON.stringify(part)])
        const [, , stamp] = await send("S", "flow.start", [layout.digest, layout.fields.length / 2])
        const status = async () => (await look("flow.status", [1])) as ReadonlyArray<any>
        await self({
          keys,
          redis,
          due: async () => Number(await redis.zscore(keys("S")[1]!, "@flow:f/r")),
          send: (verb, ...args) => send("S", verb, args),
          end: (node, generation, tag, added = [], compensated = false) =>
            send("S", "flow.ended", [
              stamp,
              String(node),
              generation,
              compensated ? 1 : 0,
              tag,
              `["${tag}"]`,
              added.length === 0 ? "" : JSON.stringify(added)
            ]),
          state: async () => (await status())[1],
          nodes: async () => (await status())[18].map(([[name], state]: any) => `${name} ${state}`).join()
        })
      })
    })

  // Behind the node that adds it, and those of these places, and in front of those nodes.
  const child = (name: string, after: ReadonlyArray<number> = [], before: ReadonlyArray<string> = []) => [
    name,
    "q",
    "1",
    after,
    "f".repeat(after.length),
    before,
    "f".repeat(before.length),
    "{}"
  ]

  it.effect("keeps what a handler has added while the run stops, for a retry", () =>
    begun(async ({ end, nodes, send, state }) => {
      await end(3, 0, "success")
      await end(1, 0, "failure")
      assert.deepStrictEqual<unknown>(await end(2, 0, "success", [child("C"), child("D", [1])]), ["ended"])
      assert.strictEqual(await nodes(), "X f,P d,T d,C c,D c")
      assert.strictEqual(await state(), 4)
      await send("flow.retry", "again", "")
      assert.strictEqual(await nodes(), "X r,P d,T d,C r,D b")
      await end(1, 1, "success")
      await end(4, 1, "success")
      await end(5, 1, "success")
      assert.strictEqual(await nodes(), "X d,P d,T d,C d,D d")
      assert.strictEqual(await state(), 3)
    }))

  it.effect("has its deadline again when no session was alive for so long that the alarm is forgotten", () =>
    begun(
      async ({ due, end, keys, redis, send, state }) => {
        const deadline = await due()
        for (const asked of [() => send("flow.observe", "m", ""), () => end(3, 0, "success")]) {
          await redis.zrem(keys("S")[1]!, "@flow:f/r")
          await asked()
          assert.strictEqual(await due(), deadline)
        }
        assert.strictEqual(await state(), 1)
      },
      [],
      60_000
    ))

  it.effect("passes over what a handler has added before, when that is done", () =>
    begun(async ({ end, nodes, send, state }) => {
      await end(2, 0, "success", [child("C")])
      await end(3, 0, "success")
      await end(4, 0, "success")
      await end(1, 0, "failure")
      assert.strictEqual(await state(), 2)
      await end(2, 0, "success", [], true)
      assert.strictEqual(await nodes(), "X f,P x,T d,C d")
      await send("flow.retry", "again", "")
      await end(1, 1, "success")
      assert.deepStrictEqual<unknown>(await end(2, 1, "success", [child("C"), child("D", [1])]), ["ended"])
      assert.strictEqual(await nodes(), "X d,P d,T d,C d,D r")
      await end(5, 0, "success")
      assert.strictEqual(await state(), 3)
    }, ["P"]))

  // As `child`, behind the first one of those that are added, and that one handles its failure.
  const handling = (name: string) => child(name, [1]).with(4, "c")

  it.effect("fails with a node whose failure was handled, until a handler has added one that does not", () =>
    begun(async ({ end, nodes, send, state }) => {
      await end(1, 0, "success")
      await end(3, 0, "success")
      await end(2, 0, "success", [child("C"), handling("D")])
      await end(4, 0, "success", [child("E")])
      for (const node of [5, 6]) await end(node, 0, "success")
      assert.strictEqual(await state(), 3)
      // The node that has added one.
      await send("flow.retry", "first", JSON.stringify(["C"]))
      await end(4, 1, "failure")
      assert.strictEqual(await nodes(), "X d,P d,T d,C f,D c,E c")
      assert.strictEqual(await state(), 4)
    }))

  it.effect("fails with a node that was added, and that has another one behind it since", () =>
    begun(async ({ end, nodes, send, state }) => {
      await end(1, 0, "success")
      await end(3, 0, "success")
      await end(2, 0, "success", [child("C"), handling("D")])
      for (const node of [4, 5]) await end(node, 0, "success")
      assert.strictEqual(await state(), 3)
      await send("flow.retry", "first", JSON.stringify(["P"]))
      await end(2, 1, "success", [child("C"), handling("D"), child("E", [1])])
      await end(4, 1, "failure")
      assert.strictEqual(await nodes(), "X d,P d,T d,C f,D c,E c")
      assert.strictEqual(await state(), 4)
    }))

  it.effect("refuses nodes that would be before themselves", () =>
    begun(async ({ end, nodes, send }) => {
      await end(1, 0, "success")
      await end(3, 0, "success")
      await end(2, 0, "success", [child("B"), child("C", [1])])
      for (const node of [4, 5]) await end(node, 0, "success")
      await send("flow.retry", "first", JSON.stringify(["P"]))
      const again = (before: string) => end(2, 1, "success", [child("C"), child("D", [1], [before])])
      for (const name of ["C", "B"]) assert.deepStrictEqual<unknown>(await again(name), ["refused", name])
      assert.deepStrictEqual<unknown>(await end(2, 1, "success", [child("B"), child("D", [1], ["C"])]), ["ended"])
      assert.strictEqual(await nodes(), "X d,P d,T d,B r,C b,D b")
      for (const [node, generation] of [[4, 1], [6, 0], [5, 1]] as const) await end(node, generation, "success")
      assert.strictEqual(await nodes(), "X d,P d,T d,B d,C d,D d")
    }))

  it.effect("begins again once for a request, also when there are others between its repetitions", () =>
    begun(async ({ end, send, state }) => {
      const fails = async (generation: number) => {
        for (const node of [2, 3]) await end(node, 0, "success")
        await end(1, generation, "failure")
        assert.strictEqual(await state(), 4)
      }
      await fails(0)
      assert.deepStrictEqual<unknown>(await send("flow.retry", "first", ""), ["retried", 1])
      assert.deepStrictEqual<unknown>(await send("flow.retry", "second", ""), ["retried", 1])
      await fails(1)
      for (const again of ["first", "second"]) {
        assert.deepStrictEqual<unknown>(await send("flow.retry", again, ""), ["retried", 4])
      }
      assert.deepStrictEqual<unknown>(await send("flow.retry", "third", ""), ["retried", 1])
    }))

  it.effect("does not begin again while it stops, and says so", () =>
    begun(async ({ end, send, state }) => {
      assert.deepStrictEqual<unknown>(await send("flow.cancel", "", 0), ["cancelled", 1])
      assert.deepStrictEqual<unknown>(await send("flow.retry", "early", ""), ["stopping"])
      for (const node of [1, 2, 3]) await end(node, 0, "failure")
      assert.strictEqual(await state(), 5)
      // Its reply was lost, and it is sent again.
      assert.deepStrictEqual<unknown>(await send("flow.retry", "early", ""), ["retried", 1])
      assert.deepStrictEqual<unknown>(await send("flow.retry", "early", ""), ["retried", 1])
    }))

  it.effect("has no nodes when it was cancelled before all were loaded", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { look, open, send } = actor(redis, freshNamespace(), "flow:f/r")
      yield* Effect.promise(async () => {
        await open("S")
        await send("S", "flow.begin", ["f", "null", "digest", 1000, 0, 1, 0, 600_000])
        assert.deepStrictEqual(await send("S", "flow.cancel", ["", 0]), ["cancelled", 5])
        const status = await look("flow.status", [1])
        assert.deepStrictEqual([status[1], status[3], status[4], status[18]], [5, 0, 0, []])
        assert.deepStrictEqual(await send("S", "flow.retry", ["again", ""]), ["missing"])
      })
    }))

  it.effect("forgets the failure of a node that was added while the run begins again, and is done again itself", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { look, open, ring, send } = actor(redis, freshNamespace(), "flow:f/r")
      const state = async () => (await look("flow.status", [1]))[1]
      yield* Effect.promise(async () => {
        await open("S")
        const names = Array.from({ length: 1500 }, (_, at) => `n${at}`)
        const spec = { queue: "q", options: "{}", payload: "0", before: [], behind: [], undo: false }
        const layout = layoutOf(names.map((name) => ({ ...spec, name })))
        await send("S", "flow.begin", ["f", "null", layout.digest, names.length, names.length + 1, 0, 0, 600_000])
        for (const part of partsOf(layout)) await send("S", "flow.load", [layout.digest, JSON.stringify(part)])
        const [, , stamp] = await send("S", "flow.start", [layout.digest, layout.fields.length / 2])
        const end = (node: number, generation: number, tag: string) =>
          send("S", "flow.ended", [stamp, `${node}`, generation, 0, tag, `["${tag}"]`, ""])
        while (await state() === 1) {
          await send("S", "flow.cancel", ["", 0])
          for (let node = 1; node <= names.length; node++) await end(node, 0, "success")
          await ring()
        }
        assert.deepStrictEqual(await send("S", "flow.retry", ["again", ""]), ["retried", 1])
        const late = ["late", "q", "1", [], "", [], "", "{}"]
        assert.deepStrictEqual(await send("S", "flow.add", [JSON.stringify([late]), "", ""]), ["added", 1])
        await end(1501, 0, "failure")
        for (let rings = 0; rings < 10; rings++) await ring()
        for (let node = 1; node <= names.length + 1; node++) await end(node, 1, "success")
        assert.strictEqual(await state(), 3)
      })
    }))
})
