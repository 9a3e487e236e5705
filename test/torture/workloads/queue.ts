import { Cron, Effect, Option, Schedule, Schema, type Scope, Stream } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import type { Client, Log, Request } from "../client.ts"
import {
  bounded,
  kept,
  limited,
  many,
  mostSize,
  planOf,
  resultOf,
  retryDelay,
  spread,
  tickOf,
  workerAttempts
} from "../queues.ts"
import { fibers, growingPause, lives, patienceOf, type Workload } from "../workload.ts"

// A failure on purpose. Its reason makes the history say "timeout".
const Refusal = Schema.Struct({ reason: Schema.Struct({ _tag: Schema.Literal("WaitTimeout") }), value: Schema.String })
type Refusal = typeof Refusal.Type

export const refusal = (value: string): Refusal => ({ reason: { _tag: "WaitTimeout" }, value })

/** Of the queues of this workload and of "stealing". */
export type Queue = Lockstep.Queue.Queue<string, string, Refusal>
type Options = Lockstep.Queue.OfferOptions & Pick<Lockstep.WorkStealing.OfferOptions, "key" | "to">
type Job = Lockstep.Queue.Job["Service"]
type Shape = typeof many | typeof limited | typeof bounded | typeof spread

export const schemas = { payload: Schema.String, success: Schema.String, error: Refusal }

// In milliseconds: what is known for longer is there when the harness looks for leaks.
export const longestRetention = 6000

/** Ids are known longer than a lease; of two queues, for so long that an offer is made again by the session after one that was lost. */
const open = (client: Client, { name, limits, ...shape }: Shape): Effect.Effect<
  Queue,
  Lockstep.Queue.QueueError,
  Lockstep.Coordinator.Coordinator | Scope.Scope
> => {
  const shards = "shards" in shape ? shape.shards : undefined
  const leases = name === many.name || name === bounded.name ? 3 : 1.5
  const retention = Math.min(leases * (client.keep - 1000) / 3, longestRetention)
  return client.lockstep.Queue.make({ ...schemas, name, limits, shards, retention })
}

// Restarts after every failure, until its scope closes.
export const forever = <E, R>(effect: Effect.Effect<unknown, E, R>) =>
  effect.pipe(Effect.catch(() => Effect.sleep(100)), Effect.forever, Effect.forkScoped)

/** What is asked of a queue. */
export const about = (queue: Queue, verb: string): Request => ({
  kind: `queue ${verb}`,
  key: queue.name,
  weight: 1,
  wait: false
})

// ---------------------------------------------------------------------------------------------------------------------
// Work
// ---------------------------------------------------------------------------------------------------------------------

/** Keeps some checkpoints, each larger than the one that it has found. */
const keeping = ({ step, tell }: Log, { checkpoint, checkpointed }: Job) =>
  Effect.gen(function*() {
    const found = Option.getOrElse(checkpointed, () => 0) as number
    tell("checkpointed", found)
    for (const next of [1, 2, 3].map((more) => found + more)) {
      tell("keeps", next)
      // A coordinator that is closed refuses it, and the handler is interrupted.
      yield* checkpoint(next).pipe(Effect.catch(() => Effect.never))
      tell("kept", next)
      step()
    }
  })

/** Handles a job as its plan says. That it is done is recorded before the worker acknowledges it. */
const handled = (client: Client, queue: Queue, value: string, job: Job, run: number) =>
  client.follow(about(queue, "handle"), (log) =>
    Effect.gen(function*() {
      const { step, tell } = log
      // Tokens are times of Redis, and a round runs on one machine.
      const skew = client.clock.wall() * 1000 - client.clock.micros()
      const { attempt, crashes, id, offeredAt, token } = job
      tell("handles", id, value, attempt, crashes, offeredAt.epochMilliseconds, skew, token, run)
      const { decides, failing, keeps, long } = planOf(value)
      if (keeps) yield* keeping(log, job)
      // A long one outlives the session of its worker, and takes a moment to end when it is interrupted.
      let left = long ? 20 + Math.floor(client.random() * 80) : 1 + Math.floor(client.random() * 3)
      const working = Effect.whileLoop({
        while: () => left-- > 0,
        body: () => Effect.sleep(long ? 25 : client.random() * 6),
        step
      })
      yield* long
        ? Effect.onInterrupt(working, () =>
          Effect.andThen(Effect.sleep(client.random() * 20), Effect.sync(() => tell("ends"))))
        : working
      if (attempt - crashes <= failing) {
        tell("refuses")
        return yield* Effect.fail(refusal(value))
      }
      if (run > 0 && decides && client.random() < 0.5) {
        tell("decides")
        return undefined
      }
      tell("done")
      return resultOf(value)
    }))

