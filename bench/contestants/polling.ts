/** The Node.js code of a guide to coordination with Redis, which asks every 100 ms. */
import { Redis } from "ioredis"
import { randomUUID } from "node:crypto"
import { meet, type Open } from "../contestant.ts"

// Both classes are the guide's, but for types, and for methods that are not used here.

interface Options {
  readonly redisUrl: string
  readonly name: string
  readonly participants?: number
  readonly count?: number
  readonly timeout?: number
}

class DistributedBarrier {
  redis: Redis
  name: string
  participants: number
  timeout: number
  key: string
  readyKey: string
  participantId: string

  constructor(options: Options) {
    this.redis = new Redis(options.redisUrl || "redis://localhost:6379")
    this.name = options.name || "barrier"
    this.participants = options.participants || 3
    this.timeout = options.timeout || 300
    this.key = `barrier:${this.name}`
    this.readyKey = `barrier:${this.name}:ready`
    this.participantId = randomUUID()
  }

  async wait(timeout: number | null = null): Promise<boolean> {
    timeout = timeout || this.timeout
    const deadline = Date.now() + timeout * 1000

    // Register
    await this.redis.pipeline()
      .sadd(this.key, this.participantId)
      .expire(this.key, timeout)
      .exec()

    while (Date.now() < deadline) {
      const count = await this.redis.scard(this.key)

      if (count >= this.participants) {
        await this.redis.set(this.readyKey, "1", "EX", 60)
        return true
      }

      if (await this.redis.get(this.readyKey)) {
        return true
      }

      await new Promise((r) => setTimeout(r, 100))
    }

    return false
  }
}

class CountdownLatch {
  redis: Redis
  name: string
  initialCount: number
  timeout: number
  countKey: string
  triggeredKey: string
  countDownScript: string

  constructor(options: Options) {
    this.redis = new Redis(options.redisUrl || "redis://localhost:6379")
    this.name = options.name || "latch"
    this.initialCount = options.count || 5
    this.timeout = options.timeout || 300
    this.countKey = `latch:${this.name}:count`
    this.triggeredKey = `latch:${this.name}:triggered`

    this.countDownScript = `
        local count = redis.call('decr', KEYS[1])
        if count <= 0 then
            redis.call('set', KEYS[2], '1', 'EX', ARGV[1])
        end
        return count
        `
  }

  async initialize(): Promise<void> {
    await this.redis.pipeline()
      .set(this.countKey, this.initialCount, "EX", this.timeout)
      .del(this.triggeredKey)
      .exec()
  }

  async countDown(): Promise<unknown> {
    return await this.redis.eval(
      this.countDownScript,
      2,
      this.countKey,
      this.triggeredKey,
      this.timeout
    )
  }

  async wait(timeout: number | null = null): Promise<boolean> {
    timeout = timeout || this.timeout
    const deadline = Date.now() + timeout * 1000

    while (Date.now() < deadline) {
      if (await this.redis.get(this.triggeredKey)) {
        return true
      }

      const count = await this.redis.get(this.countKey)
      if (count && parseInt(count) <= 0) {
        return true
      }

      await new Promise((r) => setTimeout(r, 100))
    }

    return false
  }
}

// Each instance has a connection, which is not made anew for each generation. It is another barrier or latch by its keys.

const barrierOf = (barrier: DistributedBarrier, generation: number): DistributedBarrier =>
  Object.assign(barrier, { key: `barrier:${generation}`, readyKey: `barrier:${generation}:ready` })

const latchOf = (latch: CountdownLatch, generation: number): CountdownLatch =>
  Object.assign(latch, { countKey: `latch:${generation}:count`, triggeredKey: `latch:${generation}:triggered` })

const passed = (passed: boolean): void => {
  if (!passed) throw new Error("it has given up")
}

export const open: Open = async ({ port }) => {
  const redisUrl = `redis://127.0.0.1:${port}`
  return {
    barrier: async (meeting) => {
      const { key, own, parties } = meeting
      const instances = Array.from(
        { length: own },
        () => new DistributedBarrier({ redisUrl, name: key, participants: parties })
      )
      await Promise.all(instances.map(({ redis }) => redis.ping()))
      await meet(meeting, async (generation, party) => passed(await barrierOf(instances[party]!, generation).wait()))
    },
    latch: async (meeting) => {
      const { key, own, parties, process } = meeting
      const instances = Array.from(
        { length: own + 1 },
        () => new CountdownLatch({ redisUrl, name: key, count: parties })
      )
      await Promise.all(instances.map(({ redis }) => redis.ping()))
      await meet(
        meeting,
        async (generation, party) => {
          const latch = latchOf(instances[party]!, generation)
          await latch.countDown()
          passed(await latch.wait())
        },
        async (generation) => {
          if (process === 0) await latchOf(instances[own]!, generation).initialize()
        }
      )
    }
  }
}
