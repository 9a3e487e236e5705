import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.complete", "queue:mails"],
  ["queue.work", "errands:queue:mails"],
  ["queue.done", "errands:queue:mails"],
  ["queue.entrust", "queue:more"]
] as const satisfies Rows

const make = (name: string) => Queue.make({ name, payload: Schema.Number, retention: "500 millis" })

export const program: Program = ({ namespace, other, server }) =>
  Effect.gen(function*() {
    // Only this process delivers.
    const mails = yield* insist(make("mails"))
    const more = yield* insist(make("more"))
    const theirs = yield* onNode(other)(make("more"))
    const running = yield* Effect.forkChild(insist(mails.run((n) => insist(more.followUp(n)), { concurrency: 3 })))
    yield* Effect.forEach([1, 2, 3], (n) => insist(mails.offer(n, { id: String(n) })))
    const waiting = Effect.map(theirs.state, ({ waiting }) => waiting)
    yield* eventually(Effect.map(waiting, (waiting) => assert.strictEqual(waiting, 3)))
    yield* Fiber.interrupt(running)
    yield* eventually(Effect.map(insist(mails.state), ({ workers }) => assert.strictEqual(workers, 0)))
    assert.strictEqual(yield* waiting, 3)
    // Acknowledged too: an errand would stay for the next process that has the queue open.
    const left = server.cli(
      "EVAL",
      "local left = 0 for _, key in ipairs(redis.call('KEYS', ARGV[1])) do left = left + redis.call('XLEN', key) end return left",
      0,
      `{${namespace}:*}:errands-normal:*`
    )
    yield* eventually(Effect.map(left, (left) => assert.strictEqual(Number(left), 0)))
    yield* theirs.drain()
  })
