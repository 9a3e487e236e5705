/** How far the subscribers of all processes are, so that publishers are not far ahead of them: for all contestants alike. */
import { Redis } from "ioredis"

export interface Progress {
  readonly reached: () => number
  /** Resolves when `reached` was taken anew. */
  readonly changed: () => Promise<void>
}

// In a process of its own a publisher asks Redis, which is not much as long as it is some hundred times a second.
const everyMillis = { here: 1, elsewhere: 5 }

export const openProgress = async ({ combine, own, port, process, publishing, subscribing }: {
  readonly port: number
  readonly process: number
  readonly publishing: boolean
  readonly subscribing: ReadonlyArray<number>
  readonly own: () => number
  readonly combine: (figures: ReadonlyArray<number>) => number
}): Promise<Progress> => {
  const keyOf = (process: number) => `bench:progress:${process}`
  const isLocal = publishing && subscribing.length === 1 && subscribing[0] === process
  const client = isLocal ? undefined : new Redis({ host: "127.0.0.1", port })
  let reached = 0
  let waiting: PromiseWithResolvers<void> | undefined = undefined
  const tick = async () => {
    if (client === undefined) {
      reached = own()
    } else if (subscribing.includes(process)) {
      await client.set(keyOf(process), own())
    } else {
      reached = combine((await client.mget(subscribing.map(keyOf))).map(Number))
    }
    waiting?.resolve()
    waiting = undefined
    setTimeout(tick, isLocal ? everyMillis.here : everyMillis.elsewhere)
  }
  await tick()
  return {
    reached: () => reached,
    changed: () => (waiting ??= Promise.withResolvers<void>()).promise
  }
}
