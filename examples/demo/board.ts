/** What the parent knows of the workers, from what they tell and from what the leader proclaims. */
import { Option } from "effect"
import type { Election } from "../../src/index.ts"
import { type Event, permits, type Phase } from "./protocol.ts"

export interface Worker {
  state: "starting" | "working" | "killed" | "stopped" | "finished"
  /** What it holds, with the fencing tokens. Of the lead that is the term. */
  readonly holds: Map<string, number>
  waits: string | undefined
}

/** What a worker held when it was killed or stopped. */
interface Orphan {
  readonly what: string
  readonly token: number
  readonly from: string
  readonly fate: "killed" | "stopped"
  readonly since: number
}

export interface Takeover extends Orphan {
  readonly millis: number
}

const capacity = (what: string) => what === "permit" ? permits : 1

const names = new Map([
  ["permit", "a permit"],
  ["totals", "the totals"],
  ["lead", "the lead"]
])
const called = (what: string) => names.get(what) ?? what

export const seconds = (millis: number) => `${(millis / 1000).toFixed(1)} s`

export class Board {
  readonly workers = new Map<string, Worker>()
  readonly takeovers: Array<Takeover> = []
  /** What a killed or stopped worker held, until others have it. */
  readonly orphans: Array<Orphan> = []
  /** One for each leader there was. */
  readonly terms: Array<number> = []
  readonly total: number
  files = 0
  /** As the ref says. */
  finished = 0
  words = 0
  checked = 0
  refused = 0

  constructor(names: ReadonlyArray<string>, total: number) {
    this.total = total
    for (const name of names) this.workers.set(name, { state: "starting", holds: new Map(), waits: undefined })
  }

  worker(name: string): Worker {
    return this.workers.get(name)!
  }

  /** Takes note of what a worker tells; answers what people may want to read of it. */
  on(name: string, event: Event): string | undefined {
    const worker = this.worker(name)
    switch (event._tag) {
      case "Ready":
        worker.state = "working"
        return undefined
      case "Waits":
        worker.waits = event.what
        return undefined
      case "Holds": {
        worker.waits = undefined
        const takeover = this.#takes(name, event.what, event.token)
        if (takeover === undefined) return undefined
        const what = called(event.what)
        const how = name === takeover.from ? `gets ${what} again` : `takes over ${what} from ${takeover.from}`
        return `${name} ${how}, ${seconds(takeover.millis)} later`
      }
      case "Freed":
        worker.waits = undefined
        worker.holds.delete(event.what)
        return undefined
      case "Wrote":
        this.checked++
        this.words += event.words
        if (event.part === event.parts - 1) this.files++
        return undefined
      case "Halfway":
        return undefined
      case "Lost":
        return `${name} finds that it has lost ${called(event.what)} (${event.reason})`
      case "Refused":
        this.checked++
        this.refused++
        return `${name} writes late, with token ${event.token}; refused, as ${event.seen} has been seen`
      case "Reduces":
        return `${name} finds the most frequent words of share ${event.share}`
      case "End":
        return undefined
    }
  }

  /** Takes note of who leads and what the leader proclaims; answers what people may want to read of it. */
  leads(info: Option.Option<Election.Info<Phase>>): string | undefined {
    if (Option.isNone(info)) {
      for (const { holds } of this.workers.values()) holds.delete("lead")
      return this.terms.length === 0 ? undefined : "nobody leads"
    }
    const { node: name, term, value: phase } = info.value
    if (term !== this.terms.at(-1)) {
      this.terms.push(term)
      for (const { holds } of this.workers.values()) holds.delete("lead")
      const takeover = this.#takes(name, "lead", term)
      const since = takeover && `, ${seconds(takeover.millis)} after ${takeover.from} was ${takeover.fate}`
      return `${name} leads, term ${term}${since ?? ""}`
    }
    switch (phase._tag) {
      case "Busy":
        return undefined
      case "Done":
        return `${name} proclaims the result`
    }
  }

  /** The worker will not go on: whatever it holds is left to others. */
  orphan(name: string, fate: "killed" | "stopped"): string {
    const worker = this.worker(name)
    worker.state = fate
    const holds = [...worker.holds]
    for (const [what, token] of holds) this.#leave(name, what, token, fate)
    worker.holds.clear()
    worker.waits = undefined
    return holds.map(([what]) => called(what)).join(", ")
  }

  #leave(from: string, what: string, token: number, fate: "killed" | "stopped"): void {
    this.orphans.push({ what, token, from, fate, since: performance.now() })
  }

  #takes(name: string, what: string, token: number): Takeover | undefined {
    const { holds, state } = this.worker(name)
    holds.set(what, token)
    const takeover = this.#takeover(what, token)
    // A candidate that was next in line, and is chosen before any process knows that it cannot lead.
    if (state === "killed" || state === "stopped") this.#leave(name, what, token, state)
    return takeover
  }

  // Of two permits one is still in use by others, so that only one holder too many has the orphan's. What a process held
  // before the orphan did has a smaller token.
  #takeover(what: string, token: number): Takeover | undefined {
    const index = this.orphans.findIndex((orphan) => orphan.what === what && orphan.token < token)
    const orphan = this.orphans[index]
    if (orphan === undefined) return undefined
    const holders = [...this.workers.values()].filter((worker) => worker.holds.has(what)).length
    const left = this.orphans.filter((orphan) => orphan.what === what).length
    if (holders <= capacity(what) - left) return undefined
    this.orphans.splice(index, 1)
    const takeover = { ...orphan, millis: performance.now() - orphan.since }
    this.takeovers.push(takeover)
    return takeover
  }

  get progress(): string {
    return `${this.finished} of ${this.total} files, ${this.words.toLocaleString("en")} words`
  }

  /** The leader, the holders and the waiters. */
  lines(): ReadonlyArray<string> {
    return [...this.workers].map(([name, { holds, state, waits }]) => {
      if (state !== "working") {
        const left = this.orphans.filter(({ from }) => from === name).map(({ what }) => called(what)).join(", ")
        return `${name}  ${state}${left === "" ? "" : `; its lease still covers ${left}`}`
      }
      const held = [...holds.keys()].filter((what) => what !== "lead").map(called).join(", ")
      return `${name}  ${holds.has("lead") ? "leads; " : ""}${held === "" ? "holds nothing" : `holds ${held}`}${
        waits === undefined ? "" : `; waits for ${called(waits)}`
      }`
    })
  }
}