/** Handles a job of a schedule. */
const ticked = (client: Client, queue: Queue, { id, schedule }: Job) =>
  client.follow(about(queue, "tick"), ({ tell }) =>
    Effect.sync(() => {
      const { name, tick } = Option.getOrThrow(schedule)
      tell("ticks", name, id, tick.epochMilliseconds, client.clock.wall() * 1000 - client.clock.micros())
      return ""
    }))

let runs = 0

/** Handles a job, and snoozes or discards it in the end if that was decided. */
export const decided = (client: Client, queue: Queue, value: string, run: number) =>
  Effect.flatMap(
    client.lockstep.Queue.Job,
    (job) =>
      Option.isSome(job.schedule)
        ? ticked(client, queue, job)
        : Effect.flatMap(handled(client, queue, value, job, run), (result) => {
          if (result !== undefined) return Effect.succeed(result)
          return value.startsWith("snoozes/") ? job.snooze(retryDelay) : job.discard(value)
        })
  )

// How long the workers of a client stay, in milliseconds.
const stay = (client: Client): number => 200 + client.random() ** 2 * 5000

/** Runs a pool of a changing size. A client that leaves drains the pool, or says so, as its handlers may be interrupted then. */
export const running = (
  client: Client,
  queue: Queue,
  leaves: boolean,
  { drains = client.random() < 0.3, handle = decided, stays = stay(client) }: {
    readonly drains?: boolean
    readonly handle?: typeof decided
    readonly stays?: number
  } = {}
) => {
  const run = ++runs
  const grace = client.random() < 0.5 ? 0 : Math.round(client.random() * 400)
  const size = () => client.pick([1, 2, 4, mostSize])
  const working = Effect.gen(function*() {
    const pool = yield* queue.pool((value) => handle(client, queue, value, run), {
      concurrency: size(),
      attempts: workerAttempts,
      retry: Schedule.spaced(retryDelay),
      grace
    })
    yield* Effect.forkScoped(
      Effect.forever(Effect.flatMap(Effect.sleep(200 + client.random() * 1000), () => pool.resize(size())))
    )
    yield* leaves && drains ? pool.drain : pool.await
  }).pipe(
    // Redis refuses to drain it, or to let it join one of several shards while jobs of the first come already.
    Effect.tapError(() => client.follow(about(queue, "failed"), ({ tell }) => Effect.sync(() => tell("failed", run)))),
    Effect.scoped
  )
  if (!leaves) return working
  return client.follow(about(queue, "run"), ({ tell }) =>
    Effect.raceFirst(
      working,
      Effect.flatMap(client.pause(stays), () => {
        // A job that takes longer than workers stay would never be done.
        if (client.stopping()) return Effect.never
        tell("stops", run, grace)
        return Effect.void
      })
    ))
}

export const taking = (client: Client, queue: Queue) =>
  Effect.scoped(
    Effect.flatMap(
      queue.take({ wait: client.random() * 300, attempts: workerAttempts, retry: Schedule.spaced(retryDelay) }),
      Option.match({
        onNone: () => Effect.void,
        onSome: ({ job, lost, payload, result }) =>
          Effect.raceFirst(Effect.flatMap(handled(client, queue, payload, job, 0), (value) => result(value!)), lost)
      })
    )
  )

// ---------------------------------------------------------------------------------------------------------------------
// Offer
// ---------------------------------------------------------------------------------------------------------------------

export type Wish = readonly [value: string, options: Options]

export const told = ({ tell }: Log, [value, { attempts = workerAttempts, delay = 0, expires = 0, id = "" }]: Wish) =>
  tell("offers", value, id, attempts, Number(delay), Number(expires))

const isUncertain = (error: Lockstep.Queue.QueueError | Refusal): boolean => error.reason._tag === "OfferUncertain"

