/** One worker process. It takes files until all are finished; see `main.ts` for the whole. */
import { NodeRuntime, NodeServices } from "@effect/platform-node"
import { Cause, Effect, Layer, Logger, Option, References, Schedule, Schema } from "effect"
import { Coordinator, Fence, Lease, Lock, ReadWriteLock, Redis, Semaphore } from "../../src/index.ts"
import * as protocol from "./protocol.ts"
import * as words from "./words.ts"

const settings = Schema.decodeUnknownSync(protocol.SettingsArgument)(process.argv[2])
const { folder, namespace } = settings
const totals = protocol.totalsKey(namespace)

// The parent never writes here. When this ends the parent is gone, however that happened, and so is the work.
process.stdin.once("end", () => process.exit(1)).resume().unref()

const encode = Schema.encodeSync(protocol.EventLine)
const tell = (event: protocol.Event) => Effect.sync(() => void process.stdout.write(`${encode(event)}\n`))

/** Tells the parent what is held while `body` runs. */
const holding = <A, E, R>(what: string, body: (lease: Lease.Lease) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const lease = Option.getOrThrow(yield* Lease.current)
    yield* tell({ _tag: "Holds", what, token: lease.token })
    return yield* body(lease)
  }).pipe(Effect.ensuring(tell({ _tag: "Freed", what })))

const program = Effect.gen(function*() {
  const redis = yield* Redis.Redis
  // Reading twice is as good as once, so that a lost connection is no reason to give up.
  const read = <A>(command: string, ...args: ReadonlyArray<string>) =>
    redis.send<A>(command, ...args).pipe(Effect.retry({ times: 20, schedule: Schedule.spaced("100 millis") }))
  const files = yield* words.list(folder)
  const heavy = yield* Semaphore.attach({ name: "heavy", timeout: "10 seconds" })
  let late: Effect.Effect<unknown, Fence.FenceError, Coordinator.Coordinator> | undefined

  /** The demo's own part: exactly one worker is killed, and one is stopped, at a moment that could not be worse. */
  const meetFate = Effect.fnUntraced(function*(file: string, part: number, parts: number, finished: number) {
    // Some file has to do, even when none is long enough to be written in parts.
    if (part !== parts - 1 || (parts === 1 && finished < files.length - 1)) return
    for (const [fate, after] of [["kill", settings.killAt], ["freeze", settings.freezeAt]] as const) {
      if (finished < after) continue
      if (null === (yield* redis.send("SET", `${namespace}:${fate}`, settings.name, "NX", "PX", 3_600_000))) continue
      yield* tell({ _tag: "Halfway", fate, file, part, parts })
      return yield* fate === "kill" ? Effect.never : Effect.sleep("1 minute")
    }
  })

  /**
   * Adds the counts of a file to the totals: reads, adds, writes, which is right only because nobody else does so
   * meanwhile. That is what the lock is for, and the token of its lease for the case that we only think we have it.
   */
  const merge = Effect.fnUntraced(function*(file: string, counts: words.Counts, lease: Lease.Lease) {
    const parts = words.partsOf(counts)
    const marker = yield* read<string | null>("HGET", totals, protocol.fileField(file))
    for (let at = Number(marker ?? 0); at < parts.length; at++) {
      const part = parts[at]!
      const known = yield* read<Array<string | null>>(
        "HMGET",
        totals,
        protocol.filesField,
        ...part.map(([word]) => word)
      )
      const finished = Number(known[0])
      const last = at === parts.length - 1
      // The counts, and how far we are with this file, in one command: nothing can come between the two.
      const write = Fence.run(
        lease,
        totals,
        "HSET",
        ...[protocol.fileField(file), last ? "done" : at + 1],
        ...[protocol.filesField, last ? finished + 1 : finished],
        ...part.flatMap(([word, times], index) => [word, Number(known[index + 1]) + times])
      )
      late = write
      yield* meetFate(file, at, parts.length, finished)
      yield* write
      const added = part.reduce((sum, [, times]) => sum + times, 0)
      yield* tell({ _tag: "Wrote", file, part: at, parts: parts.length, words: added })
    }
  })

  const isDone = (file: string) =>
    Effect.map(read<string | null>("HGET", totals, protocol.fileField(file)), (marker) => marker === "done")

  const index = (file: string) =>
    holding(`file ${file}`, () =>
      Effect.gen(function*() {
        if (yield* isDone(file)) return
        yield* tell({ _tag: "Waits", what: "permit" })
        yield* holding("permit", () =>
          Effect.gen(function*() {
            const counts = yield* words.count(folder, file)
            yield* tell({ _tag: "Waits", what: "totals" })
            yield* holding("totals", (lease) => merge(file, counts, lease)).pipe(Lock.withLock("totals"))
          })).pipe(heavy.withPermit)
      }))

  // The leases were lost, so what this process was about to write must not be written any more. A program would go on
  // with something else here. This one tries, as one that had not noticed would.
  const onLoss = Effect.fnUntraced(function*(lost: Lease.LeaseLost) {
    yield* tell({ _tag: "Lost", what: lost.key, reason: lost.reason })
    if (late === undefined) return false
    yield* late
    return false
  })

  /** Whether the file is finished; otherwise somebody else is at it. */
  const attempt = (file: string, wait: boolean) =>
    Effect.gen(function*() {
      if (yield* isDone(file)) return true
      if (!wait) return Option.isSome(yield* Lock.withLockIfAvailable(index(file), `file ${file}`))
      yield* tell({ _tag: "Waits", what: `file ${file}` })
      yield* Lock.withLock(index(file), `file ${file}`)
      return true
    }).pipe(
      Effect.catchReason("LockError", "LeaseLost", onLoss),
      Effect.catchReason("SemaphoreError", "LeaseLost", onLoss),
      Effect.catchReasons("FenceError", {
        StaleToken: ({ seen, token }) => Effect.as(tell({ _tag: "Refused", token, seen }), false),
        // The connection is gone, and nobody knows whether that was written. The mark in the totals does: look again.
        CoordinatorError: () => Effect.succeed(false)
      })
    )

  yield* tell({ _tag: "Ready" })
  yield* ReadWriteLock.withReadLock(Effect.void, "gate")

  const todo = [...files]
  let taken: Array<string> = []
  while (todo.length > 0 || taken.length > 0) {
    // What somebody else was at is finished by now, or being worked on, or left behind by a dead one.
    const still: Array<string> = []
    for (const file of taken) if (!(yield* attempt(file, todo.length === 0))) still.push(file)
    taken = still
    const next = todo.shift()
    if (next !== undefined && !(yield* attempt(next, false))) taken.push(next)
  }
})

program.pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ ...protocol.coordinator, namespace, name: settings.name }).pipe(
      Layer.provideMerge(Redis.layer({ url: settings.redis })),
      Layer.merge(NodeServices.layer)
    )
  ),
  // Standard output is for the parent. Losses of a session without holds are warnings; here they are of no interest.
  Effect.provideService(Logger.LogToStderr, true),
  Effect.provideService(References.MinimumLogLevel, "Error"),
  Effect.tapCause((cause) => Effect.sync(() => console.error(Cause.pretty(cause)))),
  NodeRuntime.runMain({ disableErrorReporting: true })
)
