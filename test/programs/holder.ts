/** Another process of the tests: takes a lock or permits again and again, and reports what happens to it. */
import { Effect, Exit, Layer, Option } from "effect"
import { Coordinator, Fence, Lease, Lock, Redis, Semaphore } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"
import { now } from "../support/now.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  readonly what: "lock" | "permits"
  /** `once` holds until it is lost or killed; `busy` also blocks the event loop for that long when told to hold. */
  readonly mode: "hold" | "block" | "cycle"
  readonly millis: number
}

export type Event =
  | { readonly event: "ready" | "asked" | "stopped" }
  | { readonly event: "held"; readonly token: number; readonly at: number }
  | { readonly event: "tick"; readonly token: number; readonly at: number }
  | { readonly event: "fenced"; readonly fine: boolean }
  | { readonly event: "interrupted"; readonly at: number }
  | { readonly event: "released"; readonly token: number; readonly at: number }
  | { readonly event: "lost"; readonly reason: string; readonly at: number }

const { lease, margin, millis, mode, namespace, url, what } = argument() as Argument

const say = (event: Event) => Effect.sync(() => emit(event))

const body = Effect.gen(function*() {
  const { token } = Option.getOrThrow(yield* Lease.current)
  yield* say({ event: "held", token, at: now() })
  if (mode === "cycle") {
    yield* Effect.sleep(millis)
    return yield* say({ event: "released", token, at: now() })
  }
  if (mode === "block") {
    yield* Effect.sync(() => {
      const end = performance.now() + millis
      while (performance.now() < end);
    })
    return yield* say({ event: "tick", token, at: now() })
  }
  while (true) {
    yield* Effect.sleep(20)
    yield* say({ event: "tick", token, at: now() })
  }
}).pipe(
  Effect.onInterrupt(() => say({ event: "interrupted", at: now() }))
)

const program = Effect.gen(function*() {
  yield* say({ event: "ready" })
  const held: Effect.Effect<void, Lock.LockError | Semaphore.SemaphoreError, Coordinator.Coordinator> = what === "lock"
    ? Lock.withLock(body, "shared")
    : (yield* Semaphore.make({ name: "shared", permits: 2 })).withPermit(body)
  do {
    yield* say({ event: "asked" })
    const exit = yield* Effect.exit(held)
    if (Exit.isFailure(exit)) {
      const error = Option.getOrUndefined(Exit.findErrorOption(exit))
      const reason = error !== undefined && error.reason._tag === "LeaseLost" ? error.reason.reason : String(exit.cause)
      yield* say({ event: "lost", reason, at: now() })
      // What a paused process would write after it goes on has to be refused.
      if (error?.reason._tag === "LeaseLost") {
        const fenced = yield* Effect.exit(
          Fence.run({ token: error.reason.token }, `${namespace}:written`, "SET", "late")
        )
        yield* say({ event: "fenced", fine: Exit.isSuccess(fenced) })
      }
    }
  } while (mode === "cycle")
  yield* say({ event: "stopped" })
}).pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

await Effect.runPromise(program)
