import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Effect, Fiber, Layer, Option, Schedule, Schema, Stream } from "effect"
import { Coordinator, Flow, Queue } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { innerOf } from "../src/internal/queue/errands.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { behindLine } from "./support/behindLine.ts"
import { runs } from "./support/effort.ts"
import { eventually } from "./support/eventually.ts"
import { delivered, sent, stampOf } from "./support/flows.ts"
import { assertEmpty, freshNamespace, node, onNode, TestServer, withNode } from "./support/live.ts"
import { keysOf } from "./support/namespace.ts"
import { isRangeError, upTo } from "./support/queues.ts"
import { asks } from "./support/requests.ts"
import { lose, on, pending, several } from "./support/several.ts"

class Extract extends Queue.Service<Extract>()("extract", {
  payload: Schema.String,
  success: Schema.Number,
  error: Schema.Struct({ why: Schema.String }),
  retention: "200 millis"
}) {}

class Load extends Queue.Service<Load>()("load", {
  payload: Schema.Struct({ sum: Schema.Number }),
  success: Schema.String,
  retention: "200 millis",
  shards: 2
}) {}

/** It knows its jobs for longer than flows know their runs. */
class Kept extends Queue.Service<Kept>()("kept", {
  payload: Schema.String,
  success: Schema.Number,
  retention: "3 seconds"
}) {}

class Beside extends Queue.Service<Beside>()("beside", {
  payload: Schema.String,
  success: Schema.Number,
  retention: "200 millis"
}) {}

const queues = Layer.mergeAll(Extract.layer, Load.layer)

const retention = "300 millis"

class Etl extends Flow.Service<Etl>()("etl", {
  queues: [Extract, Load],
  input: Schema.Array(Schema.String),
  colocate: "extract",
  retention
}, (flow, texts) => {
  const parts = texts.map((text) => flow.job(Extract, text))
  return flow.job(Load, {
    after: parts,
    payload: (counts) => ({ sum: counts.reduce((a, b) => a + b, 0) }),
    name: "load"
  })
}) {}

const extract = (text: string): Effect.Effect<number, { readonly why: string }> =>
  text === "bad" ? Effect.fail({ why: "bad" }) : Effect.succeed(text.length)

const load = ({ sum }: { readonly sum: number }) => Effect.succeed(`loaded ${sum}`)

const workers = <E, R>(
  extracting: (text: string) => Effect.Effect<number, E, R>,
  loading = load
) =>
  Layer.mergeAll(
    Queue.worker(Extract, extracting, { concurrency: 100, attempts: 1 }),
    Queue.worker(Load, loading, { concurrency: 100 })
  )

/** Workers that record the compensations of nodes. */
const undoing = () => {
  const undone: Array<number> = []
  const working = workers(extract, ({ sum }) =>
    Effect.sync(() => {
      undone.push(sum)
      return "undone"
    }))
  return { undone, working }
}

// Dead letters stay behind the test, and the ids of jobs and runs for a while.
const emptied = Layer.effectDiscard(
  Effect.flatMap(
    Effect.all([Extract, Load]),
    ([extract, load]) => Effect.addFinalizer(() => Effect.orDie(Effect.all([extract.obliterate, load.obliterate])))
  )
)

const live = <E, R>(working: Layer.Layer<never, E, R>) => <A, E2, R2>(self: Effect.Effect<A, E2, R2>) =>
  Effect.provide(
    Effect.tap(self, () => delivered("etl")),
    working.pipe(Layer.provideMerge(Etl.layer), Layer.provideMerge(Layer.provideMerge(emptied, queues)))
  )

const scoped = <A, E, R>(self: Effect.Effect<A, E, R>) => live(workers(extract))(Effect.scoped(self))

/** A flow of its own, whose graph the test makes. */
const made = <const O extends Flow.Shape | void>(
  build: (flow: Flow.Builder, input: void) => O,
  options: Partial<Flow.Options<void, typeof Extract | typeof Load>> = {}
) =>
  Effect.tap(
    Flow.make("made", { queues: [Extract, Load], retention, ...options }, build),
    () => Effect.addFinalizer(() => Effect.orDie(delivered("made")))
  )

/** The queue of `Extract`, with room for one job. */
const roomForOne = Queue.make({
  name: "extract",
  payload: Schema.String,
  success: Schema.Number,
  error: Schema.Struct({ why: Schema.String }),
  retention: "200 millis",
  limits: { length: 1 }
})

/** As `roomForOne`, with that job. */
const filled = Effect.tap(
  roomForOne,
  (full) => Effect.andThen(Effect.addFinalizer(() => Effect.orDie(full.obliterate)), full.offer("a"))
)

const statesOf = <O>(run: Flow.Run<O>) =>
  Effect.map(
    Stream.runCollect(run.nodes),
    (nodes) => Object.fromEntries(nodes.map(({ name, state }) => [name, state]))
  )

const reasonOf = <A, R>(self: Effect.Effect<A, Flow.FlowError, R>) =>
  Effect.map(Effect.flip(self), ({ reason }) => reason)

