import { execFileSync } from "node:child_process"
import { existsSync } from "node:fs"
import { join } from "node:path"
import { defineConfig } from "vitest/config"
import { BaseSequencer, type TestSpecification } from "vitest/node"
import { effort } from "./test/support/effort.ts"

// Tests start hundreds of programs, each of which would spend most of its time on compiling the same modules.
const compiled = join(import.meta.dirname, "node_modules/.cache/compiled")
process.env["NODE_COMPILE_CACHE"] = compiled
if (!existsSync(compiled)) {
  // What a program has compiled is written when it ends, and most programs of tests are killed.
  execFileSync(process.execPath, ["--input-type=module", "-e", "await import('./src/index.ts')"], {
    cwd: import.meta.dirname
  })
}

/** The longest files, which would run alone at the end; those that wait beside those that start many programs. */
const longest = [
  "matrix.blackhole",
  "promises",
  "processes.queue",
  "demo",
  "matrix",
  "examples",
  "processes",
  "TaskGroup.test",
  "Queue.test",
  "factors",
  "package",
  "SharedRef.test",
  "Election.test",
  "cluster",
  "connection",
  "support",
  "limits",
  "heartbeats",
  "straight.actor",
  "Queue.groups.actor"
].map((name) => join(import.meta.dirname, "test", name))

class LongestFirst extends BaseSequencer {
  override async sort(files: Array<TestSpecification>) {
    const rank = ({ moduleId }: TestSpecification) => {
      const at = longest.findIndex((name) => moduleId.startsWith(name))
      return at < 0 ? longest.length : at
    }
    return (await super.sort(files)).toSorted((x, y) => rank(x) - rank(y))
  }
}

export default defineConfig({
  test: {
    include: ["test/**/*.test.ts"],
    pool: "forks",
    // Each file starts its own Redis, and waits most of the time.
    maxWorkers: 3,
    // A process for each file would spend a second on loading the same modules.
    isolate: false,
    sequence: { sequencer: LongestFirst },
    // A test that waits for a lease to lapse, or for a failover, takes seconds; one that hangs should still end.
    testTimeout: 60_000 * Math.max(1, effort),
    hookTimeout: 60_000
  }
})
