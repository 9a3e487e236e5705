/** Another process of the tests, that works on a queue, or offers jobs to it. */
import { DateTime, Effect, Layer, Option, Schedule, Schema } from "effect"
import { Coordinator, Queue, Redis, WorkStealing } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  /** How long it works on a job; or else how many jobs it offers, beginning with which. With a deque it does both. */
  readonly millis?: number
  readonly offers?: number
  readonly from?: number
  /** How long it waits after each offer. Default: 1 ms. */
  readonly pause?: number
  /** Every second job that it offers is of one of so many groups, whose names begin so. */
  readonly groups?: readonly [count: number, name: string]
  /** One of so many jobs fails at its first attempt. */
  readonly fails?: number
  /** It sets a schedule with so many milliseconds between two ticks. */
  readonly schedule?: number
  /** Its name as a worker with a deque. */
  readonly worker?: string
}

export type Event =
  | { readonly event: "ready" }
  | { readonly event: "offered"; readonly value: number }
  | {
    readonly event: "begun" | "done" | "failed" | "interrupted"
    readonly value: number
    readonly attempt: number
    readonly crashes: number
    readonly token: number
    readonly at: number
    readonly tick: number | undefined
  }

const { fails, from = 0, groups, lease, margin, millis = 0, namespace, offers, pause = 1, schedule, url, worker } =
  argument() as Argument

const again = Effect.retry(Schedule.spaced("100 millis"))

const program = Effect.gen(function*() {
  const options = { name: "shared", payload: Schema.Number, letters: { crashes: 1000 } }
  const queue = yield* again(worker === undefined ? Queue.make(options) : WorkStealing.make({ ...options, worker }))
  if (offers !== undefined && worker === undefined) {
    emit({ event: "ready" } satisfies Event)
    for (let value = from; value < from + offers; value++) {
      const group = groups === undefined || value % 2 === 0 ? undefined : `${groups[1]} ${value % groups[0]}`
      yield* again(queue.offer(value, { id: `job ${value}`, group }))
      emit({ event: "offered", value } satisfies Event)
      yield* Effect.sleep(pause)
    }
    return yield* Effect.never
  }
  const working = queue.run((value) =>
    Effect.flatMap(Queue.Job, ({ attempt, crashes, schedule, token }) => {
      const tick = Option.getOrUndefined(Option.map(schedule, ({ tick }) => DateTime.toEpochMillis(tick)))
      const say = (event: "begun" | "done" | "failed" | "interrupted") =>
        Effect.sync(() => emit({ event, value, attempt, crashes, token, at: Date.now(), tick } satisfies Event))
      return Effect.onInterrupt(
        Effect.gen(function*() {
          yield* say("begun")
          yield* Effect.sleep(millis)
          if (fails !== undefined && attempt === 1 && value % fails === 0) {
            yield* say("failed")
            return yield* Effect.fail("no")
          }
          yield* say("done")
        }),
        () => say("interrupted")
      )
    }), { concurrency: 8, attempts: 1000, retry: Schedule.spaced("100 millis") })
  yield* Effect.forkChild(again(working))
  if (offers !== undefined) {
    yield* Effect.repeat(again(queue.state), {
      until: ({ workers }) => workers > 0,
      schedule: Schedule.spaced("10 millis")
    })
    yield* again(
      queue.offerAll(Array.from({ length: offers }, (_, at) => from + at), (value) => ({ id: `job ${value}` }))
    )
  }
  if (schedule !== undefined) yield* again(queue.schedule("often", schedule, 1))
  emit({ event: "ready" } satisfies Event)
  return yield* Effect.never
}).pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

const fiber = Effect.runFork(program as Effect.Effect<never>)
process.on("SIGTERM", () => {
  fiber.addObserver(() => process.exit(0))
  fiber.interruptUnsafe()
})
