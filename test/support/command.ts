/**
 * One command, on a connection of its own. Tests ask Redis in loops, and a command line client for each question costs more
 * time than all else that they do.
 */
import { Data, Effect } from "effect"
import * as net from "node:net"
import { framer } from "../../src/internal/testing/resp.ts"

/** An error reply, or no reply within 10 seconds. */
export class CommandError extends Data.TaggedError("CommandError")<{
  readonly command: string
  readonly message: string
}> {}

export type Reply = string | number | null | ReadonlyArray<Reply>

/** What is behind the socket of a server, and which user asks. */
export interface Target {
  readonly socket: string
  readonly credentials?: { readonly user: string; readonly password: string } | undefined
}

const encode = (words: ReadonlyArray<string>) =>
  `*${words.length}\r\n${words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`).join("")}`

/** A whole reply; an error throws. */
const decode = (frame: Buffer): Reply => {
  let at = 0
  const next = (): Reply => {
    const type = String.fromCharCode(frame[at]!)
    const end = frame.indexOf("\r\n", at)
    const line = frame.toString("utf8", at + 1, end)
    at = end + 2
    if (type === "+") return line
    if (type === ":") return Number(line)
    if (type === "-") throw new Error(line)
    const size = Number(line)
    if (size < 0) return null
    if (type === "*") return Array.from({ length: size }, next)
    const from = at
    at += size + 2
    return frame.toString("utf8", from, from + size)
  }
  return next()
}

export const call = (
  { credentials, socket }: Target,
  args: ReadonlyArray<string | number>
): Effect.Effect<Reply, CommandError> =>
  Effect.callback((resume, signal) => {
    const words = args.map(String)
    const greeting = credentials === undefined ? [] : [["AUTH", credentials.user, credentials.password]]
    const frames = framer()
    const replies: Array<Buffer> = []
    const connection = net.connect(socket)
    const settle = (result: () => Reply) => {
      connection.destroy()
      resume(Effect.try({
        try: result,
        catch: (error) => new CommandError({ command: words.join(" "), message: (error as Error).message })
      }))
    }
    const fail = (message: string) =>
      settle(() => {
        throw new Error(message)
      })
    connection.setTimeout(10_000, () => fail("no reply within 10 seconds"))
    connection.on("error", (error) => fail(error.message))
    connection.on("close", () => fail("closed without a reply"))
    connection.on("data", (chunk) => {
      replies.push(...frames(chunk))
      if (replies.length > greeting.length) settle(() => replies.map(decode).at(-1)!)
    })
    signal.addEventListener("abort", () => connection.destroy())
    connection.write([...greeting, words].map(encode).join(""))
  })

/** A reply as the command line client prints it. */
export const textOf = (reply: Reply): string =>
  reply === null ? "" : typeof reply === "object" ? reply.map(textOf).join("\n") : String(reply)
