/** The line of jobs that wait in a process, against a plain list. */
import { assert, it } from "@effect/vitest"
import * as fc from "fast-check"
import { Line, type Owner } from "../src/internal/queue/line.ts"

interface Job {
  readonly asker: Owner
  readonly number: number
}

const step = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constant("push" as const), pick: fc.nat(5) }) },
  { weight: 4, arbitrary: fc.record({ do: fc.constant("shift" as const), pick: fc.nat(5) }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("giveBack" as const), pick: fc.nat(5) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("settle" as const), pick: fc.nat(5) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("drop" as const), pick: fc.nat(5) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("take" as const), pick: fc.nat(5) }) }
)

it("a line has its jobs in order, also when their owners leave and jobs come back", () => {
  fc.assert(
    fc.property(fc.array(step, { maxLength: 120, size: "max" }), (steps) => {
      const line = new Line<Job>()
      const owners: Array<Owner> = Array.from({ length: 6 }, () => ({ waiting: 0 }))
      let jobs: Array<Job> = []
      let returned: Array<Job> = []
      // Taken out, and neither stored nor given back.
      let out: Array<Job> = []
      let count = 0
      for (const { do: what, pick } of steps) {
        const owner = owners[pick]!
        if (what === "push") {
          const job = { asker: owner, number: count++ }
          jobs.push(job)
          line.push(job)
        } else if (what === "shift") {
          const first = returned.shift() ?? jobs.shift()
          assert.strictEqual(line.first, first)
          line.shift()
          if (first !== undefined) out.push(first)
        } else if (what === "giveBack") {
          line.giveBack(out)
          returned.push(...out.filter(({ asker }) => asker.gone !== true))
          out = []
        } else if (what === "settle") {
          line.settle()
          jobs.unshift(...returned)
          returned = []
        } else if (what === "drop") {
          const own = [...returned, ...jobs].filter(({ asker }) => asker === owner)
          assert.strictEqual(line.drop(owner), own.length)
          jobs = jobs.filter(({ asker }) => asker !== owner)
          returned = returned.filter(({ asker }) => asker !== owner)
          owners[pick] = { waiting: 0 }
        } else {
          const isWanted = ({ number }: Job) => number % 3 === 0
          assert.deepStrictEqual(line.take(isWanted), [...returned, ...jobs].filter(isWanted))
          jobs = jobs.filter((job) => !isWanted(job))
          returned = returned.filter((job) => !isWanted(job))
        }
        const all = [...returned, ...jobs]
        assert.strictEqual(line.length, all.length)
        assert.strictEqual(line.owners, new Set(all.map(({ asker }) => asker)).size)
        assert.strictEqual(line.first, all[0])
      }
      const all = [...returned, ...jobs]
      assert.deepStrictEqual(line.take(() => true), all)
      assert.strictEqual(line.first, undefined)
    }),
    { numRuns: 500 }
  )
})
