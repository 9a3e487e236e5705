/** The first phase: every file is counted by one worker at a time, and added to the totals exactly once. */
import { Effect, Option } from "effect"
import { type Coordinator, type CountDownLatch, Fence, Lease, Lock, Redis, Semaphore } from "../../src/index.ts"
import * as protocol from "./protocol.ts"
import { keys, settings, tell } from "./self.ts"
import * as store from "./store.ts"
import * as words from "./words.ts"

/** Tells the parent what is held while `body` runs. */
const holding = <A, E, R>(what: string, body: (lease: Lease.Lease) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const lease = Option.getOrThrow(yield* Lease.current)
    yield* tell({ _tag: "Holds", what, token: lease.token })
    return yield* body(lease)
  }).pipe(Effect.ensuring(tell({ _tag: "Freed", what })))

/** Takes files until all are finished. Answers how many words it has written itself. */
export const map = Effect.fnUntraced(function*(files: ReadonlyArray<string>, mapped: CountDownLatch.CountDownLatch) {
  const redis = yield* Redis.Redis
  const chief = yield* protocol.Chief
  const done = yield* protocol.Finished
  const heavy = yield* Semaphore.attach({ name: "heavy", wait: "10 seconds" })
  let late: Effect.Effect<unknown, Fence.FenceError, Coordinator.Coordinator> | undefined
  let written = 0

  /** The demo's own part: one leader is killed, and a later one stopped, at a moment that could not be worse. */
  const meetFate = Effect.fnUntraced(function*(file: string, part: number, parts: number, finished: number) {
    // With the last file it has to be whoever is at it.
    if (part !== parts - 1 || !(yield* chief.isLeader) && finished < files.length - 1) return
    for (const [fate, after] of [["kill", settings.killAt], ["freeze", settings.freezeAt]] as const) {
      if (finished < after || 0 === (yield* redis.send("HSETNX", keys.fates, fate, settings.name))) continue
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
    const marker = yield* store.ask<string | null>("HGET", keys.totals, store.fileField(file))
    for (let at = Number(marker ?? 0); at < parts.length; at++) {
      const part = parts[at]!
      const known = yield* store.ask<Array<string | null>>(
        "HMGET",
        keys.totals,
        store.filesField,
        ...part.map(([word]) => word)
      )
      const finished = Number(known[0])
      const last = at === parts.length - 1
      // The counts, and how far we are with this file, in one command: nothing can come between the two.
      const write = Fence.run(
        lease,
        keys.totals,
        "HSET",
        ...[store.fileField(file), last ? "done" : at + 1],
        ...[store.filesField, last ? finished + 1 : finished],
        ...part.flatMap(([word, times], index) => [word, Number(known[index + 1]) + times])
      )
      late = write
      yield* meetFate(file, at, parts.length, finished)
      yield* write
      const added = part.reduce((sum, [, times]) => sum + times, 0)
      written += added
      yield* tell({ _tag: "Wrote", file, part: at, parts: parts.length, words: added })
      // For the view alone: the next one to finish a file sets it right.
      if (last) yield* Effect.ignore(done.set(finished + 1))
    }
  })

  /** Whoever finds a file finished counts it. By its name, it counts once, and nobody can die in between. */
  const isDone = Effect.fnUntraced(function*(file: string) {
    if ((yield* store.ask("HGET", keys.totals, store.fileField(file))) !== "done") return false
    yield* mapped.countDown({ id: file })
    return true
  })

  const index = (file: string) =>
    holding(`file ${file}`, () =>
      Effect.gen(function*() {
        if (yield* isDone(file)) return
        yield* tell({ _tag: "Waits", what: "permit" })
        yield* holding("permit", () =>
          Effect.gen(function*() {
            const counts = yield* words.count(settings.folder, file)
            yield* tell({ _tag: "Waits", what: "totals" })
            yield* holding("totals", (lease) => merge(file, counts, lease)).pipe(Lock.withLock("totals"))
          })).pipe(heavy.withPermit)
        yield* mapped.countDown({ id: file })
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
  return written
})
