/** One round: a deployment, some clients, faults at times that the seed decides, and the judgement. */
import { Deferred, Effect, Exit, Fiber, Layer, Scope } from "effect"
import * as fs from "node:fs"
import * as path from "node:path"
import { Coordinator, Lock, Redis } from "../../src/index.ts"
import { workspace } from "../../src/internal/testing/workspace.ts"
import { History, Process } from "../../src/testing.ts"
import { eventually, realSleep } from "../support/eventually.ts"
import { keysOf, remainsOf } from "../support/namespace.ts"
import { type Anomaly, refused, type Run, settled, type Span } from "./checks.ts"
import { type Argument, randomOf } from "./client.ts"
import { deploy, type Deployment, type Name } from "./deployments.ts"
import { type Fault, faults, type Victim } from "./faults.ts"
import { type Event, fold, type Hold, lastRun } from "./history.ts"
import { copy, jumping, original, type Patch } from "./library.ts"
import { resource } from "./resource.ts"
import { workloads } from "./workloads.ts"

export interface Options {
  readonly seed: number
  readonly deployment: Name
  readonly only: ReadonlyArray<string>
  /** How long faults go on, in milliseconds. */
  readonly millis: number
  /** The library with a bug in it. */
  readonly bug?: Patch | undefined
  /** How many of the bodies are long ones, 0 to 1. Default 0.02. */
  readonly long?: number | undefined
  /** Only these faults. */
  readonly faults?: ReadonlyArray<string> | undefined
}

/** A fault that was injected. */
export interface Injected extends Span {
  readonly fault: Fault
  readonly client: string
  readonly failure: string | undefined
}

export interface Report {
  readonly clients: number
  readonly holds: ReadonlyArray<Hold>
  readonly injected: ReadonlyArray<Injected>
  /** Why sessions were lost. */
  readonly lost: ReadonlyArray<string>
  readonly anomalies: ReadonlyArray<Anomaly>
  /** How long after the beginning of a fault by which Redis forgot them holders took their last step, in microseconds. */
  readonly interrupted: ReadonlyArray<readonly [fault: string, after: number]>
  readonly origin: number
  /** What each process recorded, by its name. */
  readonly histories: ReadonlyMap<string, ReadonlyArray<History.Timed<Event>>>
  /** What Redis had when some did not stop. */
  readonly redis: string | undefined
}

const lease = 2000
const margin = 400
const partitions = 4

// Before that a signal would end it.
const listening = (process: Process.Process<{ readonly event: string }>) =>
  process.waitFor(({ event }) => event === "started")

const overdue = Effect.andThen(realSleep("1 minute"), Effect.fail("it did not end"))

interface Incarnation {
  readonly name: string
  readonly file: string
  readonly process: Process.Process<{ readonly event: string }>
  killed: boolean
}