layer(TestServer.layer, { excludeTestServices: true })("Flow", (it) => {
  it.effect("runs jobs behind others, with their results", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const etl = yield* Etl
        assert.strictEqual(yield* etl.run(["a", "bb", "ccc"]), "loaded 6")
        assert.strictEqual(yield* etl.run([]), "loaded 0")
      }))
    ))

  it.effect("answers the results in the shape that the graph has", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const list = yield* Flow.make("list", { queues: [Extract], retention }, (flow) => [
          flow.job(Extract, "a"),
          flow.job(Extract, "bb")
        ])
        const answered: readonly [number, number] | ReadonlyArray<number> = yield* list.run()
        assert.deepStrictEqual(answered, [1, 2])
        const record = yield* Flow.make("record", { queues: [Extract, Load], retention }, (flow) => {
          const a = flow.job(Extract, "a")
          return { a, b: flow.job(Load, { after: [a], payload: ([sum]) => ({ sum }) }) }
        })
        const { a, b }: { readonly a: number; readonly b: string } = yield* record.run()
        assert.deepStrictEqual([a, b], [1, "loaded 1"])
        const nothing = yield* Flow.make("nothing", { queues: [Extract], retention }, () => {})
        assert.isUndefined(yield* nothing.run())
      }))
    ))

  it.effect("fails with the typed error of a node, and cancels what has not begun", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const etl = yield* Etl
        const run = yield* etl.start(["a", "bad", "ccc"])
        const reason = yield* reasonOf(run.await)
        assert.strictEqual(reason._tag, "NodeFailed")
        assert.deepStrictEqual((reason as Flow.NodeFailed).error, { why: "bad" })
        assert.include((reason as Flow.NodeFailed).message, "extract-2")
        assert.strictEqual((yield* statesOf(run)).load, "cancelled")
        assert.strictEqual((yield* run.status).state, "failed")
      }))
    ))

  it.effect("does behind a failure what the edge says", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const flow = yield* made((flow) => {
          const bad = flow.job(Extract, "bad", { name: "bad" })
          const good = flow.job(Extract, "good", { name: "good" })
          flow.job(Extract, "x", { name: "failed", after: [bad] })
          const skipped = flow.job(Extract, "x", { name: "skipped", after: [good, { node: bad, onFailure: "skip" }] })
          flow.job(Extract, "x", { name: "behind", after: [skipped] })
          return flow.job(Load, {
            name: "all",
            after: [bad, good],
            onFailure: "continue",
            payload: ([bad, good]) => {
              const [one, other]: [number | undefined, number | undefined] = [bad, good]
              return { sum: (one ?? 10) + (other ?? 100) }
            }
          })
        }, { onFailure: "finish" })
        const run = yield* flow.start()
        assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeFailed")
        assert.deepStrictEqual(yield* statesOf(run), {
          bad: "failed",
          good: "done",
          failed: "failed",
          skipped: "skipped",
          behind: "skipped",
          all: "done"
        })
      }))
    ))

  it.effect("succeeds when edges handle all failures, unless a node of the result has none", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const handled = yield* made((flow) => {
          const bad = flow.job(Extract, "bad")
          return flow.job(Load, { after: [bad], onFailure: "continue", payload: ([sum = -1]) => ({ sum }) })
        })
        assert.strictEqual(yield* handled.run(), "loaded -1")
        const skipped = yield* Flow.make("skipped", { queues: [Extract], retention }, (flow) => {
          const bad = flow.job(Extract, "bad")
          return flow.job(Extract, "a", { after: [bad], onFailure: "skip" })
        })
        assert.strictEqual((yield* reasonOf(skipped.run()))._tag, "NodeSkipped")
      }))
    ))

  it.effect("refuses wrong graphs before anything is sent", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        let other: Flow.Node<number> | undefined
        const wrong: ReadonlyArray<(flow: Flow.Builder) => unknown> = [
          (flow) => {
            const [a, b] = [flow.job(Extract, "a"), flow.job(Extract, "b")]
            flow.edge(a, b)
            flow.edge(b, a)
          },
          (flow) => {
            const a = flow.job(Extract, "a")
            flow.edge(a, a)
          },
          (flow) => [flow.job(Extract, "a", { name: "a" }), flow.job(Extract, "a", { name: "a" })],
          (flow) => flow.job(Extract, "a", { name: "" }),
          (flow) => void (other = flow.job(Extract, "a")),
          (flow) => flow.job(Extract, "a", { after: [other!] }),
          (flow) => {
            const a = flow.job(Extract, "a")
            return flow.job(Extract, "a", { after: [a, a] })
          },
          (flow) => flow.job(Extract, "a", { onFailure: "other" as never, after: [flow.job(Extract, "b")] }),
          (flow) => flow.job(Load, { sum: 1 }, { group: "g" }),
          (flow) => flow.job(Extract, "a", { attempts: 0 }),
          () => ["a"]
        ]
        for (const [at, build] of wrong.entries()) {
          const flow = yield* Flow.make(`wrong${at}`, { queues: [Extract, Load], retention }, build as never)
          const exit = yield* Effect.exit(flow.start(undefined as never))
          // That one is right, and its node is of another graph from then on.
          if (at === 4) yield* Effect.flatMap(flow.start(undefined as never), (run) => run.await)
          else isRangeError(exit)
        }
        for (const name of ["", "a/b"]) {
          isRangeError(yield* Effect.exit(Effect.scoped(Flow.make(name, { queues: [Extract] }, () => {}))))
        }
        const flow = yield* made(() => {})
        isRangeError(yield* Effect.exit(flow.start(undefined, { id: "x".repeat(450) })))
        const bad = yield* Flow.make("bad", { queues: [Extract] }, (flow) => void flow.job(Extract, 1 as never))
        assert.strictEqual((yield* reasonOf(bad.start()))._tag, "InvalidPayload")
      }))
    ))

  it.effect("offers the same jobs wherever its runs are", () =>
    withNode(() =>
      live(Layer.empty)(Effect.gen(function*() {
        const extract = yield* Extract
        const described = (colocate: string, rerun: boolean) =>
          Effect.gen(function*() {
            const options = {
              delay: "1 minute",
              priority: "low",
              attempts: 3,
              timeout: "1 second",
              group: "g"
            } as const
            const flow = yield* made((flow) => {
              flow.job(Extract, `"é\u0000`, options)
              for (const priority of ["urgent", "high", "normal", "low"] as const) {
                flow.job(Extract, priority, { priority })
              }
              flow.job(Extract, "grouped", { group: "é\u0000 " })
              flow.job(Extract, "delayed", { delay: 1500 })
            }, { colocate })
            const run = yield* flow.start(undefined, { id: `é\u0000 ${colocate} ${rerun}` })
            if (rerun) {
              yield* run.cancel
              yield* Effect.flip(run.await)
              yield* run.retry
            }
            const inState = (state: Queue.JobsOptions["state"]) => Stream.runCollect(extract.jobs({ state }))
            const all = Effect.map(
              Effect.all([inState("waiting"), inState("delayed")]),
              (both) => both.flat()
            )
            yield* eventually(Effect.map(all, (jobs) => assert.strictEqual(jobs.length, 7)))
            yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.active, 7)))
            const described = (yield* all).map(({ due, group, id, offeredAt, payload, priority, state }) => {
              const delay = due === undefined
                ? 0
                : Math.round((Number(due.epochMilliseconds) - Number(offeredAt.epochMilliseconds)) / 500)
              return [
                id.replace(run.id, "").replace(/\/\d+(?=\/\d+\/)/, ""),
                Option.getOrThrow(payload),
                priority,
                group,
                delay,
                state
              ]
            })
            yield* run.cancel
            yield* Effect.flip(run.await)
            return described.toSorted()
          }).pipe(Effect.scoped)
        const apart = upTo(9).map(String).find((name) => partitionOf(name, 16) !== partitionOf("extract", 16))!
        for (const rerun of [false, true]) {
          assert.deepStrictEqual(yield* described("extract", rerun), yield* described(apart, rerun))
        }
      }))
    ))

  it.effect("begins a run once, whichever process begins it, and lets all await it", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const begun: Array<string> = []
        const on = yield* Effect.forEach(upTo(3), () => node(server.url, { namespace }))
        const go = yield* Deferred.make<void>()
        let asked = 0
        const working = workers((text) => {
          begun.push(text)
          return Effect.as(Deferred.await(go), text.length)
        })
        const answers = yield* Effect.forEach(on, (context, at) =>
          onNode(context)(
            live(at === 0 ? working : Layer.empty)(Effect.gen(function*() {
              const etl = yield* Etl
              const running = yield* Effect.forkChild(etl.run(["a", "bb"], { id: "one" }))
              const run = yield* etl.start(["a", "bb"], { id: "one" })
              const { reason } = yield* Effect.flip(etl.run(["other"], { id: "one" }))
              assert.strictEqual(reason._tag, "RunMismatch")
              const awaiting = yield* Effect.forkChild(run.await)
              yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.active, 2)))
              if (++asked === 3) yield* Deferred.succeed(go, undefined)
              const answer = yield* Fiber.join(running)
              assert.strictEqual(yield* Fiber.join(awaiting), answer)
              return answer
            })) as Effect.Effect<string, unknown, Coordinator.Coordinator>
          ), { concurrency: "unbounded" })
        assert.deepStrictEqual(answers, ["loaded 3", "loaded 3", "loaded 3"])
        assert.deepStrictEqual(begun.toSorted(), ["a", "bb"])
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("shows its changes also when the event of one is lost", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const go = yield* Deferred.make<void>()
        const opened = Effect.gen(function*() {
          const services = yield* Layer.build(Beside.layer)
          const flow = Flow.make("one", { queues: [Beside], retention: "4 seconds", colocate: "beside" }, (flow) => {
            flow.job(Beside, "x", { name: "x" })
          })
          return [Context.get(services, Beside), yield* Effect.provideContext(flow, services)] as const
        })
        const [beside, flow] = yield* on(a!, opened)
        const [, seen] = yield* on(b!, opened)
        yield* Effect.forkScoped(beside.run(() => Effect.as(Deferred.await(go), 1)))
        const run = yield* flow.start(undefined, { id: "lost" })
        const states: Array<string> = []
        const changes = yield* Effect.forkScoped(
          Stream.runForEach(seen.attach("lost").changes, ({ state }) => Effect.sync(() => states.push(state)))
        )
        yield* eventually(Effect.sync(() => assert.include(states, "active")))
        const [session] = yield* Context.get(b!, Coordinator.Coordinator).sessions
        yield* server.cli("DEL", `{${namespace}:00}:mail:${session!.id}`)
        yield* Deferred.succeed(go, undefined)
        yield* run.await
        yield* Fiber.join(changes)
        assert.strictEqual(states.at(-1), "done")
      }), { lease: "1500 millis", margin: "300 millis" }))

  it.effect("is not cancelled any more when it is decided how it ends", () =>
    withNode(() =>
      Effect.gen(function*() {
        const go = yield* Deferred.make<void>()
        const beside = yield* Beside
        yield* Effect.addFinalizer(() => Effect.orDie(beside.obliterate))
        yield* Effect.forkScoped(
          beside.run(
            (text) =>
              text === "undo" ? Effect.as(Deferred.await(go), 1) : text === "no" ? Effect.die("no") : Effect.succeed(1),
            {
              attempts: 1
            }
          )
        )
        const flow = yield* Flow.make("undone", { queues: [Beside], retention }, (flow) => {
          const first = flow.job(Beside, "yes", { name: "first" })
          flow.compensate(first, Beside, () => "undo")
          flow.job(Beside, "no", { name: "second", after: [first] })
        })
        const run = yield* flow.start(undefined)
        yield* eventually(Effect.map(run.status, ({ state }) => assert.strictEqual(state, "compensating")))
        assert.isFalse(yield* run.cancel)
        yield* Deferred.succeed(go, undefined)
        assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeFailed")
      }).pipe(Effect.scoped, Effect.provide(Beside.layer))
    ))

  it.effect("does not know runs that were never started, or are over for long", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const etl = yield* Etl
        const never = etl.attach("never")
        for (
          const asked of [
            never.await,
            never.status,
            never.retry,
            Stream.runDrain(never.changes),
            Stream.runDrain(never.nodes)
          ]
        ) {
          assert.strictEqual((yield* reasonOf(asked as Effect.Effect<unknown, Flow.FlowError>))._tag, "RunUnknown")
        }
        assert.isFalse(yield* never.cancel)
        const run = yield* etl.start(["a"], { id: "short" })
        yield* run.await
        yield* eventually(Effect.map(reasonOf(run.status), ({ _tag }) => assert.strictEqual(_tag, "RunUnknown")))
      }))
    ))

  it.effect("begins a run anew under the id of one that is forgotten, whose jobs and graph are still known", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const ran: Array<string> = []
        yield* Effect.gen(function*() {
          const kept = yield* Kept
          yield* Effect.addFinalizer(() => Effect.orDie(kept.obliterate))
          const opened = Effect.gen(function*() {
            const flow = yield* Flow.make(
              "made",
              { queues: [Kept], input: Schema.String, retention: "1 millis" },
              (flow, text) => {
                const first = flow.job(Kept, text)
                const others = upTo(20).map(() => flow.job(Kept, { after: [first], payload: () => text }))
                return [first, ...others]
              }
            )
            yield* Effect.addFinalizer(() => Effect.orDie(delivered("made")))
            return flow
          })
          const [one, two] = [yield* opened, yield* opened]
          for (const [flow, text] of [[one, "x"], [two, "yyy"]] as const) {
            const run = yield* flow.start(text, { id: "daily" })
            // The run may be forgotten before its results are read.
            yield* eventually(Effect.map(reasonOf(run.status), ({ _tag }) => assert.strictEqual(_tag, "RunUnknown")))
            assert.deepStrictEqual(ran.splice(0), Array.from({ length: 21 }, () => text))
          }
        }).pipe(
          Effect.provide(Layer.provideMerge(
            Queue.worker(Kept, (text) => Effect.as(Effect.sync(() => ran.push(text)), text.length)),
            Kept.layer
          ))
        )
      }))
    ))

  it.effect("interrupts running nodes when it is cancelled, and starts no others", () =>
    withNode(() =>
      Effect.gen(function*() {
        const begun = yield* Deferred.make<void>()
        const interrupted = yield* Deferred.make<void>()
        const working = workers((text) =>
          text === "long"
            ? Effect.onInterrupt(
              Effect.andThen(Deferred.succeed(begun, undefined), Effect.never),
              () => Deferred.succeed(interrupted, undefined)
            )
            : extract(text)
        )
        yield* live(working)(Effect.gen(function*() {
          const etl = yield* Etl
          const run = yield* etl.start(["a", "long"])
          yield* Deferred.await(begun)
          assert.isTrue(yield* run.cancel)
          assert.strictEqual((yield* reasonOf(run.await))._tag, "FlowCancelled")
          yield* Deferred.await(interrupted)
          const states = yield* statesOf(run)
          assert.deepStrictEqual([states["extract-2"], states.load], ["cancelled", "cancelled"])
        }))
      })
    ))

  it.effect("cancels the run of a caller that is interrupted, unless that is not wanted", () =>
    withNode(() =>
      Effect.gen(function*() {
        const working = workers((text) => text === "long" ? Effect.never : Effect.succeed(text.length))
        yield* live(working)(Effect.gen(function*() {
          const etl = yield* Etl
          for (const onInterrupt of ["cancel", "continue"] as const) {
            const fiber = yield* Effect.forkChild(etl.run(["long"], { id: onInterrupt, onInterrupt }))
            const run = etl.attach(onInterrupt)
            yield* eventually(Effect.map(statesOf(run), (states) => assert.strictEqual(states["extract-1"], "active")))
            yield* Fiber.interrupt(fiber)
            if (onInterrupt === "continue") {
              assert.strictEqual((yield* run.status).state, "running")
              yield* run.cancel
            }
            assert.strictEqual((yield* reasonOf(run.await))._tag, "FlowCancelled")
          }
        }))
      })
    ))

  it.effect("does not cancel the run of another caller when one with another input is interrupted", () =>
    withNode(() =>
      Effect.gen(function*() {
        yield* live(workers(() => Effect.never))(Effect.gen(function*() {
          const etl = yield* Etl
          const run = yield* etl.start(["mine"], { id: "taken" })
          for (const wait of ["1 millis", "50 millis"] as const) {
            yield* Effect.exit(etl.run(["theirs"], { id: "taken", wait }))
          }
          const fiber = yield* Effect.forkChild(etl.run(["theirs"], { id: "taken" }), { startImmediately: true })
          yield* Fiber.interrupt(fiber)
          // What the caller does with its input meanwhile is of no account.
          const input = ["mine"]
          const later = yield* Effect.forkChild(etl.run(input, { id: "later" }))
          yield* eventually(Effect.map(etl.attach("later").status, ({ state }) => assert.strictEqual(state, "running")))
          input.push("more")
          yield* Fiber.interrupt(later)
          assert.strictEqual((yield* reasonOf(etl.attach("later").await))._tag, "FlowCancelled")
          assert.strictEqual((yield* run.status).state, "running")
          yield* run.cancel
        }))
      })
    ))

  it.effect("expires at its deadline", () =>
    withNode(() =>
      Effect.gen(function*() {
        const working = workers(() => Effect.never)
        yield* live(working)(Effect.scoped(Effect.gen(function*() {
          const flow = yield* made((flow) => {
            const a = flow.job(Extract, "a")
            flow.job(Extract, "b", { after: [a] })
          }, { deadline: "300 millis" })
          const run = yield* flow.start()
          assert.strictEqual((yield* reasonOf(run.await))._tag, "FlowExpired")
          assert.deepStrictEqual(yield* statesOf(run), { "extract-1": "cancelled", "extract-2": "cancelled" })
        })))
      })
    ))

  it.effect("goes on from the failed nodes when it is retried", () =>
    withNode(() =>
      Effect.gen(function*() {
        const begun: Array<string> = []
        let fine = false
        const working = workers((text) => {
          begun.push(text)
          return text === "later" && !fine ? Effect.fail("not yet") : Effect.succeed(text.length)
        })
        yield* live(working)(Effect.gen(function*() {
          const etl = yield* Etl
          const run = yield* etl.start(["a", "later"])
          assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeFailed")
          fine = true
          assert.isTrue(yield* run.retry)
          assert.strictEqual(yield* run.await, "loaded 6")
          assert.deepStrictEqual(begun.toSorted(), ["a", "later", "later"])
          assert.isFalse(yield* run.retry)
        }))
      })
    ))

  it.effect("awaits a run again that starts again before it is known how it has ended", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const [fails, gate] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
        const other = yield* direct()
        const opened = Effect.flatMap(Layer.build(Extract.layer), (services) =>
          Effect.provideContext(
            Flow.make("again", { queues: [Extract], retention }, (flow) => flow.job(Extract, "a")),
            services
          ))
        const [far, own] = [yield* on(context, opened), yield* on(other, opened)]
        let first = true
        const working = Layer.build(
          Layer.provide(
            Queue.worker(Extract, () =>
              Effect.gen(function*() {
                if (!first) return yield* Effect.as(Deferred.await(gate), 1)
                first = false
                yield* Deferred.await(fails)
                return yield* Effect.fail({ why: "first" })
              }), { attempts: 1 }),
            Layer.tap(Extract.layer, (services) =>
              Effect.addFinalizer(() => Effect.orDie(Context.get(services, Extract).obliterate)))
          )
        )
        yield* on(other, working)
        const run = yield* own.start(undefined, { id: "one" })
        const held = yield* line.hold(asks("flow.status", "flow:again/one"))
        const waiting = yield* Effect.forkChild(far.attach("one").await)
        yield* Deferred.succeed(fails, undefined)
        yield* held.request
        assert.isTrue(yield* run.retry)
        yield* held.release()
        yield* pending(waiting)
        yield* Deferred.succeed(gate, undefined)
        assert.strictEqual(yield* Fiber.join(waiting), 1)
        yield* on(other, delivered("again"))
      })
    ))

  it.effect("is awaited while Redis is away", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const options = { namespace, lease: "20 seconds", requestTimeout: "200 millis" } as const
        const [context, other] = [yield* node(line.url, options), yield* node(server.url, options)]
        const go = yield* Deferred.make<void>()
        const opened = made((flow) => flow.job(Extract, "a"), { retention: "10 seconds" })
        const running = yield* Effect.forkChild(
          onNode(other)(
            live(workers((text) => Effect.as(Deferred.await(go), text.length)))(Effect.scoped(Effect.gen(function*() {
              const flow = yield* opened
              return yield* flow.run(undefined, { id: "one" })
            }))) as Effect.Effect<number, unknown, Coordinator.Coordinator>
          )
        )
        yield* onNode(context)(
          live(Layer.empty)(Effect.scoped(Effect.gen(function*() {
            const run = (yield* opened).attach("one")
            yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.active, 1)), {
              message: "it runs"
            })
            for (const verb of ["flow.observe", "flow.status", "flow.outcomes"]) {
              let dropped = 0
              yield* line.onRequest(({ args }) => args.includes(verb) && dropped++ >= 0 ? "drop" : "pass")
              const awaiting = yield* Effect.forkChild(run.await)
              yield* eventually(Effect.sync(() => dropped > 0), { message: verb })
              yield* Deferred.succeed(go, undefined)
              yield* eventually(Effect.sync(() => dropped > 1), { message: verb })
              // For longer than a question takes.
              yield* Effect.sleep("700 millis")
              yield* pending(awaiting)
              yield* line.onRequest(undefined)
              assert.strictEqual(yield* Fiber.join(awaiting), 1)
            }
          }))) as Effect.Effect<void, unknown, Coordinator.Coordinator>
        )
        yield* Fiber.join(running)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("does nodes again that it is replayed from, and all behind them", () =>
    withNode(() =>
      Effect.gen(function*() {
        const begun: Array<string> = []
        const undone: Array<number> = []
        const gate = yield* Deferred.make<void>()
        let grown = 0
        const working = workers((text) =>
          Effect.gen(function*() {
            begun.push(text)
            if (text === "c" && grown > 1) return yield* Effect.fail({ why: "too much" })
            if (text === "b" && grown === 1) yield* Deferred.await(gate)
            return text.length + grown
          }), ({ sum }) =>
          Effect.sync(() => {
            undone.push(sum)
            return `loaded ${sum}`
          }))
        yield* live(working)(Effect.scoped(Effect.gen(function*() {
          const flow = yield* made((flow) => {
            const a = flow.job(Extract, "a", { name: "a" })
            const b = flow.job(Extract, "b", { name: "b", after: [a] })
            const other = flow.job(Extract, "other", { name: "other" })
            const c = flow.job(Extract, "c", { name: "c", after: [b, other] })
            flow.compensate(b, Load, (sum) => ({ sum }))
            flow.compensate(other, Load, (sum) => ({ sum }))
            return [b, c, other]
          })
          const run = yield* flow.start()
          assert.deepStrictEqual(yield* run.await, [1, 1, 5])
          begun.length = 0
          grown = 1
          assert.strictEqual((yield* reasonOf(run.replay(["b", "none"])))._tag, "NodeUnknown")
          for (const names of [[], Array.from({ length: 513 }, (_, at) => `${at}`)]) {
            isRangeError(yield* Effect.exit(run.replay(names)))
          }
          assert.isTrue(yield* run.replay(["b", "b"]))
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(begun, ["b"])))
          assert.isFalse(yield* run.replay(["a"]))
          assert.deepStrictEqual(yield* statesOf(run), { a: "done", b: "active", other: "done", c: "blocked" })
          yield* Deferred.succeed(gate, undefined)
          assert.deepStrictEqual(yield* run.await, [2, 2, 5])
          assert.deepStrictEqual(begun, ["b", "c"])
          // What is done when the next replay fails is undone once each, with its last result.
          grown = 2
          assert.isTrue(yield* run.replay(["a"]))
          assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeFailed")
          assert.deepStrictEqual(undone, [3, 5])
          assert.deepStrictEqual(begun, ["b", "c", "a", "b", "c"])
        })))
      })
    ))

  it.effect("does nodes again that a handler has added, when it is replayed from the handler's node", () =>
    withNode(() =>
      Effect.gen(function*() {
        let extra = "x"
        const working = Layer.mergeAll(
          Queue.worker(Extract, (text) =>
            Effect.gen(function*() {
              const etl = yield* Etl
              if (text !== "split") return text.length
              const a = yield* etl.add(Extract, extra, { before: ["load"] })
              yield* etl.add(Extract, extra, { name: "last", after: [a], before: ["load"] })
              return 0
            })),
          Queue.worker(Load, () =>
            Effect.gen(function*() {
              const etl = yield* Etl
              return [...(yield* etl.results(Extract)).values()].join(" ")
            }))
        )
        yield* live(working)(Effect.gen(function*() {
          const etl = yield* Etl
          const run = yield* etl.start(["split", "aa"])
          assert.strictEqual(yield* run.await, "0 2 1 1")
          extra = "xxx"
          assert.isTrue(yield* run.replay(["extract-1"]))
          assert.strictEqual(yield* run.await, "0 2 3 3")
          assert.strictEqual((yield* run.status).nodes, 5)
          assert.isTrue(yield* run.replay(["last"]))
          assert.strictEqual(yield* run.await, "0 2 3 3")
        }))
      })
    ))

  it.effect("compensates what is done, the last node first, when it has failed", () =>
    withNode(() =>
      Effect.gen(function*() {
        const { undone, working } = undoing()
        yield* live(working)(Effect.scoped(Effect.gen(function*() {
          const flow = yield* made((flow) => {
            const a = flow.job(Extract, "a", { name: "a" })
            const b = flow.job(Extract, "bb", { name: "b", after: [a] })
            const c = flow.job(Extract, "bad", { name: "c", after: [b] })
            for (const node of [a, b, c]) flow.compensate(node, Load, (sum) => ({ sum }))
          })
          const run = yield* flow.start()
          assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeFailed")
          assert.deepStrictEqual(undone, [2, 1])
          assert.deepStrictEqual(yield* statesOf(run), { a: "compensated", b: "compensated", c: "failed" })
        })))
      })
    ))

  it.effect("compensates a node once more when that has failed, and the run has failed again", () =>
    withNode(() =>
      Effect.gen(function*() {
        const undone: Array<number> = []
        const working = Layer.mergeAll(
          Queue.worker(Extract, extract, { attempts: 1 }),
          Queue.worker(Load, ({ sum }) =>
            Effect.suspend(() => {
              undone.push(sum)
              return undone.length === 1 ? Effect.die("the compensation fails") : Effect.succeed("undone")
            }), { attempts: 1 })
        )
        yield* live(working)(Effect.scoped(Effect.gen(function*() {
          const flow = yield* made((flow) => {
            const a = flow.job(Extract, "a", { name: "a" })
            const b = flow.job(Extract, "bad", { name: "b", after: [a] })
            flow.compensate(a, Load, (sum) => ({ sum }))
            flow.compensate(b, Load, (sum) => ({ sum }))
          })
          const run = yield* flow.start()
          for (const state of ["done", "compensated"] as const) {
            assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeFailed")
            assert.deepStrictEqual(yield* statesOf(run), { a: state, b: "failed" })
            if (state === "done") yield* run.retry
          }
          assert.deepStrictEqual(undone, [1, 1])
        })))
      })
    ))

  it.effect("compensates a node once when its errand comes again, after its queue, or the flow, has forgotten that", () =>
    withNode(() =>
      Effect.gen(function*() {
        const { undone, working } = undoing()
        const opened = made((flow) => {
          const a = flow.job(Extract, "a", { name: "a" })
          flow.job(Extract, "bad", { after: [a] })
          flow.compensate(a, Load, (sum) => ({ sum }))
        }, { retention: "3 seconds" })
        // As its worker leaves it that is lost behind the offer, and before the acknowledgement.
        const again = (stamp: number) =>
          Effect.andThen(
            sent("made", ["undo", ["run", stamp], 1, 0, ["a", "extract", {}], ["success", 1], 1]),
            delivered("made")
          )
        yield* live(working)(Effect.gen(function*() {
          const load = yield* Load
          const stamp = yield* Effect.scoped(Effect.gen(function*() {
            const run = yield* Effect.flatMap(opened, (flow) => flow.start(undefined, { id: "run" }))
            assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeFailed")
            const stamp = yield* stampOf("made", "run")
            const outcome = innerOf(load).job(`made/run/${stamp}/1/0/undo`).outcome(false)
            yield* eventually(Effect.map(outcome, ([tag]) => assert.strictEqual(tag, "missing")))
            yield* again(stamp)
            assert.strictEqual((yield* run.status).counts.compensated, 1)
            return stamp
          }))
          // As another process would, this one does not know the graph of the run.
          yield* Effect.scoped(Effect.gen(function*() {
            const { status } = (yield* opened).attach("run")
            yield* eventually(Effect.map(reasonOf(status), ({ _tag }) => assert.strictEqual(_tag, "RunUnknown")))
            yield* again(stamp)
          }))
          yield* eventually(Effect.map(load.state, ({ active, waiting }) => assert.strictEqual(active + waiting, 0)))
          assert.deepStrictEqual(undone, [1])
        }))
      })
    ))

  it.effect("takes in nodes that a handler adds, when its job is done", () =>
    withNode(() =>
      Effect.gen(function*() {
        let attempts = 0
        const working = Layer.mergeAll(
          Queue.worker(Extract, (text) =>
            Effect.gen(function*() {
              const etl = yield* Etl
              if (text !== "split") return text.length
              const a = yield* etl.add(Extract, "aaa", { name: "first" })
              yield* etl.add(Extract, "bbbb", { name: "second", after: [a], before: ["load"] })
              attempts++
              return attempts < 2 ? yield* Effect.fail("again") : 0
            }), { concurrency: 10, attempts: 2, retry: Schedule.spaced("20 millis") }),
          Queue.worker(Load, () =>
            Effect.gen(function*() {
              const etl = yield* Etl
              const found = yield* etl.results(Extract)
              return [...found].map(([name, count]) => `${name} ${count}`).toSorted().join(", ")
            }))
        )
        yield* live(working)(Effect.gen(function*() {
          const etl = yield* Etl
          const run = yield* etl.start(["split", "a"])
          assert.strictEqual(yield* run.await, "extract-1 0, extract-2 1, second 4")
          assert.strictEqual((yield* run.status).nodes, 5)
        }))
      })
    ))

  it.effect("fails a node that adds what does not fit", () =>
    withNode(() =>
      Effect.gen(function*() {
        const working = Layer.mergeAll(
          Queue.worker(Extract, (text) =>
            Effect.gen(function*() {
              const etl = yield* Etl
              yield* etl.add(Extract, "a", text === "twice" ? { name: "load" } : { before: ["unknown"] })
              return 1
            })),
          Queue.worker(Load, load)
        )
        yield* live(working)(Effect.gen(function*() {
          const etl = yield* Etl
          for (const text of ["twice", "unknown"]) {
            const reason = yield* reasonOf(etl.run([text]))
            assert.include(reason.message, text === "twice" ? "\"load\" is there already" : "\"unknown\" is not there")
          }
          isRangeError(yield* Effect.exit(Effect.provideService(etl.results(Extract), Queue.Job, {} as never)))
        }))
      })
    ))

  it.effect("shows the states of the nodes, and every change", () =>
    withNode(() =>
      Effect.gen(function*() {
        const go = yield* Deferred.make<void>()
        const working = workers((text) => Effect.as(Deferred.await(go), text.length))
        yield* live(working)(Effect.gen(function*() {
          const etl = yield* Etl
          const run = yield* etl.start(["a", "bb"])
          const shown = yield* Deferred.make<void>()
          const fiber = yield* Effect.forkChild(
            Stream.runCollect(Stream.tap(run.changes, () => Deferred.succeed(shown, undefined)))
          )
          yield* Deferred.await(shown)
          yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.active, 2)))
          yield* Deferred.succeed(go, undefined)
          const changes = yield* Fiber.join(fiber)
          const of = (name: string) => changes.filter(({ node }) => node === name).map(({ state }) => state)
          assert.deepStrictEqual(of("load").at(0), "blocked")
          for (const name of ["extract-1", "extract-2", "load"]) assert.strictEqual(of(name).at(-1), "done")
          const { endedAt, startedAt, state } = yield* run.status
          assert.strictEqual(state, "done")
          assert.isTrue(Option.isSome(Option.all([Option.fromUndefinedOr(endedAt), Option.fromUndefinedOr(startedAt)])))
        }))
      })
    ))

  it.effect("shows the changes again that Redis has lost", () =>
    several(1, ([node], namespace, server) =>
      Effect.gen(function*() {
        const go = yield* Deferred.make<void>()
        const working = Queue.worker(
          Extract,
          (text) => text === "a" ? Effect.as(Deferred.await(go), 1) : Effect.never,
          { concurrency: 10 }
        )
        const tested = Effect.gen(function*() {
          const extract = yield* Extract
          yield* Effect.addFinalizer(() => Effect.orDie(extract.obliterate))
          yield* Layer.build(working)
          const flow = yield* Flow.make("lost", { queues: [Extract], retention }, (flow) => {
            const first = flow.job(Extract, "a", { name: "first" })
            return flow.job(Extract, "b", { name: "second", after: [first] })
          })
          yield* Effect.addFinalizer(() => Effect.orDie(delivered("lost")))
          const run = yield* flow.start()
          yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.active, 1)))
          const keys = (yield* keysOf(server, namespace)).filter((key) => /:flow[^:]*:/.test(key))
          for (const key of keys) yield* server.cli("COPY", key, `${key} before`)
          const shown = new Map<string, Flow.NodeState>()
          const fiber = yield* Effect.forkChild(
            Stream.runForEach(run.changes, ({ node, state }) => Effect.sync(() => shown.set(node, state)))
          )
          const shows = (first: Flow.NodeState, second: Flow.NodeState) =>
            eventually(Effect.sync(() => assert.deepStrictEqual(Object.fromEntries(shown), { first, second })))
          yield* shows("active", "blocked")
          yield* Deferred.succeed(go, undefined)
          yield* shows("done", "active")
          for (const key of keys) yield* server.cli("RENAME", `${key} before`, key)
          yield* lose(node!, namespace, server)
          yield* shows("active", "blocked")
          yield* run.cancel
          yield* Fiber.join(fiber)
          assert.strictEqual(shown.get("second"), "cancelled")
        }).pipe(Effect.provide(Extract.layer))
        yield* on(node!, tested)
      })))

  it.effect("offers a node to a queue beside it in the call that ends the last job of a group there", () =>
    withNode(() =>
      Effect.gen(function*() {
        const flow = yield* Effect.tap(
          Flow.make("made", { queues: [Extract, Beside], retention }, (flow) =>
            flow.job(Beside, "next", { after: [flow.job(Extract, "first")] })),
          () =>
            Effect.addFinalizer(() =>
              Effect.orDie(delivered("made"))
            )
        )
        const beside = yield* Beside
        const extracts = yield* Extract
        const [both, last] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
        const begun: Array<string> = []
        const gates: { readonly [text: string]: Effect.Effect<void> } = {
          alone: Deferred.await(both),
          first: Deferred.await(both),
          h0: Deferred.await(last)
        }
        const handler = (text: string) =>
          Effect.suspend(() => {
            begun.push(text)
            return Effect.as(gates[text] ?? Effect.void, 1)
          })
        yield* Effect.forkChild(beside.run(handler, { concurrency: 5 }))
        yield* beside.offer("alone", { group: "g" })
        yield* beside.offerAll(["h0", "h1", "h2"], { group: "h" })
        yield* eventually(Effect.sync(() => assert.sameMembers(begun, ["alone", "h0"])))
        yield* Effect.forkChild(extracts.run(handler))
        const run = yield* Effect.forkChild(flow.run())
        yield* eventually(Effect.sync(() => assert.include(begun, "first")))
        // Both jobs end in one turn of the event loop, the one with a group first.
        yield* Deferred.succeed(both, undefined)
        assert.strictEqual(yield* Fiber.join(run), 1)
        yield* Deferred.succeed(last, undefined)
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(begun.slice(-2), ["h1", "h2"])))
        yield* eventually(Effect.map(Stream.runCollect(beside.groups), (groups) => assert.deepStrictEqual(groups, [])))
      }).pipe(Effect.scoped, Effect.provide(Layer.mergeAll(Extract.layer, Beside.layer))), { partitions: 1 }))

  it.effect("ends a run whose job its queue has no room for, and others go on", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const full = yield* filled
        yield* Effect.gen(function*() {
          const flow = yield* made((flow) => flow.job(Extract, "b"))
          const run = yield* flow.start()
          yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.ready, 1)))
          assert.isTrue(yield* run.cancel)
          assert.strictEqual((yield* reasonOf(run.await))._tag, "FlowCancelled")
          const late = yield* made((flow) => flow.job(Extract, "c"), { deadline: "300 millis" })
          assert.strictEqual((yield* reasonOf(late.run()))._tag, "FlowExpired")
        }).pipe(Effect.scoped, Effect.provideService(Extract, full), Effect.provide(Load.layer))
        // What was never offered is in no queue.
        assert.strictEqual((yield* full.state).waiting, 1)
      }))
    ))

  it.effect("offers hardly any job more when it is cancelled while its jobs wait for room", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const queue = yield* roomForOne
        yield* Effect.addFinalizer(() => Effect.orDie(queue.obliterate))
        const begun: Array<string> = []
        yield* Effect.forkScoped(
          queue.run((name) =>
            Effect.as(Effect.andThen(Effect.sync(() => begun.push(name)), Effect.sleep("5 millis")), 1)
          )
        )
        yield* Effect.gen(function*() {
          const names = Array.from({ length: 400 }, (_, at) => `n${at}`)
          const flow = yield* made((flow) => names.map((name) => flow.job(Extract, name)))
          const run = yield* flow.start()
          yield* eventually(Effect.sync(() => begun.length >= 3))
          assert.isTrue(yield* run.cancel)
          const before = begun.length
          assert.strictEqual((yield* reasonOf(run.await))._tag, "FlowCancelled")
          assert.isBelow(begun.length - before, 40)
        }).pipe(Effect.scoped, Effect.provideService(Extract, queue), Effect.provide(Load.layer))
      }))
    ))

  it.effect("keeps the place of a job in the line for room", () =>
    withNode((namespace) =>
      Effect.scoped(Effect.gen(function*() {
        const { url } = yield* TestServer
        const full = yield* filled
        yield* Effect.gen(function*() {
          const flow = yield* made((flow) => flow.job(Extract, "b"))
          const run = yield* flow.start()
          yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.ready, 1)))
          yield* Effect.sleep("1 second")
          const other = yield* node(url, { namespace })
          const behind = yield* Effect.forkChild(
            onNode(other)(Effect.scoped(Effect.flatMap(roomForOne, (queue) => queue.offer("c"))))
          )
          // Longer than the flow waits until it looks at the run again.
          yield* Effect.sleep("2 seconds")
          assert.strictEqual(yield* full.drain(), 1)
          yield* eventually(Effect.map(run.status, ({ counts }) => assert.strictEqual(counts.active, 1)))
          assert.strictEqual((yield* full.state).waiting, 1)
          assert.isUndefined(behind.pollUnsafe())
          assert.isTrue(yield* run.cancel)
          yield* Fiber.join(behind)
        }).pipe(Effect.scoped, Effect.provideService(Extract, full), Effect.provide(Load.layer))
      }))
    ))

  it.effect("refuses options that the queue of a node refuses", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        for (const priority of ["bogus", "constructor"] as const) {
          const flow = yield* made((flow) => flow.job(Extract, "a", { priority: priority as never }))
          isRangeError(yield* Effect.exit(flow.run()))
        }
        const undelayed = yield* made((flow) => flow.job(Extract, "a", { delay: 0 }))
        assert.strictEqual(yield* undelayed.run(), 1)
      }))
    ))

  it.effect("runs a fan-out and fan-in of 10,000 nodes", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const flow = yield* made((flow) => {
          const first = flow.job(Extract, "first")
          const all = upTo(10_000).map(() => flow.job(Extract, "a", { after: [first] }))
          return flow.job(Load, { after: all, payload: (counts) => ({ sum: counts.reduce((a, b) => a + b, 0) }) })
        })
        assert.strictEqual(yield* flow.run(), "loaded 10000")
      }))
    ), 600_000)

  it.effect("runs a long chain, and skips one of 10,000 nodes", () =>
    withNode(() =>
      scoped(Effect.gen(function*() {
        const chained = (first: string, length: number) => (flow: Flow.Builder) =>
          upTo(length).reduce<Flow.Node<number>>(
            (before) => flow.job(Extract, "a", { after: [before], onFailure: "skip" }),
            flow.job(Extract, first)
          )
        const chain = yield* made(chained("a", runs(2500)))
        assert.strictEqual(yield* chain.run(), 1)
        const skipped = yield* Flow.make(
          "skipped",
          { queues: [Extract], retention: "3 seconds" },
          chained("bad", 10_000)
        )
        const run = yield* skipped.start()
        assert.strictEqual((yield* reasonOf(run.await))._tag, "NodeSkipped")
        assert.strictEqual((yield* run.status).counts.skipped, 10_000)
      }))
    ), 600_000)
})
