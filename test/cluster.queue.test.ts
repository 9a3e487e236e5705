/** A queue of several shards in a Redis Cluster: spread over the primaries, while a slot migrates, and when a primary dies. */
import { assert, it } from "@effect/vitest"
import { Deferred, Effect, Fiber, Schema } from "effect"
import { Queue } from "../src/index.ts"
import { keyOf, partitionOf } from "../src/internal/actor/keys.ts"
import { ownOf } from "../src/internal/queue/naming.ts"
import { type Cluster, cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node } from "./support/live.ts"
import { shows, upTo } from "./support/queues.ts"
import { awaitInSync } from "./support/servers.ts"

const [partitions, shards, concurrency] = [6, 3, 6]

const sample = upTo(100).map((n) => `name ${n}`)

// The first shard is in partition 0.
const colocate = sample.find((name) => partitionOf(name, partitions) === 0)!

/** Groups of the shards in turn. */
const groups = upTo(9).map((at) => sample.filter((name) => partitionOf(name, shards) === at % shards)[at]!)

const shardOf = (id: string) => ownOf(id)![0]

const Payload = Schema.Struct({ n: Schema.Number, group: Schema.optionalKey(Schema.String) })
type Payload = typeof Payload.Type

/** Two processes at a queue whose shards are on primaries of their own, and what its handlers do. */
const spread = <A, E, R>(
  nodes: Cluster,
  self: (at: {
    readonly queues: readonly [Queue.Queue<Payload>, Queue.Queue<Payload>]
    readonly tags: ReadonlyArray<string>
    readonly seen: Seen
  }) => Effect.Effect<A, E, R>
) =>
  Effect.gen(function*() {
    let tags: ReadonlyArray<string>
    let namespace: string
    do {
      namespace = freshNamespace()
      tags = upTo(shards).map((shard) => `{${namespace}:0${shard}}`)
    } while (new Set(yield* Effect.forEach(tags, nodes.serving)).size < shards)
    yield* Effect.scoped(Effect.gen(function*() {
      const [one, two] = yield* Effect.forEach([1, 2], () =>
        Effect.flatMap(
          node({ cluster: nodes.startupNodes }, { namespace, partitions, lease: "12 seconds", margin: "500 millis" }),
          (context) =>
            Effect.provideContext(
              Queue.make({
                name: "work",
                payload: Payload,
                shards,
                colocate,
                limits: { concurrency },
                retention: "200 millis"
              }),
              context
            )
        ))
      yield* Effect.addFinalizer(() => Effect.orDie(one!.obliterate))
      yield* self({ queues: [one!, two!], tags, seen: new Seen() })
    }))
    yield* assertEmpty(yield* nodes.primaries, namespace)
  })

/** The handlers of all processes: which jobs they have begun, and that the limits and the order of groups hold meanwhile. */
class Seen {
  readonly handled: Array<Payload & { readonly shard: number; readonly process: number }> = []
  readonly violations: Array<string> = []
  readonly #running = new Map<string, number>()
  /** Handlers wait for it. */
  gate: Deferred.Deferred<void> | undefined = undefined

  readonly handler = (process: number) => (payload: Payload) =>
    Effect.flatMap(Queue.Job, ({ id }) => {
      const shard = shardOf(id)
      const limited = [["all", concurrency], [shard, concurrency / shards], [payload.group, 1]] as const
      const begin = Effect.sync(() => {
        this.handled.push({ ...payload, shard, process })
        for (const [what, limit] of limited) {
          const running = this.running(what) + 1
          this.#running.set(`${what}`, running)
          if (what !== undefined && running > limit) this.violations.push(`${running} of ${what}`)
        }
      })
      const end = Effect.sync(() => {
        for (const [what] of limited) this.#running.set(`${what}`, this.running(what) - 1)
      })
      return Effect.acquireUseRelease(
        begin,
        () => this.gate === undefined ? Effect.yieldNow : Deferred.await(this.gate),
        () => end
      )
    })

  running(what: string | number | undefined): number {
    return this.#running.get(`${what}`) ?? 0
  }

  of(isMeant: (payload: Seen["handled"][number]) => boolean): Array<number> {
    return this.handled.filter(isMeant).map(({ n }) => n)
  }

  /** So many more jobs of each of these shards begin. */
  readonly goesOn = (which: ReadonlyArray<number>, count = 20) =>
    Effect.suspend(() => {
      const before = which.map((at) => this.of(({ shard }) => shard === at).length)
      return eventually(Effect.sync(() => {
        for (const [index, at] of which.entries()) {
          assert.isAtLeast(this.of(({ shard }) => shard === at).length, before[index]! + count, `shard ${at}`)
        }
      }))
    })
}

/**
 * Offers jobs of each shard, in the order of the numbers of its groups: the next one when what became of the one before it is known. An
 * offer that has failed may have been stored. `from` is a multiple of the number of shards.
 */
const offering = (queues: ReadonlyArray<Queue.Queue<Payload>>, from = 0) =>
  Effect.gen(function*() {
    const [confirmed, uncertain]: [Array<Payload>, Array<number>] = [[], []]
    let isOver = false
    const fibers = yield* Effect.forEach(upTo(shards), (shard) =>
      Effect.forkChild(Effect.gen(function*() {
        for (let round = 0; !isOver; round++) {
          const n = from + round * shards + shard
          const group = groups[n % groups.length]!
          const payload = { n, group }
          const offered = yield* Effect.result(queues[round % 2]!.offer(payload, { group }))
          if (offered._tag === "Success") confirmed.push(payload)
          else uncertain.push(n)
        }
      })))
    const stop = Effect.suspend(() => {
      isOver = true
      return Effect.forEach(fibers, Fiber.join)
    })
    return { confirmed, uncertain, stop }
  })

