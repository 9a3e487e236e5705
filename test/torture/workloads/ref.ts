import { Effect, Fiber, Option, Schedule, Schema, type Scope, Stream } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import type { Client, Log } from "../client.ts"
import { counted } from "../counters.ts"
import { published } from "../outboxes.ts"
import { versioned } from "../refs.ts"
import { allOf, fibers, growingPause, type Workload } from "../workload.ts"

type SharedRef = Lockstep.SharedRef.SharedRef<string>
type Counter = Lockstep.Counter.Counter
type Events = Lockstep.Topic.Topic<string>
type Uses = Effect.Effect<void, never, Lockstep.Coordinator.Coordinator>

/** Histories are by group: the refs of one are checked together. */
const groups = {
  single: ["single"],
  pair: ["left {c}:\n", "right \u{1f512}"],
  fenced: ["fenced"],
  outbox: ["outbox"]
} as const

const groupNames = Object.keys(groups) as ReadonlyArray<keyof typeof groups>

const counters = ["steady", "reset"] as const

const refOf = ({ SharedRef }: typeof Lockstep, group: keyof typeof groups, name: string) =>
  SharedRef.make({ name, schema: Schema.String, initial: "", colocate: group === "pair" ? "pair" : undefined })

/** Has an event for each write of the outbox. */
const eventsOf = ({ Topic }: typeof Lockstep) =>
  Topic.make({ name: "of the outbox", schema: Schema.String, colocate: groups.outbox[0] })

/** A wait that was given up on purpose. It is recorded as a timeout. */
const givenUp = { reason: { _tag: "WaitTimeout" } }

// Restarts after every failure, until its scope closes.
const forever = <E, R>(effect: Effect.Effect<unknown, E, R>) =>
  effect.pipe(Effect.catch(() => Effect.sleep(100)), Effect.forever, Effect.forkScoped)

const follow = <A, E, R>(client: Client, what: string, key: string, use: (log: Log) => Effect.Effect<A, E, R>) =>
  client[what === "settled" ? "follow" : "pursue"](
    { kind: `ref ${what}`, key, weight: 0, wait: what === "settled" },
    use
  )

/** Makes values that no other process makes. */
const values = ({ unique }: Client) => {
  const name = unique().slice(0, 8)
  let count = 0
  return () => `${name}.${++count}`
}

// An operation that failed is recorded as such; the next one follows a moment later.
const paced = <E, R>(client: Client, operation: Effect.Effect<unknown, E, R>): Effect.Effect<void, never, R> =>
  Effect.andThen(operation, Effect.sleep(client.random() * 50)).pipe(
    Effect.catch(() => Effect.sleep(20 + client.random() * 50)),
    Effect.asVoid
  )

// ---------------------------------------------------------------------------------------------------------------------
// Subscribe
// ---------------------------------------------------------------------------------------------------------------------

/** What a subscriber has seen last: by it the end of a round is judged. */
interface Seen {
  last: string | number | undefined
}

/** Subscribes for as long as the client runs; some leave now and then. A conflated one is slow. */
const subscriber = Effect.fnUntraced(function*<A, E>(
  client: Client,
  key: string,
  conflate: boolean,
  changes: () => Stream.Stream<A, E>,
  words: (element: A) => readonly [last: string | number, ...what: ReadonlyArray<string | number>]
) {
  const seen: Seen = { last: undefined }
  yield* forever(Effect.suspend(() => {
    seen.last = undefined
    const leaves = !client.stopping() && client.random() < 0.3
    const reading = follow(
      client,
      conflate ? "conflated" : "versions",
      key,
      ({ tell }) =>
        Stream.runForEach(changes(), (element) =>
          Effect.suspend(() => {
            const [last, ...what] = words(element)
            tell("saw", ...what)
            seen.last = last
            return conflate && !client.stopping() ? Effect.sleep(client.random() * 100) : Effect.void
          }))
    )
    return leaves ? Effect.timeoutOption(reading, 500 + client.random() * 4000) : reading
  }))
  return seen
})