export const round = (options: Options): Effect.Effect<Report, unknown, Scope.Scope> =>
  Effect.gen(function*() {
    const random = randomOf(options.seed)
    const space = yield* workspace
    const deployment = yield* deploy(options.deployment)
    const namespace = `torture${options.seed}`
    const versions = options.bug !== undefined
      ? [copy(space.directory, "bug", options.bug)]
      : options.deployment === "rolling"
      ? [original, copy(space.directory, "next", { lua: [["local RELEASED,", "local NEXT = true\nlocal RELEASED,"]] })]
      : options.deployment === "clock"
      ? [copy(space.directory, "clock", jumping)]
      : [original]
    const fenced = path.join(space.directory, "resource")
    yield* resource(fenced)
    const scope = yield* Effect.scope

    const incarnations: Array<Incarnation> = []
    let started = 0
    const start = Effect.fnUntraced(function*(client: string, redis: Redis.Options) {
      const name = `${client}.${++started}`
      const file = path.join(space.directory, `${name}.jsonl`)
      fs.writeFileSync(file, "")
      const argument: Argument = {
        library: versions[Math.floor(random() * versions.length)]!,
        redis,
        namespace,
        lease,
        margin,
        partitions,
        seed: Math.floor(random() * 2 ** 31),
        only: options.only,
        long: options.long ?? 0.02,
        file,
        resource: fenced
      }
      const process = yield* Scope.provide(
        Process.spawn<{ readonly event: string }>(new URL("./client.ts", import.meta.url), {
          argument,
          nodeArgs: ["--disable-warning=ExperimentalWarning"]
        }),
        scope
      )
      const incarnation: Incarnation = { name, file, process, killed: false }
      incarnations.push(incarnation)
      return incarnation
    })

    const count = options.bug !== undefined ? 6 : options.deployment === "sentinel" || options.deployment === "cluster"
      ? 3 + Math.floor(random() * 2)
      : 3 + Math.floor(random() * 6)
    const victims: Array<Victim> = []
    for (let at = 1; at <= count; at++) {
      const client = `client-${at}`
      const link = yield* deployment.link
      let current = yield* start(client, link.options)
      victims.push({
        name: client,
        proxies: link.proxies,
        sigstop: Effect.suspend(() => current.process.sigstop),
        sigcont: Effect.suspend(() => current.process.sigcont),
        block: Effect.suspend(() => Effect.andThen(listening(current.process), current.process.signal("SIGHUP"))),
        replace: (after) =>
          Effect.gen(function*() {
            current.killed = true
            yield* current.process.kill9
            yield* current.process.exit
            yield* realSleep(after)
            current = yield* start(client, link.options)
          })
      })
    }
    for (const { process } of incarnations) yield* process.waitFor(({ event }) => event === "ready")

    // ---------------------------------------------------------------------------------------------------------------
    // Faults
    // ---------------------------------------------------------------------------------------------------------------

    const origin = History.now()
    const end = performance.now() + options.millis
    const injected: Array<Injected> = []
    const possible = faults.filter((fault) =>
      fault.on(options.deployment) && (options.faults === undefined || options.faults.includes(fault.name))
    )
    const busy = new Set<string>()
    const running: Array<Fiber.Fiber<void>> = []
    // A bug has to be found without the help of faults that excuse it.
    const allowed = options.bug === undefined ? possible : possible.filter(({ forgets }) => forgets !== true)
    // A round without forgetting is judged more strictly; half of them are.
    const faithful = options.faults === undefined && options.deployment !== "clock" && random() < 0.5
    const chosen = faithful ? allowed.filter(({ forgets }) => forgets !== true) : allowed
    while (performance.now() < end) {
      yield* realSleep(50 + random() * 900)
      const victim = victims[Math.floor(random() * victims.length)]!
      // Each side has its share, however many kinds it has.
      const of = random() < 0.7 ? "client" : "server"
      const forgets = random() < 0.3
      const all = chosen.filter((fault) => fault.of === of)
      const forgetting = all.filter((fault) => fault.forgets === true)
      const side = forgets && forgetting.length > 0 ? forgetting : all
      const fault = side[Math.floor(random() * side.length)]
      if (fault === undefined) continue
      const place = fault.of === "client" ? victim.name : ""
      if (busy.has(place)) continue
      busy.add(place)
      const from = History.now()
      const scene = { deployment, victim, random, lease, partitions, namespace }
      running.push(
        yield* Effect.forkScoped(
          Effect.exit(Effect.raceFirst(fault.run(scene), overdue)).pipe(
            Effect.map((exit) => {
              injected.push({
                fault,
                client: place,
                from,
                to: History.now(),
                failure: Exit.isFailure(exit) ? String(exit.cause).slice(0, 300) : undefined
              })
              busy.delete(place)
            })
          )
        )
      )
    }
    for (const fiber of running) yield* Fiber.join(fiber)
    const healed = History.now()

    // ---------------------------------------------------------------------------------------------------------------
    // Calm, and the end
    // ---------------------------------------------------------------------------------------------------------------

    const calm = lease * 2 + 1000
    yield* realSleep(calm)
    const anomalies: Array<Anomaly> = []
    for (const { killed, process } of incarnations) {
      if (!killed) yield* Effect.andThen(listening(process), process.signal("SIGUSR2"))
    }
    const alive = incarnations.filter(({ killed }) => !killed)
    // What waits was granted within a lease, and what holds is short.
    const all = yield* Deferred.make<void>()
    yield* Effect.forkScoped(
      Effect.forEach(alive, ({ process }) => process.exit, { discard: true, concurrency: "unbounded" }).pipe(
        Effect.andThen(Deferred.succeed(all, undefined))
      )
    )
    const inTime = yield* Effect.raceFirst(
      Effect.as(Deferred.await(all), true),
      Effect.as(realSleep(lease * 3 + 5000), false)
    )
    const ended = new Set<string>()
    for (const { name, process } of alive) {
      const output = yield* process.output
      if (!process.running) {
        const { code, signal } = yield* process.exit
        if (code === 0) ended.add(name)
        else {
          anomalies.push({
            check: "crash",
            detail: `${name} ended with code ${code}, signal ${signal}:\n${output.slice(-2000)}`,
            holds: []
          })
        }
      }
    }

    const histories = new Map<string, ReadonlyArray<History.Timed<Event>>>()
    let redis: string | undefined
    const lost = new Map<string, Array<number>>()
    const reasons: Array<string> = []
    const holds: Array<Hold> = []
    for (const { file, name } of incarnations) {
      const events = History.read<Event>(file)
      histories.set(name, events)
      holds.push(...fold(name, events))
      const mine: Array<number> = []
      for (const event of events) {
        if (event.event !== "lost") continue
        mine.push(event.at)
        reasons.push(event.reason)
      }
      lost.set(name, mine)
    }
    if (!inTime) {
      const open = holds.filter((hold) =>
        hold.ended === undefined && alive.some(({ name, process }) => name === hold.client && process.running)
      )
      redis = yield* dump(namespace, deployment)
      anomalies.push({
        check: "hang",
        detail: `some were still waiting ${(lease * 3 + 5000) / 1000} s after they were told to stop`,
        holds: open.slice(0, 10)
      })
    }
    const micros = lease * 1000
    const disturbed = new Map<string, Array<Span>>()
    for (const { client, from, to } of injected) {
      const names = client === ""
        ? [""]
        : incarnations.flatMap(({ name }) => name.startsWith(`${client}.`) ? [name] : [])
      for (const name of names) {
        disturbed.set(name, [...disturbed.get(name) ?? [], { from, to: to + 1_000_000 }])
      }
    }
    const run: Run = {
      lease: micros,
      forgets: injected.filter(({ fault }) => fault.forgets).map(({ from, to }) => ({ from, to: to + micros })),
      disturbed,
      lost
    }
    for (const workload of workloads) {
      const mine = holds.filter(({ kind }) => kind.split(" ")[0] === workload.name)
      for (const key of new Set(mine.map(({ key }) => key))) {
        anomalies.push(...workload.check(mine.filter((hold) => hold.key === key), run))
      }
      if (mine.length > 0 && !mine.some(({ entered }) => entered !== undefined && entered > healed)) {
        anomalies.push({
          check: "progress",
          detail: `nothing was granted to ${workload.name} after the faults`,
          holds: []
        })
      }
    }
    anomalies.push(...refused(holds, run), ...settled(holds, ended))
    for (const hold of holds) {
      if (hold.outcome?.startsWith("failed") === true && !isTyped(hold.outcome)) {
        anomalies.push({ check: "error", detail: hold.outcome, holds: [hold] })
      }
    }
    if (inTime) anomalies.push(...yield* leaks(deployment.direct, namespace, deployment))
    const interrupted = injected.filter(({ fault }) => fault.forgets).flatMap(({ fault, from, to }) =>
      holds.filter((hold) =>
        hold.outcome?.startsWith("lost") === true && hold.entered !== undefined && hold.entered < to &&
        hold.ended! > from &&
        hold.ended! < to + 2 * micros
      ).map((hold) => [fault.name, Math.max(0, lastRun(hold) - from)] as const)
    )
    return { interrupted, clients: count, holds, injected, lost: reasons, anomalies, origin, histories, redis }
  })

