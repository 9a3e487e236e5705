import { assert, layer } from "@effect/vitest"
import { Cause, Clock, Deferred, Duration, Effect, Exit, Fiber, Option, Scope } from "effect"
import { TestClock } from "effect/testing"
import { type Coordinator, Lease, Lock, Redis } from "../src/index.ts"
import { elapsed } from "./support/awake.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, onNode, short, TestServer, withNode } from "./support/live.ts"
import { within } from "./support/requests.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

/** Commands on the keys of a namespace, for looking in from outside. */
const keys = Effect.fnUntraced(function*(namespace: string) {
  const redis = yield* Redis.Redis
  const names = yield* redis.send<Array<string>>("KEYS", `{${namespace}:*`)
  // Locks that have a hold and nothing else.
  const lone = yield* Effect.forEach(
    names.filter((name) => name.endsWith(":sessions")),
    (name) =>
      Effect.map(
        redis.send<Array<string>>("HKEYS", name),
        (fields) =>
          fields.filter((field) => field.startsWith("@")).map((field) => name.replace("sessions", field.slice(1)))
      )
  )
  return [
    ...new Set([
      ...names.filter((key) => !/:(sessions|due|floor|libraries|own:.*|mail:.*)$/.test(key)),
      ...lone.flat()
    ])
  ]
})

const waiters = (key: string) => Effect.map(Lock.waiting(key), ({ length }) => length)

