import type { Redis } from "ioredis"

/** Keeps all keys of a partition; what it answers brings them back as they were, as a fail-over does that has missed what came since. */
export const snapshot = async (redis: Redis, prefix: string): Promise<() => Promise<void>> => {
  const keys = async () => (await redis.keys("*")).filter((key) => key.startsWith(prefix))
  const kept = await Promise.all(
    (await keys()).map(async (key) => [key, await redis.dumpBuffer(key), await redis.pttl(key)] as const)
  )
  return async () => {
    const all = await keys()
    if (all.length > 0) await redis.del(...all)
    for (const [key, value, life] of kept) await redis.restore(key, Math.max(0, life), value)
  }
}
