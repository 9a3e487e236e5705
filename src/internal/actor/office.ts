/** The shared parts of a coordinator's channels. */

import type { Io } from "../io.ts"
import type { RedisError } from "../redis/errors.ts"
import type { CoordinatorError } from "./errors.ts"
import type { Hooks, Settings } from "./hooks.ts"
import type { Pulse } from "./pulse.ts"
import type { Transport } from "./transport.ts"
import type { Vigil } from "./vigil.ts"

/** The channel whose session decides whether the coordinator may have others, see lua/sessions.lua. */
export interface First {
  /** Whether it has a session, for all that is known here. */
  readonly isTrusted: () => boolean
  /**
   * Opens a session, or has the one there is confirmed by Redis. Rejects with why no session can be had. `late` is called if Redis is
   * away for longer than a question waits, for this cause.
   */
  readonly opened: (late: (cause: RedisError) => void) => Promise<void>
}

export interface Office {
  readonly settings: Settings
  readonly hooks: Hooks
  readonly io: Io
  readonly transport: Transport
  /** About this coordinator, for people: JSON. */
  readonly about: string
  readonly newSession: () => string
  readonly first: () => First
  /** It has a session. The identity is the same for all coordinators of this namespace of this server. */
  readonly admitted: (identity: string) => void
  /** It can have none, and why. */
  readonly refused: (refusal: CoordinatorError) => void
  /** Why nothing can be asked now, if nothing can: the namespace belongs to others, or the coordinator is closing. */
  readonly refusal: () => CoordinatorError | undefined
  /** The heartbeat of all channels with that lease. */
  readonly pulseOf: (lease: number) => Pulse
  /** Ends sessions that are not trusted any more, of all channels. */
  readonly vigil: Vigil
  /** The channels for which Redis is out of reach, and since when. */
  readonly away: Map<object, number>
  /** When the first of the releases was asked for that have ended without an answer, until Redis answers anything. */
  silentSince: number | undefined
  /** Nothing new is begun any more, and holds are being released. */
  readonly isClosing: () => boolean
  readonly isClosed: () => boolean
}
