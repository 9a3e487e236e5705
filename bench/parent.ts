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