const watching = Effect.fnUntraced(function*(client: Client, group: string, ref: SharedRef) {
  const seen: Array<Seen> = []
  for (const conflate of [false, true]) {
    if (client.random() < 0.3) continue
    seen.push(
      client.random() < 0.7
        ? yield* subscriber(
          client,
          group,
          conflate,
          () => ref.versions({ conflate }),
          ({ value, version }) => [value, ref.name, value, version]
        )
        : yield* subscriber(
          client,
          group,
          conflate,
          () => conflate ? ref.changesWith({ conflate }) : ref.changes,
          (value) => [value, ref.name, value]
        )
    )
  }
  return seen
})

/** Waits until all subscribers have seen the last state, but no longer than a bound. */
const settled = <A, E>(client: Client, key: string, present: Effect.Effect<A, E>, all: ReadonlyArray<Seen>) =>
  follow(client, "settled", key, ({ tell }) =>
    Effect.gen(function*() {
      const until = client.clock.now() + client.keep
      const pause = growingPause()
      for (;;) {
        const last = yield* Effect.option(present)
        const behind = Option.isNone(last) ? all : all.filter((seen) => seen.last !== last.value)
        if (Option.isSome(last) && behind.length === 0) return
        if (client.clock.now() > until) {
          tell("behind", behind.length, ...behind.map((seen) => seen.last ?? "nothing"), String(last))
          return yield* Effect.fail(givenUp)
        }
        yield* pause
      }
    })).pipe(Effect.ignore)

// ---------------------------------------------------------------------------------------------------------------------
// Refs
// ---------------------------------------------------------------------------------------------------------------------

/** Reads of one ref. Each tells the value, and the version where that is answered. */
const reads = (client: Client, group: string, ref: SharedRef) => {
  const { name } = ref
  return {
    get: Effect.suspend(() =>
      follow(
        client,
        "get",
        group,
        ({ tell }) => Effect.tap(ref.get, (value) => Effect.sync(() => tell("read", name, value)))
      )
    ),
    versioned: Effect.suspend(() =>
      follow(
        client,
        "versioned",
        group,
        ({ tell }) =>
          Effect.tap(ref.versioned, ({ value, version }) => Effect.sync(() => tell("read", name, value, version)))
      )
    ),
    cached: Effect.suspend(() => {
      const age = client.random() < 0.5 ? undefined : 1 + Math.round(client.random() * 300)
      return follow(client, "cached", group, ({ tell }) =>
        Effect.tap(
          age === undefined ? ref.cached : ref.cachedWithin(age),
          (value) => Effect.sync(() => tell("cached", name, value, age ?? -1))
        ))
    }),
    until: Effect.suspend(() =>
      follow(client, "until", group, ({ tell }) =>
        Effect.gen(function*() {
          const value = yield* ref.get
          tell("read", name, value)
          const next = yield* Effect.timeoutOption(ref.until((next) => next !== value), 2000)
          if (Option.isNone(next)) return yield* Effect.fail(givenUp)
          tell("until", name, next.value)
        }))
    )
  }
}

/** Writes to one ref. Each tells the value before it asks, with what it is made from, and what has come of it. */
const writes = (client: Client, group: string, ref: SharedRef, value: () => string) => {
  const { name } = ref
  /** Each run of the function makes another value. */
  const updating = (use: (f: (base: string) => string) => Effect.Effect<unknown, Lockstep.SharedRef.SharedRefError>) =>
    follow(client, "update", group, ({ tell }) => {
      let last = ""
      const updated = use((base) => {
        last = value()
        tell("writes", name, last, "value", base)
        return last
      })
      return Effect.tap(updated, () => Effect.sync(() => tell("wrote", name, last)))
    })
  return {
    set: Effect.suspend(() =>
      follow(client, "set", group, ({ tell }) => {
        const next = value()
        tell("writes", name, next)
        return Effect.tap(ref.set(next), () => Effect.sync(() => tell("wrote", name, next)))
      })
    ),
    getAndSet: Effect.suspend(() =>
      follow(client, "getAndSet", group, ({ tell }) => {
        const next = value()
        tell("writes", name, next)
        return Effect.tap(ref.getAndSet(next), (former) => Effect.sync(() => tell("wrote", name, next, former)))
      })
    ),
    compareAndSet: Effect.gen(function*() {
      const { version } = yield* reads(client, group, ref).versioned
      yield* Effect.sleep(client.random() * client.random() * 20)
      yield* follow(client, "compareAndSet", group, ({ tell }) => {
        const next = value()
        tell("writes", name, next, "version", version)
        return Effect.tap(
          ref.compareAndSet(version, next),
          (done) => Effect.sync(() => tell(done ? "wrote" : "refused", name, next))
        )
      })
    }),
    update: Effect.suspend(() => {
      const way = client.random()
      return updating((f) =>
        way < 0.3
          ? ref.update(f)
          : way < 0.5
          ? ref.updateAndGet(f)
          : way < 0.6
          ? ref.getAndUpdate(f)
          : way < 0.8
          ? ref.modify((base) => [undefined, f(base)])
          : ref.updateEffect((base) => Effect.as(Effect.sleep(client.random() * 5), f(base)))
      )
    }),
    delete: Effect.suspend(() =>
      follow(client, "delete", group, ({ tell }) => {
        tell("deletes", name)
        return Effect.tap(ref.delete, (existed) => Effect.sync(() => tell("deleted", name, existed ? 1 : 0)))
      })
    )
  }
}