/** Each of these has begun, one of a group behind the other, and nothing else but what may have been stored. */
const assertBegun = (
  begun: ReadonlyArray<Payload>,
  confirmed: ReadonlyArray<Payload>,
  uncertain: ReadonlyArray<number>
) => {
  const known = begun.filter(({ n }) => !uncertain.includes(n))
  assert.sameMembers(numbersOf(known), numbersOf(confirmed))
  for (const group of groups) assert.deepStrictEqual(numbersOf(known, group), numbersOf(confirmed, group), group)
}

const numbersOf = (payloads: ReadonlyArray<Payload>, group?: string) =>
  payloads.filter((payload) => group === undefined || payload.group === group).map(({ n }) => n)

it.live(
  "a queue of several shards is spread over the primaries, and goes on while a slot migrates",
  () =>
    Effect.gen(function*() {
      const nodes = yield* cluster()
      yield* spread(nodes, ({ queues: [a, b], seen, tags }) =>
        Effect.gen(function*() {
          const ids = yield* Effect.forEach(upTo(90), (n) => Effect.map(a.offer({ n }), ({ id }) => id))
          yield* Effect.forEach(upTo(90, 100), (n) => {
            const group = groups[n % groups.length]!
            return b.offer({ n, group }, { group })
          })
          // Each primary has the jobs of one shard.
          for (const shard of upTo(shards)) {
            assert.strictEqual(ids.filter((id) => shardOf(id) === shard).length, 30)
            const server = yield* nodes.serving(tags[shard]!)
            assert.strictEqual(yield* server.cli("XLEN", keyOf(`${tags[shard]}:queue:work`, "normal")), "30")
            assert.strictEqual(yield* server.cli("XLEN", keyOf(`${tags[shard]}:queue:work`, "held")), "30")
          }
          yield* shows(a, { waiting: 180, active: 0 })
          // A process with fewer slots than shards draws from all of them, one job at a time.
          const few = yield* Effect.forkChild(b.run(seen.handler(1), { concurrency: 2 }))
          yield* shows(a, { completed: 180, active: 0 })
          yield* Fiber.interrupt(few)
          assert.sameMembers(seen.of(() => true), [...upTo(90), ...upTo(90, 100)])
          for (const shard of upTo(shards)) assert.strictEqual(seen.of((one) => one.shard === shard).length, 60)
          // With more slots than the limit, each shard runs its share of that.
          const gate = seen.gate = yield* Deferred.make<void>()
          const working = yield* Effect.forEach(
            [a, b],
            (queue, process) => Effect.forkChild(queue.run(seen.handler(process), { concurrency }))
          )
          const offered = yield* offering([a, b])
          yield* eventually(Effect.sync(() => {
            for (const shard of upTo(shards)) {
              assert.strictEqual(seen.running(shard), concurrency / shards)
            }
          }))
          const { waiting } = yield* a.state
          yield* eventually(Effect.map(a.state, (now) => assert.isAbove(now.waiting, waiting + 20)))
          yield* shows(b, { active: concurrency })
          seen.gate = undefined
          yield* Deferred.succeed(gate, undefined)
          yield* seen.goesOn(upTo(shards))
          // The other shards go on while one is between two primaries.
          const from = yield* nodes.serving(tags[0]!)
          const to = (yield* nodes.primaries).find((server) => server !== from)!
          const migration = yield* nodes.migration(tags[0]!, to)
          yield* migration.begin
          yield* migration.move({ count: 2 })
          yield* seen.goesOn([1, 2])
          yield* migration.complete
          assert.strictEqual(yield* nodes.serving(tags[0]!), to)
          yield* seen.goesOn(upTo(shards))
          yield* offered.stop
          yield* shows(a, { waiting: 0, active: 0 })
          yield* Effect.forEach(working, Fiber.interrupt)
          // None has run twice either.
          assertBegun(seen.handled.slice(180), offered.confirmed, offered.uncertain)
          assert.deepStrictEqual(seen.violations, [])
        }))
    }).pipe(Effect.scoped),
  60_000
)

it.live("a queue of several shards goes on when a primary dies, and no job is lost", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    yield* spread(nodes, ({ queues: [a, b], seen, tags }) =>
      Effect.gen(function*() {
        const victim = yield* nodes.serving(tags[0]!)
        const gate = seen.gate = yield* Deferred.make<void>()
        const working = yield* Effect.forEach(
          [a, b],
          (queue, process) => Effect.forkChild(queue.run(seen.handler(process), { concurrency }))
        )
        const first = yield* offering([a, b])
        yield* eventually(Effect.sync(() => assert.isAtLeast(first.confirmed.length, 300)))
        yield* first.stop
        yield* shows(a, { active: concurrency })
        // With jobs that run, and jobs that wait, on each primary.
        yield* awaitInSync(victim, yield* nodes.replicasOf(victim))
        yield* victim.stop()
        seen.gate = undefined
        yield* Deferred.succeed(gate, undefined)
        yield* seen.goesOn([1, 2])
        yield* nodes.awaitPromotion(tags[0]!, victim)
        yield* seen.goesOn([0])
        const second = yield* offering([a, b], 100_002)
        yield* seen.goesOn(upTo(shards))
        yield* second.stop
        yield* shows(a, { waiting: 0, active: 0 })
        yield* Effect.forEach(working, Fiber.interrupt)
        assert.deepStrictEqual([...first.uncertain, ...second.uncertain], [])
        // A job whose acknowledgement the replica did not have may have run twice.
        const begun = [...new Map(seen.handled.map((payload) => [payload.n, payload])).values()]
        assertBegun(begun, [...first.confirmed, ...second.confirmed], [])
        assert.deepStrictEqual(seen.violations, [])
      }))
  }).pipe(Effect.scoped), 60_000)
