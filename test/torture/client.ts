/** A process that is tortured: a real coordinator under generated workloads, until it is asked to stop. */
import { Cause, Effect, Exit, identity, Layer, Option, Schedule, Stream } from "effect"
import type { layerStore } from "../../src/effect/PersistedQueue.ts"
import type * as Lockstep from "../../src/index.ts"
import { randomOf } from "../../src/internal/simulation/choices.ts"
import { History, Program } from "../../src/testing.ts"
import type { Event, Outcome, What } from "./history.ts"
import { writer } from "./resource.ts"
import { gaveUp, keepOf } from "./workload.ts"
import { workloads } from "./workloads.ts"

/** Of every coordinator of a round; times in milliseconds. */
export interface Settings {
  readonly namespace: string
  readonly lease: number
  readonly margin: number
  readonly partitions: number
}

export interface Argument {
  /** The library under test: a copy of it may have another version, or a bug. */
  readonly library: string
  readonly redis: Lockstep.Redis.Options
  readonly settings: Settings
  readonly seed: number
  readonly only: ReadonlyArray<string>
  /** How many of the bodies are long ones, 0 to 1. */
  readonly long: number
  /** How many of the publications change the number of shards of a topic, 0 to 1; a quarter of that is how many are large. */
  readonly moves: number
  readonly file: string
  /** Path of the socket of the fenced resource. */
  readonly resource: string
}

export interface Request {
  readonly kind: string
  readonly key: string
  readonly weight: number
  readonly wait: boolean
}

/** Records what happens to one request. */
export interface Log {
  /** It is running now. */
  readonly step: () => void
  readonly tell: (...what: What) => void
}

/** The clocks of a client. */
export interface Clocks {
  /** Milliseconds of a clock that does not stand still. */
  readonly now: () => number
  /** Milliseconds since the epoch. */
  readonly wall: () => number
  /** When the first client may have begun, as `wall` says it. */
  readonly began: number
  /** Microseconds, as histories have them. */
  readonly micros: () => number
}

/** What a workload is given. */
export interface Client {
  readonly lockstep: typeof Lockstep
  /** Of the same copy of the library. */
  readonly layerStore: typeof layerStore
  /** 0 to 1. */
  readonly random: () => number
  readonly pick: <A>(items: ReadonlyArray<A>) => A
  /** 16 hexadecimal digits that no other client has. */
  readonly unique: () => string
  readonly stopping: () => boolean
  readonly clock: Clocks
  /** Waits while requests take long: the order in which they were sent would be unknown if Redis had more than it can do. */
  readonly rest: Effect.Effect<void>
  /** How long what no process has open is remembered, in milliseconds: longer than a fault keeps a client away. */
  readonly keep: number
  /** How many partitions the namespace has. */
  readonly partitions: number
  /** How many of the publications change the number of shards of a topic, 0 to 1; a quarter of that is how many are large. */
  readonly moves: number
  /**
   * Runs something that holds nothing, and records when it was asked and answered, and the token in the answer if there is
   * one; whether it succeeded.
   */
  readonly attempt: <A, E>(
    request: Request,
    effect: Effect.Effect<A, E, Lockstep.Coordinator.Coordinator>,
    tokenOf?: (answer: A) => number,
    /** What a barrier has told of all of its generation. */
    saw?: (answer: A) => ReadonlyArray<number>
  ) => Effect.Effect<boolean, never, Lockstep.Coordinator.Coordinator>
  /** Runs something that holds nothing, and records when it began and ended, and what it says meanwhile. */
  readonly follow: <A, E, R>(
    request: Request,
    use: (log: Log) => Effect.Effect<A, E, R>
  ) => Effect.Effect<A, E, R>
  /** As `follow`. Simulations interrupt it at any moment: it fails with `gaveUp` then. */
  readonly pursue: <A, E, R>(
    request: Request,
    use: (log: Log) => Effect.Effect<A, E, R>
  ) => Effect.Effect<A, E | typeof gaveUp, R>
  /** Waits for so many milliseconds. Simulations end the wait at any moment. */
  readonly pause: (millis: number) => Effect.Effect<void>
  /**
   * Runs a request to hold one thing, or all of several: `take` is given the body, and is a form of the library that runs it
   * while they are held. Its outcome is recorded and never fails.
   */
  readonly hold: (
    requests: ReadonlyArray<Request>,
    take: (body: Effect.Effect<void>) => Effect.Effect<unknown, unknown, Lockstep.Coordinator.Coordinator>
  ) => Effect.Effect<void, never, Lockstep.Coordinator.Coordinator>
}