layer(TestServer.layer, live)("Lock", (it) => {
  it.effect("fails when its last operation has blocked the process for longer than the lease", () =>
    withNode(() =>
      Effect.gen(function*() {
        const block = Effect.sync(() => {
          const until = performance.now() + 700
          while (performance.now() < until);
        })
        for (const body of [block, Effect.andThen(Effect.sleep("10 millis"), block)]) {
          const { reason } = yield* Effect.flip(Lock.withLock(body, "a"))
          assert.deepInclude(reason, { _tag: "LeaseLost", reason: "expired" })
        }
      }), { lease: "600 millis", margin: "100 millis" }))

  it.effect("does not wait for a release that Redis goes on to refuse, and makes it later", () =>
    withNode(() =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const refuse = server.cli("ACL", "SETUSER", "default", "-fcall")
        yield* within(Lock.withLock(refuse, "a"), 1000, "the end").pipe(
          Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+fcall")))
        )
        // With the next heartbeat, and not after the lease.
        yield* within(Lock.withLock(Effect.void, "a"), 4000, "the lock")
      }), { lease: "9 seconds", margin: "400 millis" }))

  it.effect("lets one in at a time, over several coordinators, with increasing tokens", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const nodes = yield* Effect.all([1, 2, 3].map(() => node(server.url, { namespace })))
        let inside = 0
        let last = 0
        let entered = 0
        const enter = Effect.gen(function*() {
          const lease = Option.getOrThrow(yield* Lease.current)
          assert.isAbove(lease.token, last)
          last = lease.token
          assert.strictEqual(++inside, 1)
          yield* Effect.yieldNow
          assert.strictEqual(inside--, 1)
          entered++
        })
        yield* Effect.forEach(
          nodes,
          (context) =>
            Effect.forEach(
              Array.from({ length: 10 }),
              () => Effect.forEach(Array.from({ length: 10 }), () => Lock.withLock(enter, "one")),
              { concurrency: "unbounded" }
            ).pipe(Effect.provideContext(context)),
          { concurrency: "unbounded" }
        )
        assert.strictEqual(entered, 300)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("grants in the order of the requests, over several coordinators", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const nodes = yield* Effect.all([1, 2, 3].map(() => node(server.url, { namespace })))
        const order: Array<number> = []
        const release = yield* Deferred.make<void>()
        const fibers: Array<Fiber.Fiber<unknown, unknown>> = []
        const held = yield* Deferred.make<void>()
        fibers.push(
          yield* Effect.forkChild(
            Effect.andThen(Deferred.succeed(held, undefined), Deferred.await(release)).pipe(
              Lock.withLock("queue"),
              onNode(nodes[0]!)
            )
          )
        )
        yield* Deferred.await(held)
        for (let at = 0; at < 12; at++) {
          fibers.push(
            yield* Effect.forkChild(
              Effect.sync(() => order.push(at)).pipe(Lock.withLock("queue"), onNode(nodes[at % 3]!))
            )
          )
          yield* eventually(
            Effect.map(waiters("queue"), (count) => count === at + 1).pipe(onNode(nodes[0]!)),
            { interval: 1 }
          )
        }
        yield* Deferred.succeed(release, undefined)
        yield* Effect.forEach(fibers, Fiber.join)
        assert.deepStrictEqual(order, Array.from({ length: 12 }, (_, at) => at))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("answers at once whether it is available", () =>
    withNode(() =>
      Effect.gen(function*() {
        assert.deepStrictEqual(yield* Lock.withLockIfAvailable(Effect.succeed(1), "a"), Option.some(1))
        yield* Effect.scoped(Effect.gen(function*() {
          const lease = Option.getOrThrow(yield* Lock.acquireIfAvailable("a"))
          assert.strictEqual(lease.key, "a")
          const nested = Lock.withLockIfAvailable(Effect.die("must not run"), "a")
          assert.strictEqual((yield* Effect.flip(nested)).reason._tag, "AlreadyHeld")
        }))
        assert.deepStrictEqual(yield* Lock.withLockIfAvailable(Effect.succeed(2), "a"), Option.some(2))
      })
    ))

  it.effect("is not available while another coordinator holds it", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        yield* Effect.scoped(Effect.gen(function*() {
          yield* Lock.acquire("a")
          const result = yield* Lock.withLockIfAvailable(Effect.die("must not run"), "a").pipe(
            onNode(other)
          )
          assert.isTrue(Option.isNone(result))
          const scoped = yield* Effect.scoped(Lock.acquireIfAvailable("a")).pipe(onNode(other))
          assert.isTrue(Option.isNone(scoped))
        }))
        assert.isTrue(
          Option.isSome(yield* Lock.withLockIfAvailable(Effect.void, "a").pipe(onNode(other)))
        )
      })
    ))

  it.effect("fails with WaitTimeout after the time to wait, and leaves the queue", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        yield* Effect.scoped(Effect.gen(function*() {
          yield* Lock.acquire("a")
          const error = yield* Effect.flip(
            Lock.withLock(Effect.die("must not run"), "a", { wait: "50 millis" }).pipe(onNode(other))
          )
          assert.strictEqual(error.reason._tag, "WaitTimeout")
          yield* eventually(Effect.map(waiters("a"), (count) => count === 0))
        }))
        assert.deepStrictEqual(yield* keys(namespace), [])
      })
    ))

  it.effect("nests in one fiber and its children when reentrant, and fails clearly when not", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const nested = Effect.gen(function*() {
          const error = yield* Effect.flip(Lock.withLock(Effect.void, "a"))
          assert.strictEqual(error.reason._tag, "AlreadyHeld")
          const outer = Option.getOrThrow(yield* Lease.current)
          const token = yield* Lock.withLock(
            Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token),
            "a",
            { reentrant: true }
          )
          assert.strictEqual(token, outer.token)
          const child = yield* Effect.forkChild(Lock.withLock(Effect.succeed("child"), "a", { reentrant: true }))
          assert.strictEqual(yield* Fiber.join(child), "child")
          assert.strictEqual(yield* Lock.withLock(Effect.succeed("other"), "b"), "other")
        })
        yield* Lock.withLock(nested, "a")
        assert.deepStrictEqual(yield* keys(namespace), [])
        // A hold of another fiber is not one's own.
        const holder = yield* Effect.forkChild(Lock.withLock(Effect.never, "a"))
        yield* eventually(Effect.map(keys(namespace), (keys) => keys.length > 0))
        assert.isTrue(Option.isNone(yield* Lock.withLockIfAvailable(Effect.void, "a", { reentrant: true })))
        yield* Fiber.interrupt(holder)
      })
    ))

  it.effect("nests thousands of times, and is free afterwards", () =>
    withNode(() =>
      Effect.gen(function*() {
        const nested = (levels: number): Effect.Effect<string, Lock.LockError, Coordinator.Coordinator> =>
          levels === 0
            ? Effect.map(Effect.yieldNow, () => "inside")
            : Effect.gen(function*() {
              return yield* Lock.withLock(nested(levels - 1), "a", { reentrant: true })
            })
        assert.strictEqual(yield* nested(5000), "inside")
        assert.isTrue(Option.isNone(yield* Lock.holder("a")))
      })
    ))

  it.effect("is held until its last user has left", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        const go = yield* Deferred.make<void>()
        const inside = yield* Deferred.make<void>()
        const detached = yield* Lock.withLock(
          Effect.gen(function*() {
            const fiber = yield* Effect.forkDetach(
              Lock.withLock(Effect.andThen(Deferred.succeed(inside, undefined), Deferred.await(go)), "a", {
                reentrant: true
              })
            )
            yield* Deferred.await(inside)
            return fiber
          }),
          "a"
        )
        const available = Lock.withLockIfAvailable(Effect.void, "a").pipe(onNode(other))
        assert.isTrue(Option.isNone(yield* available))
        yield* Deferred.succeed(go, undefined)
        yield* Fiber.join(detached)
        assert.isTrue(Option.isSome(yield* available))
      })
    ))

  it.effect("acquires into a scope, and the rest of the fiber runs under it", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          const lease = yield* Lock.acquire("a")
          assert.isTrue(yield* lease.isHeld)
          assert.strictEqual((yield* Effect.flip(Lock.withLock(Effect.void, "a"))).reason._tag, "AlreadyHeld")
          const again = yield* Effect.scoped(Lock.acquire("a", { reentrant: true }))
          assert.strictEqual(again.token, lease.token)
          assert.isTrue(yield* lease.isHeld)
          assert.strictEqual(Option.getOrThrow(yield* Lease.current).token, lease.token)
        }))
        assert.isTrue(Option.isNone(yield* Lease.current))
        assert.deepStrictEqual(yield* keys(namespace), [])
        yield* Lock.withLock(Effect.void, "a")
      })
    ))

  it.effect("knows what its fiber has acquired, also behind the region of that", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        yield* Lock.acquire("a").pipe(Effect.withSpan("span"))
        yield* Effect.retry(Lock.acquire("b"), { times: 1 })
        yield* Effect.fn("named")(() => Lock.acquire("c"))()
        for (const key of ["a", "b", "c"]) {
          assert.strictEqual((yield* Effect.flip(Lock.withLock(Effect.void, key))).reason._tag, "AlreadyHeld")
          yield* Lock.withLock(Effect.void, key, { reentrant: true })
          assert.isTrue(Option.isSome(yield* Lease.currentOf(key)))
          // In a program that another lock protects, and in a child.
          const nested = Lock.withLock(Effect.void, key, { wait: "2 seconds" })
          assert.strictEqual((yield* Effect.flip(Lock.withLock(nested, "other"))).reason._tag, "AlreadyHeld")
          const child = yield* Effect.forkChild(Effect.flip(nested))
          assert.strictEqual((yield* Fiber.join(child)).reason._tag, "AlreadyHeld")
        }
        assert.deepStrictEqual(Option.map(yield* Lease.current, ({ key }) => key), Option.some("c"))
        yield* Effect.scoped(Effect.withSpan(Lock.acquire("d"), "span"))
        assert.deepStrictEqual(Option.map(yield* Lease.current, ({ key }) => key), Option.some("c"))
        yield* Lock.withLock(Effect.void, "d")
        // A span that was opened before does not make another region of this.
        yield* Effect.withSpan(
          Effect.gen(function*() {
            yield* Lock.acquire("e")
            const nested = Lock.withLock(Effect.void, "e", { wait: "2 seconds" })
            const [error] = yield* Effect.all([Effect.flip(nested), Effect.void], { concurrency: "unbounded" })
            assert.strictEqual(error.reason._tag, "AlreadyHeld")
          }),
          "open"
        )
      }))
    ))

  it.effect("is the current lease where it is shared or protects, also behind one that was acquired since", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const key = Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).key)
        const first = yield* Lock.acquire("a")
        const second = yield* Lock.acquire("b")
        assert.strictEqual(yield* key, "b")
        const shared = Lock.withLock(key, "a", { reentrant: true })
        assert.strictEqual(yield* shared, "a")
        assert.strictEqual(yield* Lock.withLock(shared, "b", { reentrant: true }), "a")
        assert.strictEqual(yield* Lock.withLocks(key, ["a"], { reentrant: true }), "a")
        assert.strictEqual(yield* Lease.protect(key, first), "a")
        assert.strictEqual(yield* Lease.protect(key, second), "b")
        const inside = Effect.scoped(Effect.andThen(Lock.acquire("c"), key))
        assert.strictEqual(yield* Lock.withLock(inside, "a", { reentrant: true }), "c")
      }))
    ))

  it.effect("is held for no longer than maxHold by those that share it, and outlive the first holder", () =>
    withNode(() =>
      Effect.gen(function*() {
        const isMaxHold = ({ reason }: Lock.LockError) =>
          assert.strictEqual(reason._tag === "LeaseLost" && reason.reason, "maxHold")
        // A longer scope has it, too.
        const scope = yield* Scope.make()
        const sharing = Effect.andThen(Scope.provide(Lock.acquire("a", { reentrant: true }), scope), Effect.never)
        isMaxHold(yield* Effect.flip(Lock.withLock(sharing, "a", { maxHold: "50 millis" })))
        yield* within(Lock.withLock(Effect.void, "a"), 2000, "the release")
        yield* Scope.close(scope, Exit.void)
        // The first holder ends before that.
        const inside = yield* Deferred.make<void>()
        const body = Effect.andThen(Deferred.succeed(inside, undefined), Effect.never)
        const share = Effect.forkDetach(Effect.flip(Lock.withLock(body, "b", { reentrant: true })))
        const shared = yield* Lock.withLock(Effect.tap(share, () => Deferred.await(inside)), "b", {
          maxHold: "200 millis"
        })
        isMaxHold((yield* within(Fiber.join(shared), 2000, "the loss")).result)
        yield* within(Lock.withLock(Effect.void, "b"), 2000, "the release")
      }), { lease: "6 seconds", margin: "200 millis" }))

  it.effect("interrupts a holder that holds it for longer than maxHold", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        let cleaned = false
        const error = yield* Effect.never.pipe(
          Effect.onInterrupt(() => Effect.sync(() => void (cleaned = true))),
          Lock.withLock("a", { maxHold: "50 millis" }),
          Effect.flip
        )
        assert.isTrue(cleaned)
        assert.strictEqual(error.reason._tag, "LeaseLost")
        assert.strictEqual(error.reason._tag === "LeaseLost" && error.reason.reason, "maxHold")
        assert.deepStrictEqual(yield* keys(namespace), [])
        // In a scope it is lost, and released when the margin has passed though no fiber observes the loss.
        yield* Effect.scoped(Effect.gen(function*() {
          const lease = yield* Lock.acquire("a", { maxHold: "50 millis" })
          assert.strictEqual((yield* Effect.flip(lease.lost)).reason, "maxHold")
          assert.isFalse(yield* lease.isHeld)
          yield* eventually(Effect.map(keys(namespace), (keys) => keys.length === 0))
        }))
        // A holder that is done in time is not disturbed.
        assert.strictEqual(yield* Lock.withLock(Effect.succeed(1), "a", { maxHold: "1 minute" }), 1)
      }), { lease: "2 seconds", margin: "200 millis" }))

  it.effect("takes several at once, in any order of their names", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const nodes = [yield* node(server.url, { namespace }), yield* node(server.url, { namespace })]
        const names = ["a", "b", "c", "d", "e"]
        const holders = new Map<string, number>()
        yield* Effect.forEach(
          Array.from({ length: 60 }, (_, at) => at),
          (at) => {
            const wanted = names.filter(() => Math.random() < 0.6).sort(() => Math.random() - 0.5)
            return Effect.gen(function*() {
              for (const name of wanted) {
                assert.strictEqual(holders.get(name) ?? 0, 0)
                holders.set(name, 1)
              }
              yield* Effect.yieldNow
              for (const name of wanted) holders.set(name, 0)
            }).pipe(Lock.withLocks(wanted), onNode(nodes[at % 2]!))
          },
          { concurrency: "unbounded" }
        )
        assert.deepStrictEqual(yield* keys(namespace), [])
        // All or none: the time to wait is for all of them.
        yield* Effect.scoped(Effect.gen(function*() {
          yield* Lock.acquire("c")
          // Each time that it is read, the wall clock has been set back by another hour.
          let hours = 0
          const clock = Object.assign(Object.create(yield* Effect.clockWith(Effect.succeed)), {
            currentTimeMillisUnsafe: () => Date.now() - ++hours * 3_600_000
          })
          const error = yield* Lock.withLocks(Effect.die("must not run"), names, { wait: "100 millis" }).pipe(
            Effect.provideService(Clock.Clock, clock),
            onNode(nodes[0]!),
            Effect.flip
          )
          assert.strictEqual(error.reason._tag, "WaitTimeout")
          yield* eventually(
            Effect.map(keys(namespace), (keys) => keys.filter((key) => key.includes(":lock:")).length === 1)
          )
        }))
      })
    ))

  it.effect("holds a thousand, and fails when one of them is lost", () =>
    withNode(() =>
      Effect.gen(function*() {
        const names = Array.from({ length: 1000 }, (_, at) => `k${at}`)
        const started = yield* Deferred.make<void>()
        const inside = Effect.andThen(Deferred.succeed(started, undefined), Effect.never)
        const all = yield* Effect.forkChild(Effect.flip(Lock.withLocks(inside, names, { maxHold: "5 seconds" })))
        yield* Deferred.await(started)
        // Each operation looks at the leases.
        const began = Date.now()
        for (let at = 0; at < 1000; at++) yield* Effect.yieldNow
        assert.isBelow(elapsed(began), 500)
        const { reason } = yield* Fiber.join(all)
        assert.deepInclude(reason, { _tag: "LeaseLost", reason: "maxHold" })
      })
    ))

  it.effect("fails where one of several is taken again inside", () =>
    withNode(() =>
      Effect.gen(function*() {
        const again = (key: string) =>
          Effect.map(Effect.flip(Lock.withLock(Effect.void, key)), ({ reason }) => reason._tag)
        const inside = Effect.forEach(["a", "b", "c"], (key) =>
          Effect.all([again(key), Effect.flatMap(Effect.forkChild(again(key)), Fiber.join)]))
        const found = yield* Lock.withLocks(inside, ["a", "b", "c"])
        assert.deepStrictEqual(
          found.flat(),
          Array.from({ length: 6 }, () =>
            "AlreadyHeld")
        )
      })
    ))

  it.effect("reads the keys of several once, and limits each from its grant on", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const other = yield* node((yield* TestServer).url, { namespace })
        const locked = Lock.withLocks(new Map([["a", 1], ["b", 2]]).keys())
        const held = Effect.map(Lease.currentOf("b"), Option.isSome)
        assert.deepStrictEqual([yield* locked(held), yield* locked(held)], [true, true])
        yield* Effect.scoped(Effect.gen(function*() {
          yield* Lock.acquire("b").pipe(onNode(other))
          const both = yield* Effect.forkChild(
            Effect.flip(Lock.withLocks(Effect.void, ["a", "b"], { maxHold: "50 millis" }))
          )
          yield* eventually(Effect.map(Lock.holder("a"), (holder) => assert.isTrue(Option.isSome(holder))))
          // It comes though the other one is still waited for.
          yield* Lock.withLock(Effect.void, "a", { wait: "5 seconds" }).pipe(onNode(other))
          const { reason } = yield* Fiber.join(both)
          assert.strictEqual(reason._tag === "LeaseLost" && reason.reason, "maxHold")
          assert.deepStrictEqual(yield* Lock.waiting("b"), [])
        }))
        for (const keys of ["ab", 5, null, {}]) {
          const wrong = yield* Effect.exit(Lock.withLocks(Effect.void, keys as never))
          assert.isTrue(Exit.isFailure(wrong) && Cause.squash(wrong.cause) instanceof RangeError)
        }
      })
    ))

  it.effect("interrupts through several locks", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const started = yield* Deferred.make<void>()
        const fiber = yield* Effect.forkChild(
          Lock.withLocks(Effect.andThen(Deferred.succeed(started, undefined), Effect.never), ["a", "b", "c"])
        )
        yield* Deferred.await(started)
        yield* Fiber.interrupt(fiber)
        assert.deepStrictEqual(yield* keys(namespace), [])
      })
    ))

  it.effect("keeps names apart, with any characters in them", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        const names = [
          "a",
          "A",
          "a ",
          " a",
          "a\n",
          "a\r\n+OK\r\n",
          "a\u0000",
          "\u0000a",
          "{a}",
          "{}a",
          "}a{",
          "a:b",
          ":a",
          "a:",
          "😀",
          "é",
          "e\u0301",
          "lock:a",
          "semaphore:a",
          "__proto__",
          "constructor",
          "%s%d",
          "[]",
          "'\"",
          "\\",
          "null",
          "undefined",
          "x".repeat(512),
          "😀".repeat(128),
          "*",
          "?",
          "0"
        ]
        yield* Effect.scoped(Effect.gen(function*() {
          for (const name of names) yield* Lock.acquire(name)
          for (const name of names) {
            const found = yield* Effect.scoped(Lock.acquireIfAvailable(name)).pipe(onNode(other))
            assert.isTrue(Option.isNone(found), JSON.stringify(name))
          }
        }))
        yield* Effect.scoped(Effect.forEach(names, (name) => Lock.acquire(name)))
      })
    ))

  it.effect("refuses bad arguments as defects, before anything is sent", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const bad: Array<Effect.Effect<unknown, unknown, Coordinator.Coordinator>> = [
          Lock.withLock(Effect.void, ""),
          Lock.withLock(Effect.void, "\ud800"),
          Lock.withLock(Effect.void, "x".repeat(513)),
          Lock.withLock(Effect.void, "é".repeat(257)),
          Lock.withLock(Effect.void, 5 as never),
          Lock.withLock(Effect.void, undefined as never),
          Lock.withLock(Effect.void, "a", { wait: 0 }),
          Lock.withLock(Effect.void, "a", { wait: Number.NaN }),
          Lock.withLock(Effect.void, "a", { maxHold: -1 }),
          Lock.withLock(Effect.void, "a", { release: "later" as never }),
          Lock.withLock(Effect.void, "a", { reentrant: "no" as never }),
          Lock.withLock(Effect.void, "a", { cached: 0 as never }),
          Lock.withLocks(Effect.void, ["a", ""]),
          Effect.scoped(Lock.acquire("")),
          Effect.scoped(Lock.acquireIfAvailable(""))
        ]
        for (const [at, effect] of bad.entries()) {
          const exit = yield* Effect.exit(effect)
          assert.isTrue(Exit.hasDies(exit), String(at))
          const defect = Exit.isFailure(exit) ? exit.cause.reasons.find((reason) => reason._tag === "Die") : undefined
          assert.instanceOf(defect?._tag === "Die" ? defect.defect : undefined, RangeError)
        }
        assert.deepStrictEqual(yield* keys(namespace), [])
      })
    ))

  it.effect("fails, dies and is interrupted as its effect is, and is free afterwards", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        assert.strictEqual(yield* Effect.flip(Lock.withLock(Effect.fail("no"), "a")), "no")
        assert.isTrue(Exit.hasDies(yield* Effect.exit(Lock.withLock(Effect.die("no"), "a"))))
        assert.isTrue(Exit.hasInterrupts(yield* Effect.exit(Lock.withLock(Effect.interrupt, "a"))))
        const order: Array<string> = []
        const fiber = yield* Effect.forkChild(
          Effect.never.pipe(
            Effect.onInterrupt(() =>
              Effect.gen(function*() {
                order.push(`finalizer, ${(yield* keys(namespace)).length} held`)
              })
            ),
            Lock.withLock("a"),
            Effect.onExit(() => Effect.map(keys(namespace), (keys) => order.push(`after, ${keys.length} held`)))
          )
        )
        yield* eventually(Effect.map(keys(namespace), (keys) => keys.length > 0))
        yield* Fiber.interrupt(fiber)
        assert.deepStrictEqual(order, ["finalizer, 1 held", "after, 0 held"])
        const [started, broken] = [yield* Deferred.make<void>(), new Error("broken")]
        const failing = yield* Effect.forkChild(
          Effect.andThen(Deferred.succeed(started, undefined), Effect.never).pipe(
            Effect.ensuring(Effect.die(broken)),
            Lock.withLock("a")
          )
        )
        yield* Deferred.await(started)
        yield* Fiber.interrupt(failing)
        const exit = yield* Fiber.await(failing)
        assert.isTrue(Exit.hasInterrupts(exit))
        const reasons = Exit.isFailure(exit) ? exit.cause.reasons : []
        assert.isTrue(reasons.some((reason) => reason._tag === "Die" && reason.defect === broken))
      })
    ))

  it.effect("is released with the next request where the holder does not wait for the release", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const tokens: Array<number> = []
        const enter = Effect.map(Lease.current, (lease) => tokens.push(Option.getOrThrow(lease).token))
        yield* Lock.withLock(Effect.void, "a")
        yield* server.cli("CONFIG", "RESETSTAT")
        yield* Effect.forEach(Array.from({ length: 100 }), () => Lock.withLock(enter, "a", { release: "background" }))
        // Each call releases the lock before, and takes the next one.
        const calls = Number(/cmdstat_fcall:calls=(\d+)/.exec(yield* server.cli("INFO", "commandstats"))![1])
        assert.isAtMost(calls, 105)
        assert.deepStrictEqual(tokens, [...new Set(tokens)].sort((a, b) => a - b))
        // By itself, when nothing else is asked.
        yield* eventually(Effect.map(keys(namespace), (keys) => keys.length === 0))
      })
    ))

  it.effect("wakes the next one at once when a coordinator is closed", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const waiting = yield* Effect.scoped(Effect.gen(function*() {
          const other = yield* node(server.url, { namespace })
          const held = yield* Deferred.make<void>()
          const lost = yield* Effect.forkDetach(
            Effect.andThen(Deferred.succeed(held, undefined), Effect.never).pipe(
              Lock.withLock("a"),
              onNode(other),
              Effect.flip
            )
          )
          yield* Deferred.await(held)
          const waiting = yield* Effect.forkDetach(
            Effect.sync(() => Date.now()).pipe(
              Lock.withLock("a"),
              Effect.provideContext(yield* Effect.context<never>())
            )
          )
          yield* eventually(Effect.map(waiters("a"), (count) => count === 1))
          return { waiting, lost }
        }))
        const closed = Date.now()
        assert.isBelow(elapsed(closed, yield* Fiber.join(waiting.waiting)), 1000)
        const error = yield* Fiber.join(waiting.lost)
        assert.strictEqual(
          error._tag === "LockError" && error.reason._tag === "LeaseLost" && error.reason.reason,
          "closed"
        )
      })
    ))

  it.effect("keeps its leases under a TestClock", () =>
    withNode(() =>
      Effect.gen(function*() {
        yield* Lock.withLock(
          Effect.gen(function*() {
            yield* TestClock.adjust(Duration.days(1))
            yield* realSleep("3 seconds")
            assert.isTrue(yield* Option.getOrThrow(yield* Lease.current).isHeld)
          }),
          "a"
        )
        // The time to wait is of the program's clock.
        const holder = yield* Effect.forkChild(Lock.withLock(Effect.never, "a"))
        yield* realSleep("50 millis")
        const waiting = yield* Effect.forkChild(Effect.flip(Lock.withLock(Effect.void, "a", { wait: "1 hour" })))
        yield* realSleep("50 millis")
        yield* TestClock.adjust("1 hour")
        assert.strictEqual((yield* Fiber.join(waiting)).reason._tag, "WaitTimeout")
        yield* Fiber.interrupt(holder)
      }).pipe(Effect.provide(TestClock.layer())), short))
})
