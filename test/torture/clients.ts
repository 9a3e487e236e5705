/** The clients of a round: processes, each of which is replaced when it is killed. */
import { Effect, Scope } from "effect"
import * as fs from "node:fs"
import * as path from "node:path"
import { History, Process } from "../../src/testing.ts"
import { realSleep } from "../support/eventually.ts"
import type { Anomaly } from "./checks.ts"
import type { Argument } from "./client.ts"
import type { Link } from "./deployments.ts"
import type { Victim } from "./faults.ts"
import type { Event } from "./history.ts"

export interface Options {
  readonly count: number
  /** For one client. */
  readonly link: Effect.Effect<Link, never, Scope.Scope>
  /** What to import: each process has one of them. */
  readonly versions: ReadonlyArray<string>
  readonly random: () => number
  /** Of the histories. */
  readonly directory: string
  /** What is the same for all processes. */
  readonly argument: Omit<Argument, "library" | "redis" | "seed" | "file">
}

/** How the clients ended that were asked to stop, by their names. */
export interface Ended {
  readonly well: ReadonlySet<string>
  /** Not in time. */
  readonly hung: ReadonlySet<string>
  readonly crashes: ReadonlyArray<Anomaly>
}

/** Events of each process by its name, which is that of the client and a number. */
export type Histories = ReadonlyMap<string, ReadonlyArray<History.Timed<Event>>>

export interface Clients {
  readonly victims: ReadonlyArray<Victim>
  /** Tells those that live to stop, and waits for so many milliseconds at most. */
  readonly stop: (patience: number) => Effect.Effect<Ended>
  readonly histories: Effect.Effect<Histories>
}

interface Incarnation {
  readonly name: string
  readonly file: string
  readonly process: Process.Process<{ readonly event: string }>
  killed: boolean
}

// The machine may have much else to do.
const startUp = { timeout: "1 minute" } as const

// Before that a signal would end it.
const listening = ({ process }: Incarnation) => process.waitFor(({ event }) => event === "started", startUp)

const victim = (
  name: string,
  { proxies }: Link,
  first: Incarnation,
  start: Effect.Effect<Incarnation>
): Victim => {
  let current = first
  return {
    name,
    proxies,
    sigstop: Effect.suspend(() => current.process.sigstop),
    sigcont: Effect.suspend(() => current.process.sigcont),
    block: Effect.suspend(() => Effect.andThen(listening(current), current.process.signal("SIGHUP"))),
    replace: (after) =>
      Effect.gen(function*() {
        current.killed = true
        yield* current.process.kill9
        yield* current.process.exit
        yield* realSleep(after)
        current = yield* start
      })
  }
}

const stop = Effect.fnUntraced(function*(alive: ReadonlyArray<Incarnation>, patience: number) {
  for (const one of alive) yield* Effect.andThen(listening(one), one.process.signal("SIGUSR2"))
  yield* Effect.raceFirst(
    Effect.forEach(alive, ({ process }) => process.exit, { discard: true, concurrency: "unbounded" }),
    realSleep(patience)
  )
  const well = new Set<string>()
  const hung = new Set<string>()
  const crashes: Array<Anomaly> = []
  for (const { name, process } of alive) {
    if (process.running) {
      hung.add(name)
      continue
    }
    const { code, signal } = yield* process.exit
    if (code === 0) {
      well.add(name)
      continue
    }
    const output = (yield* process.output).slice(-2000)
    crashes.push({ check: "crash", detail: `${name} ended with code ${code}, signal ${signal}:\n${output}`, holds: [] })
  }
  return { well, hung, crashes }
})

/** Starts them, and waits until they are at work. */
export const clients = Effect.fnUntraced(function*(options: Options): Effect.fn.Return<Clients, never, Scope.Scope> {
  const { random, versions } = options
  const scope = yield* Effect.scope
  const incarnations: Array<Incarnation> = []
  const start = Effect.fnUntraced(function*(client: string, link: Link) {
    const name = `${client}.${incarnations.length + 1}`
    const file = path.join(options.directory, `${name}.jsonl`)
    fs.writeFileSync(file, "")
    const argument: Argument = {
      ...options.argument,
      library: versions[Math.floor(random() * versions.length)]!,
      redis: link.options,
      seed: Math.floor(random() * 2 ** 31),
      file
    }
    const process = yield* Process.spawn<{ readonly event: string }>(new URL("./client.ts", import.meta.url), {
      argument,
      nodeArgs: ["--disable-warning=ExperimentalWarning"]
    })
    const incarnation: Incarnation = { name, file, process, killed: false }
    incarnations.push(incarnation)
    return incarnation
  }, Scope.provide(scope))

  const victims: Array<Victim> = []
  for (let at = 1; at <= options.count; at++) {
    const name = `client-${at}`
    const link = yield* options.link
    victims.push(victim(name, link, yield* start(name, link), start(name, link)))
  }
  for (const { process } of incarnations) yield* process.waitFor(({ event }) => event === "ready", startUp)
  return {
    victims,
    stop: (patience) => stop(incarnations.filter(({ killed }) => !killed), patience),
    histories: Effect.sync(() => new Map(incarnations.map(({ file, name }) => [name, History.read<Event>(file)])))
  }
})
