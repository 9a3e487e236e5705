import { type ChildProcess, spawn } from "node:child_process"
import { once } from "node:events"
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { afterAll, afterEach, describe, expect, it } from "vitest"

const main = fileURLToPath(new URL("../examples/demo/main.ts", import.meta.url))
const root = mkdtempSync(join(tmpdir(), "lockstep-demo-"))
const folderOf = (name: string) => {
  const folder = join(root, name)
  mkdirSync(folder)
  return folder
}
// A copy, as nobody may change a file between the count and the count that it is compared with.
const sources = folderOf("sources")
cpSync(fileURLToPath(new URL("../src", import.meta.url)), sources, { recursive: true })

afterAll(() => rmSync(root, { recursive: true }))

const children = new Set<ChildProcess>()

afterEach(() => {
  for (const child of children) child.kill("SIGKILL")
  children.clear()
})

const run = (folder: string) => {
  const child = spawn(process.execPath, [main, folder], { stdio: ["ignore", "pipe", "pipe"] })
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
    // Where nobody waits for orphans, what is left of one is a zombie.
    return process.platform !== "linux" || !/^\d+ \(.*\) Z/.test(readFileSync(`/proc/${pid}/stat`, "utf8"))
  } catch {
    return false
  }
}

describe("demo", () => {
  it("counts every word once though one worker is killed and one is stopped", async () => {
    const { ended, output } = run(sources)
    expect(await ended, output()).toBe(0)
    const text = output()
    expect(text).toMatch(/worker-\d is killed \(kill -9\) while it holds file \S+, a permit, the totals/)
    expect(text).toMatch(/worker-\d takes over the totals from worker-\d, \d\.\d s later/)
    expect(text).toMatch(/worker-\d writes late, with token \d+; refused, as \d+ has been seen/)
    expect(text).toMatch(/^totals match/m)
    // On anything but a terminal: lines for people and files, without control characters.
    // oxlint-disable-next-line no-control-regex
    expect(text).not.toMatch(/[\u0000-\u0009\u000b-\u001f]/)
  })

  it("works with a single file, smaller than one part", async () => {
    const folder = folderOf("one")
    writeFileSync(join(folder, "one.txt"), "to be or not to be")
    const { ended, output } = run(folder)
    expect(await ended, output()).toBe(0)
    expect(output()).toMatch(/^words +6, 4 different ones$/m)
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
