/** `DurableQueue` of `effect` on our queues: workflows of one process, and workers of others. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Layer, Schema, Scope } from "effect"
import { PersistedQueue } from "effect/persistence"
import { DurableQueue, Workflow, WorkflowEngine } from "effect/workflow"
import { layerStore } from "../src/effect/PersistedQueue.ts"
import { Queue } from "../src/index.ts"
import { type Node, TestServer } from "./support/live.ts"
import { shows } from "./support/queues.ts"
import { lose, on, pending, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const shape = { payload: { n: Schema.Number }, success: Schema.Number, error: Schema.String }

const Squares = DurableQueue.make({ name: "squares", ...shape, idempotencyKey: ({ n }) => `${n}` })
const Flow = Workflow.make("Flow", { ...shape, idempotencyKey: ({ n }) => `${n}` })

const square = ({ n }: { readonly n: number }) => n < 0 ? Effect.fail(`no ${n}`) : Effect.succeed(n * n)

/** The queues of a coordinator, as `effect` has them. */
const factoryOf = (context: Node) =>
  on(
    context,
    Layer.build(Layer.fresh(PersistedQueue.layer.pipe(Layer.provide(layerStore({ retention: "300 millis" })))))
  )

/** An engine that runs the workflow beside one coordinator; workers of others; and the queue below. */
const started = (context: Node) =>
  Effect.gen(function*() {
    const engine = yield* Layer.build(WorkflowEngine.layerMemory)
    const factory = yield* factoryOf(context)
    const flow = Flow.toLayer((payload) => DurableQueue.process(Squares, payload))
    yield* Layer.build(flow).pipe(Effect.provideContext(engine), Effect.provideContext(factory))
    const below = yield* on(context, Queue.make({ name: "DurableQueue/squares", payload: Schema.Unknown }))
    yield* Effect.addFinalizer(() => Effect.orDie(Effect.andThen(below.drain({ delayed: true }), below.discard())))
    const work = <R>(context: Node, handler: (payload: { readonly n: number }) => Effect.Effect<number, string, R>) =>
      Effect.gen(function*() {
        const scope = yield* Scope.fork(yield* Effect.scope)
        const factory = yield* Scope.provide(factoryOf(context), scope)
        yield* Layer.build(DurableQueue.worker(Squares, handler)).pipe(
          Effect.provideContext(engine),
          Effect.provideContext(factory),
          Scope.provide(scope)
        )
        return Scope.close(scope, Exit.void)
      })
    const execute = (n: number) => Effect.provideContext(Flow.execute({ n }), engine)
    return { below, execute, work }
  })

layer(TestServer.layer, live)("a durable queue", (it) => {
  it.effect("answers workflows with the results and errors of workers of other processes", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const { below, execute, work } = yield* started(a!)
        const waiting = yield* Effect.forkChild(execute(12))
        yield* shows(below, { waiting: 1 })
        yield* pending(waiting)
        yield* work(b!, square)
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the result"), 144)
        const error = yield* promptly(Effect.flip(execute(-1)), "the error")
        assert.strictEqual(error, "no -1")
        const all = yield* Effect.forEach([1, 2, 3, 4, 5], execute, { concurrency: "unbounded" })
        assert.deepStrictEqual(all, [1, 4, 9, 16, 25])
        yield* shows(below, { completed: 7, waiting: 0, active: 0, dead: 0 })
      })))

  it.effect("gives an element to another worker when its worker stops, or loses its session", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const { below, execute, work } = yield* started(a!)
        const [first, second] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
        const waiting = yield* Effect.forkChild(execute(12))
        const stop = yield* work(b!, () => Effect.andThen(Deferred.succeed(first, undefined), Effect.never))
        yield* promptly(Deferred.await(first), "the first worker")
        yield* stop
        yield* shows(below, { waiting: 1, active: 0 })
        yield* work(c!, () => Effect.andThen(Deferred.succeed(second, undefined), Effect.never))
        yield* promptly(Deferred.await(second), "the second worker")
        yield* work(a!, square)
        yield* pending(waiting)
        yield* lose(c!, namespace, server)
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the result"), 144)
        yield* shows(below, { completed: 1, waiting: 0 })
      })))
})
