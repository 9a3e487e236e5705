import { assert } from "@effect/vitest"
import { Cron, Effect, Option, Stream } from "effect"
import { eventually } from "../support/eventually.ts"
import { insist, leads } from "../support/uncertain.ts"
import { opened } from "./mails.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.schedule", "queue:mails"],
  ["queue.ticks", "queue:mails"],
  ["queue.scheduled", "queue:mails"],
  ["queue.schedules", "queue:mails"],
  ["queue.unschedule", "queue:mails"],
  ["queue.jobs", "queue:mails"],
  ["queue.history", "queue:mails"],
  ["queue.clean", "queue:mails"],
  ["queue.obliterate", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const { mails, of, theirs } = yield* opened(other)
    const schedules = Effect.map(Stream.runCollect(theirs.schedules), (all) => all.length)
    yield* leads(mails.schedule("daily", Cron.parseUnsafe("0 0 * * *"), 5), undefined, schedules, 1)
    yield* eventually(Effect.map(Stream.runCollect(theirs.schedules), ([daily]) => assert.isDefined(daily!.next)))
    assert.strictEqual((yield* insist(mails.nextRuns("daily", 3))).length, 3)
    assert.strictEqual((yield* insist(Stream.runCollect(mails.schedules))).length, 1)
    yield* leads(mails.unschedule("daily"), true, schedules, 0)
    yield* theirs.schedule("hourly", "1 hour", 6)
    yield* theirs.offer(7)
    const [job] = yield* insist(Stream.runCollect(mails.jobs({ state: "waiting" })))
    assert.deepStrictEqual(job!.payload, Option.some(7))
    assert.isAtLeast((yield* insist(mails.history)).length, 1)
    yield* leads(mails.clean("1 hour"), 0, of("dead"), 0)
    yield* leads(mails.obliterate, 1, of("waiting"), 0)
    assert.strictEqual(yield* schedules, 0)
  })
