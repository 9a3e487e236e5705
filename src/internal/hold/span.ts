/** Spans around calls, waits and holds, where a program is traced. */

import type * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import type * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import * as Scope from "effect/Scope"
import * as Tracer from "effect/Tracer"
import { across } from "./holding.ts"

/** Whether spans are made: there is a tracer, or an open span. */
const isTraced = ({ cache }: Fiber.Fiber<unknown, unknown>): boolean =>
  cache.tracer !== undefined || cache.span !== undefined

const optionsOf = (kind: string, key: string) =>
  ({
    attributes: { "lockstep.kind": kind, "lockstep.key": key },
    kind: "client",
    captureStackTrace: false
  }) as const

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
    ? across(self, (self) => Effect.withSpan(self, name, optionsOf(kind, key)) as typeof self)
    : self

/** As `spanned`, in the fiber that runs it. */
export const spanning = <A, E, R>(
  self: Effect.Effect<A, E, R>,
  name: string,
  kind: string,
  key: string
): Effect.Effect<A, E, R> => Effect.withFiber((fiber) => spanned(fiber, self, name, kind, key))

/** A span until the scope is closed, where there is a tracer or an open span. */
export const spannedScope = (
  fiber: Fiber.Fiber<unknown, unknown>,
  scope: Scope.Scope,
  name: string,
  kind: string,
  key: string
): Effect.Effect<unknown> =>
  isTraced(fiber)
    ? Scope.provide(Effect.makeSpanScoped(name, optionsOf(kind, key)), scope)
    : Effect.void

/**
 * A span that lasts until the answered function is called with its end; nothing where there is no tracer and no open
 * span.
 */
export const spannedUntil = (
  fiber: Fiber.Fiber<unknown, unknown>,
  name: string,
  kind: string,
  key: string
): Effect.Effect<((exit: Exit.Exit<unknown, unknown>) => void) | undefined> => {
  if (!isTraced(fiber)) return Effect.undefined
  const scope = Scope.makeUnsafe()
  return Effect.as(
    spannedScope(fiber, scope, name, kind, key),
    (exit) => Effect.runSync(Scope.close(scope, exit))
  )
}

/** As `spanned`, for what is handled elsewhere: it is given the W3C `traceparent` of its span, or "", and the services of the fiber. */
export const sending = <A, E, R>(
  use: (trace: string, context: Context.Context<never>) => Effect.Effect<A, E, R>,
  name: string,
  kind: string,
  key: string
): Effect.Effect<A, E, R> =>
  Effect.withFiber((fiber) => {
    const { context } = fiber
    if (!isTraced(fiber)) return use("", context)
    const traced = Effect.withFiber<A, E, R>(({ cache: { span } }) =>
      use(span === undefined ? "" : `00-${span.traceId}-${span.spanId}-${span.sampled ? "01" : "00"}`, context)
    )
    return spanned(fiber, traced, name, kind, key)
  })

/** A span around a handler, with the sender's as a link. */
export const receiving = <A, E, R>(
  self: Effect.Effect<A, E, R>,
  name: string,
  attributes: { readonly [name: string]: string | number },
  trace: string | undefined
): Effect.Effect<A, E, R> =>
  Effect.withFiber<A, E, R>((fiber) => {
    if (!isTraced(fiber)) return self
    const parts = trace?.split("-")
    return Effect.withSpan(self, name, {
      attributes,
      kind: "consumer",
      captureStackTrace: false,
      links: parts?.length === 4
        ? [{
          span: Tracer.externalSpan({ traceId: parts[1]!, spanId: parts[2]!, sampled: parts[3] === "01" }),
          attributes: {}
        }]
        : []
    }) as Effect.Effect<A, E, R>
  })
