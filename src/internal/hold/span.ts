import * as Effect from "effect/Effect"
import type * as Fiber from "effect/Fiber"

/** Whether spans are made: there is a tracer, or an open span. */
export const isTraced = ({ cache }: Fiber.Fiber<unknown, unknown>): boolean =>
  cache.tracer !== undefined || cache.span !== undefined

/**
 * A span around a wait, a hold, or a `with...` form where there is a tracer or an open span. Otherwise none is made: it
 * would be most of what an uncontended lock costs.
 */
export const spanned = <A, E, R>(
  fiber: Fiber.Fiber<unknown, unknown>,
  self: Effect.Effect<A, E, R>,
  name: string,
  kind: string,
  key: string
): Effect.Effect<A, E, R> =>
  isTraced(fiber)
    ? Effect.withSpan(self, name, {
      attributes: { "lockstep.kind": kind, "lockstep.key": key },
      kind: "client",
      captureStackTrace: false
    }) as Effect.Effect<A, E, R>
    : self
