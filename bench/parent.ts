/** What a process of a contestant says to the process that has started it, and what it measures of itself. */
import { now, sleep } from "./machine.ts"

export type ToChild = { readonly from: number; readonly to: number } | { readonly more: true }

export const send = (message: unknown): Promise<void> =>
  new Promise((resolve, reject) => process.send!(message, (error: Error | null) => error ? reject(error) : resolve()))

export const receive = (): Promise<ToChild> => new Promise((resolve) => process.once("message", resolve))

export const cpuMillis = (): number => {
  const { system, user } = process.cpuUsage()
  return (system + user) / 1000
}

// Milliseconds from one to the next while it is warmed up, and between the end of that and the measurement.
const warmupInterval = 2
const settling = 1000

/**
 * Milliseconds to the next one, about. What is measured at rest is what compiled code needs that rests, so that until a
 * second before the measurement they follow each other fast.
 */
export const paced = (from: number, interval: number): number =>
  now() < from - settling ? Math.min(warmupInterval, interval) : interval

/** What was counted between two times that the parent says. What was noted before them is forgotten. */
export const counted = async (go: Promise<unknown>, counts: ReadonlyArray<number>, notes: Array<unknown>) => {
  const { from, to } = await go as { from: number; to: number }
  await sleep(from - now())
  notes.length = 0
  const before = { at: now(), counts: [...counts], cpu: cpuMillis() }
  await sleep(to - now())
  return {
    millis: now() - before.at,
    cpuMillis: cpuMillis() - before.cpu,
    counts: counts.map((count, at) => count - before.counts[at]!)
  }
}
