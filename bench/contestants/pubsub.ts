/**
 * What a release costs at least: a counter, and a message that the last one publishes. Each process has one connection for
 * messages. It loses them when that breaks, and knows nothing of parties that leave or die.
 */
import { Redis } from "ioredis"
import { meet, type Meeting, type Open, publishing, type Sample } from "../contestant.ts"
import { sleep } from "../machine.ts"

export const open: Open = async ({ autoPipelining, port }) => {
  const client = new Redis({ host: "127.0.0.1", port, enableAutoPipelining: autoPipelining })
  const subscriber = new Redis({ host: "127.0.0.1", port })
  const broadcast = async (meeting: Meeting): Promise<void> => {
    const { key, parties } = meeting
    const waiting = new Map<string, Array<() => void>>()
    subscriber.on("message", (_, generation: string) => {
      const all = waiting.get(generation) ?? []
      waiting.delete(generation)
      for (const release of all) release()
    })
    await subscriber.subscribe(key)
    await meet(meeting, async (number) => {
      const generation = String(number)
      const released = new Promise<void>((resolve) => {
        const all = waiting.get(generation)
        if (all === undefined) waiting.set(generation, [resolve])
        else all.push(resolve)
      })
      if (await client.incr(`${key}:${generation}`) === parties) await client.publish(key, generation)
      await released
    })
  }
  return {
    barrier: broadcast,
    latch: broadcast,
    signal: async ({ arriving, key, opened, pause, process, released }) => {
      if (process === 0) {
        let number = 0
        subscriber.on("message", () => released(number++))
        await subscriber.subscribe(key)
        await opened()
        await new Promise(() => {})
      }
      await opened()
      for (let number = 0;; number++) {
        await sleep(pause(number, 0))
        arriving(number)
        await client.publish(key, "")
      }
    },
    traffic: async (traffic) => {
      const { handlers, name, opened } = traffic
      if (handlers.length > 0) {
        subscriber.on("message", (_, body: string) => {
          const event = JSON.parse(body) as Sample
          for (const handler of handlers) handler(event)
        })
        await subscriber.subscribe(name)
      }
      await opened()
      await publishing(traffic, (body) => client.publish(name, body))
      await new Promise(() => {})
    }
  }
}
