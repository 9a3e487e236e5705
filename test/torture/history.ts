/** What clients record, and the holds that it amounts to. */
import type { History } from "../../src/testing.ts"

/** How a request ended. */
export type Outcome = "released" | "busy" | "timeout" | "interrupted" | `lost ${string}` | `failed ${string}`

/** Words and numbers that a workload reads again in its check. */
export type What = ReadonlyArray<string | number>

/** What a request has received, and when. */
export interface Told {
  readonly at: number
  readonly what: What
}

export type Event =
  | {
    readonly event: "ask"
    readonly id: string
    readonly kind: string
    readonly key: string
    readonly weight: number
    readonly wait: boolean
  }
  | { readonly event: "enter"; readonly id: string; readonly token: number }
  | { readonly event: "saw"; readonly id: string; readonly others: ReadonlyArray<number> }
  | { readonly event: "step"; readonly id: string }
  | { readonly event: "told"; readonly id: string; readonly what: What }
  | { readonly event: "write"; readonly id: string; readonly accepted: boolean }
  | { readonly event: "leave"; readonly id: string }
  | { readonly event: "end"; readonly id: string; readonly outcome: Outcome }
  | { readonly event: "lost"; readonly reason: string; readonly partition: number }

/** One request to hold, from the question to the end, in microseconds of the machine's clock. */
export interface Hold {
  readonly client: string
  readonly id: string
  readonly kind: string
  readonly key: string
  readonly weight: number
  readonly wait: boolean
  readonly asked: number
  /** When its body began to run, if it did. */
  entered: number | undefined
  token: number | undefined
  /** What a barrier has told it of all of its generation. */
  saw: ReadonlyArray<number> | undefined
  /** Its body ran more than once. */
  repeated: boolean
  /** Each is a moment when its body was running. */
  readonly steps: Array<number>
  readonly told: Array<Told>
  /** Refused by the fenced resource. */
  refused: number | undefined
  /** When the body was finished, and it was going to be released. */
  left: number | undefined
  /** When the caller was answered; never, if the process was killed. */
  ended: number | undefined
  outcome: Outcome | undefined
}

export const fold = (client: string, events: ReadonlyArray<History.Timed<Event>>): ReadonlyArray<Hold> => {
  const holds = new Map<string, Hold>()
  for (const event of events) {
    if (event.event === "ask") {
      const { id, key, kind, wait, weight } = event
      holds.set(id, {
        client,
        id,
        kind,
        key,
        weight,
        wait,
        asked: event.at,
        entered: undefined,
        token: undefined,
        saw: undefined,
        repeated: false,
        steps: [],
        told: [],
        refused: undefined,
        left: undefined,
        ended: undefined,
        outcome: undefined
      })
      continue
    }
    if (event.event === "lost") continue
    const hold = holds.get(event.id)!
    switch (event.event) {
      case "enter":
        if (hold.entered !== undefined) hold.repeated = true
        hold.entered = event.at
        hold.token = event.token
        break
      case "saw":
        hold.saw = event.others
        break
      case "step":
        hold.steps.push(event.at)
        break
      case "told":
        hold.told.push({ at: event.at, what: event.what })
        break
      case "write":
        if (!event.accepted) hold.refused = event.at
        break
      case "leave":
        hold.left = event.at
        break
      case "end":
        hold.ended = event.at
        hold.outcome = event.outcome
    }
  }
  return [...holds.values()]
}

/**
 * When the body ran for the last time, as far as it is to blame for that: one operation may be under way when a process is
 * stopped, and ends when it goes on.
 */
export const lastRun = (hold: Hold): number => {
  const moments = [hold.entered!, ...hold.steps, ...(hold.left === undefined ? [] : [hold.left])]
  const lost = hold.outcome?.startsWith("lost") === true || hold.outcome === undefined
  return moments.length > 1 && lost ? moments.at(-2)! : moments.at(-1)!
}

/** One line for people. */
export const describe = (hold: Hold, origin: number): string => {
  const at = (time: number | undefined) => time === undefined ? "-" : `${((time - origin) / 1e6).toFixed(6)}s`
  const request = `${hold.client} ${hold.kind} ${JSON.stringify(hold.key)} weight ${hold.weight}`
  return [
    `${request}${hold.wait ? "" : " if available"}: asked ${at(hold.asked)}`,
    `entered ${at(hold.entered)}`,
    `token ${hold.token ?? "-"}`,
    `last step ${at(hold.steps.at(-1))}`,
    `left ${at(hold.left)}`,
    `ended ${at(hold.ended)}: ${hold.outcome ?? "its process died"}`
  ].join(", ")
}
