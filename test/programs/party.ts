/** Another process of the tests: one party of a barrier or a double barrier, which says how far it has come. */
import { Cause, Effect, Layer, Option } from "effect"
import { Barrier, Coordinator, DoubleBarrier, Redis } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  readonly parties: number
  /** What it does, and stays in: the wait of a barrier, its action, the wait to enter, a phase, or the wait to leave it. */
  readonly does: "await" | "withdraw" | "act" | "enter" | "stay" | "leave"
}

export type Event =
  | { readonly event: "ready" | "acting" | "inside" | "leaving" | "done" }
  | { readonly event: "failed"; readonly reason: string }

const { does, lease, margin, namespace, parties, url } = argument() as Argument

const say = (event: Event) => Effect.sync(() => emit(event))

const program = Effect.gen(function*() {
  if (does === "await" || does === "withdraw" || does === "act") {
    const barrier = yield* Barrier.make({
      name: "all",
      parties,
      onDeparture: does === "withdraw" ? "withdraw" : "break",
      ...does === "act" ? { action: () => Effect.andThen(say({ event: "acting" }), Effect.never) } : {}
    })
    yield* say({ event: "ready" })
    yield* barrier.await()
  } else {
    const barrier = yield* DoubleBarrier.make({ name: "step", parties })
    yield* say({ event: "ready" })
    const phase = yield* barrier.enter()
    yield* say({ event: "inside" })
    if (does !== "leave") yield* Effect.never
    yield* say({ event: "leaving" })
    yield* barrier.leave(phase)
  }
  yield* say({ event: "done" })
}).pipe(
  Effect.catchCause((cause) => {
    const error = Option.getOrUndefined(Cause.findErrorOption(cause)) as
      | { readonly reason?: { readonly _tag?: string } }
      | undefined
    return say({ event: "failed", reason: error?.reason?._tag ?? String(cause) })
  }),
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

await Effect.runPromise(program)