export const offering = (client: Client, queue: Queue, wishes: ReadonlyArray<Wish>) =>
  client.pursue(about(queue, "offer"), (log) => {
    for (const wish of wishes) told(log, wish)
    const byValue = new Map(wishes)
    const [[value, options]] = wishes as [Wish]
    const offered = wishes.length === 1
      ? Effect.map(queue.offer(value, options), (one) => [one])
      : queue.offerAll(byValue.keys(), (value) => byValue.get(value)!)
    return offered.pipe(
      // The job is stored, and its id is lost.
      Effect.catchIf(
        (error) => isUncertain(error) && wishes.length === 1,
        () => Effect.succeed([{ id: "", duplicate: false }])
      ),
      Effect.map((all) => {
        for (const [at, { duplicate, id }] of all.entries()) log.tell("stored", wishes[at]![0], id, duplicate ? 1 : 0)
        return all
      })
    )
  })

/** Records the outcome of a job whose outcome is kept; other errors come from the coordinator. */
const concluded = (
  { tell }: Log,
  value: string,
  id: string,
  result: Effect.Effect<
    string,
    Lockstep.Queue.QueueError | Refusal
  >
) =>
  result.pipe(
    Effect.map((text) => tell("result", value, id, text)),
    Effect.catch((error) => {
      if (!("_tag" in error)) return Effect.sync(() => tell("refused", value, id, error.value))
      const { reason } = error
      if (reason._tag === "JobFailed") return Effect.sync(() => tell("failed", value, id, reason.outcome))
      if (reason._tag === "OutcomeUnknown") return Effect.sync(() => tell("failed", value, id, "unknown"))
      return Effect.fail(error)
    })
  )

export const executing = (client: Client, queue: Queue, [value, { result: _, ...options }]: Wish) => {
  const executed = client.pursue(about(queue, "execute"), (log) => {
    told(log, [value, options])
    return concluded(log, value, "", queue.execute(value, options))
  })
  return client.random() < 0.2 ? Effect.timeoutOption(executed, client.random() * 100) : executed
}

export const cancelling = (client: Client, queue: Queue, id: string) =>
  client.pursue(about(queue, "cancel"), ({ tell }) => {
    tell("cancels", id)
    return Effect.map(queue.job(id).cancel, (found) => tell("cancelled", found ? 1 : 0))
  })

/** Values say what handlers do with them. Each is offered once. */
export const valuesOf = ({ unique }: Client) => {
  const name = unique().slice(0, 8)
  let count = 0
  return (plan: string) => `${plan}/${name}.${++count}`
}

const plain = Array.from({ length: 8 }, () => "plain")

/** Offers in every way, and cancels some. */
const producer = (client: Client, queue: Queue) => {
  const { pick, random } = client
  const value = valuesOf(client)
  const options = (): Options => {
    const delay = random() < 0.15 ? Math.round(random() * 400) : undefined
    const priority = random() < 0.4 ? pick(["urgent", "high", "normal", "low"] as const) : undefined
    const attempts = random() < 0.3 ? 1 + Math.floor(random() * 3) : undefined
    const retry = attempts === undefined ? undefined : Schedule.spaced(retryDelay)
    return {
      delay,
      priority,
      attempts,
      retry,
      expires: random() < 0.1 ? 1 + Math.round(random() ** 3 * 150) : undefined
    }
  }
  const grouped = (own: string): Wish => {
    const group = `group ${pick([1, 2, 3])}`
    return [`${own}#${group}`, { ...options(), group }]
  }
  const wish = (): Wish => {
    const own = value(pick([...plain, "fails1", "fails2", "never", "snoozes", "discards", "keeps"]))
    return random() < 0.7 ? [own, options()] : grouped(own)
  }
  return Effect.gen(function*() {
    const way = random()
    // Clients that come at the same time bring the same id.
    const turn = Math.floor(client.clock.wall() / 100)
    if (way < 0.2) yield* offering(client, queue, Array.from({ length: 2 + Math.floor(random() * 20) }, wish))
    else if (way < 0.4) yield* executing(client, queue, wish())
    else if (way < 0.6) {
      const id = `turn ${turn}`
      const own = value("plain")
      const result = random() < 0.5 || { timeToLive: client.keep }
      yield* offering(client, queue, [[own, { id, result, priority: pick(["high", "normal"]) }]])
      // Some ask when it has ended.
      if (random() < 0.5) yield* Effect.sleep(random() * 300)
      if (random() < 0.5) {
        yield* client.pursue(about(queue, "result"), (log) => concluded(log, own, id, queue.job(id).result()))
      }
    } else if (way < 0.7) {
      // While its handler ends, no other job of its group begins.
      const isGrouped = random() >= 0.5
      const given = !isGrouped && random() < 0.5 ? client.unique() : undefined
      const own = value("long")
      const long: Wish = isGrouped ? grouped(own) : [own, { ...options(), id: given }]
      const [offered] = yield* offering(client, queue, [long])
      yield* Effect.sleep(random() * 500)
      const id = given ?? offered!.id
      if (id !== "" && random() < 0.8) yield* cancelling(client, queue, id)
    } else if (way < 0.73) {
      yield* offering(client, queue, [[value("slow"), { timeout: 60, attempts: 2 }]])
    } else yield* offering(client, queue, [wish()])
    yield* Effect.sleep(random() * 250)
  }).pipe(Effect.catch(() => Effect.sleep(20 + random() * 50)))
}

