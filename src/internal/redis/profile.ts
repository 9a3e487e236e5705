/** How ioredis is configured, and the pauses between attempts to connect. */

import type * as IoRedis from "ioredis"
import type { Io } from "../io.ts"

/** How many milliseconds after its closing starts a silent socket is destroyed. */
export const disconnectTimeout = 200

/** How long one of so many servers may take that are asked in turn, in milliseconds: it leaves the others their time. */
export const shareOf = (connectTimeout: number, servers: number): number => Math.ceil(connectTimeout / (servers + 1))

/** How many milliseconds to wait before the next attempt: 25 to 50 at first, and 1000 to 2000 in the end. */
export const backoff = (io: Io) => (times: number): number => {
  const ceiling = Math.min(2000, 50 * 2 ** Math.min(times - 1, 10))
  return Math.round(ceiling * (0.5 + io.random() / 2))
}

/**
 * Overrides the options of callers. `maxRetriesPerRequest: 0` makes `autoResendUnfulfilledCommands: false` reject
 * instead of forgetting; `enableReadyCheck` would need INFO.
 */
export const profile = {
  lazyConnect: true,
  enableOfflineQueue: false,
  maxRetriesPerRequest: 0,
  autoResendUnfulfilledCommands: false,
  // ioredis would do it without handling its failure.
  autoResubscribe: false,
  enableAutoPipelining: false,
  enableReadyCheck: false,
  keepAlive: 5000,
  noDelay: true,
  replyMapping: "legacy",
  protocol: 3,
  stringNumbers: false,
  keyPrefix: "",
  readOnly: false,
  monitor: false,
  disableClientInfo: true,
  disconnectTimeout,
  commandTimeout: undefined,
  socketTimeout: undefined,
  blockingTimeout: undefined,
  scripts: undefined,
  himportFieldsets: undefined
} satisfies IoRedis.RedisOptions

/** Leaves a primary that has been deposed without noticing it, which still answers. */
export const sentinelProfile = {
  role: "master",
  failoverDetector: true,
  updateSentinels: true,
  // Its pauses could not be ended: the connection tries again by itself.
  sentinelRetryStrategy: () => null,
  sentinelReconnectStrategy: () => 5000
} satisfies IoRedis.RedisOptions
