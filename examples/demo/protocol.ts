/** What the demo's processes have in common: their settings, and what the workers tell the parent. */
import { Schema } from "effect"
import type { Coordinator } from "../../src/index.ts"

/** How many files may be worked on at once, over all processes. */
export const permits = 2

/** A short lease, so that a takeover takes seconds. Services that may ride out a fail-over want the default of 15. */
export const coordinator = { lease: "2 seconds", margin: "500 millis", partitions: 4 } satisfies Coordinator.Options

/** What a worker gets as its only argument. */
export class Settings extends Schema.Class<Settings>("Settings")({
  redis: Schema.String,
  namespace: Schema.String,
  name: Schema.String,
  folder: Schema.String,
  /** After so many finished files, the worker in the middle of a merge is killed. */
  killAt: Schema.Int,
  /** After so many finished files, the worker in the middle of a merge is stopped (SIGSTOP) for a while. */
  freezeAt: Schema.Int
}) {}

export const Fate = Schema.Literals(["kill", "freeze"])
export type Fate = typeof Fate.Type

/** What a worker tells the parent: one line of JSON each, on its standard output. */
export const Event = Schema.Union([
  Schema.TaggedStruct("Ready", {}),
  Schema.TaggedStruct("Waits", { what: Schema.String }),
  Schema.TaggedStruct("Holds", { what: Schema.String, token: Schema.Int }),
  Schema.TaggedStruct("Freed", { what: Schema.String }),
  /** Inside its locks, with half of a file written. It goes no further before it was killed or stopped. */
  Schema.TaggedStruct("Halfway", { fate: Fate, file: Schema.String, part: Schema.Int, parts: Schema.Int }),
  /** One fenced write. */
  Schema.TaggedStruct("Wrote", { file: Schema.String, part: Schema.Int, parts: Schema.Int, words: Schema.Int }),
  Schema.TaggedStruct("Lost", { what: Schema.String, reason: Schema.String }),
  /** A write with a token that is no longer the newest: it was not executed. */
  Schema.TaggedStruct("Refused", { token: Schema.Int, seen: Schema.Int })
])
export type Event = typeof Event.Type

export const EventLine = Schema.fromJsonString(Event)
export const SettingsArgument = Schema.fromJsonString(Settings)

// Words have no spaces, so these never collide with one. They are in the same hash as the counts, so that one command
// writes both: either a part of a file is counted and marked, or it is neither.
export const filesField = "number of files"
export const fileField = (file: string) => `file ${file}`
export const totalsKey = (namespace: string) => `${namespace}:totals`
