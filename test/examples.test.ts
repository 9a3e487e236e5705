import { execFile } from "node:child_process"
import { readdirSync } from "node:fs"
import { fileURLToPath } from "node:url"
import { promisify } from "node:util"
import { describe, expect, it } from "vitest"

const folder = fileURLToPath(new URL("../examples/", import.meta.url))

/** A line of the output of each example. The examples assert what they show; this is to see that they got there. */
const lines: Record<string, string> = {
  "10-lock.ts": "with a lock, 20 sales leave 80 of 100",
  "20-read-write-lock.ts": "version 4 was read while its writer was still busy",
  "30-semaphore.ts": "ten were printed, at most 5 at a time",
  "40-many-locks.ts": "alice 88, bob 94, carol 118",
  "50-fencing.ts": "SQL has what was written by the second, Redis has what was written by the second",
  "60-reentrant-and-max-hold.ts": "and the lock is free again",
  "70-loss.ts": "the next time: started, written, cleaned up",
  "80-latches.ts": "3 have begun, and all have finished",
  "81-barrier.ts": "6, 15, 24; and then: generation 4 broken (left), 2 missing",
  "85-task-group.ts": "6 shards, 179700 in all, and one of them by its second worker",
  "86-signal.ts": "woken: ann, cy",
  "87-rendezvous.ts": "delivered by bob, and swapped a pear for an apple",
  "90-election.ts": "leads: 10.0.0.2:8080",
  "91-singleton.ts": "reports are made by a only",
  "92-simulation.ts": "an account that looks at tokens loses nothing, in 20 schedules",
  "93-topic.ts": "ann 10 30, bob 20 40, cy 7 -5",
  "94-schema-evolution.ts": "en, de, fr, en",
  "95-shared-ref.ts": "8 workers, and ann and bob have 100",
  "96-queue.ts": "sent to ann, bob, cy; 2 + 3 = 5; one dead letter, replayed",
  "97-flow.ts": "every module was compiled once, behind its imports, also after internal/actor/keys.ts had failed",
  "98-work-stealing.ts": "85 folders, by ann, bob, cy, and none twice",
  "99-batch.ts": "monday: 6 done, 1 failed; monday: 7 done, 0 failed"
}

describe("examples", () => {
  it("are all known here", () => {
    const files = readdirSync(folder).filter((file) => /^\d.*\.ts$/.test(file))
    expect(files.sort()).toEqual(Object.keys(lines))
  })

  for (const [file, line] of Object.entries(lines)) {
    it(file, async () => {
      // Rejects, with the output, when the exit code is not 0, and when the program does not exit by itself.
      const { stdout } = await promisify(execFile)(process.execPath, [file], { cwd: folder, timeout: 60_000 })
      expect(stdout.split("\n")).toContain(line)
    }, 70_000)
  }
})