const singly = (client: Client, group: string, ref: SharedRef, value: () => string): Uses => {
  const read = reads(client, group, ref)
  const write = writes(client, group, ref, value)
  return paced(
    client,
    Effect.suspend((): Effect.Effect<unknown, unknown> => {
      const way = client.random()
      if (way < 0.12) return write.set
      if (way < 0.22) return write.getAndSet
      if (way < 0.34) return write.compareAndSet
      if (way < 0.37) return write.delete
      if (way < 0.6) {
        // Some meet in one process, and are one write.
        const together = client.random() < 0.5 ? [1] : [1, 2, 3]
        return Effect.forEach(together, () => Effect.ignore(write.update), { concurrency: "unbounded", discard: true })
      }
      if (way < 0.7) return read.get
      if (way < 0.78) return read.versioned
      if (way < 0.82) return read.until
      return Effect.forEach([1, 2, 3, 4], () => Effect.andThen(read.cached, Effect.sleep(client.random() * 10)))
    })
  )
}

/** Writes both refs, one of them, or none: then what it saw has to be of one moment. */
const together = (client: Client, refs: readonly [SharedRef, SharedRef], value: () => string) =>
  Effect.suspend(() => {
    const way = client.random()
    const changed = [way < 0.5 || way < 0.65, way < 0.5 || way >= 0.65 && way < 0.8] as const
    return follow(client, "transaction", "pair", ({ tell }) => {
      let last = ""
      let saw: readonly [string, string] = ["", ""]
      const done = client.lockstep.SharedRef.transaction(refs, (values) => {
        last = value()
        saw = values
        for (const [at, { name }] of refs.entries()) {
          if (changed[at]) tell("writes", name, last, "value", values[at]!)
          else if (changed.includes(true)) tell("beside", name, last, values[at]!)
        }
        const next = (at: 0 | 1) => changed[at] ? last : values[at]
        return [undefined, [next(0), next(1)]]
      })
      return Effect.tap(done, () =>
        Effect.sync(() => {
          for (const [at, { name }] of refs.entries()) if (changed[at]) tell("wrote", name, last)
          if (!changed.includes(true)) tell("snapshot", ...refs.flatMap(({ name }, at) => [name, saw[at]!]))
        }))
    })
  })

const jointly = (client: Client, refs: readonly [SharedRef, SharedRef], value: () => string): Uses =>
  paced(
    client,
    Effect.suspend((): Effect.Effect<unknown, unknown> => {
      const way = client.random()
      const ref = client.pick(refs)
      if (way < 0.6) return together(client, refs, value)
      if (way < 0.7) return writes(client, "pair", ref, value).set
      if (way < 0.85) return writes(client, "pair", ref, value).update
      return reads(client, "pair", ref).versioned
    })
  )

