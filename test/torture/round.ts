/** One round: a deployment, some clients, faults at times that the seed decides, and the judgement. */
import { Effect, type Scope } from "effect"
import * as path from "node:path"
import { randomOf } from "../../src/internal/simulation/choices.ts"
import { workspace } from "../../src/internal/testing/workspace.ts"
import { History } from "../../src/testing.ts"
import { realSleep } from "../support/eventually.ts"
import type { Settings } from "./client.ts"
import { clients, type Histories } from "./clients.ts"
import { deploy, type Name } from "./deployments.ts"
import { type Fault, faults } from "./faults.ts"
import { judge, type Judgement, realDelays } from "./judgement.ts"
import { dump, leaks } from "./leftovers.ts"
import { copy, jumping, original, type Patch } from "./library.ts"
import { resource } from "./resource.ts"
import { inject, type Injected } from "./schedule.ts"

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

export interface Report extends Judgement {
  readonly clients: number
  readonly injected: ReadonlyArray<Injected>
  /** When the faults began. */
  readonly origin: number
  readonly histories: Histories
  /** What Redis had when some did not stop. */
  readonly redis: string | undefined
}

/** What the clients import: one of these each. */
const versionsOf = ({ bug, deployment }: Options, directory: string): ReadonlyArray<string> => {
  if (bug !== undefined) return [copy(directory, "bug", bug)]
  switch (deployment) {
    case "rolling":
      return [original, copy(directory, "next", { lua: [["MOST_INLINE = 64", "MOST_INLINE = 2"]] })]
    case "clock":
      return [copy(directory, "clock", jumping)]
    default:
      return [original]
  }
}

const countOf = ({ bug, deployment }: Options, random: () => number): number => {
  if (bug !== undefined) return 6
  // They have servers of their own to run on the same cores.
  const most = deployment === "sentinel" || deployment === "cluster" ? 2 : 6
  return 3 + Math.floor(random() * most)
}

/** Short, so that many end; behind Sentinel and on Cluster mostly longer than a fail-over, which it then lives to see. */
const leaseOf = ({ deployment }: Options, random: () => number): { readonly lease: number; readonly margin: number } =>
  (deployment === "sentinel" || deployment === "cluster") && random() < 0.7
    ? { lease: 9000, margin: 1000 }
    : { lease: 2000, margin: 400 }

const faultsOf = ({ bug, deployment, faults: only }: Options, random: () => number): ReadonlyArray<Fault> => {
  const possible = faults.filter(({ name, on }) => on(deployment) && (only === undefined || only.includes(name)))
  // A round without forgetting is judged more strictly; half of them are.
  const faithful = only === undefined && deployment !== "clock" && random() < 0.5
  // A bug has to be found without the help of faults that excuse it.
  return faithful || bug !== undefined ? possible.filter(({ forgets }) => forgets !== true) : possible
}

export const round = (options: Options): Effect.Effect<Report, unknown, Scope.Scope> =>
  Effect.gen(function*() {
    const random = randomOf(options.seed)
    const settings: Settings = { namespace: `torture${options.seed}`, partitions: 4, ...leaseOf(options, random) }
    const { directory } = yield* workspace
    const deployment = yield* deploy(options.deployment)
    const fenced = path.join(directory, "resource")
    yield* resource(fenced)
    const count = countOf(options, random)
    const group = yield* clients({
      count,
      link: deployment.link,
      versions: versionsOf(options, directory),
      random,
      directory,
      argument: { settings, only: options.only, long: options.long ?? 0.02, moves: 0.02, resource: fenced }
    })

    const origin = History.now()
    const scene = { ...settings, deployment, random }
    const injected = yield* inject(faultsOf(options, random), group.victims, scene, options.millis)
    const healed = History.now()

    // In the calm what waits is granted within a lease, and what holds is short.
    yield* realSleep(settings.lease * 2 + 1000)
    const patience = settings.lease * 3 + 20_000
    const ended = yield* group.stop(patience)
    const hung = ended.hung.size > 0
    const waiting = hung ? yield* dump(deployment, settings.namespace) : undefined
    const histories = yield* group.histories
    const judgement = judge({
      histories,
      injected,
      healed,
      ended,
      patience,
      lease: settings.lease,
      delays: realDelays
    })
    const left = hung ? [] : yield* leaks(deployment, settings)
    return {
      ...judgement,
      anomalies: [...judgement.anomalies, ...left],
      clients: count,
      injected,
      origin,
      histories,
      redis: left.length > 0 ? yield* dump(deployment, settings.namespace) : waiting
    }
  })
