/** What the benchmark runs on, and how its processes are kept apart. */
import { spawnSync } from "node:child_process"
import { readFileSync } from "node:fs"
import * as os from "node:os"

/** Milliseconds on a clock that all processes of a machine share. */
export const now = (): number => Number(process.hrtime.bigint()) / 1e6

export const sleep = (millis: number): Promise<void> =>
  new Promise((resolve) => setTimeout(resolve, Math.max(0, millis)))

const read = (file: string): string => {
  try {
    return readFileSync(file, "utf8")
  } catch {
    return ""
  }
}

// "0-3,8" is 0 1 2 3 8. A container may not have all cores, nor the first ones.
const allowedCores = (): ReadonlyArray<number> => {
  const list = /Cpus_allowed_list:\s*(\S+)/.exec(read("/proc/self/status"))?.[1] ?? ""
  return list.split(",").filter((part) => part !== "").flatMap((part) => {
    const [first = 0, last = first] = part.split("-").map(Number)
    return Array.from({ length: last - first + 1 }, (_, at) => first + at)
  })
}

export interface Cores {
  /** The core of Redis; `undefined` when nothing is pinned. */
  readonly server: number | undefined
  /** The core of the n-th client process. */
  readonly client: (n: number) => number | undefined
  readonly description: string
}

export const findCores = (): Cores => {
  const cores = allowedCores()
  const [server, ...clients] = cores
  const unpinned = (why: string): Cores => ({
    server: undefined,
    client: () => undefined,
    description: `NOT pinned, as ${why}: expect noise`
  })
  if (spawnSync("taskset", ["--version"]).error !== undefined) return unpinned("there is no `taskset`")
  if (server === undefined || clients.length === 0) return unpinned("there is one core only")
  if (spawnSync("taskset", ["-c", String(server), "true"]).status !== 0) return unpinned("`taskset` is not permitted")
  return {
    server,
    client: (n) => clients[n % clients.length],
    description: clients.length === 1
      ? `Redis on core ${server}, all clients on core ${clients[0]}`
      : `Redis on core ${server}, each client process on a core of its own from ${clients[0]} on`
  }
}

/** The command line that runs a program on one core. */
export const pinned = (core: number | undefined, command: string, args: ReadonlyArray<string>): ReadonlyArray<string> =>
  core === undefined ? [command, ...args] : ["taskset", "-c", String(core), command, ...args]

export const describe = (): string => {
  const cpus = os.cpus()
  const system = /PRETTY_NAME="(.*)"/.exec(read("/etc/os-release"))?.[1] ?? os.type()
  const memory = (os.totalmem() / 2 ** 30).toFixed(0)
  return `${cpus[0]?.model.trim() ?? "unknown processor"}, ${cpus.length} cores, ${memory} GiB, ${system}, ` +
    `kernel ${os.release()}, ${os.arch()}`
}
