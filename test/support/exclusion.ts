import { Effect, Option } from "effect"
import { Lease } from "../../src/index.ts"
import { realSleep } from "./eventually.ts"

/** More inside than there may be, or a token that is not newer than one before it. */
export interface Violation {
  readonly what: "overlap" | "token"
  readonly key: string
  readonly detail: string
}

/**
 * Watches which holders are inside of what. It runs in the process of the test, so that it sees all coordinators at once, and it
 * judges while they run.
 */
export const exclusion = () => {
  const inside = new Map<string, number>()
  const tokens = new Map<string, number>()
  const violations: Array<Violation> = []
  let entered = 0

  /** For the body of a `with...` form: stays for so many milliseconds, or until it is interrupted. */
  const enter = (key: string, options?: {
    readonly permits?: number | undefined
    readonly capacity?: number | undefined
    readonly millis?: number | undefined
  }): Effect.Effect<number> => {
    const { capacity = 1, millis = 0, permits = 1 } = options ?? {}
    return Effect.acquireUseRelease(
      Effect.map(Lease.current, (lease) => {
        const { token } = Option.getOrThrow(lease)
        const now = (inside.get(key) ?? 0) + permits
        inside.set(key, now)
        entered++
        if (now > capacity) violations.push({ what: "overlap", key, detail: `${now} of ${capacity}` })
        const last = tokens.get(key) ?? 0
        // Those that share can see their grants in another order than Redis gave them.
        if (capacity === 1 && token <= last) violations.push({ what: "token", key, detail: `${token} after ${last}` })
        tokens.set(key, Math.max(last, token))
        return token
      }),
      (token) => Effect.as(millis === 0 ? Effect.yieldNow : realSleep(millis), token),
      () => Effect.sync(() => inside.set(key, inside.get(key)! - permits))
    )
  }

  return {
    enter,
    violations: violations as ReadonlyArray<Violation>,
    get entered() {
      return entered
    },
    /** Whether any holder is inside of anything. */
    get busy() {
      return [...inside.values()].some((count) => count > 0)
    },
    token: (key: string) => tokens.get(key) ?? 0
  }
}