/** Offers plain jobs, many at once now and then, so that some wait, for longer than an interval of the rate at times. */
const orderly = (client: Client, queue: Queue) => {
  const value = valuesOf(client)
  return Effect.gen(function*() {
    const way = client.random()
    const size = way < 0.02
      ? 60
      : way < 0.04
      ? 1 + Math.floor(client.random() * 25)
      : 1 + Math.floor(client.random() * 2)
    const wishes = Array.from({ length: size }, (): Wish => [value(client.random() < 0.05 ? "fails1" : "plain"), {}])
    yield* offering(client, queue, wishes)
    yield* Effect.sleep(100 + client.random() ** 2 * 2000)
  }).pipe(Effect.catch(() => Effect.sleep(20 + client.random() * 50)))
}

// ---------------------------------------------------------------------------------------------------------------------
// Operate
// ---------------------------------------------------------------------------------------------------------------------

const pausing = (client: Client, queue: Queue) => {
  const turned = (verb: "pause" | "resume") => client.pursue(about(queue, verb), () => queue[verb])
  const resumed = turned("resume").pipe(Effect.retry(Schedule.spaced(100)))
  return Effect.gen(function*() {
    yield* Effect.sleep(50 + client.random() ** 3 * 4000)
    // A process may have been killed before it resumed.
    if (client.random() < 0.2 || client.stopping()) return yield* resumed
    yield* Effect.andThen(turned("pause"), Effect.sleep(100 + client.random() * 400)).pipe(
      Effect.ensuring(Effect.ignore(resumed))
    )
  })
}

/** Reads the dead letters, and replays or discards some of the first, if that is wanted. */
export const letters = (client: Client, queue: Queue, known: Set<string>, operates: boolean) =>
  Effect.gen(function*() {
    const found = yield* client.pursue(about(queue, "letters"), ({ tell }) =>
      Effect.map(Stream.runCollect(queue.deadLetters), (all) => {
        for (const { attempts, body, crashes, id, letter, reason } of all) {
          if (known.has(letter)) {
            continue
          }
          known.add(letter)
          tell("letter", letter, id, JSON.parse(body) as string, reason, attempts, crashes)
        }
        return all
      }))
    if (!operates) {
      return
    }
    for (const { body, letter } of found.slice(0, 8)) {
      const way = client.random()
      if (
        way < 0.3 && !Object.keys(spread.ticks).some((name) =>
          tickOf(name) === JSON.parse(body)
        )
      ) {
        yield* client.pursue(about(queue, "replay"), ({ tell }) => {
          tell("replays", letter, JSON.parse(body) as string)
          return Effect.map(queue.replay([letter]), (count) => tell("replayed", count))
        })
      } else if (way < 0.6) {
        yield* queue.discard([letter])
      }
    }
  })

/** Waits until no job is left but dead letters, no longer than a bound. Answers whether none is. */
export const emptied = <E, R>(
  client: Client,
  { tell }: Log,
  asked: Effect.Effect<Effect.Success<Queue["state"]>, E, R>
) =>
  Effect.gen(function*() {
    const isOver = patienceOf(client)
    const pause = growingPause()
    for (;;) {
      const state = yield* asked.pipe(Effect.catch(() => Effect.undefined))
      const left = state === undefined ? Number.POSITIVE_INFINITY : state.waiting + state.delayed + state.active
      if (left === 0) return true
      if (isOver(left)) {
        if (state !== undefined) tell("open", state.waiting, state.delayed, state.active, state.workers)
        return false
      }
      yield* pause
    }
  })

/** As `emptied`, and reads the dead letters. */
export const settled = (client: Client, queue: Queue, known: Set<string>) =>
  client.follow(
    { kind: "queue settled", key: queue.name, weight: 0, wait: true },
    (log) =>
      Effect.gen(function*() {
        // The process that has paused the queue may be dead.
        const done = yield* emptied(client, log, Effect.andThen(queue.resume, queue.state))
        yield* letters(client, queue, known, false).pipe(Effect.retry(Schedule.spaced(100)))
        if (!done) return yield* Effect.fail(refusal(""))
      })
  ).pipe(Effect.ignore)

