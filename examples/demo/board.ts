/** What the parent knows of the workers, from what they tell. */
import type { Event } from "./protocol.ts"
import { permits } from "./protocol.ts"

export interface Worker {
  state: "starting" | "working" | "killed" | "stopped" | "finished"
  /** What it holds, with the fencing tokens. */
  readonly holds: Map<string, number>
  waits: string | undefined
}

export interface Takeover {
  readonly what: string
  readonly from: string
  readonly to: string
  readonly millis: number
}

interface Orphan {
  readonly what: string
  readonly token: number
  readonly from: string
  readonly since: number
}

const capacity = (what: string) => what === "permit" ? permits : 1

const called = (what: string) => what === "permit" ? "a permit" : what === "totals" ? "the totals" : what

export const seconds = (millis: number) => `${(millis / 1000).toFixed(1)} s`

export class Board {
  readonly workers = new Map<string, Worker>()
  readonly takeovers: Array<Takeover> = []
  /** What a killed or stopped worker held, until others have it. */
  readonly orphans: Array<Orphan> = []
  readonly total: number
  files = 0
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
      case "Holds":
        worker.waits = undefined
        worker.holds.set(event.what, event.token)
        return this.#takeover(name, event.what)
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
    }
  }

  /** The worker will not go on: whatever it holds is left to others. */
  orphan(name: string, state: "killed" | "stopped", now: number): string {
    const worker = this.worker(name)
    worker.state = state
    for (const [what, token] of worker.holds) this.orphans.push({ what, token, from: name, since: now })
    const holds = [...worker.holds.keys()].map(called)
    worker.holds.clear()
    worker.waits = undefined
    return holds.join(", ")
  }

  // Of two permits one is still in use by others, so that only one holder too many has the orphan's.
  #takeover(name: string, what: string): string | undefined {
    const index = this.orphans.findIndex((orphan) => orphan.what === what)
    const orphan = this.orphans[index]
    if (orphan === undefined) return undefined
    const holders = [...this.workers.values()].filter((worker) => worker.holds.has(what)).length
    const left = this.orphans.filter((orphan) => orphan.what === what).length
    if (holders <= capacity(what) - left) return undefined
    this.orphans.splice(index, 1)
    const millis = performance.now() - orphan.since
    this.takeovers.push({ what, from: orphan.from, to: name, millis })
    const how = name === orphan.from ? `gets ${called(what)} again` : `takes over ${called(what)} from ${orphan.from}`
    return `${name} ${how}, ${seconds(millis)} later`
  }

  get progress(): string {
    return `${this.files} of ${this.total} files, ${this.words.toLocaleString("en")} words`
  }

  /** Who has what, and who waits for what. */
  lines(): ReadonlyArray<string> {
    return [...this.workers].map(([name, { holds, state, waits }]) => {
      if (state !== "working") {
        const left = this.orphans.filter(({ from }) => from === name).map(({ what }) => called(what)).join(", ")
        return `${name}  ${state}${left === "" ? "" : `; its lease still covers ${left}`}`
      }
      const held = [...holds.keys()].map(called).join(", ")
      return `${name}  ${held === "" ? "holds nothing" : `holds ${held}`}${
        waits === undefined ? "" : `; waits for ${called(waits)}`
      }`
    })
  }
}
