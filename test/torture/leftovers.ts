/** What Redis has when all clients have ended, or should have. */
import { Effect, Layer } from "effect"
import * as Lockstep from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { delivered } from "../support/flows.ts"
import { keysOf, remainsOf } from "../support/namespace.ts"
import type { Anomaly } from "./checks.ts"
import type { Settings } from "./client.ts"
import type { Deployment } from "./deployments.ts"
import { workloads } from "./workloads.ts"

const { Coordinator, Lock, Redis } = Lockstep

const readers: { readonly [type: string]: readonly [command: string, ...args: ReadonlyArray<string>] } = {
  hash: ["HGETALL"],
  set: ["SMEMBERS"],
  zset: ["ZRANGE", "0", "-1", "WITHSCORES"],
  stream: ["XRANGE", "-", "+"]
}

/** All that Redis has of a namespace, for people. */
export const dump = Effect.fnUntraced(function*({ primaries }: Deployment, namespace: string) {
  const lines: Array<string> = []
  for (const server of yield* primaries) {
    for (const key of yield* keysOf(server, namespace)) {
      const [command, ...args] = readers[yield* server.cli("TYPE", key)] ?? ["TYPE"]
      lines.push(`${server.port} ${JSON.stringify(key)}`, yield* server.cli(command, key, ...args))
      if (command !== "XRANGE") continue
      // Of a queue: which jobs are in work, and how often each was delivered. Other streams do not have the group.
      lines.push(yield* Effect.orElseSucceed(server.cli("XPENDING", key, "workers", "-", "+", 100), () => ""))
    }
  }
  return lines.join("\n")
})

// So many that there are some in each partition.
const names = Array.from({ length: 64 }, (_, at) => `sweep ${at}`)

/**
 * Tokens of fenced writers, numbers of the sums of processes that were killed, and how many shards a topic has: Redis keeps
 * them for a day.
 */
const isKeptForADay = Effect.fnUntraced(function*({ primaries }: Deployment, key: string) {
  const kind = /^\{[^}]+\}:(sharedRef|counter|topic):/.exec(key)?.[1]
  if (kind === undefined) return false
  const kept = kind === "topic" ? /^(s|[EL]\d+)$/ : /^[fb]/
  for (const server of yield* primaries) {
    // Another node of a cluster does not answer.
    const fields = yield* Effect.orElseSucceed(server.cli("HKEYS", key), () => "")
    if (fields === "") continue
    return fields.split("\n").every((field) => kept.test(field)) && Number(yield* server.cli("PTTL", key)) > 0
  }
  return false
})

/** Nothing stays behind once a coordinator has been everywhere. */
export const leaks = (deployment: Deployment, settings: Settings): Effect.Effect<ReadonlyArray<Anomaly>> =>
  Effect.suspend(() => {
    let left: ReadonlyArray<string> = []
    const look = Effect.gen(function*() {
      const all = yield* remainsOf(yield* deployment.primaries, settings.namespace)
      left = yield* Effect.filter(all, (key) => Effect.map(isKeptForADay(deployment, key), (kept) => !kept))
    })
    // No other process is left to find the dead.
    const sweep = Effect.gen(function*() {
      const coordinator = yield* Coordinator.Coordinator
      yield* Effect.forEach(names, (name) => Lock.withLock(Effect.void, name), { concurrency: "unbounded" })
      yield* Effect.forEach(workloads, ({ clear }) => clear?.(Lockstep, delivered) ?? Effect.void)
      yield* look
      const own = (yield* coordinator.sessions).flatMap(({ id }) => id === undefined ? [] : [id])
      left = left.filter((key) => !own.some((id) => key.includes(id)) && !key.endsWith(":due"))
      return left.length === 0
    })
    const swept = eventually(sweep, {
      timeout: settings.lease * 3 + 10_000,
      interval: 200,
      message: "the dead are forgotten"
    }).pipe(
      Effect.provide(
        Coordinator.layer(settings).pipe(Layer.provideMerge(Redis.layer(deployment.direct)), Layer.fresh)
      )
    )
    const emptied = eventually(Effect.map(look, () => left.length === 0), { message: "the namespace is empty" })
    return Effect.andThen(swept, emptied).pipe(
      Effect.as([]),
      Effect.catchCause((cause) =>
        Effect.succeed([{
          check: "leak",
          detail: `left behind: ${left.slice(0, 20).join(", ")} (${String(cause).slice(0, 200)})`,
          holds: []
        }])
      )
    )
  })
