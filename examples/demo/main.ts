/**
 * Four processes count the words of many files together. One is killed and one is stopped in the middle of a merge, and
 * not a word is missing or counted twice.
 *
 *   node examples/demo/main.ts [folder]
 *
 * Each file is claimed under a lock, worked on with one of two permits, and added to the totals under another lock, its
 * fencing token checked. It starts a private Redis, or uses the one that REDIS_URL names.
 */
import { NodeRuntime, NodeServices } from "@effect/platform-node"
import {
  Cause,
  Deferred,
  Effect,
  Exit,
  Layer,
  Option,
  type PlatformError,
  Schedule,
  Schema,
  Scope,
  Stream
} from "effect"
import { ChildProcess } from "effect/process"
import { fileURLToPath } from "node:url"
import { Coordinator, ReadWriteLock, Redis, Semaphore } from "../../src/index.ts"
import { Board, seconds } from "./board.ts"
import * as protocol from "./protocol.ts"
import * as View from "./view.ts"
import * as words from "./words.ts"

class DemoFailed extends Schema.TaggedError<DemoFailed>()("DemoFailed", { message: Schema.String }) {}

const folder = process.argv[2] ?? fileURLToPath(new URL("../../node_modules/effect/src", import.meta.url))
const names = ["worker-1", "worker-2", "worker-3", "worker-4"]
const namespace = `demo-${process.pid}-${Date.now()}`
const totals = protocol.totalsKey(namespace)
const view = View.make(process.stdout)

const decode = Schema.decodeUnknownEffect(protocol.EventLine)
const encode = Schema.encodeSync(protocol.SettingsArgument)

const spawn = (settings: protocol.Settings) =>
  ChildProcess.make(process.execPath, [fileURLToPath(new URL("worker.ts", import.meta.url)), encode(settings)], {
    stdin: "pipe",
    // A stopped process does not hear SIGTERM.
    forceKillAfter: "2 seconds"
  })

/**
 * Stops a process, and answers an effect that wakes it. A stopped process notices nothing, not even that we are gone,
 * so a shell wakes it: when its standard input ends, which our own end ends too.
 */
const stop = Effect.fnUntraced(function*(pid: number) {
  const waker = yield* ChildProcess.make("sh", ["-c", `read -r _; kill -CONT ${pid}`], { stdin: "pipe" })
  process.kill(pid, "SIGSTOP")
  return Stream.run(Stream.empty, waker.stdin)
})

const index = Effect.fnUntraced(function*(redisUrl: string, board: Board) {
  const gate = yield* Scope.make()
  yield* ReadWriteLock.acquireWrite("gate").pipe(Scope.provide(gate))
  const heavy = yield* Semaphore.make({ name: "heavy", permits: protocol.permits })
  // Whoever is stopped is woken when others have written so much that its own write would do harm by now.
  let stopped: { readonly name: string; readonly wake: Effect.Effect<void, PlatformError.PlatformError> } | undefined
  let writes = 0

  const work = Effect.fnUntraced(function*(name: string, ready: Deferred.Deferred<void>) {
    const worker = yield* spawn(
      new protocol.Settings({
        redis: redisUrl,
        namespace,
        name,
        folder,
        killAt: Math.floor(board.total / 3),
        freezeAt: Math.floor(board.total * 2 / 3)
      })
    )
    yield* view.say(`${name} is process ${worker.pid}`)
    const on = Effect.fnUntraced(function*(event: protocol.Event) {
      const line = board.on(name, event)
      if (line !== undefined) yield* view.say(line)
      if (event._tag === "Ready") yield* Deferred.succeed(ready, undefined)
      const done = board.files === board.total
      if (event._tag === "Wrote" && stopped !== undefined && stopped.name !== name && (++writes >= 20 || done)) {
        const { name, wake } = stopped
        stopped = undefined
        board.worker(name).state = "working"
        yield* view.say(`${name} is woken`)
        yield* wake
      }
      if (event._tag !== "Halfway") return
      const kill = event.fate === "kill"
      if (kill) process.kill(worker.pid, "SIGKILL")
      else stopped = { name, wake: yield* stop(worker.pid) }
      const held = board.orphan(name, kill ? "killed" : "stopped", performance.now())
      yield* view.say(`${name} ${kill ? "is killed (kill -9)" : "is stopped (SIGSTOP)"} while it holds ${held}`)
      yield* view.say(`${name} had written ${event.part} of ${event.parts} parts of ${event.file}`)
    })
    // What the library logs, and what Node says of a crash.
    const log = worker.stderr.pipe(
      Stream.decodeText(),
      Stream.splitLines,
      Stream.runForEach((line) => view.say(`${name} | ${line}`))
    )
    yield* Effect.forkScoped(log)
    yield* worker.stdout.pipe(
      Stream.decodeText(),
      Stream.splitLines,
      Stream.mapEffect((line) => decode(line)),
      Stream.runForEach(on)
    )
    const exit = yield* Effect.exit(worker.exitCode)
    if (board.worker(name).state === "killed") return
    if (Exit.isFailure(exit) || exit.value !== 0) {
      return yield* new DemoFailed({ message: `${name} has failed` })
    }
    board.worker(name).state = "finished"
  }, Effect.scoped)

  const ready = yield* Effect.forEach(names, () => Deferred.make<void>())
  const open = Effect.gen(function*() {
    yield* Effect.forEach(ready, Deferred.await, { discard: true })
    yield* view.say(`${names.length} workers are ready: ${board.total} files, ${protocol.permits} at a time`)
    yield* Scope.close(gate, Exit.void)
  })
  yield* Effect.all([open, ...names.map((name, index) => work(name, ready[index]!))], {
    concurrency: "unbounded",
    discard: true
  })
  const available = yield* heavy.available
  if (available !== protocol.permits) {
    return yield* new DemoFailed({ message: `Of ${protocol.permits} permits, ${available} have come back` })
  }
}, Effect.scoped)

