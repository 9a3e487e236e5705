/** The workers, as the parent has them: it starts them, does them harm, and says what happens. */
import { Deferred, Effect, Exit, Fiber, Option, type PlatformError, Schema, Scope, Stream } from "effect"
import { ChildProcess } from "effect/process"
import { fileURLToPath } from "node:url"
import { ReadWriteLock, Semaphore, Topic } from "../../src/index.ts"
import type { Board } from "./board.ts"
import * as protocol from "./protocol.ts"
import type { View } from "./view.ts"

export class DemoFailed extends Schema.TaggedError<DemoFailed>()("DemoFailed", { message: Schema.String }) {}

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

/** Says who leads, as anybody may know who looks on. Answers what the last leader proclaims. */
const watch = Effect.fnUntraced(function*(board: Board, view: View) {
  const chief = yield* protocol.Chief
  const phases = chief.changes.pipe(
    Stream.tap((info) => {
      const line = board.leads(info)
      return line === undefined ? Effect.void : view.say(line)
    }),
    Stream.map((info) => Option.getOrUndefined(info)?.value),
    Stream.filter((phase) => phase?._tag === "Done")
  )
  const done = yield* Stream.runHead(phases)
  return Option.getOrThrow(done)!.top
})

/** Has the workers do all the work. Answers the most frequent words. */
export const work = Effect.fnUntraced(function*(
  board: Board,
  view: View,
  settings: Pick<protocol.Settings, "redis" | "namespace" | "folder">
) {
  const gate = yield* Scope.make()
  yield* ReadWriteLock.acquireWrite("gate").pipe(Scope.provide(gate))
  const heavy = yield* Semaphore.make({ name: "heavy", permits: protocol.permits })
  const top = yield* Effect.forkScoped(watch(board, view))

  // A stopped process is woken when others have written so much that its own write would do harm by now.
  let stopped: { readonly name: string; readonly wake: Effect.Effect<void, PlatformError.PlatformError> } | undefined
  let writes = 0

  const finished = yield* protocol.Finished
  const counting = yield* finished.changes.pipe(
    Stream.takeUntil((files) => files === board.total),
    Stream.runForEach((files) => Effect.sync(() => void (board.finished = files))),
    Effect.forkScoped
  )

  const news = yield* protocol.News
  const ready = new Map<string, Deferred.Deferred<void>>()
  const workers = new Map<string, number>()
  for (const name of board.workers.keys()) ready.set(name, yield* Deferred.make<void>())
  const on = Effect.fnUntraced(function*(name: string, event: protocol.Event) {
    const line = board.on(name, event)
    if (line !== undefined) yield* view.say(line)
    if (event._tag === "Ready") yield* Deferred.succeed(ready.get(name)!, undefined)
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
    const pid = workers.get(name)!
    if (kill) process.kill(pid, "SIGKILL")
    else stopped = { name, wake: yield* stop(pid) }
    const held = board.orphan(name, kill ? "killed" : "stopped")
    yield* view.say(`${name} ${kill ? "is killed (kill -9)" : "is stopped (SIGSTOP)"} while it holds ${held}`)
    yield* view.say(`${name} had written ${event.part} of ${event.parts} parts of ${event.file}`)
  })
  const told = yield* news.subscribed({ from: "beginning" })
  const listening = yield* told.pipe(
    Topic.events,
    Stream.takeWhile(({ value }) => value._tag !== "End"),
    Stream.runForEach(({ publisher, value }) => on(publisher, value)),
    Effect.forkScoped
  )

  const run = Effect.fnUntraced(function*(name: string) {
    const worker = yield* spawn(
      new protocol.Settings({
        ...settings,
        name,
        killAt: Math.floor(board.total / 3),
        freezeAt: Math.floor(board.total * 2 / 3)
      })
    )
    workers.set(name, worker.pid)
    yield* view.say(`${name} is process ${worker.pid}`)
    // What the library logs, and what Node says of a crash.
    const log = worker.stderr.pipe(
      Stream.decodeText(),
      Stream.splitLines,
      Stream.runForEach((line) => view.say(`${name} | ${line}`))
    )
    yield* Effect.forkScoped(log)
    const exit = yield* Effect.exit(worker.exitCode)
    if (board.worker(name).state === "killed") return
    if (Exit.isFailure(exit) || exit.value !== 0) {
      return yield* new DemoFailed({ message: `${name} has failed` })
    }
    board.worker(name).state = "finished"
  }, Effect.scoped)

  const names = [...board.workers.keys()]
  const open = Effect.gen(function*() {
    yield* Effect.forEach(ready.values(), Deferred.await, { discard: true })
    yield* view.say(`${names.length} workers are ready: ${board.total} files, ${protocol.permits} at a time`)
    yield* Scope.close(gate, Exit.void)
  })
  yield* Effect.all([open, ...names.map(run)], { concurrency: "unbounded", discard: true })
  yield* news.publish({ _tag: "End" })
  yield* Fiber.join(listening)
  // What the ref says comes on its own way, and may come later.
  yield* Effect.timeoutOption(Fiber.join(counting), "10 seconds")
  const available = yield* heavy.available
  if (available !== protocol.permits) {
    return yield* new DemoFailed({ message: `Of ${protocol.permits} permits, ${available} have come back` })
  }
  return yield* Fiber.join(top)
}, Effect.scoped)
