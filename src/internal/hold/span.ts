import * as Effect from "effect/Effect"
import type * as Fiber from "effect/Fiber"

/** A span around a `with...` form where somebody looks: a tracer is provided, or a span is open. */
export const spanned = <A, E, R>(
  { cache }: Fiber.Fiber<unknown, unknown>,
  self: Effect.Effect<A, E, R>,
  name: string,
  key: string
): Effect.Effect<A, E, R> =>
  cache.tracer === undefined && cache.span === undefined
    ? self
    : Effect.withSpan(self, name, {
      attributes: { "lockstep.key": key },
      kind: "client",
      captureStackTrace: false
    }) as Effect.Effect<A, E, R>
