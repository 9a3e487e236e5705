/** The classes of named primitives: each is a service of its own, with a layer. */

import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import type * as Scope from "effect/Scope"

/** A class that is a service of its own, with the layer that makes it. */
export interface ServiceClass<in out Self, in out Id extends string, in out Shape, out E, out R>
  extends Context.ServiceClass<Self, Id, Shape>
{
  readonly layer: Layer.Layer<Self, E, Exclude<R, Scope.Scope>>
}

/** The class of a named primitive: two modules may use the same name. */
export const service = <Self, const Module extends string, const Name extends string, Shape, E, R>(
  module: Module,
  name: Name,
  make: Effect.Effect<Shape, E, R>
): ServiceClass<Self, `lockstep/${Module}/${Name}`, Shape, E, R> => {
  const tag = Context.Service<Self, Shape>()(`lockstep/${module}/${name}`)
  return Object.assign(tag, { layer: Layer.effect(tag, make as Effect.Effect<Shape, E, R>) }) as never
}
