/** What a coordinator's channels share. */

import type { Io } from "../io.ts"
import type { Hooks, Settings } from "./hooks.ts"
import type { Pulse } from "./pulse.ts"
import type { Transport } from "./transport.ts"

export interface Office {
  readonly settings: Settings
  readonly hooks: Hooks
  readonly io: Io
  readonly transport: Transport
  /** About this coordinator, for people: JSON. */
  readonly about: string
  readonly newSession: () => string
  /** The heartbeat of all channels with that lease. */
  readonly pulseOf: (lease: number) => Pulse
  /** Nothing new is begun any more, and holds are being released. */
  readonly isClosing: () => boolean
  readonly isClosed: () => boolean
}
