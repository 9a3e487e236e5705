/** The queue of the programs about queues, as this process has it and as another one has. */
import { Effect, Schema } from "effect"
import { Queue } from "../../src/index.ts"
import { type Node, onNode } from "../support/live.ts"
import { insist } from "../support/uncertain.ts"

// What is known of ids outlives the queue for as long as they are.
const make = Queue.make({ name: "mails", payload: Schema.Number, retention: "500 millis" })

export const opened = (other: Node) =>
  Effect.gen(function*() {
    const mails = yield* insist(make)
    const theirs = yield* onNode(other)(make)
    /** A part of the state, as the other process sees it. */
    const of = <K extends keyof Queue.State>(key: K) => Effect.map(theirs.state, (state) => state[key])
    return { mails, theirs, of }
  })
