/** Readers share, writers are alone. A reader can become a writer, and a writer a reader, without letting go. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { ReadWriteLock } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

let [readers, most, version] = [0, 0, 1]

const read = Effect.gen(function*() {
  most = Math.max(most, ++readers)
  const before = version
  yield* Effect.sleep("20 millis")
  assert.equal(version, before, "no process writes while another one reads")
  readers--
}).pipe(ReadWriteLock.withReadLock("catalogue"))

const write = Effect.sync(() => {
  assert.equal(readers, 0, "no process reads while another one writes")
  version++
}).pipe(ReadWriteLock.withWriteLock("catalogue"))

const program = Effect.gen(function*() {
  yield* Effect.all([read, read, read, write, read, read], { concurrency: "unbounded" })
  yield* Console.log(`up to ${most} read at once, and version ${version} was written alone`)
  assert.equal(most, 3, "the two that came after the writer waited behind it")

  // Look first, and write only if there is need to: what was read is still true, as no one else can have written.
  const refresh = Effect.suspend(() => version < 3 ? write : Effect.void).pipe(ReadWriteLock.withReadLock("catalogue"))
  yield* refresh
  yield* refresh
  assert.equal(version, 3)

  // Write, and let others read already while the rest is done.
  let busy = true
  const publish = Effect.gen(function*() {
    const lease = yield* ReadWriteLock.acquireWrite("catalogue")
    version = 4
    yield* ReadWriteLock.downgrade(lease)
    yield* Effect.sleep("100 millis")
    busy = false
  }).pipe(Effect.scoped)
  const look = Effect.sync(() => ({ version, busy })).pipe(ReadWriteLock.withReadLock("catalogue"))
  const [, seen] = yield* Effect.all([publish, look], { concurrency: "unbounded" })
  yield* Console.log(`version ${seen.version} was read while its writer was still busy`)
  assert.deepEqual(seen, { version: 4, busy: true })
})

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
