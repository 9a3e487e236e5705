/** A simulated process: its clocks, its timers, the tasks of its event loop, and its connections. */

import * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Fiber from "effect/Fiber"
import * as Formatter from "effect/Formatter"
import * as Logger from "effect/Logger"
import * as Option from "effect/Option"
import * as Random from "effect/Random"
import * as References from "effect/References"
import * as Scheduler from "effect/Scheduler"
import * as Stream from "effect/Stream"
import { Redis } from "../../Redis.ts"
import { CurrentIo, type Io, live, type Timer } from "../io.ts"
import { checkShared, keysOf, slotOf } from "../redis/command.ts"
import { type Connections, register, whenReady } from "../redis/connection.ts"
import { CommandFailed, fail, type RedisError } from "../redis/errors.ts"
import { sent } from "../redis/waiting.ts"
import { prettyOf } from "../text.ts"
import { randomOf } from "./choices.ts"
import { Wire } from "./wire.ts"

// In milliseconds.
const commandTimeout = 5000

/** An event at a time of the world. */
export interface Alarm {
  readonly at: number
  readonly number: number
  readonly process: Process
  readonly ring: () => void
}

/** The part of the world that a process needs. */
export interface World {
  /** Whether its Redis is a cluster. */
  readonly cluster: boolean
  /** Milliseconds since the simulation has begun. */
  readonly now: () => number
  readonly set: (alarm: Omit<Alarm, "number">) => Timer
  /** A connection breaks. */
  readonly onCut: (wire: Wire) => void
  /** Receives the log lines, if any receiver is set. */
  readonly onLog: ((line: string) => void) | undefined
}

/** The answer to a command of a program that Redis never receives, as it has functions of its own, or as a node of a cluster has it. */
const refusalOf = (
  cluster: boolean,
  command: string,
  args: ReadonlyArray<string | number>
): RedisError | undefined => {
  if (command.toUpperCase() === "FUNCTION") {
    return fail(new CommandFailed({ command, code: "ERR", detail: "it cannot be simulated" }))
  }
  const slots = cluster ? new Set(keysOf(command, args).map(slotOf)) : undefined
  return slots === undefined || slots.size < 2
    ? undefined
    : fail(new CommandFailed({ command, code: "CROSSSLOT", detail: "Keys in request don't hash to the same slot" }))
}

const shown = (value: unknown): string => typeof value === "string" ? value : Formatter.format(value)

/** The world begins at this time, in milliseconds since the epoch. */
export const epoch = 1_800_000_000_000

export class Process implements Scheduler.Scheduler, Scheduler.SchedulerDispatcher {
  readonly executionMode = "async"
  readonly name: string
  readonly io: Io
  /** It does nothing any more. */
  crashed = false
  /** Its program has ended. */
  ended = false
  /** It does nothing until then. */
  pausedUntil = 0
  /** Of its wall clock, in milliseconds; and how fast its clocks are. */
  skew = 0
  readonly rate: number
  tasks: Array<() => void> = []
  /** One function for each effect that can be interrupted: it is called to do so. */
  readonly interrupts = new Set<() => void>()
  /** Its connections that are not closed. */
  wires: Array<Wire> = []
  readonly #world: World
  readonly #services: Context.Context<never>

  constructor(name: string, seed: number, rate: number, world: World) {
    this.name = name
    this.rate = rate
    this.#world = world
    const random = randomOf(seed)
    const wall = () => epoch + world.now() + this.skew
    this.io = {
      now: () => world.now() * rate,
      wall,
      after: (millis, f) => this.#after(millis, f),
      exactly: (millis, f) => this.#after(millis, f),
      defer: live.defer,
      random,
      id: () =>
        Array.from({ length: 12 }, () => "0123456789abcdefghijklmnopqrstuv"[Math.floor(random() * 32)]).join(""),
      host: name,
      pid: 1,
      run: (effect) => Effect.runForkWith(this.#services)(effect)
    }
    const nanos = () => BigInt(Math.round(wall() * 1e6))
    const monotonic = () => BigInt(Math.round(this.io.now() * 1e6))
    const clock: Clock.Clock = {
      monotonicTimeNanosUnsafe: monotonic,
      monotonicTimeNanos: Effect.sync(monotonic),
      currentTimeMillisUnsafe: wall,
      currentTimeMillis: Effect.sync(wall),
      currentTimeNanosUnsafe: nanos,
      currentTimeNanos: Effect.sync(nanos),
      sleep: (duration) =>
        Effect.callback((resume) => {
          const timer = this.#after(Duration.toMillis(duration), () => resume(Effect.void))
          return Effect.sync(timer.cancel)
        })
    }
    const { onLog } = world
    const loggers = onLog === undefined
      ? []
      : [Logger.make(({ cause, fiber, logLevel, message }) => {
        const why = cause.reasons.length === 0 ? "" : `: ${prettyOf(cause)}`
        const annotations = Object.entries(fiber.getRef(References.CurrentLogAnnotations)).map(([key, value]) =>
          ` ${key}=${shown(value)}`
        )
        onLog(`logs ${logLevel} ${[message].flat().map(shown).join(" ")}${annotations.join("")}${why}`)
      })]
    this.#services = Context.empty().pipe(
      Context.add(Scheduler.Scheduler, this),
      Context.add(Clock.Clock, clock),
      Context.add(CurrentIo, this.io),
      Context.add(Random.Random, {
        nextDoubleUnsafe: random,
        nextIntUnsafe: () => Math.floor((random() - 0.5) * 2 * Number.MAX_SAFE_INTEGER)
      }),
      Context.add(Logger.CurrentLoggers, new Set(loggers))
    ) as Context.Context<never>
  }

