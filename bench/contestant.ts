/** What a contestant does, in the way that its users would do it. */

export interface Settings {
  readonly port: number
  /** How long a lock outlives its holder, in milliseconds. */
  readonly lease: number
  /** Of the ioredis client. Lockstep has its own client settings. */
  readonly autoPipelining: boolean
}

export interface Worker {
  readonly key: string
  /** Milliseconds inside the lock. Zero: what is inside is `entered` alone. */
  readonly stay: number
  /** Milliseconds between a release and asking again. */
  readonly pause: number
  readonly running: () => boolean
  /** Called first thing under the lock. */
  readonly entered: () => void
  /** Called last thing under the lock, unless `stay` is zero. */
  readonly leaving: () => void
}

export interface Contestant {
  /** A loop of acquire and release for each worker, all at once. */
  readonly locks: (workers: ReadonlyArray<Worker>) => Promise<void>
  /** The same with one permit of the semaphore that is the key; all workers have the same. */
  readonly permits?: ((count: number, workers: ReadonlyArray<Worker>) => Promise<void>) | undefined
  /** Holds all of them from the time of its return on, renewed as need be. */
  readonly hold: (keys: ReadonlyArray<string>) => Promise<void>
}

export type Open = (settings: Settings) => Promise<Contestant>

/** Calls `f` for every item, at most so many at once. */
export const all = async <A>(items: ReadonlyArray<A>, atOnce: number, f: (item: A) => Promise<void>): Promise<void> => {
  let next = 0
  await Promise.all(Array.from({ length: Math.min(atOnce, items.length) }, async () => {
    while (next < items.length) await f(items[next++]!)
  }))
}

/** How many locks are asked for at once when many are to be held. */
export const holdsAtOnce = 500
