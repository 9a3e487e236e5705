import type { Effect, Scope } from "effect"
import type { Coordinator } from "../../src/index.ts"
import type { Requests } from "../../src/internal/actor/lua.ts"
import type { Proxy } from "../../src/testing/Proxy.ts"
import type { Node } from "../support/live.ts"
import type { Server } from "../support/servers.ts"

/** Requests, and the ends of the keys that they are about; "" for any. */
export type Rows = ReadonlyArray<readonly [verb: keyof Requests, key: string]>

export interface World {
  readonly server: Server
  readonly namespace: string
  /** Between this coordinator and Redis. */
  readonly line: Proxy
  readonly mine: Node
  /** One with a connection of its own that is never disturbed. */
  readonly other: Node
}

/** Makes each of its requests once, and after each asserts the state that it must have led to. Runs on `mine`. */
export type Program = (world: World) => Effect.Effect<void, unknown, Coordinator.Coordinator | Scope.Scope>