/** What has become of the totals: the counts, and which files are in them. */
const result = Effect.gen(function*() {
  const redis = yield* Redis.Redis
  const flat = yield* redis.send<Array<string>>("HGETALL", totals).pipe(
    Effect.retry({ times: 20, schedule: Schedule.spaced("100 millis") })
  )
  const counts: words.Counts = new Map()
  const marks = new Map<string, string>()
  for (let at = 0; at < flat.length; at += 2) {
    const [field, value] = [flat[at]!, flat[at + 1]!]
    if (field.includes(" ")) marks.set(field, value)
    else counts.set(field, Number(value))
  }
  return { counts, marks }
})

const alone = Effect.fnUntraced(function*(files: ReadonlyArray<string>) {
  const counts: words.Counts = new Map()
  for (const file of files) {
    for (const [word, times] of yield* words.count(folder, file)) counts.set(word, (counts.get(word) ?? 0) + times)
  }
  return counts
})

const demo = Effect.gen(function*() {
  const files = yield* words.list(folder)
  if (files.length === 0) return yield* new DemoFailed({ message: `There are no text files in ${folder}` })
  const embedded = yield* Effect.serviceOption(Redis.EmbeddedServer)
  const redisUrl = Option.match(embedded, { onNone: () => process.env["REDIS_URL"]!, onSome: ({ url }) => url })
  const board = new Board(names, files.length)

  yield* view.say(`Indexing ${folder}`)
  if (Option.isSome(embedded)) yield* view.say(`A private Redis is process ${embedded.value.pid}`)
  const started = performance.now()
  yield* Effect.raceFirst(index(redisUrl, board), view.run(board))
  const wall = performance.now() - started
  yield* view.say(`All workers are finished. Counting again in this process alone, to compare`)

  const { counts, marks } = yield* result
  const expected = yield* alone(files)
  const problems = [
    ...words.differences(expected, counts).slice(0, 5),
    ...files.flatMap((file) => marks.get(protocol.fileField(file)) === "done" ? [] : [`${file} is not marked done`]),
    // At the end nobody may need a permit any more.
    ...board.orphans.flatMap(({ from, what }) =>
      what === "permit" ? [] : [`nobody has taken over ${what} from ${from}`]
    ),
    ...(board.takeovers.length > 0 ? [] : ["nobody was killed or stopped"]),
    ...(board.refused > 0 ? [] : ["no late write was refused"])
  ]
  if (problems.length > 0) return yield* new DemoFailed({ message: `It went wrong:\n${problems.join("\n")}` })

  const occurrences = [...counts.values()].reduce((sum, times) => sum + times, 0)
  const [fastest, slowest] = [Math.min, Math.max].map((f) => seconds(f(...board.takeovers.map(({ millis }) => millis))))
  const lines = [
    `files            ${files.length}`,
    `words            ${occurrences.toLocaleString("en")}, ${counts.size.toLocaleString("en")} different ones`,
    `wall time        ${seconds(wall)}`,
    `takeovers        ${board.takeovers.length}, after ${fastest} to ${slowest} (lease ${protocol.coordinator.lease})`,
    `tokens checked   ${board.checked}, ${board.refused} refused`,
    `totals match     to the last word`
  ]
  yield* Effect.sync(() => process.stdout.write(`\n${lines.join("\n")}\n`))
}).pipe(
  Effect.ensuring(Effect.ignore(Effect.flatMap(Redis.Redis, (redis) => redis.send("DEL", totals)))),
  Effect.timeoutOrElse({
    duration: "5 minutes",
    orElse: () => new DemoFailed({ message: "It takes too long; something hangs" })
  })
)

const redis = process.env["REDIS_URL"] === undefined ? Redis.layerEmbedded() : Redis.layerConfig()

demo.pipe(
  Effect.provide(
    Coordinator.layer({ ...protocol.coordinator, namespace, name: "parent" }).pipe(
      Layer.provideMerge(redis),
      Layer.merge(NodeServices.layer)
    )
  ),
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
