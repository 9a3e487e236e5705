/** The Redis of the benchmark: a private one, without persistence, on loopback TCP for all contestants alike. */
import { Redis } from "ioredis"
import { spawn, spawnSync } from "node:child_process"
import { createServer } from "node:net"
import { tmpdir } from "node:os"
import { pinned, sleep } from "./machine.ts"

export interface Server {
  readonly port: number
  readonly version: string
  readonly client: Redis
  /** The fields of INFO. */
  readonly info: () => Promise<ReadonlyMap<string, string>>
  readonly stop: () => Promise<void>
}

// Ends the server when our end of the pipe closes, however that came about.
const guard =
  `trap '' INT TERM HUP; (trap - INT TERM HUP; exec "$@") </dev/null >/dev/null 2>&1 & read -r _; kill -9 $!`

const program = ["redis-server", "valkey-server"].find((name) => spawnSync(name, ["--version"]).error === undefined)

const freePort = (): Promise<number> =>
  new Promise((resolve, reject) => {
    const probe = createServer()
    probe.once("error", reject)
    probe.listen(0, "127.0.0.1", () => {
      const address = probe.address()
      probe.close(() => resolve(typeof address === "object" && address !== null ? address.port : 0))
    })
  })

export const start = async (core: number | undefined): Promise<Server> => {
  if (program === undefined) throw new Error("neither redis-server nor valkey-server is on PATH")
  const port = await freePort()
  const options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", tmpdir()]
  const shell = spawn("/bin/sh", ["-c", guard, "bench", ...pinned(core, program, options.map(String))], {
    stdio: ["pipe", "ignore", "inherit"],
    // A group of its own, so that Ctrl-C reaches us first.
    detached: true
  })
  const client = new Redis({ host: "127.0.0.1", port, retryStrategy: () => 20, replyMapping: "legacy" })
  client.on("error", () => {})
  const deadline = performance.now() + 10_000
  while (client.status !== "ready") {
    if (performance.now() > deadline) throw new Error(`${program} did not start`)
    await sleep(10)
  }
  const info: Server["info"] = async () => {
    const text = String(await client.call("INFO", "everything"))
    return new Map(
      text.split("\r\n").flatMap((line) => {
        const at = line.indexOf(":")
        return at < 1 || line.startsWith("#") ? [] : [[line.slice(0, at), line.slice(at + 1)] as const]
      })
    )
  }
  const first = await info()
  const version = first.has("valkey_version")
    ? `Valkey ${first.get("valkey_version")}`
    : `Redis ${first.get("redis_version")}`
  return {
    port,
    version,
    client,
    info,
    stop: async () => {
      client.disconnect()
      const exited = new Promise((resolve) => shell.once("exit", resolve))
      shell.stdin.end()
      await exited
    }
  }
}

/** Seconds of processor time that the server has used. */
export const cpuSeconds = (info: ReadonlyMap<string, string>): number =>
  Number(info.get("used_cpu_user")) + Number(info.get("used_cpu_sys"))

/**
 * How many commands clients have sent, given which ones these clients send: Redis counts what scripts and functions call
 * in the same place, and no contestant's scripts call the commands that it sends itself.
 */
export const calls = (info: ReadonlyMap<string, string>, commands: ReadonlyArray<string>): number =>
  commands.reduce((sum, name) => sum + Number(/calls=(\d+)/.exec(info.get(`cmdstat_${name}`) ?? "")?.[1] ?? 0), 0)

/** How many commands Redis has executed, those of scripts and functions too. */
export const commands = (info: ReadonlyMap<string, string>): number =>
  [...info].reduce((sum, [name, text]) => {
    const isCommand = name.startsWith("cmdstat_") && name !== "cmdstat_info"
    return isCommand ? sum + Number(/calls=(\d+)/.exec(text)![1]) : sum
  }, 0)

/** Bytes of data, without the buffers of clients. */
export const dataBytes = (info: ReadonlyMap<string, string>): number =>
  Number(info.get("used_memory")) - Number(info.get("mem_clients_normal") ?? 0)

/** Milliseconds until the lease of lockstep's only holder of a resource runs out. */
export const leaseLeft = async ({ client }: Server, kind: "lock" | "election", name: string): Promise<number> => {
  const holderOf = async (sessions: string) => {
    // A lock with its holder is a field of the sessions, as lua/Lock.lua says: the holder is the first claim, perhaps with a flag.
    const inline = await client.hget(sessions, `@${kind}:${name}`)
    const at = inline?.split(" ").findIndex((word) => word.includes("/")) ?? -1
    if (at >= 0) return inline!.split(" ")[at]!.slice(at === 0 ? 1 : 0)
    const hash = await client.hgetall(sessions.replace(/sessions$/, `${kind}:${name}`))
    return Object.keys(hash).find((field) => field.startsWith("h"))?.slice(1)
  }
  let holder: string | undefined
  let sessions = ""
  for (sessions of await client.keys("*:sessions")) {
    holder = await holderOf(sessions)
    if (holder !== undefined) break
  }
  const session = holder!.slice(0, holder!.lastIndexOf("/"))
  const deadline = Number(
    await client.eval(
      "local _, _, deadline = struct.unpack('<Bdd', redis.call('HGET', KEYS[1], 's' .. ARGV[1])) return deadline",
      1,
      sessions,
      session
    )
  )
  const [seconds, micros] = await client.time()
  return deadline - (Number(seconds) * 1000 + Number(micros) / 1000)
}
