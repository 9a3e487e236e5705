import { Effect, Fiber, Schema, type Scope } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import type { Client, Request } from "../client.ts"
import { dealt, deques, keepers, keys, mostKept, placed } from "../stealing.ts"
import { fibers, lives, type Workload } from "../workload.ts"
import {
  about,
  cancelling,
  decided,
  executing,
  forever,
  letters,
  offering,
  type Queue,
  running,
  schemas,
  settled,
  taking,
  told,
  valuesOf,
  type Wish
} from "./queue.ts"

type Stealing = Queue & Pick<Lockstep.WorkStealing.WorkStealing<string>, "worker" | "workers">

/** What this workload shares with that of queues is recorded as its own. */
const renamed = (client: Client): Client => {
  const named = (request: Request): Request => ({ ...request, kind: request.kind.replace("queue", "stealing") })
  return {
    ...client,
    follow: (request, use) => client.follow(named(request), use),
    pursue: (request, use) => client.pursue(named(request), use)
  }
}

const open = (
  client: Client,
  name: string,
  worker: string | undefined,
  steal: Lockstep.WorkStealing.StealOptions
): Effect.Effect<
  Stealing,
  Lockstep.Queue.QueueError,
  Lockstep.Coordinator.Coordinator | Scope.Scope
> => client.lockstep.WorkStealing.make({ ...schemas, name, worker, steal, retention: (client.keep - 1000) / 2 })

/** A job of a tree offers two more, to the deque of its worker: at once, or when it is done. */
const growing: typeof decided = (client, queue, value, run) => {
  const depth = /^tree(\d)\//.exec(value)
  if (depth === null) return decided(client, queue, value, run)
  const child = valuesOf(client)
  const wishes = [1, 2].map((): Wish => [child(depth[1] === "1" ? "plain" : `tree${Number(depth[1]) - 1}`), {}])
  const grown = client.random() < 0.5
    ? offering(client, queue, wishes)
    : Effect.forEach(wishes, ([own, options]) =>
      client.pursue(about(queue, "offer"), (log) => {
        told(log, [own, options])
        return queue.followUp(own, options)
      }))
  return Effect.andThen(Effect.ignore(grown), decided(client, queue, value, run))
}

/** Works until the pools of this life have left, and tells whether the queue has settled: the last life ends so. */
const living = Effect.fnUntraced(function*(
  client: Client,
  queue: Stealing,
  { drains, lives, stays }: { readonly lives: number; readonly stays: number; readonly drains?: boolean },
  produce: (client: Client) => Effect.Effect<void, never, Lockstep.Coordinator.Coordinator>
) {
  let [left, over, ended] = [lives, false, false]
  const known = new Set<string>()
  // The last pool of a life leaves also when all are asked to stop meanwhile.
  const leaving = { ...client, stopping: () => !ended && client.stopping() }
  const pools = yield* Effect.suspend(() =>
    running(leaving, queue, true, { handle: growing, stays, ...drains === false && { drains } })
  )
    .pipe(
      Effect.catch(() => Effect.sleep(100)),
      Effect.repeat({
        while: () => {
          over ||= !client.stopping() && --left <= 0
          // Its fibers may wait for jobs that no other process works on.
          return !ended
        }
      }),
      Effect.forkScoped
    )
  yield* forever(Effect.delay(
    Effect.suspend(() => client.stopping() ? Effect.void : letters(client, queue, known, true)),
    500 + client.random() * 1000
  ))
  // Its fibers end by themselves, so that no job that they took is interrupted.
  const mortal = { ...client, stopping: () => over || client.stopping() }
  yield* fibers(1, mortal, produce(mortal))
  if (over && !client.stopping()) {
    ended = true
    yield* Fiber.join(pools)
    return false
  }
  yield* settled(client, queue, known)
  return true
})

