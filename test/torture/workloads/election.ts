import { Effect, Option, Schema, Stream } from "effect"
import type { Coordinator, Election } from "../../../src/index.ts"
import {
  type Anomaly,
  exclusive,
  fifo,
  isKeptBlindly,
  isLost,
  linearizable,
  overlaps,
  type Run,
  tokens
} from "../checks.ts"
import type { Client } from "../client.ts"
import type { Hold } from "../history.ts"
import { fibers, onlyOnce, type Workload } from "../workload.ts"

/** Its leaders hand over to the candidate that they choose. */
const chosen = "exclusive chief"
/** Its leaders only resign. */
const inherited = "exclusive heir"
/** Its leaders may keep the leadership. */
const kept = "exclusive keeper"

type Election = Election.Election<number>

/** One term of `lead`, which would run the body again. */
const once = ({ lead }: Election, body: Effect.Effect<void>, options: Election.CampaignOptions) =>
  Effect.suspend(() => lead(onlyOnce(body), options))

const candidate = (client: Client, election: Election, cached = false) =>
  Effect.suspend(() => {
    const { Lease } = client.lockstep
    const wait = client.random() < 0.2 ? 1 + client.random() * 300 : undefined
    const options = { wait, cached }
    return client.hold(
      [{ kind: "election", key: election.name, weight: 1, wait: true }],
      (body) =>
        client.random() < 0.5
          ? once(election, body, options)
          : Effect.scoped(Effect.flatMap(election.campaign(options), (lease) => Lease.protect(body, lease)))
    )
  })

/** Again and again, now and then for longer than a leadership is kept, with rests between. */
const again = (client: Client, election: Election) =>
  Effect.suspend(() => {
    const { now } = client.clock
    const until = now() + client.random() * (client.random() < 0.3 ? 1500 : 150)
    const repeated = Effect.whileLoop({
      while: () => now() < until,
      body: () => candidate(client, election, true),
      step: () => {}
    })
    return Effect.andThen(repeated, Effect.sleep(client.random() * 100))
  })

/** What a leader here does besides. */
const govern = (client: Client, election: Election) =>
  Effect.gen(function*() {
    yield* Effect.sleep(client.random() * 30)
    if (!(yield* election.isLeader)) return
    const attempt = <E>(what: string, effect: Effect.Effect<void, E, Coordinator.Coordinator>) =>
      client.attempt({ kind: `election ${what}`, key: election.name, weight: 0, wait: false }, effect)
    const way = client.random()
    if (way < 0.3) yield* attempt("resigns", election.resign)
    else if (way < 0.6) yield* attempt("proclaims", election.proclaim(client.random()))
    else if (election.name === chosen) {
      yield* attempt(
        "transfers",
        Effect.flatMap(
          election.candidates,
          (found) => found.length === 0 ? Effect.void : election.transferTo(client.pick(found))
        )
      )
    }
  })

let observations = 0

/** Records the terms that it sees, and 0 for none. */
const observe = (client: Client, election: Election) =>
  Effect.suspend(() => {
    const request = { kind: `election saw ${++observations}`, key: election.name, weight: 0, wait: false }
    return Stream.runForEach(election.changes, (info) =>
      Effect.uninterruptible(
        client.attempt(request, Effect.succeed(Option.getOrUndefined(info)?.term ?? 0), (term) => term)
      ))
  }).pipe(
    Effect.catch(() => Effect.sleep(100)),
    Effect.forever
  )

/** Elections in which each process is a candidate and an observer; the leader resigns, hands over or proclaims meanwhile. */
export const election: Workload = {
  name: "election",
  run: (client) =>
    Effect.gen(function*() {
      const elections: Array<Election> = []
      for (const name of [chosen, inherited, kept]) {
        const election = yield* client.lockstep.Election.make({ name, schema: Schema.Number, value: 0 })
        yield* Effect.forkScoped(observe(client, election))
        elections.push(election)
      }
      yield* Effect.forEach(
        elections,
        (election) =>
          Effect.all(
            [
              election.name === kept
                ? fibers(1, client, again(client, election))
                : fibers(2, client, candidate(client, election)),
              fibers(1, client, govern(client, election))
            ],
            { concurrency: "unbounded", discard: true }
          ),
        { concurrency: "unbounded", discard: true }
      )
    }).pipe(Effect.scoped, Effect.orDie),
  check: (holds, run) => {
    const terms = holds.filter(({ kind }) => kind === "election")
    const key = terms[0]?.key
    const found = [
      ...tokens(terms),
      ...exclusive(terms, 1, run),
      ...linearizable(terms, 1, run),
      ...(key === chosen ? [] : fifo(terms, run))
    ]
    if (key !== kept) return [...found, ...overlooked(holds, run)]
    // Others see one leader for all terms that follow each other in a process.
    return [
      ...found.filter((anomaly) => !isKeptBlindly(anomaly, run, 1)),
      ...overlooked(holds, run).filter(({ check }) => check !== "missed")
    ]
  }
}

/** An observer sees every term, in order, unless its session was lost, events were, or Redis has forgotten something. */
function overlooked(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const found: Array<Anomaly> = []
  const terms = holds.filter(({ entered, kind }) =>
    kind === "election" && entered !== undefined && !overlaps(run.forgets, entered - run.lease, entered + run.lease)
  ).sort((a, b) => a.token! - b.token!)
  const last = new Map<string, { readonly term: Hold; readonly vacant: boolean }>()
  const seen = holds.filter(({ entered, kind }) => kind.startsWith("election saw") && entered !== undefined)
  for (const now of seen.sort((a, b) => a.entered! - b.entered!)) {
    const stream = `${now.client} ${now.kind}`
    const before = last.get(stream)
    if (now.token === 0) {
      if (before !== undefined) last.set(stream, { ...before, vacant: true })
      continue
    }
    last.set(stream, { term: now, vacant: false })
    if (before === undefined) continue
    const [from, to] = [before.term.entered! - 1_000_000, now.entered! + 1_000_000]
    if (overlaps(run.forgets, from - run.lease, to)) continue
    const [older, newer] = [before.term.token!, now.token!]
    if (newer < older || newer === older && before.vacant) {
      found.push({ check: "stale", detail: "a term was seen after a later one, or its end", holds: [before.term, now] })
    } else if (!isLost(run, now.client, from, to) && !overlaps(run.undelivered, from, to)) {
      const missed = terms.find(({ token }) => token! > older && token! < newer)
      if (missed !== undefined) {
        found.push({ check: "missed", detail: "a term was not seen", holds: [before.term, missed, now] })
      }
    }
  }
  return found
}
