/** The first half: every file is counted by one worker at a time, and added to the totals exactly once. */
import { Effect, Option, Schedule } from "effect"
import { Fence, Lease, Lock, Queue, Redis, Semaphore } from "../../src/index.ts"
import * as protocol from "./protocol.ts"
import { keys, settings, tell } from "./self.ts"
import * as store from "./store.ts"
import * as words from "./words.ts"

type Write = ReturnType<typeof Fence.run>

/** Tells the parent of the hold while `body` runs. */
const told = <A, E, R>(what: string, token: number, body: Effect.Effect<A, E, R>) =>
  Effect.andThen(tell({ _tag: "Holds", what, token }), body).pipe(Effect.ensuring(tell({ _tag: "Freed", what })))

const holding = <A, E, R>(what: string, body: (lease: Lease.Lease) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const lease = Option.getOrThrow(yield* Lease.current)
    return yield* told(what, lease.token, body(lease))
  })

/** Takes files for as long as the scope is open. */
export const map = Effect.fnUntraced(function*(files: ReadonlyArray<string>) {
  const queue = yield* protocol.Files
  const redis = yield* Redis.Redis
  const chief = yield* protocol.Chief
  const done = yield* protocol.Finished
  const heavy = yield* Semaphore.attach({ name: "heavy", wait: "10 seconds" })

  /** The demo's own part: one leader is killed, and a later one stopped, at a moment that could not be worse. */
  const meetFate = Effect.fnUntraced(function*(file: string, part: number, parts: number, finished: number) {
    // With the last file it has to be the one that works on it.
    if (part !== parts - 1 || !(yield* chief.isLeader) && finished < files.length - 1) return
    for (const [fate, after] of [["kill", settings.killAt], ["freeze", settings.freezeAt]] as const) {
      if (finished < after || 0 === (yield* redis.send("HSETNX", keys.fates, fate, settings.name))) continue
      yield* tell({ _tag: "Halfway", fate, file, part, parts })
      return yield* fate === "kill" ? Effect.never : Effect.sleep("1 minute")
    }
  })

  /**
   * Adds the counts of a file to the totals: reads, adds, writes, which is right only because no other process does so
   * meanwhile. That is what the lock is for, and the token of its lease for the case that we only think we have it.
   */
  const merge = Effect.fnUntraced(function*(
    file: string,
    counts: words.Counts,
    lease: Lease.Lease,
    prepare: (write: Write) => void
  ) {
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
      const write = (by: { readonly token: number }) =>
        Fence.run(
          by,
          keys.totals,
          "HSET",
          ...[store.fileField(file), last ? "done" : at + 1],
          ...[store.filesField, last ? finished + 1 : finished],
          ...part.flatMap(([word, times], index) => [word, Number(known[index + 1]) + times])
        )
      // A lease that is known to be lost writes nothing, and a worker that had not noticed the loss has its token still.
      prepare(write({ token: lease.token }))
      yield* meetFate(file, at, parts.length, finished)
      yield* write(lease)
      const added = part.reduce((sum, [, times]) => sum + times, 0)
      yield* tell({ _tag: "Wrote", file, part: at, parts: parts.length, words: added })
      // For the view alone: the next one to finish a file sets it right.
      if (last) yield* Effect.ignore(done.set(finished + 1))
    }
  })

  /** The handler of a job. Another worker may have begun the file: this worker goes on from there. */
  const index = Effect.fnUntraced(function*(file: string) {
    const { token } = yield* Queue.Job
    let late: Write | undefined
    const count = Effect.gen(function*() {
      yield* tell({ _tag: "Waits", what: "permit" })
      const counted = holding("permit", () =>
        Effect.gen(function*() {
          const counts = yield* words.count(settings.folder, file)
          yield* tell({ _tag: "Waits", what: "totals" })
          const merged = holding("totals", (lease) => merge(file, counts, lease, (write) => late = write))
          yield* Lock.withLock(merged, "totals")
        }))
      yield* heavy.withPermit(counted)
    })
    // The session was lost, and the file with it, so what this process was about to write must not be written any more. A
    // program would clean up here. This worker tries to write, as a worker that had not noticed would.
    const lost = Effect.gen(function*() {
      yield* tell({ _tag: "Lost", what: `file ${file}`, reason: "interrupted" })
      if (late !== undefined) yield* late
    }).pipe(
      Effect.catchReason(
        "FenceError",
        "StaleToken",
        ({ seen, token }) => seen === undefined ? Effect.void : tell({ _tag: "Refused", token, seen })
      ),
      Effect.ignore
    )
    const body = Effect.gen(function*() {
      if ((yield* store.ask("HGET", keys.totals, store.fileField(file))) !== "done") yield* count
    })
    yield* told(`file ${file}`, token, body).pipe(Effect.onInterrupt(() => lost))
  })

  yield* queue.pool(index, { retry: Schedule.spaced("100 millis") })
})
