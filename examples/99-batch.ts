/**
 * An import of files. The number of rows is known only when a file is read, so the job of a file adds the jobs of its rows. A report is
 * made when all have ended. One row cannot be imported: when that is mended, the run goes on with this row alone.
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Deferred, Effect, Layer, Schema, Stream } from "effect"
import assert from "node:assert/strict"
import { Batch, Queue } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const files: Record<string, ReadonlyArray<string>> = {
  "fruit.csv": ["apple", "pear"],
  "metal.csv": ["tin", "?", "zinc"]
}

class File extends Queue.Service<File>()("file", {
  payload: Schema.Struct({ batch: Schema.String, name: Schema.String })
}) {}

class Row extends Queue.Service<Row>()("row", {
  payload: Schema.String,
  error: Schema.Struct({ row: Schema.String })
}) {}

class Report extends Queue.Service<Report>()("report", { payload: Schema.String }) {}

const report = ({ done, failed, id }: Batch.End) => `${id}: ${done} done, ${failed} failed`

class Import extends Batch.Service<Import>()("import", {
  queues: [File, Row, Report],
  onDone: { queue: Report, payload: report },
  onFailed: { queue: Report, payload: report }
}) {}

const imported: Array<string> = []
let mended = false

// The run is not over before this job is, so it can add more. With names, a second attempt adds nothing twice.
const readFile = Effect.fnUntraced(function*({ batch, name }: { readonly batch: string; readonly name: string }) {
  const run = (yield* Import).attach(batch)
  yield* run.addAll(Row, files[name]!, { name: (_, at) => `${name}:${at}`, attempts: 1 })
})

const importRow = Effect.fnUntraced(function*(row: string) {
  if (row === "?" && !mended) return yield* Effect.fail({ row })
  imported.push(row)
})

const reports: Array<string> = []
const two = Deferred.makeUnsafe<void>()

const program = Effect.gen(function*() {
  const run = yield* (yield* Import).start({ id: "monday" })
  yield* run.addAll(File, Object.keys(files).map((name) => ({ batch: run.id, name })), { name: ({ name }) => name })
  // The job of a file ends after it has added its rows, so when nothing is left, no more rows come.
  yield* Stream.runDrain(Stream.takeUntil(run.changes, ({ remaining }) => remaining === 0))
  yield* run.seal
  const { reason } = yield* Effect.flip(run.await)
  assert(reason._tag === "BatchFailed")
  assert.deepEqual([reason.job, reason.error], ["metal.csv:1", { row: "?" }])

  mended = true
  yield* run.retry
  assert.equal((yield* run.await).done, 7)
  assert.deepEqual(imported.toSorted(), ["?", "apple", "pear", "tin", "zinc"])
  yield* Deferred.await(two)
  yield* Console.log(reports.join("; "))
})

const workers = Layer.mergeAll(
  Queue.worker(File, readFile),
  Queue.worker(Row, importRow, { concurrency: 8 }),
  Queue.worker(Report, (text) => reports.push(text) === 2 ? Deferred.succeed(two, undefined) : Effect.void)
)

program.pipe(
  Effect.provide(
    workers.pipe(
      Layer.provideMerge(Import.layer),
      Layer.provideMerge(Layer.mergeAll(File.layer, Row.layer, Report.layer)),
      Layer.provide(layer())
    )
  ),
  NodeRuntime.runMain
)
