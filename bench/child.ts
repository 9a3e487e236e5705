/** Starts and talks to the processes of the contestants. */
import { spawn } from "node:child_process"
import { fileURLToPath } from "node:url"
import type { Job } from "./case.ts"
import { pinned } from "./machine.ts"
import type { ToChild } from "./parent.ts"

export interface Child {
  /** The next message from it. */
  readonly next: <A>() => Promise<A>
  readonly send: (message: ToChild) => void
  /** SIGKILL. */
  readonly kill: () => void
  readonly ended: Promise<void>
}

const program = fileURLToPath(new URL("case.ts", import.meta.url))

export const start = (core: number | undefined, job: Job, nodeOptions: ReadonlyArray<string> = []): Child => {
  const [command, ...args] = pinned(core, process.execPath, [
    "--expose-gc",
    ...nodeOptions,
    program,
    JSON.stringify(job)
  ])
  const child = spawn(command!, args, {
    // What it logs must not get into the table.
    stdio: ["ignore", process.stderr, process.stderr, "ipc"],
    env: { ...process.env, NODE_ENV: "production", DEBUG: "" }
  })
  const messages: Array<unknown> = []
  let waiting: { readonly resolve: (message: never) => void; readonly reject: (error: Error) => void } | undefined
  let over: Error | undefined
  child.on("message", (message) => {
    if (waiting === undefined) return void messages.push(message)
    waiting.resolve(message as never)
    waiting = undefined
  })
  const ended = new Promise<void>((resolve) => {
    const end = (how: string) => {
      over = new Error(`the process of ${job.contestant} (${job.task.is}) ended: ${how}`)
      waiting?.reject(over)
      waiting = undefined
      resolve()
    }
    child.once("exit", (code, signal) => end(`${signal ?? `exit code ${code}`}`))
    child.once("error", (error) => end(error.message))
  })
  return {
    next: () =>
      new Promise((resolve, reject) => {
        if (messages.length > 0) return resolve(messages.shift() as never)
        if (over !== undefined) return reject(over)
        waiting = { resolve, reject }
      }),
    send: (message) => void child.send(message),
    kill: () => void child.kill("SIGKILL"),
    ended
  }
}
