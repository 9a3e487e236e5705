/**
 * The sizes of the folders of a tree. A worker that scans a folder offers its subfolders, which go to its own deque; workers
 * without folders steal half of what another one has. Three workers have a process each in your program.
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Schedule, Schema } from "effect"
import assert from "node:assert/strict"
import { WorkStealing } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

// One half of the tree is deep, the other one is flat.
const subfolders = (path: string): ReadonlyArray<string> =>
  path === "" || path.startsWith("/deep") && path.split("/").length < 7
    ? [`${path}/deep`, `${path}/more`]
    : path === "/more"
    ? Array.from({ length: 20 }, (_, at) => `${path}/${at}`)
    : []

const program = Effect.gen(function*() {
  const scanned = new Map<string, string>()

  const worker = Effect.fnUntraced(function*(name: string) {
    const folders = yield* WorkStealing.make({ name: "folders", payload: Schema.String, worker: name })
    yield* Effect.forkScoped(
      folders.run((path) =>
        Effect.gen(function*() {
          assert.ok(!scanned.has(path))
          scanned.set(path, name)
          yield* Effect.sleep("3 millis")
          yield* folders.offerAll(subfolders(path))
        })
      )
    )
    return folders
  })

  const [folders] = yield* Effect.forEach(["ann", "bob", "cy"], worker)
  const until = (done: (found: ReadonlyArray<WorkStealing.WorkerState>) => boolean) =>
    Effect.repeat(folders!.workers, { until: done, schedule: Schedule.spaced("10 millis") })
  yield* until((workers) => workers.length === 3)
  yield* folders!.offer("", { to: "bob" })
  yield* Effect.repeat(folders!.state, {
    until: ({ active, waiting }) => active + waiting === 0,
    schedule: Schedule.spaced("10 millis")
  })

  const workers = yield* folders!.workers
  const sum = (count: (worker: WorkStealing.WorkerState) => number) =>
    workers.reduce((sum, worker) => sum + count(worker), 0)
  assert.equal(sum(({ own, shared, stolen }) => own + shared + stolen), scanned.size)
  assert.ok(sum(({ stolen }) => stolen) > 0)
  assert.equal(new Set(scanned.values()).size, 3)
  yield* Console.log(`${scanned.size} folders, by ${workers.map(({ name }) => name).join(", ")}, and none twice`)
})

program.pipe(Effect.scoped, Effect.provide(layer()), NodeRuntime.runMain)
