/**
 * A Redis server that lives as long as this process at most.
 *
 * Its parent is a shell that waits on a pipe from us. When this process has ended, however that happened, the pipe
 * closes, and the shell ends the server and removes the directory.
 */

import { spawn } from "node:child_process"
import * as fs from "node:fs"
import * as net from "node:net"
import * as os from "node:os"
import * as path from "node:path"
import type { Io } from "../io.ts"

/** Which server to start, and how. */
export interface Options {
  readonly binary?: string | undefined
  readonly args?: ReadonlyArray<string> | undefined
}

export interface Embedded {
  readonly url: string
  readonly path: string
  readonly pid: number
  readonly stop: () => Promise<void>
}

// The shell ignores what ends a whole process group, such as Ctrl-C, because it has to outlive us by a moment. The
// server is killed rather than asked: it has nothing to save, or it has an append-only file.
const script = `
trap '' INT TERM HUP
dir=$1
shift
(trap - INT TERM HUP; exec "$@") </dev/null &
pid=$!
echo "$pid" >"$dir/pid"
read -r _
kill -9 "$pid" 2>/dev/null
wait "$pid" 2>/dev/null
rm -rf "$dir"
`

const names = ["redis-server", "valkey-server"]

const isExecutable = (file: string): boolean => {
  try {
    fs.accessSync(file, fs.constants.X_OK)
    return fs.statSync(file).isFile()
  } catch {
    return false
  }
}

const onPath = (name: string): string | undefined => {
  if (name.includes("/")) return isExecutable(name) ? name : undefined
  for (const directory of (process.env["PATH"] ?? "").split(path.delimiter)) {
    const file = path.join(directory, name)
    if (directory !== "" && isExecutable(file)) return file
  }
  return undefined
}

const find = (binary: string | undefined): string => {
  const wanted = binary ?? process.env["LOCKSTEP_REDIS_SERVER"]
  const found = wanted === undefined ? names.map(onPath).find((file) => file !== undefined) : onPath(wanted)
  if (found !== undefined) return found
  throw new Error(
    `${wanted ?? names.join(" or ")} was not found; install it with "apt-get install redis-server", ` +
      `"dnf install redis", "apk add redis" or "brew install redis", or set LOCKSTEP_REDIS_SERVER to its path`
  )
}

/** Whether a server on this socket answers PING, within so many milliseconds. */
const answers = (socket: string, io: Io, millis: number): Promise<boolean> =>
  new Promise((resolve) => {
    const connection = net.connect(socket)
    const end = (answer: boolean) => {
      timer.cancel()
      connection.destroy()
      resolve(answer)
    }
    const timer = io.after(millis, () => end(false))
    connection.once("error", () => end(false))
    connection.once("close", () => end(false))
    connection.once("data", (data) => end(data.toString().startsWith("+PONG")))
    connection.write("PING\r\n")
  })

/** Starts the shell. It removes the directory at its end, and nothing else does. */
const spawnIn = (directory: string, command: ReadonlyArray<string>, args: ReadonlyArray<string>) => {
  try {
    return spawn("/bin/sh", ["-c", script, "lockstep", directory, ...command, ...args], {
      // A group of its own, so that Ctrl-C reaches us first.
      detached: true,
      stdio: ["pipe", "pipe", "pipe"]
    })
  } catch (error) {
    fs.rmSync(directory, { recursive: true, force: true })
    throw error
  }
}

export const start = async (options: Options, timeoutMillis: number, io: Io): Promise<Embedded> => {
  const binary = find(options.binary)
  const directory = fs.mkdtempSync(path.join(os.tmpdir(), "lockstep-"))
  let socket = path.join(directory, "redis.sock")
  // The longest path that a unix socket can have is 104 bytes on macOS and 108 on Linux.
  if (Buffer.byteLength(socket) > 100) {
    fs.rmSync(directory, { recursive: true, force: true })
    throw new Error(
      `the temporary directory ${os.tmpdir()} has too long a name for a socket; set TMPDIR to a shorter one`
    )
  }
  socket = fs.realpathSync(directory) + "/redis.sock"
  const shell = spawnIn(directory, [
    binary,
    ...["--port", "0", "--unixsocket", socket, "--unixsocketperm", "700", "--dir", directory],
    ...["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--daemonize", "no"]
  ], options.args ?? [])
  let output = ""
  const keep = (data: Buffer) => {
    output = (output + data.toString()).slice(-2000)
  }
  shell.stdout.on("data", keep)
  shell.stderr.on("data", keep)
  const exited = new Promise<void>((resolve) => shell.once("exit", () => resolve()))
  shell.once("error", () => {})
  shell.stdin.once("error", () => {})
  const stop = async () => {
    shell.ref()
    shell.stdin.end()
    await exited
  }
  // Neither the shell nor its pipes keep this process alive.
  shell.unref()
  for (const stream of [shell.stdin, shell.stdout, shell.stderr]) (stream as unknown as net.Socket).unref()

  const deadline = io.now() + timeoutMillis
  const pidFile = path.join(directory, "pid")
  for (;;) {
    if (await answers(socket, io, Math.max(1, deadline - io.now()))) break
    const pid = readPid(pidFile)
    const dead = pid !== undefined && !isAlive(pid)
    if (dead || io.now() > deadline) {
      await stop()
      const last = output.trim().split("\n").at(-1)
      throw new Error(
        `${binary} ${dead ? "ended at once" : "did not answer in time"}${last ? `; it said: ${last}` : ""}`
      )
    }
    await new Promise<void>((resolve) => void io.after(5, resolve))
  }
  const url = `unix://${socket.split("/").map(encodeURIComponent).join("/")}`
  return { url, path: socket, pid: readPid(pidFile)!, stop }
}

const readPid = (file: string): number | undefined => {
  try {
    return Number.parseInt(fs.readFileSync(file, "utf8"), 10) || undefined
  } catch {
    return undefined
  }
}

const isAlive = (pid: number): boolean => {
  try {
    process.kill(pid, 0)
    // A child that the shell has not waited for yet is a zombie, and still has a process id.
    return !fs.existsSync(`/proc/${pid}/stat`) || !/^\d+ \(.*\) Z/.test(fs.readFileSync(`/proc/${pid}/stat`, "utf8"))
  } catch {
    return false
  }
}
