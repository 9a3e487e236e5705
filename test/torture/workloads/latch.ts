import { Effect, Exit, Scope } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import { type Anomaly, isDisturbed, isLost, overlaps, type Run } from "../checks.ts"
import type { Client, Request } from "../client.ts"
import type { Hold } from "../history.ts"
import { fibers, gaveUp, latest, type Workload } from "../workload.ts"

const total = 4

/** A latch for each moment; one latch, of which each moment is a run; and one that begins anew when no process has it open. */
const latchOf = ({ clock, pick, random }: Client) => {
  const now = clock.wall()
  // A process that comes late may begin the run before again.
  const run = Math.floor(now / 200) - (random() < 0.1 ? 1 : 0)
  return pick([{ name: `phase ${Math.floor(now / 500)}` }, { name: "runs", run: `${run}` }, {
    name: "fresh",
    fresh: true
  }])
}

type Verb = "pass" | "count" | "make" | "close"

const kindOf = (verb: Verb, run = ""): string => `latch ${verb} ${run}`
const isOf = (verb: Verb) => ({ kind }: Hold): boolean => kind.startsWith(`latch ${verb} `)
const runOf = ({ kind }: Hold): string => kind.split(" ")[2]!

let made = 0

/** Counts the latch down and waits for it; the last one that waits does what is left. */
const passing = (client: Client) => {
  const { fresh, name, run } = { fresh: false, run: undefined, ...latchOf(client) }
  const request = (verb: Verb, weight: number): Request => ({
    kind: kindOf(verb, run),
    key: name,
    weight,
    wait: verb === "pass"
  })
  // Tells openings of one process apart.
  const number = ++made
  const passing = Effect.fnUntraced(function*(scope: Scope.Scope) {
    let [shared, superseded] = [undefined as Lockstep.CountDownLatch.CountDownLatch | undefined, false]
    const attempt = (
      verb: Verb,
      weight: number,
      effect: Effect.Effect<unknown, Lockstep.CountDownLatch.CountDownLatchError, Lockstep.Coordinator.Coordinator>
    ) =>
      client.attempt(
        request(verb, weight),
        Effect.tapError(effect, ({ reason }) => Effect.sync(() => superseded ||= reason._tag === "Superseded"))
      )
    const making = client.lockstep.CountDownLatch.make({ name, run, fresh, count: total, timeToLive: client.keep })
    yield* attempt("make", number, Effect.map(Scope.provide(making, scope), (latch) => shared = latch))
    if (shared === undefined) return yield* Effect.sleep(50 + client.random() * 50)
    const { await: passed, countDown } = shared
    const count = (by: number) => attempt("count", by, countDown({ by }))
    yield* Effect.sleep(client.random() * 20)
    yield* count(1)
    const pass = attempt("pass", 1, passed)
    // Shorter than a run.
    const limit = 50 + client.random() * (run === undefined && !fresh ? 500 : 100)
    const passes = Effect.timeoutOrElse(pass, { duration: limit, orElse: () => Effect.succeed(false) })
    if (yield* passes) return
    // A count is for the round in which it was asked first: another process can have begun the latch anew meanwhile.
    while (!superseded && !((yield* count(total)) && (yield* passes))) yield* Effect.sleep(50)
  })
  return Effect.gen(function*() {
    const scope = yield* Scope.make()
    yield* passing(scope)
    // No progress, so nothing that succeeds.
    const closing = Effect.andThen(Effect.uninterruptible(Scope.close(scope, Exit.void)), Effect.fail(gaveUp))
    yield* client.attempt(request("close", number), closing)
  })
}

// Redis answers in so many microseconds, if it can be reached.
const swift = 200_000

const isSuperseded = ({ outcome }: Hold): boolean => / belongs to run /.test(outcome ?? "")

