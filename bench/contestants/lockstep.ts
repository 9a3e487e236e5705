import { Deferred, Effect, type Exit, Layer, ManagedRuntime, References, Schema, Scope, Stream } from "effect"
import {
  Barrier,
  Coordinator,
  CountDownLatch,
  Election,
  Flow,
  Lock,
  Queue,
  Redis,
  Semaphore,
  SharedRef,
  Signal,
  Topic
} from "../../src/index.ts"
import {
  groupConcurrency,
  groupPrefetch,
  holdsAtOnce,
  type JobQueue,
  type Meeting,
  type Open,
  rest,
  type Traffic,
  type Worker
} from "../contestant.ts"
import { produce, sample } from "./producing.ts"

const inside = (worker: Worker): Effect.Effect<void> =>
  worker.stay === 0
    ? Effect.sync(worker.entered)
    : Effect.sync(worker.entered).pipe(
      Effect.andThen(Effect.sleep(worker.stay)),
      Effect.andThen(Effect.sync(worker.leaving))
    )

const loops = <E, R>(workers: ReadonlyArray<Worker>, under: (worker: Worker) => Effect.Effect<void, E, R>) =>
  Effect.forEach(
    workers,
    Effect.fnUntraced(function*(worker: Worker) {
      while (worker.running()) {
        yield* under(worker)
        if (worker.pause !== 0) yield* Effect.sleep(worker.pause)
      }
    }),
    { concurrency: "unbounded", discard: true }
  )

/** All parties of this process, once. */
const generation = <E>({ arriving, own, pause, released }: Meeting, number: number, pass: Effect.Effect<unknown, E>) =>
  Effect.forEach(
    Array.from({ length: own }, (_, party) => party),
    (party) =>
      Effect.sleep(pause(number, party)).pipe(
        Effect.andThen(Effect.sync(() => arriving(number))),
        Effect.andThen(pass),
        Effect.andThen(Effect.sync(() => released(number)))
      ),
    { concurrency: "unbounded", discard: true }
  ).pipe(Effect.andThen(Effect.sleep(rest)))

const forever = <E, R>(self: (number: number) => Effect.Effect<unknown, E, R>): Effect.Effect<never, E, R> =>
  Effect.gen(function*() {
    for (let number = 0;; number++) yield* self(number)
  })

const barrier = Effect.fnUntraced(function*(meeting: Meeting) {
  const barrier = yield* Barrier.make({ name: meeting.key, parties: meeting.parties })
  yield* Effect.promise(meeting.opened)
  yield* forever((number) => generation(meeting, number, barrier.await()))
}, Effect.scoped)

const latch = Effect.fnUntraced(function*(meeting: Meeting) {
  const { key, opened, parties } = meeting
  yield* Effect.promise(opened)
  yield* forever(Effect.fnUntraced(function*(number) {
    const latch = yield* CountDownLatch.make({ name: `${key}:${number}`, count: parties, timeToLive: "5 seconds" })
    yield* generation(meeting, number, Effect.andThen(latch.countDown(), latch.await))
  }, Effect.scoped))
})

const signal = Effect.fnUntraced(function*(meeting: Meeting) {
  const signal = yield* Signal.make({ name: meeting.key })
  yield* Effect.promise(meeting.opened)
  yield* forever((number) =>
    meeting.process === 0
      ? Effect.andThen(signal.await, Effect.sync(() => meeting.released(number)))
      : Effect.sleep(meeting.pause(number, 0)).pipe(
        Effect.andThen(Effect.sync(() => meeting.arriving(number))),
        Effect.andThen(signal.set)
      )
  )
})

const refs = (
  workers: ReadonlyArray<Worker>,
  use: (ref: SharedRef.SharedRef<number>) => Effect.Effect<unknown, SharedRef.SharedRefError>,
  prepare: (ref: SharedRef.SharedRef<number>) => Effect.Effect<unknown, SharedRef.SharedRefError> = () => Effect.void
) =>
  Effect.forEach(
    workers,
    Effect.fnUntraced(function*({ entered, key, running }: Worker) {
      const ref = yield* SharedRef.make({ name: key, schema: Schema.Number, initial: 0 })
      yield* prepare(ref)
      const once = use(ref)
      while (running()) {
        yield* once
        entered()
      }
    }),
    { concurrency: "unbounded", discard: true }
  )

