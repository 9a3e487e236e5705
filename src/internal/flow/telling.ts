/** The fields and messages of the errors of flows and batches about a run. */

import * as Schema from "effect/Schema"
import { describe } from "../hold/loss.ts"

/** The fields of an error about a run. */
export const run = {
  name: Schema.String,
  namespace: Schema.String,
  run: Schema.String
}

interface About {
  readonly name: string
  readonly namespace: string
  readonly run: string
}

/** The run of a flow, or of a batch. */
export const aboutRun = (kind: "flow" | "batch") => ({ name, namespace, run }: About): string =>
  `run ${JSON.stringify(run)} of ${describe(kind, name, namespace)}`

/** The error of a handler, behind a colon, if there is one. */
export const becauseOf = (error: unknown): string =>
  error === "" || error === undefined ? "" : `: ${typeof error === "string" ? error : JSON.stringify(error)}`
