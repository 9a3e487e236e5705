/** Directories and child processes of tests, which end with the scope and with this process. */

import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { type ChildProcess, spawn, type StdioOptions } from "node:child_process"
import { randomBytes } from "node:crypto"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"

// Waits for the end of its standard input, which comes with the end of the process that holds the other side, even by
// SIGKILL. Renaming the directory first makes a child that is just being started fail to write its pid file, so that
// it never gets to `exec`. Own session and ignored signals: Ctrl-C at a terminal must not stop the clean-up.
const guardScript = `
trap '' INT TERM HUP
cat > /dev/null
mv "$0" "$0.gone" 2> /dev/null || exit 0
for file in "$0.gone"/*.pid; do
  [ -s "$file" ] && kill -9 "$(cat "$file")"
done
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  rm -rf "$0.gone" && exit 0
  sleep 0.1
done
`

const childScript = `echo $$ > "$0" && exec "$@"`

/** How a child ended: one of the two is not null. */
export interface Ended {
  readonly code: number | null
  readonly signal: NodeJS.Signals | null
}

/** A child process that cannot outlive its workspace. */
export interface Child {
  readonly pid: number
  readonly process: ChildProcess
  readonly running: boolean
  readonly ended: Promise<Ended>
  /** Does nothing when the process has ended. */
  readonly signal: (signal: NodeJS.Signals) => void
}

/** A temporary directory and the processes started in it. */
export interface Workspace {
  readonly directory: string
  readonly spawn: (command: string, args: ReadonlyArray<string>, options?: {
    readonly stdio?: StdioOptions
    readonly env?: NodeJS.ProcessEnv
  }) => Child
}

const startGuard = () => {
  const directory = path.join(os.tmpdir(), `lockstep-${randomBytes(6).toString("hex")}`)
  const guard = spawn("/bin/sh", ["-c", guardScript, directory], {
    stdio: ["pipe", "ignore", "ignore"],
    cwd: "/",
    detached: true
  })
  guard.unref()
  // After the guard, so that there is no moment with a directory and without a guard.
  fs.mkdirSync(directory, { mode: 0o700 })
  return { directory, guard }
}

const onceEnded = (child: ChildProcess) =>
  new Promise<Ended>((resolve) => {
    if (child.exitCode !== null || child.signalCode !== null) {
      resolve({ code: child.exitCode, signal: child.signalCode })
    } else {
      child.once("exit", (code, signal) => resolve({ code, signal }))
    }
  })

/**
 * A directory and its processes, for the life of the scope: when it closes, and likewise when this process dies by any
 * signal, the processes are killed and the directory is removed.
 */
export const workspace: Effect.Effect<Workspace, never, Scope.Scope> = Effect.acquireRelease(
  Effect.sync(() => {
    const { directory, guard } = startGuard()
    const children = new Set<Child>()
    let started = 0
    const start: Workspace["spawn"] = (command, args, options) => {
      const pidFile = path.join(directory, `${++started}.pid`)
      const child = spawn("/bin/sh", ["-c", childScript, pidFile, command, ...args], {
        stdio: options?.stdio ?? "ignore",
        env: options?.env ?? process.env,
        cwd: directory
      })
      if (child.pid === undefined) throw new Error(`cannot start ${command}`)
      const self: Child = {
        pid: child.pid,
        process: child,
        get running() {
          return child.exitCode === null && child.signalCode === null
        },
        ended: onceEnded(child).then((ended) => {
          // The number may belong to another process from now on.
          fs.rmSync(pidFile, { force: true })
          children.delete(self)
          return ended
        }),
        signal: (signal) => {
          child.kill(signal)
        }
      }
      children.add(self)
      return self
    }
    return { directory, guard, children, spawn: start }
  }),
  ({ children, directory, guard }) =>
    Effect.promise(async () => {
      const ended = Array.from(children, (child) => child.ended)
      for (const child of children) child.signal("SIGKILL")
      await Promise.all(ended)
      fs.rmSync(directory, { recursive: true, force: true, maxRetries: 5 })
      guard.ref()
      guard.stdin.end()
      await onceEnded(guard)
    })
)