const traffic = Effect.fnUntraced(function*({ group, handlers, name, next, opened, pause, publishers }: Traffic) {
  const schema = Schema.Struct({ number: Schema.Number, at: Schema.Number })
  const topic = yield* Topic.make({ name, schema })
  const publisher = Effect.gen(function*() {
    for (;;) {
      for (let wait = pause(); wait !== undefined; wait = pause()) yield* Effect.promise(() => wait!)
      yield* topic.publish(next())
    }
  })
  const handling = Effect.forEach(
    handlers,
    (handler) =>
      group
        ? topic.run(({ value }) => Effect.sync(() => handler(value)), {
          group: "bench",
          from: "beginning",
          concurrency: groupConcurrency,
          prefetch: groupPrefetch
        })
        : topic.subscribe({ from: "beginning" }).pipe(
          Topic.values,
          Stream.runForEachArray((values) =>
            Effect.sync(() => {
              for (const value of values) handler(value)
            })
          )
        ),
    { concurrency: "unbounded", discard: true }
  )
  const publishing = Effect.gen(function*() {
    // The handlers read from the beginning, so they miss nothing meanwhile; the measurement is of live events only.
    yield* Effect.sleep(200)
    yield* Effect.promise(opened)
    yield* Effect.all(Array.from({ length: publishers }, () => publisher), { concurrency: "unbounded", discard: true })
    yield* Effect.never
  })
  yield* Effect.all([handlers.length === 0 ? Effect.never : handling, publishing], {
    concurrency: "unbounded",
    discard: true
  })
}, Effect.scoped)

const lead = Effect.fnUntraced(function*({ entered, key, leaving, stay }: Worker) {
  const election = yield* Election.make({ name: key })
  yield* election.leadForever(
    Effect.sync(entered).pipe(
      Effect.andThen(Effect.sleep(stay)),
      Effect.andThen(Effect.sync(leaving)),
      // Interrupts this, after which it campaigns again.
      Effect.andThen(election.resign)
    )
  )
}, Effect.scoped)

// A hold that ends spoils the measurement.
const ended = (exit: Exit.Exit<unknown, unknown>): void => {
  console.error("lockstep: a hold has ended", exit)
  process.exit(1)
}

/** Ends when a fiber of its own has the lock, for as long as the process lives. */
const hold = Effect.fnUntraced(function*(key: string) {
  const entered = yield* Deferred.make<void>()
  const inside = Effect.andThen(Deferred.succeed(entered, undefined), Effect.never)
  const fiber = yield* Effect.forkDetach(Lock.withLock(inside, key))
  fiber.addObserver(ended)
  yield* Deferred.await(entered)
})

