/** A task group over several OS processes, which are killed and paused while they work and wait. */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber, Schema, type Scope, Stream } from "effect"
import { TaskGroup } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/tasks.ts"
import { elapsed } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, sturdy, TestServer } from "./support/live.ts"
import { now } from "./support/now.ts"
import { deadForgotten } from "./support/several.ts"

const lease = 2000
const timing = { lease: `${lease} millis`, margin: "400 millis" } as const

interface Case {
  readonly here: Node
  readonly group: TaskGroup.TaskGroup<string, string>
  readonly start: (
    mode: Argument["mode"],
    worker: string,
    shards: ReadonlyArray<string>,
    millis?: number
  ) => Effect.Effect<Effect.Success<ReturnType<typeof spawn<Event>>>, never, Scope.Scope>
}

const scenario = <A, E, R>(shards: number, self: (scenario: Case) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const here = yield* node(server.url, { namespace, ...sturdy })
      yield* Effect.scoped(Effect.gen(function*() {
        const group = yield* TaskGroup.make({ name: "shared", result: Schema.String, timeToLive: "100 millis", shards })
        yield* self({
          here,
          group,
          start: (mode, worker, shards, millis = 0) =>
            spawn<Event>(new URL("./programs/tasks.ts", import.meta.url), {
              argument: { url: server.url, namespace, ...timing, mode, worker, shards, millis } satisfies Argument
            })
        })
      })).pipe(Effect.provideContext(here))
      // The process that is left cleans up behind the dead.
      yield* deadForgotten(here, namespace, server)
    }))
    yield* assertEmpty(server, namespace)
  })

const is = <T extends Event["event"]>(name: T) => (event: Event): event is Extract<Event, { event: T }> =>
  event.event === name

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("processes of a task group", (it) => {
  it.effect("waiters observe that a worker was killed when its lease has run out, and another one takes over", () =>
    scenario(2, ({ group, start }) =>
      Effect.gen(function*() {
        const worker = yield* start("hold", "first", ["x"])
        yield* worker.waitFor(is("started"))
        yield* group.run("y", Effect.succeed("here"))
        const failing = yield* Effect.forkChild(Effect.map(Effect.flip(group.awaitAll()), ({ reason }) => ({
          reason,
          at: Date.now()
        })))
        const waiting = yield* Effect.forkChild(group.awaitAll({ onWorkerLost: "wait" }))
        const shown = yield* Effect.forkChild(
          Stream.runHead(Stream.filter(group.changes, ({ changed }) => changed?.status === "lost"))
        )
        yield* worker.waitFor(is("tick"))
        yield* worker.kill9
        const killed = Date.now()
        const { at, reason } = yield* Fiber.join(failing)
        assert.deepInclude(reason, { _tag: "WorkerLost", shard: "x" })
        // Not before its lease is over: the last renewal can be a third of a lease old.
        assert.isAbove(at - killed, lease * 0.6)
        assert.isBelow(elapsed(killed, at), lease + 1000)
        yield* Fiber.join(shown)
        assert.isUndefined(waiting.pollUnsafe())
        yield* start("cycle", "second", ["x"])
        assert.deepStrictEqual([...yield* Fiber.join(waiting)], [["x", "second"], ["y", "here"]])
      })))

  it.effect("a worker that goes on after a pause is interrupted, and cannot submit", () =>
    scenario(1, ({ group, start }) =>
      Effect.gen(function*() {
        const worker = yield* start("hold", "first", ["x"])
        yield* worker.waitFor(is("tick"))
        yield* worker.sigstop
        const waiting = yield* Effect.forkChild(group.awaitAll({ onWorkerLost: "wait" }))
        yield* Stream.runHead(Stream.filter(group.changes, ({ lost }) => lost === 1))
        yield* group.run("x", Effect.succeed("here"))
        const continued = now()
        yield* worker.sigcont
        assert.strictEqual((yield* worker.waitFor(is("refused"))).reason, "LeaseLost")
        // Its own timer was due long before, and yet it did nothing more.
        assert.deepStrictEqual(worker.received.filter((event) => event.event === "tick" && event.at >= continued), [])
        assert.deepStrictEqual([...yield* Fiber.join(waiting)], [["x", "here"]])
        yield* worker.exit
      })))

  it.effect("waiters and watchers may be killed, and nothing stays behind", () =>
    scenario(1, ({ group, start }) =>
      Effect.gen(function*() {
        const waiting = [
          yield* start("await", "a", []),
          yield* start("progress", "b", []),
          yield* start("await", "c", [])
        ]
        yield* Effect.forEach(waiting, (process) => process.waitFor(is("ready")))
        yield* waiting[1]!.waitFor(is("shown"))
        yield* waiting[0]!.kill9
        yield* waiting[1]!.kill9
        yield* group.run("x", Effect.succeed("here"))
        // The third one has its results and ends by itself.
        assert.strictEqual((yield* waiting[2]!.exit).code, 0)
      })))

  it.effect("workers that are killed at random lose nothing that was accepted, and all gets done", () => {
    const shards = Array.from({ length: 40 }, (_, n) => `shard ${n}`)
    return scenario(shards.length, ({ group, start }) =>
      Effect.gen(function*() {
        const waiting = yield* Effect.forkChild(group.awaitAll({ onWorkerLost: "wait" }))
        const accepted = new Map<string, Set<string>>()
        const collect = (worker: string, events: ReadonlyArray<Event>) => {
          for (const event of events.filter(is("submitted"))) {
            accepted.set(event.shard, (accepted.get(event.shard) ?? new Set()).add(worker))
          }
        }
        for (let round = 0; round < 2; round++) {
          const names = [0, 1].map((n) => `${round}.${n}`)
          const workers = yield* Effect.forEach(names, (name, n) =>
            start("cycle", name, n === 0 ? shards : [...shards].reverse(), 100))
          yield* Effect.forEach(workers, (worker) =>
            worker.waitFor(is("submitted")))
          yield* workers[round]!.kill9
          yield* workers[round]!.exit
          yield* workers[1 - round]!.waitFor(is("submitted"), { after: workers[1 - round]!.received.length })
          yield* workers[1 - round]!.kill9
          yield* Effect.forEach(workers, (worker) => worker.exit)
          names.forEach((name, n) => collect(name, workers[n]!.received))
        }
        const { done } = yield* group.snapshot
        assert.isTrue(done >= accepted.size && done < shards.length, `${done} of ${accepted.size}`)
        // What was lost in the end is taken over here, as soon as it is free.
        yield* Effect.forEach(shards, (shard) =>
          eventually(group.run(shard, Effect.succeed("here")), { message: shard }), { concurrency: "unbounded" })
        const results = yield* Fiber.join(waiting)
        assert.strictEqual(results.size, shards.length)
        // `run` also answers a process that finds a shard done. So one that was answered is its worker, or another one is.
        for (const [shard, workers] of accepted) {
          assert.notStrictEqual(results.get(shard), "here", `${shard} was accepted from ${[...workers].join(", ")}`)
        }
      }))
  })
})
