import { Effect, type Exit, Fiber, Scheduler } from "effect"

/** Interrupts a fiber before operation number `at`, its own or of the fibers that work for it. */
class Interrupter extends Scheduler.MixedScheduler {
  count = 0
  target: Fiber.Fiber<unknown, unknown> | undefined = undefined
  readonly at: number

  constructor(at: number) {
    super()
    this.at = at
  }

  override shouldYield(fiber: Fiber.Fiber<unknown, unknown>): boolean {
    if (this.target !== undefined && ++this.count === this.at) {
      this.target.interruptUnsafe()
      // Whichever fiber it is of, so that the interruption comes before this very operation.
      return true
    }
    return super.shouldYield(fiber)
  }
}

/** Runs a program that is interrupted before operation number `at`, if it has so many: how it ended, and whether it has. */
export const interruptedAt = <A, E, R>(
  at: number,
  program: Effect.Effect<A, E, R>
): Effect.Effect<{ readonly exit: Exit.Exit<A, E>; readonly reached: boolean }, never, R> =>
  Effect.gen(function*() {
    const scheduler = new Interrupter(at)
    const fiber = yield* Effect.forkChild(
      Effect.withFiber((fiber) => {
        scheduler.target = fiber
        return program
      }).pipe(Effect.provideService(Scheduler.Scheduler, scheduler))
    )
    const exit = yield* Fiber.await(fiber)
    return { exit, reached: scheduler.count >= at }
  })

/** Runs a program that is interrupted after so many turns of the event loop, regardless of what it waits for then. */
export const interruptedAfter = <A, E, R>(
  turns: number,
  program: Effect.Effect<A, E, R>
): Effect.Effect<Exit.Exit<A, E>, never, R> =>
  Effect.gen(function*() {
    const fiber = yield* Effect.forkChild(program, { startImmediately: true })
    for (let turn = 0; turn < turns; turn++) {
      yield* Effect.promise(() => new Promise<void>((resolve) => setImmediate(resolve)))
    }
    yield* Fiber.interrupt(fiber)
    return yield* Fiber.await(fiber)
  })