/** With `withLock` a hold is a fiber and the fiber that it protects; with `Lock.acquire` it is an entry of a scope. */
const make = (scoped: boolean, options?: Lock.Options): Open => async ({ lease, port }) => {
  const runtime = ManagedRuntime.make(
    Coordinator.layer({ namespace: "bench", lease }).pipe(Layer.provide(Redis.layer({ host: "127.0.0.1", port })))
  )
  await runtime.context()
  /** Settles only by failing. */
  const holding = <E>(
    make: (held: () => void) => Effect.Effect<unknown, E, Coordinator.Coordinator>
  ): Promise<void> =>
    new Promise((resolve, reject) => {
      runtime.runPromise(make(resolve)).catch((error) => {
        console.error(`lockstep: ${error}`)
        reject(error)
      })
    })
  return {
    locks: (workers) =>
      runtime.runPromise(loops(workers, (worker) => Lock.withLock(inside(worker), worker.key, options))),
    permits: (count, workers) =>
      runtime.runPromise(Effect.scoped(Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: workers[0]!.key, permits: count })
        yield* loops(workers, (worker) => semaphore.withPermits(1)(inside(worker)))
      }))),
    get: (workers) => runtime.runPromise(refs(workers, (ref) => ref.get, (ref) => ref.set(1))),
    cached: (workers) => runtime.runPromise(refs(workers, (ref) => ref.cached, (ref) => ref.set(1))),
    update: (workers) => runtime.runPromise(refs(workers, (ref) => ref.update((value) => value + 1))),
    lead: (workers) =>
      runtime.runPromise(
        // Each term that ends is worth a message.
        Effect.forEach(workers, lead, { concurrency: "unbounded", discard: true }).pipe(
          Effect.provideService(References.MinimumLogLevel, "Warn")
        )
      ),
    barrier: (meeting) => runtime.runPromise(barrier(meeting)),
    latch: (meeting) => runtime.runPromise(latch(meeting)),
    signal: (meeting) => runtime.runPromise(signal(meeting)),
    traffic: (events) => runtime.runPromise(traffic(events)),
    queue: async (name): Promise<JobQueue> => {
      // The process ends without closing it.
      const scope = Scope.makeUnsafe()
      const queue = await runtime.runPromise(Scope.provide(Queue.make({ name, payload: sample }), scope))
      const jobQueue = (optionsOf?: (job: Sample) => Queue.OfferOptions): JobQueue => ({
        produce: (production) =>
          runtime.runPromise(
            produce(
              production,
              (job) => queue.offer(job, optionsOf?.(job)),
              (jobs) => queue.offerAll(jobs, optionsOf)
            )
          ),
        work: (concurrency, handler) =>
          runtime.runPromise(queue.run((job) => Effect.sync(() => handler(job)), { concurrency })),
        delay: (jobs) => runtime.runPromise(queue.offerAll(jobs, { delay: "1 hour" })),
        grouped: (groups) => Promise.resolve(jobQueue(({ number }) => ({ group: `${number % groups}` })))
      })
      return jobQueue()
    },
    flow: async (graph, nodes) => {
      const scope = Scope.makeUnsafe()
      const open = <A, E, R>(self: Effect.Effect<A, E, R>) =>
        runtime.runPromise(Scope.provide(self as never, scope)) as Promise<A>
      class Steps extends Queue.Service<Steps>()("steps", { payload: Schema.Number, success: Schema.Number }) {}
      const queue = await open(Queue.make({ name: "steps", payload: Schema.Number, success: Schema.Number }))
      const flow = await open(
        Effect.provideService(
          Flow.make("bench", { queues: [Steps], colocate: "steps", retention: "1 minute" }, (flow) => {
            if (graph === "chain") {
              let last = flow.job(Steps, 1)
              for (let count = 1; count < nodes; count++) last = flow.job(Steps, 1, { after: [last] })
              return last
            }
            const first = graph === "fan-out" ? [flow.job(Steps, 1)] : []
            const all = Array.from({ length: nodes }, () => flow.job(Steps, 1, { after: first }))
            return flow.job(Steps, 1, { after: all })
          }),
          Steps,
          queue
        )
      )
      void open(queue.run(() => Effect.succeed(1), { concurrency: 64 }))
      return () => runtime.runPromise(flow.run())
    },
    hold: (keys) =>
      scoped
        ? holding((held) =>
          Effect.forEach(keys, (key) => Lock.acquire(key), { concurrency: holdsAtOnce, discard: true }).pipe(
            Effect.andThen(Effect.sync(held)),
            Effect.andThen(Effect.never),
            Effect.scoped
          )
        )
        : runtime.runPromise(Effect.forEach(keys, hold, { concurrency: holdsAtOnce, discard: true }))
  }
}

export const open: Open = make(false)

export const openScoped: Open = make(true)

export const openBackground: Open = make(false, { release: "background" })

export const openCached: Open = make(false, { cached: true })
