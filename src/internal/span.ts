import * as Effect from "effect/Effect"

/**
 * A span around a `with...` form, where somebody looks: a tracer is provided or a span is open. Otherwise none is made,
 * which is most of what an uncontended lock would cost.
 */
export const spanned = <A, E, R>(self: Effect.Effect<A, E, R>, name: string, key: string): Effect.Effect<A, E, R> =>
  Effect.withFiber((fiber) =>
    fiber.cache.tracer === undefined && fiber.cache.span === undefined
      ? self
      : Effect.withSpan(self, name, {
        attributes: { "lockstep.key": key },
        kind: "client",
        captureStackTrace: false
      }) as Effect.Effect<A, E, R>
  )