/** Writes while it holds the lock, and now and then when it does not any more, as if it did not know. */
const fenced = (client: Client, ref: SharedRef, value: () => string): Uses => {
  const { Lock } = client.lockstep
  const write = (lease: Pick<Lockstep.Lease.Lease, "key" | "kind" | "token">) =>
    follow(client, "setFenced", "fenced", ({ tell }) => {
      const next = value()
      tell("writes", ref.name, next, "token", lease.token)
      return ref.setFenced(lease, next).pipe(
        Effect.tap(() => Effect.sync(() => tell("wrote", ref.name, next))),
        Effect.catch((error) => {
          if (error.reason._tag !== "StaleToken") return Effect.fail(error)
          const { seen } = error.reason
          tell("refused", ref.name, next, ...(seen === undefined ? [] : [seen]))
          return Effect.void
        })
      )
    })
  return paced(
    client,
    Effect.gen(function*() {
      if (client.random() < 0.3) return yield* reads(client, "fenced", ref).versioned
      const lease = yield* Effect.scoped(Effect.gen(function*() {
        const lease = yield* Lock.acquire("of the fenced ref", { wait: 1000 })
        for (let left = 1 + Math.floor(client.random() * 3); left > 0; left--) yield* write(lease)
        return lease
      }))
      if (client.random() < 0.6) return
      yield* Effect.sleep(client.random() * 100)
      const { key, kind, token } = lease
      yield* write({ key, kind, token })
    })
  )
}

/** Reads all events of the outbox. */
const census = (client: Client, ref: SharedRef, events: Events) =>
  follow(client, "census", "outbox", ({ tell }) =>
    Effect.map(allOf(events), (all) => {
      for (const { id, value } of all) tell("event", ref.name, value, id)
      tell("counted", ref.name)
    })).pipe(Effect.timeoutOption(client.keep), Effect.ignore)

/** The last event of the outbox is that of the present version. */
const compared = (client: Client, ref: SharedRef, events: Events) =>
  Effect.suspend(() =>
    follow(client, "comparison", "outbox", ({ tell }) =>
      Effect.gen(function*() {
        const before = yield* ref.versioned
        const { length } = yield* events.state
        const event = length === 0 ? undefined : yield* events.subscribe({ from: { last: 1 } }).pipe(
          Stream.filter((element) => element._tag === "Event"),
          Stream.take(1),
          Stream.runCollect
        )
        const after = yield* ref.versioned
        if (before.version !== after.version || before.version === 0) return
        tell("beside event", ref.name, before.value, event?.[0]?.value ?? "")
      }))
  ).pipe(Effect.timeoutOption(client.keep))

// ---------------------------------------------------------------------------------------------------------------------
// Counters
// ---------------------------------------------------------------------------------------------------------------------

/** An amount tells which addition it is: hardly two have the same. */
const amount = (client: Client, counter: Counter): number => {
  const by = 1 + Math.floor(client.random() * 2 ** 37)
  return counter.name === "reset" && client.random() < 0.2 ? -by : by
}

const counting = (client: Client, counter: Counter): Uses =>
  paced(
    client,
    Effect.suspend((): Effect.Effect<unknown, unknown> => {
      const { name } = counter
      const way = client.random()
      if (way < 0.25) {
        return follow(client, "count", name, ({ tell }) =>
          Effect.tap(counter.get, (value) =>
            Effect.sync(() =>
              tell("read", value)
            )))
      }
      if (way < 0.28 && name === "reset") {
        return follow(client, "reset", name, ({ tell }) =>
          Effect.tap(counter.reset, (former) =>
            Effect.sync(() =>
              tell("reset", former)
            )))
      }
      const by = amount(client, counter)
      return follow(client, "add", name, ({ tell }) => {
        tell("adds", by)
        return Effect.tap(counter.add(by), (sum) =>
          Effect.sync(() => tell("sum", sum)))
      })
    })
  )

/** Adds in a scope for a while. What was added before a flush that succeeded is in Redis. */
const batching = (client: Client, counter: Counter): Uses =>
  Effect.suspend(() => {
    let left = Math.floor(client.random() * 200)
    return follow(client, "batch", counter.name, ({ tell }) =>
      Effect.scoped(Effect.gen(function*() {
        const batched = yield* counter.batched({ flush: 1 + Math.round(client.random() * 50) })
        for (; left > 0 && !client.stopping(); left--) {
          const by = amount(client, counter)
          tell("adds", by)
          yield* batched.add(by)
          yield* Effect.sleep(client.random() * 20)
          if (client.random() > 0.05) continue
          const until = Effect.timeoutOption(batched.flush, 3000)
          if (Option.isSome(yield* until)) tell("flushed")
        }
        yield* batched.flush
        tell("flushed")
      })))
  }).pipe((batch) => paced(client, batch))

