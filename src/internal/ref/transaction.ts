/** Changes refs of one partition together. */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { Requests } from "../actor/lua.ts"
import type { Outbox } from "../hold/following.ts"
import { type Cell, together, type Versioned, type Written } from "./cell.ts"

const unchanged: Written = { json: "", following: undefined }

/** The function may run several times: its result for outdated values says nothing. */
export const transaction = <B, E>(
  refs: ReadonlyArray<readonly [cell: Cell<any, E>, outbox: Outbox<any>]>,
  f: (values: ReadonlyArray<any>) => readonly [B, ReadonlyArray<any>]
): Effect.Effect<B, E> => {
  const cells = refs.map(([cell]) => cell)
  const [first, ...rest] = cells as [Cell<any, E>, ...Array<Cell<any, E>>]
  const others = rest.map(({ place }) => place.key)
  const attempt = (bases: ReadonlyArray<Versioned<any>>, verified: boolean): Effect.Effect<B, E> =>
    Effect.flatMap(
      Effect.exit(Effect.suspend(() => {
        const [result, values] = f(bases.map(({ value }) => value))
        if (values.length !== cells.length) throw new RangeError(`f must answer ${cells.length} values`)
        return Effect.map(
          Effect.forEach(refs, ([cell, outbox], at) =>
            Object.is(values[at], bases[at]!.value)
              ? Effect.succeed(unchanged)
              : cell.prepare(values[at], outbox, "committed")),
          (all) => ({ result, all })
        )
      })),
      (exit) => {
        if (Exit.isFailure(exit)) {
          // The failure of a function on outdated values says nothing.
          return verified ? Effect.failCause(exit.cause) : Effect.flatMap(fresh, (bases) => attempt(bases, true))
        }
        const { all, result } = exit.value
        const texts = all.map(({ json }) => json)
        const following = all.map(({ following }) => following).reduce(together, undefined)
        const changes = cells.map((cell, at) =>
          `${bases[at]!.version} ${cell.options.timeToLive} ${Buffer.byteLength(texts[at]!)}:${texts[at]}`
        )
        const answered = (reply: Requests["sharedRef.commit"]["reply"]) => {
          if (reply[0] !== "committed") return
          for (const [at, text] of texts.entries()) if (text !== "") cells[at]!.wrote(reply[1], text)
        }
        return Effect.flatMap(
          first.write("sharedRef.commit", [cells.length, changes.join("")], answered, { following, others }),
          (reply) =>
            reply[0] === "committed" ? Effect.succeed(result) : Effect.flatMap(
              Effect.forEach(cells, (cell, at) => {
                const [version, value] = (reply[1] as ReadonlyArray<readonly [number, unknown]>)[at]!
                return cell.decode(cell.last = { version, parse: () => value })
              }),
              (bases) => attempt(bases, true)
            )
        )
      }
    )
  const fresh = Effect.forEach(cells, (cell) => cell.versioned, { concurrency: "unbounded" })
  return Effect.suspend(() => {
    const guesses = cells.map((cell) => cell.guess)
    if (guesses.includes(undefined)) return Effect.flatMap(fresh, (bases) => attempt(bases, true))
    return Effect.flatMap(Effect.all(guesses.map((guess) => guess!)), (bases) => attempt(bases, false))
  })
}
