/** Models of several queues in one partition, driven by the calls of sessions. */
import type { actor } from "./actor.ts"

/** The model of one queue. */
interface Driven<Step> {
  readonly once: (by: number, step: Step) => Promise<unknown>
  readonly take: () => Promise<void>
  readonly replay: (by: string) => Promise<void>
  readonly ended: (by: number) => void
}

interface Asked<Step> {
  readonly queue: number
  readonly step: Step
}

/** One call of a session: its steps, and replays behind them. */
export const asked = async <Step extends { readonly do: string }>(
  { together }: ReturnType<typeof actor>,
  queues: ReadonlyArray<Driven<Step>>,
  by: number,
  name: string,
  steps: ReadonlyArray<Asked<Step>>
): Promise<void> => {
  await together(name, steps.map(({ queue, step }) => () => queues[queue]!.once(by, step)))
  for (const queue of queues) await queue.take()
  for (const { queue, step } of steps) if (step.do === "replay") await queues[queue]!.replay(name)
}

/** A session ends, is reaped, and is followed by another one. */
export const ended = async (
  { end, open, reap }: ReturnType<typeof actor>,
  queues: ReadonlyArray<Pick<Driven<never>, "ended">>,
  by: number,
  sessions: Array<number>,
  nameOf: (worker: number) => string
): Promise<void> => {
  await end(nameOf(by))
  await reap(nameOf(by))
  for (const queue of queues) queue.ended(by)
  sessions[by]!++
  await open(nameOf(by))
}