const outcomeOf = (exit: Exit.Exit<unknown, unknown>): Outcome => {
  if (Exit.isSuccess(exit)) {
    return exit.value !== null && typeof exit.value === "object" && "_tag" in exit.value && exit.value._tag === "None"
      ? "busy"
      : "released"
  }
  const error = Option.getOrUndefined(Exit.findErrorOption(exit)) as
    | { readonly _tag?: string; readonly reason?: { readonly _tag: string; readonly reason?: unknown } }
    | undefined
  if (error?._tag === "LeaseLost") return `lost ${String(error.reason)}`
  if (error === undefined) {
    return Cause.hasInterruptsOnly(exit.cause)
      ? "interrupted"
      : `failed ${Cause.pretty(exit.cause)}`
  }
  const reason = error.reason
  if (reason?._tag === "LeaseLost") return `lost ${String(reason.reason)}`
  if (reason?._tag === "WaitTimeout") return "timeout"
  if (error === gaveUp) return "interrupted"
  return `failed ${Cause.pretty(exit.cause).split("\n")[0]!}`
}

/** What a process has once it is at work. */
// In milliseconds. Below the first, a client need not rest; it rests for no longer than the second.
const [swift, longestRest] = [100, 500]

const digits = (random: number): string => Math.floor(random * 2 ** 32).toString(16).padStart(8, "0")

export interface Tools extends Pick<Client, "lockstep" | "layerStore" | "random" | "stopping" | "clock"> {
  /** How long it rests at least, in milliseconds. Default 0. */
  readonly least?: (() => number) | undefined
  /** Lets what is asked be interrupted at any moment: it fails with `gaveUp` then. */
  readonly interruptible?: <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | typeof gaveUp, R>
  readonly argument: Pick<Argument, "settings" | "long" | "moves">
  readonly record: (event: Event) => void
  /** To the fenced resource. */
  readonly write: (key: string, token: number) => Effect.Effect<boolean>
}

interface Asked extends Request {
  readonly id: string
}

/** What is done while they are held. */
const body = Effect.fnUntraced(function*(tools: Tools, requests: ReadonlyArray<Asked>) {
  const { argument, lockstep, random, record, stopping, write } = tools
  const held: Array<{ readonly id: string; readonly key: string; readonly token: number }> = []
  for (const { id, key } of requests) {
    const { token } = Option.getOrThrow(yield* lockstep.Lease.currentOf(key))
    held.push({ id, key, token })
    record({ event: "enter", id, token })
  }
  // Some hold for about as long as a lease.
  const long = random() < argument.long
  const steps = 1 + Math.floor(random() * (long ? 100 : 5))
  const writes = random() < 0.5
  for (let step = 0; step < steps && !(long && stopping()); step++) {
    if (random() < 0.3) yield* Effect.yieldNow
    else yield* Effect.sleep(random() * (long ? argument.settings.lease / 25 : 6))
    for (const { id } of held) record({ event: "step", id })
  }
  for (const { id, key, token } of held) {
    // Locks only: those that share write in any order.
    if (writes && key.startsWith("exclusive")) record({ event: "write", id, accepted: yield* write(key, token) })
  }
  for (const { id } of held) record({ event: "leave", id })
})

