import { Cause, Duration, Effect, Exit } from "effect"
import { realSleep } from "../../src/internal/testing/sleep.ts"
import { awake } from "./awake.ts"

export { realSleep }

/**
 * Runs `effect` until it succeeds with something other than `false`, and returns that. Failures and defects mean "not
 * yet". At the deadline (30 s by default, but for stalls) it dies with the last failure in the message; an attempt still
 * running then is interrupted.
 */
export const eventually = <A, E, R>(
  effect: Effect.Effect<A, E, R>,
  options?: {
    readonly timeout?: Duration.Input | undefined
    readonly interval?: Duration.Input | undefined
    readonly message?: string | undefined
  }
): Effect.Effect<Exclude<A, false>, never, R> =>
  Effect.suspend(() => {
    const timeout = Duration.toMillis(options?.timeout ?? "30 seconds")
    const started = performance.now()
    let attempts = 0
    let last = "the first attempt did not finish"
    const poll: Effect.Effect<Exclude<A, false>, never, R> = Effect.gen(function*() {
      while (true) {
        attempts++
        const exit = yield* Effect.exit(effect)
        if (Exit.isFailure(exit)) {
          if (Cause.hasInterruptsOnly(exit.cause)) return yield* Effect.failCause(exit.cause as Cause.Cause<never>)
          last = Cause.pretty(exit.cause)
        } else if (exit.value === false) {
          last = "the condition was false"
        } else {
          return exit.value as Exclude<A, false>
        }
        yield* realSleep(options?.interval ?? 20)
      }
    })
    const expire = Effect.suspend(() => {
      const waited = Math.round(performance.now() - started)
      const what = options?.message ?? "condition"
      return Effect.die(new Error(`${what}: not met after ${waited} ms and ${attempts} attempts; last: ${last}`))
    })
    return Effect.raceFirst(poll, Effect.andThen(awake(timeout), expire))
  })
