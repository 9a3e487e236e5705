import { Effect } from "effect"
import { type ChildProcess, spawn } from "node:child_process"
import { once } from "node:events"
import { cpSync, globSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { afterAll, afterEach, describe, expect, it } from "vitest"
import { eventually } from "./support/eventually.ts"
import { standalone } from "./support/servers.ts"

const main = fileURLToPath(new URL("../examples/demo/main.ts", import.meta.url))
const root = mkdtempSync(join(tmpdir(), "lockstep-demo-"))
const folderOf = (name: string) => {
  const folder = join(root, name)
  mkdirSync(folder)
  return folder
}
// A copy, so that no file changes between the count and the count that it is compared with.
const sources = folderOf("sources")
cpSync(fileURLToPath(new URL("../src", import.meta.url)), sources, { recursive: true })

afterAll(() => rmSync(root, { recursive: true }))

const children = new Set<ChildProcess>()

afterEach(() => {
  for (const child of children) child.kill("SIGKILL")
  children.clear()
})

const run = (folder: string, env: NodeJS.ProcessEnv = process.env) => {
  const child = spawn(process.execPath, [main, folder], { env, stdio: ["ignore", "pipe", "pipe"] })
  children.add(child)
  let output = ""
  const waiting = new Set<() => void>()
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding("utf8").on("data", (text: string) => {
      output += text
      for (const check of waiting) check()
    })
  }
  return {
    child,
    output: () => output,
    saw: (pattern: RegExp) =>
      new Promise<void>((resolve, reject) => {
        const check = () => {
          if (pattern.test(output)) resolve()
        }
        waiting.add(check)
        child.once("close", () => reject(new Error(`ended without ${pattern}:\n${output}`)))
        check()
      }),
    ended: once(child, "close").then(([code]) => code as number | null)
  }
}

const isAlive = (pid: number) => {
  try {
    process.kill(pid, 0)
    // Where no process waits for orphans, an orphan that has ended stays as a zombie.
    return process.platform !== "linux" || !/^\d+ \(.*\) Z/.test(readFileSync(`/proc/${pid}/stat`, "utf8"))
  } catch {
    return false
  }
}

/** The five most frequent words of two letters or more, as the result has them. */
const mostFrequent = (folder: string) => {
  const counts = new Map<string, number>()
  for (const file of globSync("**/*.{ts,json}", { cwd: folder })) {
    const text = readFileSync(join(folder, file), "utf8").toLowerCase()
    for (const word of text.split(/[^\p{L}\p{N}_]+/u)) {
      if (/^\p{L}{2,}$/u.test(word)) counts.set(word, (counts.get(word) ?? 0) + 1)
    }
  }
  const sorted = [...counts].sort(([a, m], [b, n]) => n - m || (a < b ? -1 : 1))
  return sorted.slice(0, 5).map(([word, times]) => `${word} ${times.toLocaleString("en")}`).join(", ")
}

describe("demo", () => {
  it("counts every word once though one leader is killed and one is stopped", async () => {
    const { ended, output } = run(sources)
    expect(await ended, output()).toBe(0)
    const text = output()
    const [, killed, held] = /(worker-\d) is killed \(kill -9\) while it holds (.*)/.exec(text)!
    for (const what of ["the lead", "file ", "a permit", "the totals"]) expect(held).toContain(what)
    expect(text).toMatch(/worker-\d takes over the totals from worker-\d, \d\.\d s later/)
    expect(text).toMatch(/worker-\d writes late, with token \d+; refused, as \d+ has been seen/)
    expect(text).toMatch(/^totals match/m)

    const progress = [...text.matchAll(/ (\d+) of (\d+) files, /g)].map(([, finished, total]) =>
      [finished, total].map(Number)
    )
    const finished = progress.map(([finished]) => finished!)
    expect(finished).toEqual(finished.toSorted((a, b) => a - b))
    expect(finished.at(-1)).toBeGreaterThan(0)
    const total = Number(/^files +(\d+)$/m.exec(text)?.[1])
    expect(new Set(progress.map(([, total]) => total))).toEqual(new Set([total]))

    const terms = [...text.matchAll(/(worker-\d) leads, term (\d+)(?:, (\d\.\d) s after (worker-\d) was killed)?/g)]
    const numbers = terms.map(([, , term]) => Number(term))
    expect(numbers).toEqual([...new Set(numbers)].sort((a, b) => a - b))
    const [, successor, , vacant] = terms.find(([, , , , predecessor]) => predecessor === killed)!
    expect(successor).not.toBe(killed)
    // A lease of two seconds, which may have been renewed some time before.
    expect(Number(vacant)).toBeGreaterThan(1)

    const shares = [0, 1, 2, 3].map((share) =>
      new RegExp(`worker-\\d finds the most frequent words of share ${share}$`, "m")
    )
    const steps = [...shares, /worker-\d proclaims the result/]
    for (const step of steps) expect(text).toMatch(step)
    expect(/^most frequent +(.*)$/m.exec(text)?.[1]).toBe(mostFrequent(sources))
    // On anything but a terminal: lines for people and files, without control characters.
    // oxlint-disable-next-line no-control-regex
    expect(text).not.toMatch(/[\u0000-\u0009\u000b-\u001f]/)
  })

  it("works with a single file, smaller than one part, and leaves nothing in a Redis that was there before", async () => {
    const folder = folderOf("one")
    writeFileSync(join(folder, "one.txt"), "to be or not to be")
    const program = Effect.gen(function*() {
      const server = yield* standalone()
      const { ended, output } = run(folder, { ...process.env, REDIS_URL: server.url })
      expect(yield* Effect.promise(() => ended), output()).toBe(0)
      expect(output()).toMatch(/^words +6, 4 different ones$/m)
      expect(output()).toMatch(/^most frequent +be 2, to 2, not 1, or 1$/m)
      // The numbers of the partitions stay, and for a day the fence.
      const left = Effect.map(server.cli("KEYS", "*"), (keys) => {
        const more = keys.split("\n").filter((key) => !/:(sessions|floor|libraries)$|lockstep:fence:/.test(key))
        expect(more.filter((key) => key !== "")).toEqual([])
      })
      yield* eventually(left, { message: "nothing is left" })
    })
    await Effect.runPromise(Effect.scoped(program))
  })

  it("says what is wrong, and fails, when there is nothing to count", async () => {
    const { ended, output } = run(folderOf("none"))
    expect(await ended).toBe(1)
    expect(output()).toContain("There are no text files in")
  })

  for (const signal of ["SIGINT", "SIGKILL"] as const) {
    it(`leaves no process behind after ${signal}, also none that is stopped`, async () => {
      const { child, ended, output, saw } = run(sources)
      await saw(/is stopped \(SIGSTOP\)/)
      const pids = [...output().matchAll(/process (\d+)/g)].map(([, pid]) => Number(pid))
      expect(pids).toHaveLength(5)
      child.kill(signal)
      expect(await ended).toBe(signal === "SIGINT" ? 130 : null)
      await expect.poll(() => pids.filter(isAlive), { timeout: 10_000 }).toEqual([])
    })
  }
})
