/** What a contestant does, in the way that its users would do it. */
import { sleep } from "./machine.ts"

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

/** Parties of several processes that meet, generation after generation. */
export interface Meeting {
  readonly key: string
  /** In all processes together. */
  readonly parties: number
  /** In this one. */
  readonly own: number
  /** Which process this is, from 0 on. The first one is opened first, and prepares what the others need. */
  readonly process: number
  /** To be called once this process can begin. Returns when all can. */
  readonly opened: () => Promise<void>
  /** Milliseconds until a party of this process comes. */
  readonly pause: (generation: number, party: number) => number
  /** Called right before a party does what others may be waiting for. */
  readonly arriving: (generation: number) => void
  /** Called right after a party has got what it has waited for. */
  readonly released: (generation: number) => void
}

/** What is done with a value that processes share. */
export type RefVerb = "get" | "cached" | "update"

export interface Sample {
  /** Consecutive, from 1 on. */
  readonly number: number
  /** When it was published, if that is of interest. */
  readonly at: number
}

/** Events that some processes publish, and others handle. */
export interface Traffic {
  readonly name: string
  /** One for each subscriber of this process. */
  readonly handlers: ReadonlyArray<(event: Sample) => void>
  /** Every event goes to one of the handlers of all processes, rather than to all. */
  readonly group: boolean
  /** How many events are published at a time here. */
  readonly publishers: number
  /** What is to be waited for before the next event may be published, if anything. To be asked again after that. */
  readonly pause: () => Promise<void> | undefined
  /** The next event. To be called right before it is published, so that numbers are in order. */
  readonly next: () => Sample
  /** To be called once all handlers of this process hear of events. Returns when the others do. */
  readonly opened: () => Promise<void>
}

/** How jobs are offered. */
export interface Production {
  /** How many calls are under way at a time. */
  readonly producers: number
  /** Jobs of each call. 1: the call for a single job. */
  readonly batch: number
  /** Asked before each call, whether there is one more. */
  readonly more: () => boolean | Promise<boolean>
  /** The next job. To be called right before it is offered. */
  readonly next: () => Sample
  /** To be called when a call has stored so many jobs. */
  readonly stored: (jobs: number) => void
}

export interface JobQueue {
  /** Ends when there are no more jobs. */
  readonly produce: (production: Production) => Promise<void>
  /** Runs jobs, so many at a time. It ends only by failing. */
  readonly work: (concurrency: number, handler: (job: Sample) => void) => Promise<never>
  /** Stores so many jobs that begin in an hour. */
  readonly delay?: (jobs: ReadonlyArray<Sample>) => Promise<unknown>
  /** The same, with so many groups, by the numbers of the jobs. Each group has one job at a time, in the order of their offers. */
  readonly grouped?: (groups: number) => Promise<JobQueue>
}

/** Jobs one behind the other; one behind all others; or one before, and one behind, all others. */
export type Graph = "chain" | "fan-in" | "fan-out"

/** None of these ends, except by failing, but `hold`, `queue`, `flow` and `steal`. No contestant can do everything. */
export interface Contestant {
  /** A loop of acquire and release for each worker, all at once. */
  readonly locks?: (workers: ReadonlyArray<Worker>) => Promise<void>
  /** The same with one permit of the semaphore that is the key; all workers have the same. */
  readonly permits?: (count: number, workers: ReadonlyArray<Worker>) => Promise<void>
  /** The same with leadership, which ends by resigning. */
  readonly lead?: (workers: ReadonlyArray<Worker>) => Promise<void>
  /** Each worker reads the value that is its key, again and again. */
  readonly get?: (workers: ReadonlyArray<Worker>) => Promise<void>
  /** The same from the memory of the process. */
  readonly cached?: (workers: ReadonlyArray<Worker>) => Promise<void>
  /** Each worker adds one to the value that is its key, which others change too, and never over the work of others. */
  readonly update?: (workers: ReadonlyArray<Worker>) => Promise<void>
  /** Holds all of them from the time of its return on, renewed as need be. */
  readonly hold?: (keys: ReadonlyArray<string>) => Promise<void>
  /** Each party waits for all parties. */
  readonly barrier?: (meeting: Meeting) => Promise<void>
  /** Each party counts down a latch of as many as there are parties, another one for each generation, and waits for it. */
  readonly latch?: (meeting: Meeting) => Promise<void>
  /** The process with number 0 waits for a signal again and again, and the other one sets it. */
  readonly signal?: (meeting: Meeting) => Promise<void>
  /** Publishes, and handles what is published. */
  readonly traffic?: (traffic: Traffic) => Promise<void>
  /** Opens a queue of jobs. What becomes of finished jobs: as by `default`, or they are `removed` if that can be set. */
  readonly queue?: (name: string, finished: "default" | "removed") => Promise<JobQueue>
  /** Makes it ready to run a graph of so many jobs; each call runs it once, until its end is known. */
  readonly flow?: (graph: Graph, nodes: number) => Promise<() => Promise<unknown>>
  /** Runs jobs of so many milliseconds, those of each worker offered by itself, and says how long that took. */
  readonly steal?: (loads: ReadonlyArray<ReadonlyArray<number>>, keep: number) => Promise<number>
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

/**
 * Milliseconds between two generations: a process that begins the next one would hold up another one that is still
 * releasing this one on the same core.
 */
export const rest = 5

/** The parties of a meeting, where waiting is a promise. */
export const meet = async (
  { arriving, opened, own, pause, released }: Meeting,
  pass: (generation: number, party: number) => Promise<unknown>,
  prepare: (generation: number) => Promise<unknown> = async () => {}
): Promise<void> => {
  await prepare(0)
  await opened()
  for (let generation = 0;; generation++) {
    // No party can be there before this process, too, has been in this generation.
    await prepare(generation + 1)
    await Promise.all(Array.from({ length: own }, async (_, party) => {
      await sleep(pause(generation, party))
      arriving(generation)
      await pass(generation, party)
      released(generation)
    }))
    await sleep(rest)
  }
}

/** How many events a member of a group has at a time, and how many of them it handles at a time. */
export const groupPrefetch = 512
export const groupConcurrency = 64

/** All publishers of this process, where a publication is a promise. */
export const publishing = async (
  { next, pause, publishers }: Traffic,
  publish: (body: string) => Promise<unknown>
): Promise<void> => {
  await Promise.all(Array.from({ length: publishers }, async () => {
    for (;;) {
      for (let wait = pause(); wait !== undefined; wait = pause()) await wait
      await publish(JSON.stringify(next()))
    }
  }))
}

/** All producers of this process, where an offer is a promise. */
export const producing = async (
  { batch, more, next, producers, stored }: Production,
  offer: (job: Sample) => Promise<unknown>,
  offerAll: (jobs: ReadonlyArray<Sample>) => Promise<unknown>
): Promise<void> => {
  await Promise.all(Array.from({ length: producers }, async () => {
    for (;;) {
      const goesOn = more()
      if (!(typeof goesOn === "boolean" ? goesOn : await goesOn)) return
      await (batch === 1 ? offer(next()) : offerAll(Array.from({ length: batch }, next)))
      stored(batch)
    }
  }))
}
