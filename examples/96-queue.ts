/**
 * Mails of a shop. Producers offer them, and workers on any process send them. What cannot be sent is retried, becomes a dead
 * letter in the end, and is replayed when the bug is fixed. A second queue has results, and a third one runs the jobs of each
 * account in order. A program with a loop of its own takes one job at a time, of a queue that a schedule fills.
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Layer, Option, Schedule, Schema, Stream } from "effect"
import assert from "node:assert/strict"
import { Queue } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

class Mails extends Queue.Service<Mails>()("mails", {
  payload: Schema.Struct({ to: Schema.String }),
  // Over all processes: the provider allows no more.
  limits: { concurrency: 10, rate: { jobs: 100, interval: "1 second" } }
}) {}

class Sums extends Queue.Service<Sums>()("sums", {
  payload: Schema.Tuple([Schema.Number, Schema.Number]),
  success: Schema.Number
}) {}

class Syncs extends Queue.Service<Syncs>()("syncs", {
  payload: Schema.Struct({ account: Schema.String, step: Schema.Number }),
  groups: { concurrency: 1 }
}) {}

class Reports extends Queue.Service<Reports>()("reports", { payload: Schema.String }) {}

const synced: Array<string> = []

const sync = ({ account, step }: { readonly account: string; readonly step: number }) =>
  Effect.gen(function*() {
    const { attempt } = yield* Queue.Job
    if (step === 1 && attempt === 1) return yield* Effect.fail("the server is away")
    synced.push(`${account}${step}`)
  })

const sent: Array<string> = []
let cyIsKnown = false

const send = ({ to }: { readonly to: string }) =>
  Effect.gen(function*() {
    const { attempt } = yield* Queue.Job
    if (to === "ann" && attempt === 1) return yield* Effect.fail("the server is away")
    if (to === "cy" && !cyIsKnown) return yield* Effect.fail("unknown address")
    sent.push(to)
  })

// In your program, these layers are in the processes that work.
const workers = Layer.mergeAll(
  Queue.worker(Mails, send, { concurrency: 5, retry: Schedule.spaced("20 millis"), attempts: 3 }),
  Queue.worker(Sums, ([a, b]) => Effect.succeed(a + b)),
  Queue.worker(Syncs, sync, { concurrency: 5, retry: Schedule.spaced("20 millis") })
)

const program = Effect.gen(function*() {
  const mails = yield* Mails
  const until = (done: (state: Queue.State) => boolean) =>
    Effect.repeat(mails.state, { until: done, schedule: Schedule.spaced("10 millis") })
  yield* mails.offerAll([{ to: "ann" }, { to: "cy" }])
  // With an id, a mail that is offered twice is sent once.
  const first = yield* mails.offer({ to: "bob" }, { id: "welcome/bob", delay: "50 millis" })
  assert.deepEqual(yield* mails.offer({ to: "bob" }, { id: "welcome/bob" }), { id: first.id, duplicate: true })
  yield* until(({ completed, dead }) => completed === 2 && dead === 1)

  const [letter] = yield* Stream.runCollect(mails.deadLetters)
  assert.equal(letter!.attempts, 3)
  assert.match(letter!.error, /unknown address/)
  cyIsKnown = true
  yield* mails.replay([letter!.letter])
  yield* until(({ completed }) => completed === 3)

  // The result comes to whichever process waits for it.
  const sums = yield* Sums
  const sum = yield* sums.execute([2, 3])

  // The second step of an account does not begin before the first one is done, though that is retried.
  const syncs = yield* Syncs
  const steps = [1, 2].flatMap((step) => ["a", "b"].map((account) => ({ account, step })))
  yield* syncs.offerAll(steps, ({ account }) => ({ group: account }))
  yield* Effect.repeat(syncs.state, {
    until: ({ completed }) => completed === 4,
    schedule: Schedule.spaced("10 millis")
  })
  for (const account of ["a", "b"]) {
    assert.deepEqual(synced.filter((step) => step.startsWith(account)), [`${account}1`, `${account}2`])
  }

  // An urgent report goes ahead of one that waits; and one comes each hour, from whichever process is there.
  const reports = yield* Reports
  yield* reports.offer("of the month")
  const { id } = yield* reports.offer("of the audit", { priority: "urgent" })
  const progress = yield* Effect.forkChild(Stream.runCollect(reports.job(id).progress), { startImmediately: true })
  yield* reports.schedule("hourly", "1 hour", "of the hour")
  const write = (report: string) =>
    Effect.gen(function*() {
      const job = yield* Queue.Job
      yield* job.progress("half")
      return report
    })
  const next = reports.withJob(write, { wait: "100 millis" })
  assert.deepEqual(yield* next, Option.some("of the audit"))
  assert.deepEqual(yield* Fiber.join(progress), ["half"])
  assert.deepEqual(yield* next, Option.some("of the month"))
  // `None` when no job comes in time. A consumer would wait for longer, "30 seconds" for example.
  assert.deepEqual(yield* next, Option.none())
  yield* Console.log(`sent to ${sent.toSorted().join(", ")}; 2 + 3 = ${sum}; one dead letter, replayed`)
})

program.pipe(
  Effect.provide(workers.pipe(Layer.provideMerge(Layer.mergeAll(Mails.layer, Sums.layer, Syncs.layer, Reports.layer)))),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
