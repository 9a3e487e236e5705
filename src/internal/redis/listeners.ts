/** The state of a connection and the callbacks for its changes, for one node and for a Cluster. */

import type { ConnectionState } from "./connection.ts"
import type { RedisError } from "./errors.ts"

export const makeListeners = () => {
  const ready = new Set<() => void>()
  const down = new Set<(error: RedisError | undefined) => void>()
  let state: ConnectionState = "connecting"
  return {
    state: () => state,
    up: () => {
      if (state === "closed") return
      state = "ready"
      for (const f of [...ready]) f()
    },
    down: (error: RedisError | undefined) => {
      if (state === "closed") return
      if (state === "ready") state = "reconnecting"
      for (const f of [...down]) f(error)
    },
    close: () => {
      if (state === "closed") return
      state = "closed"
      for (const f of [...down]) f(undefined)
      ready.clear()
      down.clear()
    },
    onReady: (f: () => void) => {
      ready.add(f)
      if (state === "ready") f()
      return () => void ready.delete(f)
    },
    onDown: (f: (error: RedisError | undefined) => void) => {
      down.add(f)
      return () => void down.delete(f)
    }
  }
}
