/** On a terminal a picture that is drawn again and again; elsewhere plain lines, and not too many of them. */
import { Effect } from "effect"
import type { Board } from "./board.ts"

export interface View {
  /** Says something that stays. */
  readonly say: (line: string) => Effect.Effect<void>
  /** Shows the board until it is interrupted. */
  readonly run: (board: Board) => Effect.Effect<never>
}

const stamp = (started: number) => `${((performance.now() - started) / 1000).toFixed(1).padStart(5)} s  `

const plain = (out: NodeJS.WriteStream, started: number): View => ({
  say: (line) => Effect.sync(() => void out.write(`${stamp(started)}${line}\n`)),
  run: (board) => {
    let last = board.progress
    return Effect.sleep("1 second").pipe(
      Effect.andThen(Effect.sync(() => {
        if (board.progress === last) return
        last = board.progress
        out.write(`${stamp(started)}${board.progress}\n`)
      })),
      Effect.forever
    )
  }
})

const terminal = (out: NodeJS.WriteStream, started: number): View => {
  const up = (lines: number) => lines === 0 ? "" : `\u001b[${lines}A`
  let drawn = 0
  const erase = () => `${up(drawn)}\r\u001b[J`
  const fit = (line: string) => line.length < out.columns ? line : `${line.slice(0, out.columns - 2)}…`
  const draw = (board: Board) => {
    const width = 30
    const done = Math.round(board.finished / board.total * width)
    const bar = `${"█".repeat(done)}${"░".repeat(width - done)}`
    const lines = ["", `${stamp(started)}${bar}  ${board.progress}`, ...board.lines().map((line) => `  ${line}`)]
    out.write(`${erase()}${lines.map((line) => `${fit(line)}\n`).join("")}`)
    drawn = lines.length
  }
  return {
    say: (line) =>
      Effect.sync(() => {
        out.write(`${erase()}${stamp(started)}${line}\n`)
        drawn = 0
      }),
    run: (board) =>
      Effect.sync(() => draw(board)).pipe(
        Effect.andThen(Effect.sleep("100 millis")),
        Effect.forever,
        Effect.onExit(() =>
          Effect.sync(() => {
            out.write(erase())
            drawn = 0
          })
        )
      )
  }
}

export const make = (out: NodeJS.WriteStream): View => {
  const started = performance.now()
  return out.isTTY ? terminal(out, started) : plain(out, started)
}
