/** The error of members whose run was replaced by another one. */

import * as Schema from "effect/Schema"
import { describe } from "./loss.ts"

export class Superseded extends Schema.Error<Superseded>("lockstep/Superseded")({
  _tag: Schema.tag("Superseded"),
  kind: Schema.String,
  name: Schema.String,
  namespace: Schema.String,
  run: Schema.String,
  current: Schema.String
}) {
  override get message(): string {
    const [run, current] = [JSON.stringify(this.run), JSON.stringify(this.current)]
    return `${describe(this.kind, this.name, this.namespace)} belongs to run ${current} now, and this member ` +
      `to run ${run}: end this program, or open it again with the current run.`
  }
}