export const clientOf = (tools: Tools): Client => {
  const { argument, clock, interruptible = identity, layerStore, lockstep, random, record, stopping } = tools
  let asked = 0
  let latency = 0
  const ask = (request: Request): Asked => {
    const id = `${++asked}`
    record({ event: "ask", id, ...request })
    return { id, ...request }
  }
  const follow: Client["follow"] = (request, use) =>
    Effect.uninterruptibleMask((restore) => {
      const { id } = ask(request)
      record({ event: "enter", id, token: 0 })
      const log: Log = {
        step: () => record({ event: "step", id }),
        tell: (...what) => record({ event: "told", id, what })
      }
      return Effect.onExit(
        restore(use(log)),
        (exit) => Effect.sync(() => record({ event: "end", id, outcome: outcomeOf(exit) }))
      )
    })
  return {
    lockstep,
    layerStore,
    random,
    pick: (items) => items[Math.floor(random() * items.length)]!,
    unique: () => digits(random()) + digits(random()),
    stopping,
    clock,
    rest: Effect.suspend(() => {
      const least = tools.least?.() ?? 0
      const millis = Math.max(least, latency < swift ? 0 : Math.min(latency, longestRest))
      return millis === 0 ? Effect.void : Effect.sleep(millis)
    }),
    keep: keepOf(argument.settings.lease),
    partitions: argument.settings.partitions,
    moves: argument.moves,
    // Every request has an end, also if it is interrupted before it begins.
    attempt: (request, effect, tokenOf, saw) =>
      Effect.uninterruptibleMask((restore) => {
        const { id } = ask(request)
        const askedAt = clock.now()
        return Effect.map(Effect.exit(restore(interruptible(effect))), (exit) => {
          if (Exit.isSuccess(exit)) {
            if (!request.wait) latency += (clock.now() - askedAt - latency) / 8
            record({ event: "enter", id, token: tokenOf?.(exit.value) ?? 0 })
            if (saw !== undefined) record({ event: "saw", id, others: saw(exit.value) })
          }
          record({ event: "end", id, outcome: outcomeOf(exit) })
          return Exit.isSuccess(exit)
        })
      }),
    follow,
    pursue: (request, use) => follow(request, (log) => interruptible(use(log))),
    pause: (millis) => Effect.ignore(interruptible(Effect.sleep(millis))),
    hold: Effect.fnUntraced(function*(requests, take) {
      const all = requests.map(ask)
      const chance = random()
      const held = interruptible(take(body(tools, all)))
      // Some give up: while they ask, wait, hold or release.
      const limit = Math.round(random() * random() * argument.settings.lease)
      const exit = yield* Effect.exit(
        chance < 0.12
          ? Effect.timeoutOrElse(held, { duration: limit, orElse: () => Effect.fail(gaveUp) })
          : held
      )
      for (const { id } of all) record({ event: "end", id, outcome: outcomeOf(exit) })
      if (Exit.isFailure(exit)) yield* Effect.sleep(20 + random() * 50)
      else if (random() < 0.5) yield* Effect.sleep(random() * 15)
    })
  }
}

/** Those of this machine. */
const clock: Clocks = { now: () => performance.now(), wall: Date.now, began: 0, micros: History.now }

/** The module that stands beside the index of a library. */
export const storeOf = async (index: string): Promise<typeof layerStore> =>
  (await import(new URL("effect/PersistedQueue.ts", index).href)).layerStore

const main = async () => {
  const argument = Program.argument<Argument>()
  const lockstep: typeof Lockstep = await import(argument.library)
  const layerStore = await storeOf(argument.library)
  const random = randomOf(argument.seed)
  let stop = false
  process.on("SIGUSR2", () => {
    stop = true
  })
  // A blocked event loop, for as long as the lease and more.
  process.on("SIGHUP", () => {
    const end = performance.now() + argument.settings.lease * (1 + random() / 2)
    while (performance.now() < end);
  })

  Program.emit({ event: "started" })

  const program = Effect.gen(function*() {
    const { record } = yield* History.recorder<Event>(argument.file)
    const write = yield* writer(argument.resource)
    const client = clientOf({ argument, clock, layerStore, lockstep, random, stopping: () => stop, record, write })
    const chosen = workloads.filter(({ name }) => argument.only.length === 0 || argument.only.includes(name))
    const { changes } = yield* lockstep.Coordinator.Coordinator
    yield* Effect.forkScoped(Stream.runForEach(changes, (change) =>
      Effect.sync(() => {
        const { partition, reason = "", to } = change
        if (to === "lost") record({ event: "lost", reason, partition })
      })))
    Program.emit({ event: "ready" })
    yield* Effect.forEach(chosen, (workload) => workload.run(client), { concurrency: "unbounded", discard: true })
  }).pipe(
    Effect.scoped,
    Effect.provide(
      lockstep.Coordinator.layer(argument.settings).pipe(
        Layer.provideMerge(lockstep.Redis.layer(argument.redis))
      )
    ),
    // It is started while things are broken, too.
    Effect.tapCause((cause) => Effect.sync(() => console.error(Cause.pretty(cause)))),
    Effect.retry(Schedule.spaced(200))
  )
  await Effect.runPromise(program)
  process.exit(0)
}

if (import.meta.main) await main()
