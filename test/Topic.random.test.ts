/** Topics under random use: what is handled or read, and what is said to be missing, is all that was published. */
import { assert, layer } from "@effect/vitest"
import { Context, Effect, Fiber, Schedule, Schema, type Scope, Stream } from "effect"
import { Coordinator, Topic } from "../src/index.ts"
import { spaceOf } from "../src/internal/hold/place.ts"
import type { Tenancy } from "../src/internal/hold/tenancy.ts"
import { make as proxy, type Proxy } from "../src/testing/Proxy.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { freshNamespace, type Node, node, TestServer } from "./support/live.ts"
import { on } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const rounds = 8
const stepsPerRound = 60

interface Dice {
  /** A whole number below this one. */
  readonly below: (count: number) => number
  readonly chance: (of: number) => boolean
}

const diceOf = (seed: number): Dice => {
  let state = seed
  const random = () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0
    return state / 2 ** 32
  }
  return { below: (count) => Math.floor(random() * count), chance: (of) => random() < of }
}

/** A process whose mailbox is read late, one that publishes, and a topic that keeps little. */
interface Round {
  readonly dice: Dice
  readonly topic: Topic.Topic<number>
  readonly publisher: Topic.Topic<number>
  readonly publish: Effect.Effect<void, Topic.TopicError>
  /** Changes the shards, in some rounds. */
  readonly resize: Effect.Effect<void, unknown>
  /** As if events of the mailboxes of the topic were missing. */
  readonly miss: Effect.Effect<void>
  /** For less than this many milliseconds. */
  readonly pause: (millis: number) => Effect.Effect<void>
  /** How many were published. */
  readonly total: () => number
}

const delayMailboxes = (line: Proxy, dice: Dice) =>
  line.onRequest(async ({ name }) => {
    if (name === "XREAD" && dice.chance(0.3)) await new Promise((resolve) => setTimeout(resolve, dice.below(30)))
    return "pass" as const
  })

const missed = (context: Node): void => {
  const { kernel } = spaceOf(Context.get(context, Coordinator.Coordinator))
  for (let at = 0; at < kernel.settings.partitions; at++) {
    for (const { session, tenant } of kernel.partitionAt(at).channels.values()) {
      if (session !== undefined) (tenant as Tenancy).missed(session)
    }
  }
}

/** Runs a test again and again, each time with another topic. */
const inRounds = (use: (round: Round) => Effect.Effect<void, unknown, Scope.Scope>) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const seed = Math.floor(Math.random() * 2 ** 31)
    const dice = diceOf(seed)
    const round = Effect.scoped(Effect.gen(function*() {
      const line = yield* proxy(server)
      const options = { namespace: freshNamespace(), partitions: 4 }
      const [reader, writer] = [yield* node(line.url, options), yield* node(server.url, options)]
      yield* delayMailboxes(line, dice)
      const moves = dice.chance(0.4)
      const retention = { length: dice.chance(0.7) ? 8 : 200, protect: dice.chance(0.4) }
      const make = (shards: number) => Topic.make({ name: "t", schema: Schema.Number, retention, shards })
      const publisher = yield* on(writer, make(dice.chance(0.4) ? 3 : 1))
      yield* Effect.addFinalizer(() => Effect.orDie(publisher.purge))
      const topic = yield* on(reader, Topic.make({ name: "t", schema: Schema.Number }))
      let total = 0
      yield* use({
        dice,
        topic,
        publisher,
        publish: Effect.suspend(() => {
          const values = Array.from({ length: 1 + dice.below(30) }, () => total++)
          const hasKeys = dice.chance(0.5)
          return Effect.asVoid(publisher.publishAll(values, (n) => hasKeys ? { key: String(n % 5) } : {}))
        }),
        resize: Effect.suspend(() =>
          moves ? Effect.asVoid(Effect.scoped(on(writer, make(1 + dice.below(4))))) : Effect.void
        ),
        miss: Effect.sync(() => missed(reader)),
        pause: (millis) => Effect.suspend(() => realSleep(dice.below(millis))),
        total: () => total
      })
    }))
    for (let n = 0; n < rounds; n++) {
      yield* Effect.tapCause(round, (cause) => Effect.logError(`seed ${seed}, round ${n}`, cause))
    }
  })

