/** Whether what begins keeps to a rate: one each `spacing` ms, and what is saved up of that in `burst` ms. */
import { assert } from "@effect/vitest"

// In ms: tokens tell the time, and consecutive ones of a call run ahead of it.
const inexact = 2

export const bucket = (spacing: number, burst: number) => {
  let free = 0
  return (token: number, what: string): void => {
    if (spacing === 0) return
    const now = Math.floor(token / 1000)
    assert.isAtMost(free + spacing - burst, now + inexact, `${what} began too early`)
    free = Math.max(free, now) + spacing
  }
}