// What a user has to reckon with; everything else is a defect.
const isTyped = (outcome: string): boolean =>
  /^failed lockstep\/\w+\/\w+Error: /.test(outcome) && !/defect/i.test(outcome)

/** All that Redis has of a namespace, for people. */
const dump = (namespace: string, { primaries }: Deployment): Effect.Effect<string, unknown> =>
  Effect.gen(function*() {
    const lines: Array<string> = []
    const commands: { readonly [type: string]: readonly [command: string, ...args: ReadonlyArray<string>] } = {
      hash: ["HGETALL"],
      set: ["SMEMBERS"],
      zset: ["ZRANGE", "0", "-1", "WITHSCORES"],
      stream: ["XRANGE", "-", "+"]
    }
    for (const server of yield* primaries) {
      for (const key of yield* keysOf(server, namespace)) {
        const [command, ...args] = commands[yield* server.cli("TYPE", key)] ?? ["TYPE"]
        lines.push(`${server.port} ${JSON.stringify(key)}`, yield* server.cli(command, key, ...args))
      }
    }
    return lines.join("\n")
  })

/** Nothing stays behind once a coordinator has been everywhere. */
const leaks = (
  direct: Redis.Options,
  namespace: string,
  deployment: Deployment
): Effect.Effect<ReadonlyArray<Anomaly>, unknown> =>
  Effect.gen(function*() {
    let left: ReadonlyArray<string> = []
    const look = Effect.gen(function*() {
      left = yield* remainsOf(yield* deployment.primaries, namespace)
      return left.length === 0
    })
    // Whoever is left has to find the dead; with a coordinator of its own in each partition the harness is.
    const swept = yield* Effect.exit(
      Effect.scoped(
        Effect.gen(function*() {
          const here = yield* Layer.build(
            Coordinator.layer({ namespace, partitions, lease, margin }).pipe(
              Layer.provideMerge(Redis.layer(direct)),
              Layer.fresh
            )
          )
          const names = Array.from({ length: 64 }, (_, at) => `sweep ${at}`)
          yield* eventually(
            Effect.gen(function*() {
              yield* Effect.forEach(names, (name) => Lock.withLock(Effect.void, name), { concurrency: "unbounded" })
                .pipe(
                  Effect.provideContext(here)
                )
              yield* look
              const own = new Set(
                (yield* Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions), here))
                  .flatMap((
                    { id }
                  ) => id === undefined ? [] : [id])
              )
              left = left.filter((key) => ![...own].some((id) => key.includes(id)) && !key.endsWith(":due"))
              return left.length === 0
            }),
            { timeout: lease * 3 + 10_000, interval: 200, message: "the dead are forgotten" }
          )
        })
      )
    )
    if (Exit.isFailure(swept)) {
      return [{
        check: "leak",
        detail: `left behind: ${left.slice(0, 20).join(", ")} (${String(swept.cause).slice(0, 200)})`,
        holds: []
      }]
    }
    const empty = yield* Effect.exit(eventually(look, { timeout: 10_000, message: "the namespace is empty" }))
    return Exit.isFailure(empty)
      ? [{ check: "leak", detail: `left behind: ${left.slice(0, 20).join(", ")}`, holds: [] }]
      : []
  })
