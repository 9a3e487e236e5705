/**
 * Four processes count the words of many files together, under a leader that one of them is. The leader is killed in the
 * middle of a merge, and the next one is stopped, and not a word is missing or counted twice.
 *
 *   node examples/demo/main.ts [folder]
 *
 * The leader begins a flow. First each file is a job, worked on with one of two permits, and added to the totals under a
 * lock, its fencing token checked. Behind all of these, one job for each share of the words finds the most frequent ones.
 * The leader awaits these, and proclaims the result. The next leader begins a new term, and goes on with the same run.
 * What the workers tell goes through a topic, and a shared ref says how many files are finished: this process shows both.
 *
 * It starts a private Redis, or uses the one that REDIS_URL names.
 */
import { NodeRuntime, NodeServices } from "@effect/platform-node"
import { Cause, Effect, Layer, Option, References } from "effect"
import { fileURLToPath } from "node:url"
import { Coordinator, Redis } from "../../src/index.ts"
import { Board, seconds } from "./board.ts"
import * as crew from "./crew.ts"
import * as protocol from "./protocol.ts"
import * as store from "./store.ts"
import * as View from "./view.ts"
import * as words from "./words.ts"

const folder = process.argv[2] ?? fileURLToPath(new URL("../../node_modules/effect/src", import.meta.url))
const names = ["worker-1", "worker-2", "worker-3", "worker-4"]
const namespace = `demo-${process.pid}-${Date.now()}`
const keys = store.keysOf(namespace)
const view = View.make(process.stdout)

const alone = Effect.fnUntraced(function*(files: ReadonlyArray<string>) {
  const counts: words.Counts = new Map()
  for (const file of files) {
    for (const [word, times] of yield* words.count(folder, file)) counts.set(word, (counts.get(word) ?? 0) + times)
  }
  return counts
})

const list = (top: ReadonlyArray<readonly [word: string, times: number]>) =>
  top.map(([word, times]) => `${word} ${times.toLocaleString("en")}`).join(", ")

const demo = Effect.gen(function*() {
  const files = yield* words.list(folder)
  if (files.length === 0) return yield* new crew.DemoFailed({ message: `There are no text files in ${folder}` })
  const embedded = yield* Effect.serviceOption(Redis.EmbeddedServer)
  const redis = Option.match(embedded, { onNone: () => process.env["REDIS_URL"]!, onSome: ({ url }) => url })
  const board = new Board(names, files.length)

  yield* view.say(`Indexing ${folder}`)
  if (Option.isSome(embedded)) yield* view.say(`A private Redis is process ${embedded.value.pid}`)
  const started = performance.now()
  const top = yield* Effect.raceFirst(crew.work(board, view, { redis, namespace, folder }), view.run(board))
  const wall = performance.now() - started
  yield* view.say(`All workers are finished. Counting again in this process alone, to compare`)

  const { counts, marks } = yield* store.readTotals(keys)
  const expected = yield* alone(files)
  const frequent = words.top(expected)
  const problems = [
    ...words.differences(expected, counts).slice(0, 5),
    ...files.flatMap((file) => marks.get(store.fileField(file)) === "done" ? [] : [`${file} is not marked done`]),
    ...(list(top) === list(frequent) ? [] : [`the most frequent words are ${list(frequent)}, and not ${list(top)}`]),
    ...(board.finished === files.length ? [] : [`the shared ref says that ${board.finished} files are finished`]),
    // At the end no process may need a permit any more.
    ...board.orphans.flatMap(({ from, what }) =>
      what === "permit" ? [] : [`nobody has taken over ${what} from ${from}`]
    ),
    ...(board.terms.every((term, index) => index === 0 || term > board.terms[index - 1]!)
      ? []
      : [`a term is not larger than the one before: ${board.terms.join(", ")}`]),
    ...(board.takeovers.length > 0 ? [] : ["nobody was killed or stopped"]),
    ...(board.refused > 0 ? [] : ["no late write was refused"])
  ]
  if (problems.length > 0) return yield* new crew.DemoFailed({ message: `It went wrong:\n${problems.join("\n")}` })

  const occurrences = [...counts.values()].reduce((sum, times) => sum + times, 0)
  const [fastest, slowest] = [Math.min, Math.max].map((f) => seconds(f(...board.takeovers.map(({ millis }) => millis))))
  const vacancies = board.takeovers.filter(({ what }) => what === "lead").map(({ millis }) => seconds(millis))
  const lines = [
    `files            ${files.length}`,
    `words            ${occurrences.toLocaleString("en")}, ${counts.size.toLocaleString("en")} different ones`,
    `most frequent    ${list(top) || "none"}`,
    `wall time        ${seconds(wall)}`,
    `takeovers        ${board.takeovers.length}, after ${fastest} to ${slowest} (lease ${protocol.coordinator.lease})`,
    `terms            ${board.terms.length}${vacancies.length === 0 ? "" : `, vacant for ${vacancies.join(" and ")}`}`,
    `tokens checked   ${board.checked}, ${board.refused} refused`,
    `totals match     to the last word`
  ]
  yield* Effect.sync(() => process.stdout.write(`\n${lines.join("\n")}\n`))
}).pipe(
  Effect.ensuring(Effect.ignore(store.clear(keys))),
  Effect.ensuring(Effect.ignore(Effect.flatMap(protocol.Indexing, (indexing) => indexing.attach(protocol.run).cancel))),
  Effect.ensuring(Effect.ignore(Effect.flatMap(protocol.News, (news) => news.purge))),
  Effect.ensuring(Effect.ignore(Effect.flatMap(protocol.Finished, (finished) => finished.delete))),
  Effect.timeoutOrElse({
    duration: "5 minutes",
    orElse: () => new crew.DemoFailed({ message: "It takes too long; something hangs" })
  })
)

const redis = process.env["REDIS_URL"] ? Redis.layerConfig() : Redis.layerEmbedded()

demo.pipe(
  Effect.provide(
    protocol.layer.pipe(
      Layer.provideMerge(Coordinator.layer({ ...protocol.coordinator, namespace, name: "parent" })),
      Layer.provideMerge(redis),
      Layer.merge(NodeServices.layer)
    )
  ),
  // Counting alone may keep this process too busy for its lease, which protects nothing any more.
  Effect.provideService(References.MinimumLogLevel, "Error"),
  Effect.tapCause((cause) =>
    Cause.hasInterruptsOnly(cause)
      ? Effect.void
      : Effect.sync(() =>
        console.error(Option.match(Cause.findErrorOption(cause), {
          onNone: () => Cause.pretty(cause),
          onSome: (error) => error.message
        }))
      )
  ),
  NodeRuntime.runMain({ disableErrorReporting: true })
)