// ---------------------------------------------------------------------------------------------------------------------
// All
// ---------------------------------------------------------------------------------------------------------------------

interface Part {
  readonly uses: Uses
  readonly settled: Effect.Effect<void>
}

const usingCounter = Effect.fnUntraced(function*(client: Client, name: typeof counters[number]) {
  const counter = yield* client.lockstep.Counter.make({ name })
  const seen: Array<Seen> = []
  for (const conflate of [false, true]) {
    if (client.random() < 0.3) continue
    const changes = () => counter.changesWith({ conflate })
    seen.push(yield* subscriber(client, name, conflate, changes, (value) => [value, value]))
  }
  const uses = Effect.all(
    [fibers(1, client, counting(client, counter)), fibers(1, client, batching(client, counter))],
    {
      concurrency: "unbounded",
      discard: true
    }
  )
  return { uses, settled: settled(client, name, counter.get, seen) } satisfies Part
})

const usingOutbox = Effect.fnUntraced(function*(client: Client, value: () => string) {
  // Redis may be out of reach at that moment.
  const events = yield* Effect.orDie(Effect.retry(eventsOf(client.lockstep), Schedule.spaced(100)))
  const ref = yield* refOf(client.lockstep, "outbox", groups.outbox[0])
  const publishing = ref.publishing((value) => Effect.orDie(events.publication(value)))
  const seen = yield* watching(client, "outbox", ref)
  const use = singly(client, "outbox", publishing, value)
  const look = paced(client, compared(client, ref, events))
  return {
    uses: fibers(1, client, Effect.suspend(() => client.random() < 0.8 ? use : look)),
    settled: Effect.andThen(settled(client, "outbox", ref.get, seen), census(client, ref, events))
  } satisfies Part
})

const usingGroup = Effect.fnUntraced(function*(client: Client, group: keyof typeof groups) {
  const value = values(client)
  if (group === "outbox") return yield* usingOutbox(client, value)
  const parts: Array<Effect.Effect<void>> = []
  const refs: Array<SharedRef> = []
  for (const name of groups[group]) {
    const ref = yield* refOf(client.lockstep, group, name)
    refs.push(ref)
    parts.push(settled(client, group, ref.get, yield* watching(client, group, ref)))
  }
  const [first, second] = refs as [SharedRef, SharedRef]
  const once = group === "pair"
    ? jointly(client, [first, second], value)
    : group === "single"
    ? singly(client, group, first, value)
    : fenced(client, first, value)
  return {
    uses: fibers(group === "single" ? 2 : 1, client, once),
    settled: Effect.all(parts, { concurrency: "unbounded", discard: true })
  } satisfies Part
})

const using = (client: Client): Effect.Effect<void, never, Lockstep.Coordinator.Coordinator | Scope.Scope> =>
  Effect.gen(function*() {
    const parts: Array<Part> = []
    for (const name of counters) parts.push(yield* usingCounter(client, name))
    for (const group of groupNames) parts.push(yield* usingGroup(client, group))
    const running = yield* Effect.forEach(parts, ({ settled, uses }) => Effect.forkChild(Effect.andThen(uses, settled)))
    yield* Effect.forEach(running, Fiber.join, { discard: true })
  })

/**
 * Four groups of refs and two counters, which all clients read, change and subscribe to: a single ref with every operation,
 * a pair with transactions, one that is written under a lock, and one that publishes each write. Of the counters, one is only
 * added to.
 */
export const ref: Workload = {
  name: "ref",
  run: (client) => Effect.scoped(using(client)),
  check: (holds, run) =>
    counters.some((name) => name === holds[0]?.key)
      ? counted(holds, run)
      : [...versioned(holds, run), ...published(holds, run)],
  clear: (lockstep) =>
    Effect.gen(function*() {
      for (const group of groupNames) {
        for (const name of groups[group]) {
          yield* Effect.flatMap(refOf(lockstep, group, name), (ref) => ref.delete)
        }
      }
      for (const name of counters) {
        yield* Effect.flatMap(lockstep.Counter.make({ name }), (counter) => counter.reset)
      }
      yield* Effect.scoped(Effect.flatMap(eventsOf(lockstep), ({ purge }) => purge))
    })
}
