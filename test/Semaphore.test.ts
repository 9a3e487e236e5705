import { assert, layer } from "@effect/vitest"
import { Cause, type Context, Deferred, Effect, Exit, Fiber, Layer, Option, pipe, Scope } from "effect"
import * as fc from "fast-check"
import { Coordinator, Lease, Semaphore } from "../src/index.ts"
import { runs } from "./support/effort.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, onNode, TestServer, withNode } from "./support/live.ts"
import { waits } from "./support/requests.ts"
import { ownedIn } from "./support/sessions.ts"
import { forgetSession, lose, on, several } from "./support/several.ts"

class Pool extends Semaphore.Service<Pool>()("pool", { permits: 5 }) {}

class Guests extends Semaphore.Service<Guests>()("pool", {}) {}

const waiting = (namespace: string, count: number) =>
  Effect.flatMap(TestServer, (server) => waits(server, namespace, "semaphore:*", count))

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("Semaphore", (it) => {
  it.effect("never lets more in than it has permits, over several coordinators", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const nodes = yield* Effect.all([1, 2, 3].map(() => node(server.url, { namespace })))
        let taken = 0
        let most = 0
        yield* Effect.forEach(
          nodes,
          (context) =>
            Effect.gen(function*() {
              const semaphore = yield* Semaphore.make({ name: "s", permits: 5 })
              yield* Effect.forEach(
                Array.from({ length: 60 }, (_, at) => 1 + at % 5),
                (permits) =>
                  Effect.gen(function*() {
                    taken += permits
                    most = Math.max(most, taken)
                    assert.isAtMost(taken, 5)
                    yield* Effect.yieldNow
                    taken -= permits
                  }).pipe(semaphore.withPermits(permits)),
                { concurrency: "unbounded" }
              )
            }).pipe(Effect.scoped, Effect.provideContext(context)),
          { concurrency: "unbounded" }
        )
        assert.strictEqual(most, 5)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("has its members as functions too, data-first and data-last", () =>
    several(1, ([context]) =>
      on(
        context!,
        Effect.gen(function*() {
          const semaphore = yield* Semaphore.make({ name: "s", permits: 3 })
          const free = semaphore.available
          const options = { wait: "1 second" } as const
          assert.strictEqual(yield* Semaphore.withPermits(semaphore, 2, free), 1)
          assert.strictEqual(yield* Semaphore.withPermits(semaphore, 2, free, options), 1)
          assert.strictEqual(yield* free.pipe(Semaphore.withPermits(semaphore, 2, options)), 1)
          assert.strictEqual(yield* free.pipe(Semaphore.withPermit(semaphore)), 2)
          assert.strictEqual(yield* Semaphore.withPermit(semaphore, free), 2)
          const lease = yield* Semaphore.take(semaphore, 1)
          const others = yield* pipe(semaphore, Semaphore.take(2, options))
          assert.deepStrictEqual(yield* Semaphore.withPermitsIfAvailable(semaphore, 1, free), Option.none())
          assert.deepStrictEqual(yield* Semaphore.takeIfAvailable(semaphore, 1), Option.none())
          yield* pipe(semaphore, Semaphore.release(others))
          assert.deepStrictEqual(
            yield* free.pipe(Semaphore.withPermitsIfAvailable(semaphore, 1, {})),
            Option.some(1)
          )
          yield* Semaphore.release(semaphore, lease)
          yield* Effect.scoped(Effect.gen(function*() {
            yield* Semaphore.takeScoped(semaphore, 1)
            yield* pipe(semaphore, Semaphore.takeScoped(1))
            assert.strictEqual(yield* free, 1)
          }))
          assert.isTrue(Option.isSome(yield* pipe(semaphore, Semaphore.takeIfAvailable(1))))
          yield* Semaphore.resize(semaphore, 5)
          assert.strictEqual(yield* semaphore.permits, 5)
          yield* pipe(semaphore, Semaphore.resize(4))
          assert.strictEqual(yield* free, 3)
        })
      )))

  it.effect("is created once and joined by all, and refuses another number", () =>
    withNode(() =>
      Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          const [a, b] = yield* Effect.all([
            Semaphore.make({ name: "s", permits: 3 }),
            Semaphore.make({ name: "s", permits: 3 })
          ], { concurrency: "unbounded" })
          const error = yield* Effect.flip(Semaphore.make({ name: "s", permits: 4 }))
          assert.strictEqual(error.reason._tag, "PermitsMismatch")
          assert.strictEqual(error.reason._tag === "PermitsMismatch" && error.reason.existing, 3)
          const lease = yield* a.take(2)
          assert.strictEqual(yield* b.available, 1)
          yield* b.release(lease)
          yield* b.release(lease)
          assert.strictEqual(yield* a.available, 3)
        }))
        // No process has it open any more, so that it can be made with another number.
        yield* Effect.scoped(Semaphore.make({ name: "s", permits: 4 }))
      })
    ))

  it.effect("is attached to without knowing the number, before and after it is made", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        yield* Effect.scoped(Effect.gen(function*() {
          const error = yield* Effect.flip(Semaphore.attach({ name: "s", wait: "50 millis" }))
          assert.strictEqual(error.reason._tag, "WaitTimeout")
          const early = yield* Effect.forkChild(Semaphore.attach({ name: "s" }).pipe(onNode(other)))
          yield* waiting(namespace, 1)
          yield* Semaphore.make({ name: "s", permits: 7 })
          assert.strictEqual(yield* (yield* Fiber.join(early)).available, 7)
          const late = yield* Semaphore.attach({ name: "s", wait: "1 second" })
          assert.strictEqual(yield* late.withPermits(7)(late.available), 0)
        }))
      })
    ))

  it.effect("does not let small takes overtake a big one", () =>
    withNode((namespace) =>
      Effect.scoped(Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: "s", permits: 3 })
        const order: Array<string> = []
        const first = yield* semaphore.take(1)
        const enter = (name: string, permits: number) =>
          Effect.sync(() => void order.push(name)).pipe(semaphore.withPermits(permits))
        const big = yield* Effect.forkChild(enter("big", 3))
        yield* waiting(namespace, 1)
        assert.isTrue(Option.isNone(yield* semaphore.takeIfAvailable(1)))
        const small = yield* Effect.forkChild(enter("small", 1))
        yield* waiting(namespace, 2)
        yield* semaphore.release(first)
        yield* Fiber.join(big)
        yield* Fiber.join(small)
        assert.deepStrictEqual(order, ["big", "small"])
      }))
    ))

  it.effect("names its holders, its waiters, and how much they want", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = yield* Effect.all(
          [one!, two!].map((context) => on(context, Semaphore.make({ name: "a", permits: 4 })))
        )
        const lease = yield* mine!.take(3)
        const waiters = [yield* Effect.forkChild(theirs!.take(4))]
        yield* waits(server, namespace, "semaphore:a", 1)
        waiters.push(yield* Effect.forkChild(mine!.take(2)))
        yield* waits(server, namespace, "semaphore:a", 2)
        const [holder, ...others] = yield* theirs!.holders
        assert.deepInclude(holder, { node: "node0", token: lease.token, weight: 3 })
        assert.deepStrictEqual(others, [])
        const waiting = yield* mine!.waiting
        assert.deepStrictEqual(waiting.map(({ node, weight }) => [node, weight]), [["node1", 4], ["node0", 2]])
        yield* Fiber.interruptAll(waiters)
        yield* mine!.release(lease)
      })))

  it.effect("lets small ones go on when the big one in front gives up", () =>
    withNode((namespace) =>
      Effect.scoped(Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: "s", permits: 3 })
        yield* semaphore.takeScoped(1)
        const big = yield* Effect.forkChild(semaphore.withPermits(3)(Effect.void))
        yield* waiting(namespace, 1)
        const small = yield* Effect.forkChild(semaphore.withPermit(Effect.succeed("in")))
        yield* waiting(namespace, 2)
        yield* Fiber.interrupt(big)
        assert.strictEqual(yield* Fiber.join(small), "in")
      }))
    ))

  it.effect("wakes the waiters that fit when it is resized, and revokes nothing when it shrinks", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        yield* Effect.scoped(Effect.gen(function*() {
          const semaphore = yield* Semaphore.make({ name: "s", permits: 1 })
          const theirs = yield* onNode(other)(Semaphore.attach({ name: "s" }))
          const mine = yield* semaphore.take(1)
          const waiters = yield* Effect.forEach([1, 2, 3], () => Effect.forkChild(theirs.take(1)))
          yield* waiting(namespace, 3)
          yield* semaphore.resize(3)
          const granted = [yield* Fiber.join(waiters[0]!), yield* Fiber.join(waiters[1]!)]
          yield* waiting(namespace, 1)
          // They can now take more than they knew of.
          assert.strictEqual(yield* theirs.permits, 3)
          yield* semaphore.resize(1)
          assert.strictEqual(yield* semaphore.available, -2)
          assert.isTrue(yield* mine.isHeld)
          yield* semaphore.release(mine)
          yield* theirs.release(granted[0]!)
          yield* waiting(namespace, 1)
          yield* theirs.release(granted[1]!)
          yield* theirs.release(yield* Fiber.join(waiters[2]!))
          // The semaphore refuses a waiter that wants more than there will ever be.
          yield* semaphore.resize(2)
          const one = yield* semaphore.take(1)
          const two = yield* Effect.forkChild(Effect.flip(semaphore.take(2)))
          yield* waiting(namespace, 1)
          yield* semaphore.resize(1)
          assert.strictEqual((yield* Fiber.join(two)).reason._tag, "PermitsExceeded")
          yield* semaphore.release(one)
          const exceeded = yield* Effect.flip(theirs.take(3))
          assert.strictEqual(exceeded.reason._tag, "PermitsExceeded")
        }))
      })
    ))

  it.effect("is released in the background if its take says so, also where it is released by hand", () =>
    withNode(() =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const semaphore = yield* Semaphore.make({ name: "s", permits: 2 })
        const lease = yield* semaphore.take(2, { release: "background" })
        yield* server.pause
        const since = performance.now()
        yield* semaphore.release(lease)
        yield* semaphore.release(lease)
        const took = performance.now() - since
        yield* server.resume
        assert.isBelow(took, 1000)
        yield* eventually(Effect.map(semaphore.available, (available) => available === 2))
      })
    ))

  it.effect("owns nothing of a waiter that is refused when it is resized", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        yield* Effect.scoped(Effect.gen(function*() {
          const semaphore = yield* Semaphore.make({ name: "s", permits: 2 })
          const theirs = yield* onNode(other)(Semaphore.attach({ name: "s" }))
          const lease = yield* semaphore.take(2)
          const owned = Effect.map(ownedIn(server, namespace), (entries) => [...entries].sort())
          const before = yield* owned
          const waiters = yield* Effect.forEach(
            [semaphore, theirs, semaphore, theirs],
            (one) => Effect.forkChild(Effect.flip(one.take(2)))
          )
          yield* waiting(namespace, 4)
          assert.strictEqual((yield* owned).length, before.length + 4)
          yield* semaphore.resize(1)
          for (const waiter of waiters) {
            assert.strictEqual((yield* Fiber.join(waiter)).reason._tag, "PermitsExceeded")
          }
          yield* eventually(Effect.map(owned, (now) => assert.deepStrictEqual(now, before)))
          yield* semaphore.release(lease)
        }))
      })
    ))

  it.effect("is a typed service", () =>
    withNode(() =>
      Effect.gen(function*() {
        const pool = yield* Pool
        const guests = yield* Guests
        assert.strictEqual(yield* pool.withPermits(2)(guests.available), 3)
        const lease = yield* Effect.map(Lease.current, Option.getOrThrow).pipe(pool.withPermit)
        assert.strictEqual(lease.key, "pool")
        assert.deepStrictEqual(yield* pool.withPermitsIfAvailable(5)(Effect.succeed(1)), Option.some(1))
      }).pipe(Effect.provide(Layer.mergeAll(Pool.layer, Guests.layer)))
    ))

  it.effect("refuses bad numbers as defects, before anything is sent", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: "s", permits: 3 })
        const bad: Array<Effect.Effect<unknown, unknown, unknown>> = [
          ...[0, -1, 1.5, Number.NaN, Infinity, 2 ** 31, "1" as never].flatMap((permits) => [
            semaphore.take(permits),
            semaphore.takeIfAvailable(permits),
            semaphore.withPermits(permits)(Effect.void),
            semaphore.withPermitsIfAvailable(permits)(Effect.void),
            Effect.scoped(semaphore.takeScoped(permits))
          ]),
          ...[0, -1, 1.5, Number.NaN, 2 ** 31].flatMap((permits) => [
            semaphore.resize(permits),
            Semaphore.make({ name: "t", permits })
          ]),
          Semaphore.make({ name: "", permits: 1 }),
          Semaphore.attach({ name: "" }),
          Semaphore.attach({ name: "t", wait: 0 })
        ]
        for (const [at, effect] of bad.entries()) {
          const exit = yield* Effect.exit(effect as Effect.Effect<unknown>)
          assert.isTrue(Exit.hasDies(exit), String(at))
          const defect = Exit.isFailure(exit) ? exit.cause.reasons.find((reason) => reason._tag === "Die") : undefined
          assert.instanceOf(defect?._tag === "Die" ? defect.defect : undefined, RangeError, String(at))
        }
        assert.strictEqual(yield* semaphore.available, 3)
        // How many there are may be for others to decide.
        const many: Array<Effect.Effect<unknown, Semaphore.SemaphoreError, Scope.Scope>> = [
          semaphore.take(4),
          semaphore.withPermitsIfAvailable(4)(Effect.void),
          Effect.flatMap(Semaphore.attach({ name: "s" }), (attached) => attached.withPermits(4)(Effect.void)) as never
        ]
        for (const effect of many) assert.strictEqual((yield* Effect.flip(effect)).reason._tag, "PermitsExceeded")
      }))
    ))

  it.effect("loses what was taken when its maxHold has passed, and releases it after the margin", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: "s", permits: 3 })
        const ends = (lease: Lease.Lease) =>
          Effect.gen(function*() {
            const lost = yield* Effect.timeout(Effect.flip(lease.lost), "3 seconds")
            assert.deepInclude(lost, { _tag: "LeaseLost", reason: "maxHold", kind: "semaphore", key: "s" })
            assert.isFalse(yield* lease.isHeld)
            yield* eventually(Effect.map(semaphore.available, (available) => available === 3))
          })
        const maxHold = "50 millis"
        const first = yield* semaphore.take(1, { maxHold })
        yield* Effect.flip(first.lost)
        assert.strictEqual(yield* semaphore.available, 2, "before the margin has passed")
        yield* ends(first)
        // The limit of the call, and that of the coordinator.
        yield* ends(yield* semaphore.take(1, { maxHold }))
        yield* ends(Option.getOrThrow(yield* semaphore.takeIfAvailable(1, { maxHold })))
        yield* Effect.scoped(Effect.flatMap(semaphore.takeScoped(1, { maxHold }), ends))
        yield* ends(yield* semaphore.take(1))
        yield* ends(Option.getOrThrow(yield* semaphore.takeIfAvailable(1)))
        yield* Effect.scoped(Effect.flatMap(semaphore.takeScoped(1), ends))

        // A lease that is released in time, or before its margin has passed, takes nothing from the next holder.
        const early = yield* semaphore.take(3)
        yield* semaphore.release(early)
        const late = yield* semaphore.take(3, { maxHold: "20 millis" })
        yield* Effect.flip(late.lost)
        yield* semaphore.release(late)
        const next = yield* semaphore.take(3, { maxHold: "1 minute" })
        yield* realSleep("800 millis")
        assert.isTrue(yield* next.isHeld)
        assert.strictEqual(yield* semaphore.available, 0)
        yield* semaphore.release(next)
        assert.isTrue(Exit.hasDies(yield* Effect.exit(semaphore.take(1, { maxHold: 0 }))))
        assert.isTrue(Exit.hasDies(yield* Effect.exit(semaphore.takeIfAvailable(1, { maxHold: -1 }))))
        yield* waiting(namespace, 0)
      }), { lease: "3 seconds", margin: "400 millis", maxHold: "200 millis" }))

  it.effect("fails with SemaphoreGone outside of its scope", () =>
    withNode(() =>
      Effect.gen(function*() {
        const semaphore = yield* Effect.scoped(Semaphore.make({ name: "s", permits: 3 }))
        assert.strictEqual((yield* Effect.flip(semaphore.take(1))).reason._tag, "SemaphoreGone")
        assert.strictEqual((yield* Effect.flip(semaphore.resize(1))).reason._tag, "SemaphoreGone")
        assert.strictEqual((yield* Effect.flip(semaphore.available)).reason._tag, "SemaphoreGone")
      })
    ))

  it.effect.each([true, false])(
    "has its holders and waiters ask again where it alone is gone: known elsewhere %s",
    (known) =>
      several(2, ([a, b], namespace, server) =>
        Effect.gen(function*() {
          const options = { name: "s", permits: 1 } as const
          const one = yield* on(a!, Semaphore.make(options))
          const before = known ? yield* on(b!, Semaphore.make(options)) : undefined
          const held = yield* Deferred.make<void>()
          const holder = yield* Effect.forkChild(
            Effect.flip(one.withPermit(Effect.andThen(Deferred.succeed(held, undefined), Effect.never)))
          )
          yield* Deferred.await(held)
          const waiter = yield* Effect.forkChild(one.withPermit(Effect.succeed("waited")))
          yield* waiting(namespace, 1)
          yield* server.cli("DEL", `{${namespace}:00}:semaphore:s`)
          const other = before ?? (yield* on(b!, Semaphore.make(options)))
          assert.strictEqual(yield* other.withPermit(Effect.succeed("taken")), "taken")
          const { reason } = yield* Fiber.join(holder)
          assert.strictEqual(reason._tag, "LeaseLost")
          assert.strictEqual(yield* Fiber.join(waiter), "waited")
        }))
  )

  it.effect.each(["fail", "keep", "resize"] as const)(
    "has the number of the next process when none has it open, though permits are held: %s",
    (onMismatch) =>
      several(2, ([a, b]) =>
        Effect.gen(function*() {
          const scope = yield* Scope.make()
          const former = yield* on(a!, Scope.provide(Semaphore.make({ name: "s", permits: 5 }), scope))
          const lease = yield* former.take(1)
          yield* Scope.close(scope, Exit.void)
          const next = yield* on(b!, Semaphore.make({ name: "s", permits: 7, onMismatch }))
          assert.strictEqual(yield* next.permits, 7)
          yield* former.release(lease)
        }))
  )

  it.effect("is waited for again by those that wait to attach, where it alone is gone", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const attached = yield* Effect.forkChild(
          Effect.flatMap(on(a!, Semaphore.attach({ name: "s" })), ({ permits }) => permits)
        )
        yield* waiting(namespace, 1)
        yield* server.cli("DEL", `{${namespace}:00}:semaphore:s`)
        yield* on(b!, Semaphore.make({ name: "s", permits: 3 }))
        assert.strictEqual(yield* Fiber.join(attached), 3)
      })))

  it.effect("fails with all that has failed under its permits", () =>
    withNode(() =>
      Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: "s", permits: 1 })
        const cause = Cause.combine(Cause.fail("one"), Cause.die("other"))
        const exit = yield* Effect.exit(semaphore.withPermit(Effect.failCause(cause)))
        assert.deepStrictEqual(exit, Exit.failCause(cause))
      })
    ))

  it.effect("is created again where it alone is gone, as after an eviction", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const options = { name: "s", permits: 2 } as const
        const [one, other] = [yield* on(a!, Semaphore.make(options)), yield* on(b!, Semaphore.make(options))]
        const uses = [
          one.withPermits(2)(Effect.succeed(2)),
          one.permits,
          Effect.andThen(one.takeIfAvailable(1), (lease) => Effect.as(one.release(Option.getOrThrow(lease)), 2)),
          Effect.as(Effect.scoped(one.takeScoped(1)), 2),
          Effect.as(one.resize(2), 2)
        ]
        for (const use of uses) {
          yield* server.cli("DEL", `{${namespace}:00}:semaphore:s`)
          assert.strictEqual(yield* use, 2)
          assert.strictEqual(yield* other.available, 2)
          const error = yield* Effect.flip(Effect.scoped(on(b!, Semaphore.make({ name: "s", permits: 3 }))))
          assert.strictEqual(error.reason._tag, "PermitsMismatch")
        }
      })))

  it.effect.each(["fail", "resize"] as const)(
    "keeps a number that a process has missed: %s",
    (onMismatch) =>
      several(2, ([a, b], namespace, server) =>
        Effect.gen(function*() {
          const semaphore = yield* on(a!, Semaphore.make({ name: "s", permits: 5, onMismatch }))
          yield* Effect.scoped(Effect.gen(function*() {
            const other = yield* on(b!, Semaphore.make({ name: "s", permits: 5 }))
            yield* forgetSession(a!, namespace, server)
            yield* other.resize(7)
            yield* lose(a!, namespace, server)
            yield* eventually(Effect.map(other.available, (available) => assert.strictEqual(available, 7)))
            yield* eventually(semaphore.withPermits(7)(Effect.void))
          }))
          yield* semaphore.withPermits(7)(Effect.void)
        }))
  )

  it.effect("comes back with its permits after Redis has lost its data", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace, lease: "2 seconds", margin: "400 millis" })
        yield* Effect.scoped(Effect.gen(function*() {
          const semaphore = yield* Semaphore.make({ name: "s", permits: 2 })
          const theirs = yield* onNode(other)(Semaphore.attach({ name: "s" }))
          const before = yield* semaphore.take(2)
          const waiter = yield* Effect.forkChild(theirs.withPermits(2)(Effect.map(Lease.current, Option.getOrThrow)))
          yield* waiting(namespace, 1)
          yield* server.cli("FLUSHALL")
          assert.strictEqual((yield* Effect.flip(before.lost)).reason, "unknown")
          const after = yield* Fiber.join(waiter)
          assert.isAbove(after.token, before.token)
          yield* eventually(Effect.map(semaphore.available, (available) => available === 2))
        }))
      }), { lease: "2 seconds", margin: "400 millis" }))

  const action = fc.record({
    node: fc.nat({ max: 2 }),
    permits: fc.integer({ min: 1, max: 4 }),
    hold: fc.integer({ min: 0, max: 3 }),
    end: fc.constantFrom("normal", "normal", "interrupt", "wait", "fail")
  })

  it.effect(
    "keeps its promises under random use, interruption, time-outs and closing coordinators",
    () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const run = (actions: ReadonlyArray<typeof action extends fc.Arbitrary<infer A> ? A : never>, close: number) =>
          Effect.gen(function*() {
            const namespace = freshNamespace()
            yield* Effect.scoped(Effect.gen(function*() {
              let taken = 0
              let last = 0
              const members = yield* Effect.forEach([0, 1, 2], () =>
                Effect.gen(function*() {
                  const closed = yield* Deferred.make<void>()
                  const ready = yield* Deferred.make<Semaphore.Semaphore>()
                  const fiber = yield* Effect.forkChild(
                    Effect.scoped(Effect.gen(function*() {
                      const context = yield* node(server.url, { namespace })
                      const semaphore = yield* Semaphore.make({ name: "s", permits: 4 }).pipe(
                        Effect.provideContext(context)
                      )
                      yield* Deferred.succeed(ready, semaphore)
                      yield* Deferred.await(closed)
                    }))
                  )
                  return { closed, fiber, semaphore: yield* Deferred.await(ready) }
                }))
              const users = yield* Effect.forEach(actions, (action, at) =>
                Effect.gen(function*() {
                  const { semaphore } = members[action.node]!
                  const body = Effect.gen(function*() {
                    const { token } = Option.getOrThrow(yield* Lease.current)
                    assert.notStrictEqual(token, last)
                    last = token
                    taken += action.permits
                    assert.isAtMost(taken, 4)
                    yield* Effect.sleep(action.hold)
                    if (action.end === "fail") return yield* Effect.fail("no")
                  }).pipe(Effect.onExit(() => Effect.sync(() => void (taken -= action.permits))))
                  const fiber = yield* Effect.forkChild(
                    semaphore.withPermits(action.permits, action.end === "wait" ? { wait: action.hold + 1 } : {})(body)
                  )
                  if (action.end === "interrupt") {
                    yield* Effect.sleep(action.hold)
                    yield* Effect.forkChild(Fiber.interrupt(fiber))
                  }
                  if (at === close) yield* Deferred.succeed(members[action.node]!.closed, undefined)
                  return fiber
                }))
              // Every user gets to an end: nothing is left waiting for what was leaked.
              const exits = yield* Effect.forEach(users, Fiber.await)
              for (const exit of exits) {
                assert.isFalse(Exit.hasDies(exit), Exit.isFailure(exit) ? String(exit.cause) : "")
              }
              const alive = yield* Effect.filter(members, ({ closed }) =>
                Effect.map(Deferred.isDone(closed), (done) => !done))
              for (const { semaphore } of alive) {
                yield* eventually(
                  Effect.map(semaphore.available, (available) =>
                    available === 4),
                  { interval: 1 }
                )
              }
              for (const { closed, fiber } of members) {
                yield* Deferred.succeed(closed, undefined)
                yield* Fiber.join(fiber)
              }
            }))
            yield* assertEmpty(server, namespace)
          })
        const context = yield* Effect.context<TestServer>()
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(
              fc.array(action, { minLength: 1, maxLength: 40, size: "max" }),
              fc.nat({ max: 80 }),
              (actions, close) =>
                Effect.runPromise(Effect.provideContext(run(actions, close), context as Context.Context<never>))
            ),
            { numRuns: runs(15) }
          )
        )
      }),
    120_000
  )

  it.effect("has a Coordinator that says what it has open", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: "s", permits: 1 })
        yield* semaphore.takeScoped(1)
        const sessions = yield* Effect.flatMap(Coordinator.Coordinator, (coordinator) => coordinator.sessions)
        assert.strictEqual(sessions.reduce((sum, { claims }) => sum + claims, 0), 2)
        assert.isTrue(sessions.every(({ state }) => state === "open"))
      }))
    ))
})
