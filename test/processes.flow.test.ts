/** Flows over several OS processes: killed at each step of a node's end, and killed and stopped while large runs go on. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import { spawn } from "../src/testing/Process.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import type { Argument, Event } from "./programs/flow.ts"
import { freshNamespace, TestServer } from "./support/live.ts"
import { asks } from "./support/requests.ts"
import type { Server } from "./support/servers.ts"

type Process = Effect.Success<ReturnType<typeof spawn<Event>>>

const starter = (server: Server, namespace: string, depth: number, width: number) => (url = server.url) =>
  spawn<Event>(new URL("./programs/flow.ts", import.meta.url), {
    argument: {
      url,
      namespace,
      lease: "2 seconds",
      margin: "400 millis",
      run: "one",
      depth,
      width
    } satisfies Argument
  })

const resultOf = (one: Process) =>
  Effect.map(
    one.waitFor((event): event is Extract<Event, { readonly event: "result" }> => event.event === "result", {
      timeout: "40 seconds"
    }),
    (event) => (event as Extract<Event, { readonly event: "result" }>).result
  )

/** All attempts of a node are of one job, which was offered once. */
const startedOnce = (processes: ReadonlyArray<Process>, nodes: number) => {
  const jobs = new Map<number, number>()
  for (const event of processes.flatMap(({ received }) => received)) {
    if (event.event !== "begun") continue
    assert.strictEqual(event.offeredAt, jobs.get(event.node) ?? event.offeredAt, `node ${event.node} has started once`)
    jobs.set(event.node, event.offeredAt)
  }
  assert.strictEqual(jobs.size, nodes)
}

// What a process asks for while a run begins, and while a node starts and ends.
const steps = [
  ["flow.begin", "flow:layers/one"],
  ["flow.load", "flow:layers/one"],
  ["flow.start", "flow:layers/one"],
  ["queue.offer", "queue:steps"],
  ["flow.begun", "flow:layers/one"],
  ["queue.finish", "queue:steps"],
  ["flow.ended", "flow:layers/one"],
  ["flow.inputs", "flow:layers/one"],
  ["queue.done", "errands:layers"],
  ["flow.outcomes", "flow:layers/one"]
] as const

layer(TestServer.layer, { excludeTestServices: true, timeout: "120 seconds" })("a flow of processes", (it) => {
  for (const executed of [false, true]) {
    it.effect(
      `goes on when a process is killed at a step that Redis has ${executed ? "executed" : "not seen"}`,
      () =>
        Effect.gen(function*() {
          const server = yield* TestServer
          yield* Effect.forEach(steps, ([verb, key]) =>
            Effect.scoped(Effect.gen(function*() {
              const line = yield* proxy(server)
              const start = starter(server, freshNamespace(), 3, 2)
              const held = yield* line.hold(asks(verb, key))
              const killed = yield* start(line.url)
              yield* held.request
              // Redis may get it, and the process dies all the same before it receives the reply.
              if (executed) yield* held.release("dropReply")
              yield* killed.kill9
              yield* killed.exit
              if (!executed) yield* held.release("drop")
              const other = yield* start()
              assert.strictEqual(yield* resultOf(other), 8, `${verb} ${key}`)
              startedOnce([killed, other], 7)
              yield* other.kill9
            })), { concurrency: 3, discard: true })
        }),
      180_000
    )
  }

  it.effect(
    "starts each node of a large run once while processes are killed and stopped",
    () =>
      Effect.scoped(Effect.gen(function*() {
        const server = yield* TestServer
        const start = starter(server, freshNamespace(), 40, 25)
        const all = yield* Effect.all([start(), start(), start()], { concurrency: "unbounded" })
        const alive = [...all]
        const begun = () => all.flatMap(({ received }) => received).filter(({ event }) => event === "begun").length
        for (const how of ["SIGKILL", "SIGTERM", "SIGKILL", "SIGKILL"] as const) {
          const victim = alive.shift()!
          const before = begun()
          yield* victim.waitFor(({ event }) => event === "begun")
          yield* victim.signal(how)
          yield* victim.exit
          const next = yield* start()
          all.push(next)
          alive.push(next)
          yield* next.waitFor(({ event }) => event === "ready")
          assert.isAtLeast(begun(), before)
        }
        const results = yield* Effect.forEach(alive, resultOf, { concurrency: "unbounded" })
        assert.deepStrictEqual(new Set(results).size, 1)
        assert.strictEqual(results[0], 25 * 2 ** 39)
        startedOnce(all, 1001)
        yield* Effect.forEach(alive, (one) => one.kill9)
      })),
    180_000
  )
})