  #after(millis: number, ring: () => void): Timer {
    if (millis === Number.POSITIVE_INFINITY) return { cancel: () => {} }
    return this.#world.set({ at: this.#world.now() + Math.max(0, millis) / this.rate, process: this, ring })
  }

  // ---------------------------------------------------------------------------------------------------------------
  // What Effect runs
  // ---------------------------------------------------------------------------------------------------------------

  shouldYield(fiber: Fiber.Fiber<unknown, unknown>): boolean {
    return fiber.currentOpCount >= fiber.cache.maxOpsBeforeYield
  }

  makeDispatcher(): Scheduler.SchedulerDispatcher {
    return this
  }

  scheduleTask(task: () => void): void {
    this.tasks.push(task)
  }

  /** One turn of its event loop. */
  flush(): void {
    const { tasks } = this
    this.tasks = []
    for (const task of tasks) task()
  }

  // ---------------------------------------------------------------------------------------------------------------
  // What programs are given
  // ---------------------------------------------------------------------------------------------------------------

  /** Lets an effect be interrupted by a fault, and answers nothing then. */
  interruptible<A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<Option.Option<A>, E, R> {
    return Effect.suspend(() => {
      const struck = Deferred.makeUnsafe<Option.Option<A>>()
      const interrupt = () => Deferred.doneUnsafe(struck, Effect.succeed(Option.none()))
      this.interrupts.add(interrupt)
      return Effect.ensuring(
        Effect.raceFirst(Effect.asSome(self), Deferred.await(struck)),
        Effect.sync(() => this.interrupts.delete(interrupt))
      )
    })
  }

  #connect(role: string): Wire {
    const wire = new Wire(role, {
      name: this.name,
      io: this.io,
      // One that has crashed never notices that its connections break: an error would let its fibers go on.
      isPaused: () => this.crashed || this.pausedUntil > this.#world.now(),
      onCut: this.#world.onCut,
      onClose: (closed) => {
        this.wires = this.wires.filter((one) => one !== closed)
      }
    })
    this.wires.push(wire)
    return wire
  }

  /** The services of its programs: a connection to the simulated Redis among them. */
  context(): Context.Context<Redis> {
    const commands = this.#connect("commands")
    const connections: Connections = {
      topology: this.#world.cluster ? "cluster" : "standalone",
      commands,
      dedicated: (_, role = "reader") => this.#connect(role),
      masters: () => [commands],
      commandTimeout,
      features: { functions: true }
    }
    // As a layer is, which is built when there is a connection.
    const connected = whenReady(commands)
    // Programs share the connection, and have none of their own.
    const absent = (member: keyof Redis["Service"]) => new Error(`Redis has no ${member} in a simulation`)
    const redis: Redis["Service"] = {
      topology: connections.topology,
      server: { flavor: "redis", version: "unknown" },
      send: (command, ...args) =>
        Effect.suspend(() => {
          checkShared(command, args)
          const refusal = refusalOf(this.#world.cluster, command, args)
          if (refusal !== undefined) return Effect.fail(refusal)
          return sent(
            this.io,
            () => connected.then(() => commands.send(command, args, commandTimeout) as Promise<never>)
          )
        }),
      connect: () => Effect.die(absent("connect")),
      state: Effect.sync(commands.state),
      changes: Stream.die(absent("changes")),
      get client(): never {
        throw absent("client")
      }
    }
    register(redis, connections)
    return Context.add(this.#services, Redis, redis)
  }
}
