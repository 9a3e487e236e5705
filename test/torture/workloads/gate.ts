import { Effect } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import { type Anomaly, isDisturbed, isLost, type Run } from "../checks.ts"
import type { Client } from "../client.ts"
import type { Hold } from "../history.ts"
import { forgot } from "../states.ts"
import { fibers, latest, type Workload } from "../workload.ts"

const key = "gate"

/** Of a wait, in milliseconds. */
const limit = 2000

type Verb = "open" | "release" | "close" | "pass"

const kindOf = (verb: Verb): string => `gate ${verb}`
const isOf = (...verbs: ReadonlyArray<Verb>) => ({ kind }: Hold): boolean => verbs.some((verb) => kind === kindOf(verb))

// The latch is closed for most of the time.
const keeping: ReadonlyArray<Verb> = ["open", "close", "release", "close"]

const using = Effect.fnUntraced(function*(client: Client, isKeeper: boolean) {
  const { close, open, release, waitFor } = yield* client.lockstep.Latch.make({ name: key, timeToLive: client.keep })
  const effects: { readonly [verb in Verb]: Effect.Effect<boolean | void, Lockstep.Latch.LatchError> } = {
    open,
    close,
    release,
    pass: waitFor({ wait: limit })
  }
  for (let times = 0; times < 6 && !client.stopping(); times++) {
    const verb = isKeeper ? client.pick(keeping) : "pass"
    yield* client.attempt({ kind: kindOf(verb), key, weight: 1, wait: verb === "pass" }, effects[verb], Number)
    yield* Effect.sleep(isKeeper ? 50 + client.random() * 400 : client.random() * 20)
  }
}, Effect.scoped)

const lives = (client: Client, count: number, isKeeper: boolean) =>
  fibers(
    count,
    client,
    Effect.suspend(() => using(client, isKeeper)).pipe(Effect.catch(() => Effect.sleep(100)))
  )

/** A latch that opens and closes: no waiter passes while it is closed, and all pass when it is opened or released. */
export const gate: Workload = {
  name: "gate",
  run: (client) =>
    Effect.all([lives(client, 1, true), lives(client, 2, false)], { concurrency: "unbounded", discard: true }),
  check: (holds, run) => [...early(holds, run), ...late(holds, run)]
}

/** A request is executed within this time, and an event arrives, if nothing is disturbed: in microseconds. */
const swift = (run: Run): number => Math.min(run.lease / 2, 1_000_000)

/** Each pass needs an opening that was not over before, or a release while it waited; processes observe both a moment later. */
function early(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const openings = holds.filter(isOf("open"))
  const releases = holds.filter(isOf("release"))
  // One that its session was lost with is made again, and does nothing if another process has closed the latch meanwhile.
  const closings = holds.filter(isOf("close")).filter(({ asked, client, entered }) =>
    entered !== undefined && !isLost(run, client, asked, entered)
  )
  return holds.filter(isOf("pass")).filter(({ asked, client, entered }) => {
    if (entered === undefined) return false
    const isHeard = (at: number) => at + swift(run) < asked && !isDisturbed(run, client, at, asked)
    const isOver = (opening: Hold) =>
      closings.some((closing) =>
        closing.asked > latest(opening, run) && isHeard(closing.entered!) && !forgot(run, closing.asked, entered)
      )
    return !openings.some((opening) => opening.asked < entered && !isOver(opening)) &&
      !releases.some((release) => release.asked < entered && !isHeard(latest(release, run)))
  }).map((pass) => ({ check: "early", detail: "a latch was passed that was closed", holds: [pass] }))
}

/** No wait goes on that was under way when the latch was opened or released. */
function late(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  // One that answers false has found the latch open, or was made again behind a closing.
  const wakes = holds.filter(isOf("open", "release")).filter(({ entered, token }) =>
    entered !== undefined && token === 1
  )
  return holds.filter(isOf("pass")).filter(({ asked, client, ended, entered = ended ?? 0 }) =>
    !forgot(run, asked, entered) && !isLost(run, client, asked, entered) &&
    !isDisturbed(run, client, asked - run.lease, entered) &&
    wakes.some((wake) => wake.asked > asked + swift(run) && wake.entered! + swift(run) < entered)
  ).map((pass) => ({ check: "hang", detail: "a latch was opened for it, and it was not woken", holds: [pass] }))
}
