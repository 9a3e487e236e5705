/** Queues of numbers, and workers of them. */
import { assert } from "@effect/vitest"
import { Effect, Exit, Fiber, Schema } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "./eventually.ts"
import type { Server } from "./servers.ts"

export const hostile = "x\u0000}{:\r\n\"é😀"

export const upTo = (count: number, from = 0) => Array.from({ length: count }, (_, at) => from + at)

// Jobs outlive their program, so the tests remove them. Ids do so for the window.
export const emptied = <A, S, E>(queue: Queue.Queue<A, S, E>) =>
  Effect.addFinalizer(() => Effect.orDie(Effect.andThen(queue.drain({ delayed: true }), queue.discard())))

export const make = (options: Partial<Queue.Options<number> & { readonly name: string }> = {}) =>
  Effect.tap(Queue.make({ name: hostile, payload: Schema.Number, retention: "200 millis", ...options }), emptied)

export const isRangeError = <A, E>(exit: Exit.Exit<A, E>) =>
  assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"), String(exit))

export const shows = <A, S, E>(queue: Queue.Queue<A, S, E>, expected: Partial<Queue.State>) =>
  eventually(Effect.map(queue.state, (state) => {
    const found = Object.fromEntries(Object.keys(expected).map((key) => [key, state[key as keyof Queue.State]]))
    assert.deepStrictEqual(found, expected)
  }))

/** A worker in a fiber of its own, and what it has begun. */
export const working = <A, S, E, E2 = never>(
  queue: Queue.Queue<A, S, E>,
  handler: (payload: A) => Effect.Effect<S, E2, Queue.Job> = () => Effect.succeed(undefined as S),
  options?: Queue.RunOptions<E2>
) =>
  Effect.gen(function*() {
    const begun: Array<A> = []
    const fiber = yield* Effect.forkChild(queue.run((payload) => {
      begun.push(payload)
      return handler(payload)
    }, options))
    return { begun, stop: Fiber.interrupt(fiber), fiber }
  })

export const begins = <A>({ begun }: { readonly begun: ReadonlyArray<A> }, expected: ReadonlyArray<A>) =>
  eventually(Effect.sync(() => assert.deepStrictEqual(begun, expected)), { timeout: "30 seconds" })

/** Waits until so many processes stand in the line for room of the only queue of a namespace. */
export const inLine = (server: Server, namespace: string, count: number) =>
  eventually(
    Effect.map(
      server.cli(
        "EVAL",
        "return redis.call('HGET', redis.call('KEYS', ARGV[1])[1], 'f')",
        0,
        `{${namespace}:*}:queue:*`
      ),
      (found) => assert.strictEqual(found.trim() === "" ? 0 : found.trim().split(" ").length, count)
    ),
    { message: `${count} in line` }
  )