layer(TestServer.layer, live)("a topic under random use", (it) => {
  it.effect(
    "has a group handle all that was published, or observe that it misses it",
    () =>
      inRounds(({ dice, miss, pause, publish, publisher, resize, topic, total }) =>
        Effect.gen(function*() {
          const handled = new Set<number>()
          let gaps = 0
          const orderBy = dice.chance(0.5) ? "key" as const : undefined
          const begin = Effect.suspend(() =>
            Effect.forkScoped(
              topic.run(({ value }) =>
                Effect.gen(function*() {
                  if (dice.chance(0.5)) yield* pause(4)
                  if (dice.chance(0.15)) return yield* Effect.fail("again")
                  handled.add(value)
                }), {
                group: "g",
                from: "beginning",
                orderBy,
                concurrency: 1 + dice.below(3),
                prefetch: 1 + dice.below(6),
                retry: Schedule.spaced(dice.chance(0.5) ? 1 : 20),
                // A member that leaves meanwhile has not observed it.
                onGap: ({ missed }) => Effect.andThen(pause(4), Effect.sync(() => gaps += missed!))
              })
            )
          )
          // The first one stays, as a purge removes a group without members.
          const members = [yield* begin]
          yield* eventually(Effect.map(topic.state, ({ groups }) => assert.strictEqual(groups[0]?.members, 1)))
          for (let step = 0; step < stepsPerRound; step++) {
            const what = dice.below(20)
            if (what < 11) yield* publish
            else if (what < 13) members.push(yield* begin)
            else if (what < 15 && members.length > 1) {
              yield* Fiber.interrupt(members.splice(1 + dice.below(members.length - 1), 1)[0]!)
            } else if (what < 16) yield* publisher.purge
            else if (what < 17) yield* resize
            else if (what < 18) yield* miss
            else yield* pause(10)
          }
          yield* eventually(
            Effect.gen(function*() {
              const { groups } = yield* publisher.state
              assert.deepStrictEqual(groups.map(({ lag, pending }) => [lag, pending]), [[0, 0]])
              assert.strictEqual(handled.size + gaps, total())
            })
          )
        })
      ),
    60_000
  )

  it.effect(
    "has subscribers read all that was published, or see that they miss it, in the order of each key",
    () =>
      inRounds(({ dice, miss, pause, publish, publisher, resize, topic, total }) =>
        Effect.gen(function*() {
          const begin = Effect.gen(function*() {
            const strategy = (["suspend", "sliding", "dropping"] as const)[dice.below(3)]!
            const capacity = 1 + dice.below(40)
            const stream = yield* topic.subscribed({ from: "beginning", buffer: { strategy, capacity } })
            const found = { strategy, capacity, read: 0, gaps: 0, disorder: 0 }
            const last = new Map<string, number>()
            yield* Effect.forkScoped(Stream.runForEach(stream, (element) =>
              Effect.suspend(() => {
                if (element._tag === "Gap") {
                  found.gaps += element.missed!
                } else if (element._tag === "Event") {
                  const { key = "", value } = element
                  found.read++
                  if (key !== "" && value <= (last.get(key) ?? -1)) found.disorder++
                  last.set(key, value)
                }
                return dice.chance(0.15) ? pause(8) : Effect.void
              })))
            return found
          })
          const all = yield* Effect.replicateEffect(begin, 5)
          for (let step = 0; step < stepsPerRound; step++) {
            const what = dice.below(20)
            if (what < 14) yield* publish
            else if (what < 15) yield* publisher.purge
            else if (what < 16) yield* resize
            else if (what < 17) yield* miss
            else yield* pause(10)
          }
          for (const found of all) {
            yield* eventually(Effect.sync(() => {
              assert.strictEqual(found.read + found.gaps, total(), JSON.stringify(found))
              assert.strictEqual(found.disorder, 0, JSON.stringify(found))
            }))
          }
        })
      ),
    60_000
  )
})