/** Offers to deques in every way, and cancels some. */
const producer = (client: Client, queue: Stealing, names: ReadonlyArray<string>) => {
  const { pick, random } = client
  const value = valuesOf(client)
  const wish = (): Wish => {
    const own = value(pick(["plain", "plain", "plain", "plain", "fails1", "fails2", "never", "tree2", "long"]))
    const attempts = random() < 0.3 ? 1 + Math.floor(random() * 3) : undefined
    const expires = random() < 0.1 ? 1 + Math.round(random() * 150) : undefined
    const way = random()
    if (way < 0.2) return [own, { attempts, expires, to: pick(names) }]
    if (way < 0.4) return [own, { attempts, expires, key: pick(keys) }]
    return [own, { attempts, expires, delay: random() < 0.2 ? Math.round(random() * 300) : undefined }]
  }
  return Effect.gen(function*() {
    const way = random()
    if (way < 0.3) {
      // Enough to be stolen of.
      const to = random() < 0.5 ? pick(names) : undefined
      const count = 2 + Math.floor(random() * (random() < 0.1 ? 80 : 12))
      yield* offering(client, queue, Array.from({ length: count }, (): Wish => [value("plain"), { to }]))
    } else if (way < 0.4) yield* executing(client, queue, wish())
    else if (way < 0.5) {
      const id = client.unique()
      const to = pick(names)
      yield* offering(client, queue, [[value("plain"), { id, to }], ...Array.from({ length: 4 }, wish)])
      if (random() < 0.5) yield* Effect.sleep(random() * 30)
      yield* cancelling(client, queue, id)
    } else yield* offering(client, queue, [wish()])
    yield* Effect.sleep(50 + random() * 250)
  }).pipe(Effect.catch(() => Effect.sleep(20 + random() * 50)))
}

/** A worker comes and goes, and beside it one that has a deque and takes nothing but a job now and then. */
const thriving = (client: Client) =>
  Effect.gen(function*() {
    const names = ["a", "b", "c", "d"]
    const steal = { keep: client.pick([0, 0, 2]), most: client.pick([1, 4, 256]) }
    const queue = yield* open(client, deques, client.random() < 0.7 ? client.pick(names) : undefined, steal)
    const sleeper = yield* open(client, deques, undefined, { most: steal.most })
    const lives = 1 + Math.floor(client.random() * 3)
    return yield* living(client, queue, { lives, stays: 500 + client.random() * 2000 }, (mortal) => {
      const [awake, asleep] = [queue, sleeper].map((one) =>
        producer(mortal, one, [...names, sleeper.worker, queue.worker, "nobody"])
      ) as [ReturnType<typeof producer>, ReturnType<typeof producer>]
      return Effect.suspend(() => {
        const way = mortal.random()
        if (way < 0.05) return Effect.ignore(taking(mortal, sleeper))
        return way < 0.3 ? asleep : awake
      })
    })
  })

/** Offers to deques that nothing is stolen of: the value says to which one. */
const dealing = (client: Client, queue: Stealing) => {
  const { pick, random } = client
  const value = valuesOf(client)
  return Effect.gen(function*() {
    const workers = yield* queue.workers
    const wishes = Array.from({ length: 1 + Math.floor(random() * (random() < 0.2 ? 12 : 3)) }, (): Wish => {
      // Deques have jobs only while their workers are busy.
      const own = value(pick(["plain", "plain", "plain", "plain", "plain", "fails1", "long"]))
      const way = random()
      if (way < 0.2 || workers.length === 0) return [dealt(own, "to", queue.worker), {}]
      if (way < 0.5) {
        const to = pick(workers).name
        return [dealt(own, "to", to), { to }]
      }
      const key = pick(keys)
      return [dealt(own, "key", key), { key }]
    })
    yield* offering(client, queue, wishes)
    yield* Effect.sleep(100 + random() * 300)
  }).pipe(Effect.catch(() => Effect.sleep(20 + random() * 50)))
}

/** A worker that nothing is stolen of while it stands: from its first `take` on, and until it says that it leaves. */
const keeping = (client: Client, worker: string) =>
  Effect.gen(function*() {
    const queue = yield* open(client, keepers, worker, { keep: mostKept })
    return yield* client.follow(about(queue, "stand"), ({ tell }) =>
      Effect.gen(function*() {
        yield* taking(client, queue)
        tell("stands", worker)
        const stays = 3000 + client.random() * 15_000
        const isOver = yield* living(client, queue, { lives: 1, stays, drains: false }, (mortal) =>
          dealing(mortal, queue))
        tell("leaves")
        return isOver
      }))
  })

/**
 * Two queues with deques. Of one, workers with few names come and go, beside workers that offer and take nothing; they steal of each
 * other. Of the other one, each worker keeps its jobs, so that it tells something where a job runs.
 */
export const stealing: Workload = {
  name: "stealing",
  run: (all) => {
    const client = renamed(all)
    const worker = `k${client.unique().slice(0, 8)}`
    return Effect.forEach(
      [thriving(client), keeping(client, worker)],
      lives,
      { concurrency: "unbounded", discard: true }
    )
  },
  check: placed,
  clear: ({ WorkStealing }) =>
    Effect.scoped(
      Effect.forEach([deques, keepers], (name) =>
        Effect.flatMap(WorkStealing.make({ payload: Schema.String, name }), (queue) =>
          Effect.andThen(queue.drain({ delayed: true }), queue.discard())), { discard: true })
    )
}