const usingMany = Effect.fnUntraced(function*(client: Client) {
  const queue = yield* open(client, many)
  const known = new Set<string>()
  yield* forever(Effect.suspend(() => running(client, queue, true)))
  yield* forever(Effect.suspend(() => running(client, queue, true)))
  if (client.random() < 0.5) yield* forever(taking(client, queue))
  yield* forever(Effect.delay(
    Effect.suspend(() => client.stopping() ? Effect.void : letters(client, queue, known, true)),
    500 + client.random() * 1000
  ))
  yield* fibers(2, client, producer(client, queue))
  yield* settled(client, queue, known)
})

/** Offers more jobs than may wait, so that processes stand in line, and gives up now and then. */
const crowding = (client: Client, queue: Queue) => {
  const { pick, random } = client
  const value = valuesOf(client)
  const wish = (): Wish => [value(pick(["plain", "plain", "fails1", "keeps"])), {}]
  return Effect.gen(function*() {
    const way = random()
    const offered = way < 0.3 ? executing(client, queue, wish()) : offering(
      client,
      queue,
      Array.from({ length: 1 + Math.floor(random() * (way < 0.5 ? 12 : 3)) }, wish)
    )
    yield* random() < 0.2 ? Effect.timeoutOption(offered, random() * 300) : offered
    yield* Effect.sleep(random() * 200)
  }).pipe(Effect.catch(() => Effect.sleep(20 + random() * 50)))
}

const usingBounded = Effect.fnUntraced(function*(client: Client) {
  const queue = yield* open(client, bounded)
  const known = new Set<string>()
  yield* forever(Effect.suspend(() => running(client, queue, true)))
  yield* fibers(2, client, crowding(client, queue))
  yield* settled(client, queue, known)
})

/** Sets the schedules: a schedule that is there goes on as it is. */
const scheduling = (client: Client, queue: Queue) =>
  Effect.gen(function*() {
    const { interval } = spread.ticks
    yield* queue.schedule("interval", interval, tickOf("interval"), { missed: "all" })
    yield* queue.schedule("calendar", Cron.parseUnsafe("* * * * * *", "UTC"), tickOf("calendar"), { missed: "all" })
    // They are deleted when Redis has forgotten them.
    yield* Effect.sleep(3000 + client.random() * 3000)
  })

const usingSpread = Effect.fnUntraced(function*(client: Client) {
  const queue = yield* open(client, spread)
  const known = new Set<string>()
  yield* forever(Effect.suspend(() => running(client, queue, true)))
  yield* forever(Effect.suspend(() => scheduling(client, queue)))
  yield* fibers(1, client, producer(client, queue))
  yield* settled(client, queue, known)
})

const usingLimited = Effect.fnUntraced(function*(client: Client) {
  const queue = yield* open(client, limited)
  yield* forever(Effect.suspend(() => running(client, queue, false)))
  yield* Effect.all([
    fibers(1, client, orderly(client, queue)),
    fibers(1, client, Effect.ignore(pausing(client, queue)))
  ], { concurrency: "unbounded" })
  yield* settled(client, queue, new Set())
})

/**
 * Four queues. Every client offers jobs to one of them in every way, executes and cancels some, runs workers that leave, takes
 * jobs, and replays or discards dead letters. The other one has limits and is paused now and then; its workers stay, so that the
 * order of its jobs tells something. In the third one few jobs may wait. The fourth one has two shards and schedules.
 */
export const queue: Workload = {
  name: "queue",
  run: (client) =>
    Effect.forEach(
      [usingMany, usingLimited, usingBounded, usingSpread],
      (using) => lives(using(client)),
      { concurrency: "unbounded", discard: true }
    ),
  check: kept,
  clear: ({ Queue }) =>
    Effect.scoped(
      Effect.forEach([many, limited, bounded, spread], ({ name, ...shape }) =>
        Effect.flatMap(
          Queue.make({ payload: Schema.String, name, shards: "shards" in shape ? shape.shards : 1 }),
          (queue) =>
            Effect.gen(function*() {
              for (const schedule of Object.keys(spread.ticks)) {
                yield* queue.unschedule(schedule)
              }
              yield* queue.drain({ delayed: true })
              yield* queue.discard()
            })
        ), { discard: true })
    )
}