/** The spans in which processes may have a latch open; of one that died, the moment is unknown. */
const openingsOf = (holds: ReadonlyArray<Hold>, run: Run) => {
  const idOf = ({ client, weight }: Hold): string => `${client} ${weight}`
  const closed = new Map(holds.filter(isOf("close")).map((hold) => [idOf(hold), hold]))
  return holds.filter(isOf("make")).map((make) => {
    const { asked = 0, client = "", ended = Number.POSITIVE_INFINITY } = closed.get(idOf(make)) ?? {}
    // Redis may not have received that it was closed, or have forgotten it.
    const isLate = ended - asked > swift || isDisturbed(run, client, asked, ended) ||
      isLost(run, client, make.asked, ended) ||
      overlaps(run.forgets, ended - run.lease, ended + run.lease)
    return { from: make.asked, to: isLate ? ended + 2 * run.lease : ended }
  }).sort((one, other) => one.from - other.from)
}

/** No waiter passes before enough has been counted since a moment. That all pass afterwards is for `hang` to say. */
const early = (
  holds: ReadonlyArray<Hold>,
  run: Run,
  since: (pass: Hold) => number = () => 0
): ReadonlyArray<Anomaly> => {
  const counts = holds.filter(isOf("count"))
  return holds.filter((hold) => isOf("pass")(hold) && hold.entered !== undefined).flatMap((pass) => {
    const begun = since(pass)
    const before = counts.filter((count) => count.asked < pass.entered! && latest(count, run) >= begun)
    const sum = before.reduce((sum, { weight }) => sum + weight, 0)
    return sum >= total
      ? []
      : [{ check: "early", detail: `${pass.kind} of ${pass.key} after ${sum} of ${total}`, holds: [pass, ...before] }]
  })
}

/** As `early`, since the moment when the first of those that had it open together has opened it. */
const fresh = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const openings = openingsOf(holds, run)
  return early(holds, run, ({ asked }) => {
    let [since, until] = [0, 0]
    for (const { from, to } of openings) {
      if (from > asked) break
      if (from > until) since = from
      until = Math.max(until, to)
    }
    return since
  })
}

/** Each run opens by its own counts, and counts until another run has begun, but not behind it. */
const succeeding = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const makes = holds.filter(isOf("make"))
  const runs = new Set(makes.map(runOf))
  const wrong = holds.filter((hold) => isOf("count")(hold) || isOf("pass")(hold)).flatMap(
    (hold): ReadonlyArray<Anomaly> => {
      const mine = makes.filter((make) => runOf(make) === runOf(hold))
      const others = makes.filter((make) => runOf(make) !== runOf(hold) && make.asked < (hold.ended ?? 0))
      const joined = Math.min(...mine.filter(({ client }) => client === hold.client).map(({ asked }) => asked))
      if (hold.ended === undefined || overlaps(run.forgets, joined - run.lease, hold.ended)) return []
      if (isSuperseded(hold) && !others.some((other) => latest(other, run) >= joined)) {
        return [{ check: "superseded", detail: `run ${runOf(hold)} was, and there was no other`, holds: [hold] }]
      }
      if (!isOf("count")(hold) || hold.entered === undefined) return []
      const last = Math.max(...mine.map((make) => latest(make, run)))
      // Redis knows a latch for a while that no process has open.
      const later = others.find((other) =>
        other.asked > last && other.entered !== undefined && other.entered < hold.asked &&
        hold.entered! < latest({ ...other, entered: undefined }, run)
      )
      return later === undefined ? [] : [{
        check: "superseded",
        detail: `run ${runOf(hold)} was not, though run ${runOf(later)} had begun`,
        holds: [hold, later]
      }]
    }
  )
  return [...wrong, ...[...runs].flatMap((name) => early(holds.filter((hold) => runOf(hold) === name), run))]
}

/** Latches that all processes that come at the same time count down and wait for; the last one does what is left. */
export const latch: Workload = {
  name: "latch",
  run: (client) => fibers(2, client, Effect.suspend(() => passing(client))),
  check: (holds, run) => {
    const [{ key }] = holds as [Hold]
    return key === "runs" ? succeeding(holds, run) : key === "fresh" ? fresh(holds, run) : early(holds, run)
  }
}
