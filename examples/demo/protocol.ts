/** What the demo's processes have in common: their settings, what the leader proclaims, and what the workers tell. */
import { Layer, Schema } from "effect"
import { type Coordinator, Election, Flow, Queue, SharedRef, Topic } from "../../src/index.ts"

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
  /** After so many finished files, the leader is killed in the middle of a merge. */
  killAt: Schema.Int,
  /** After so many finished files, the leader is stopped (SIGSTOP) for a while, also in the middle of a merge. */
  freezeAt: Schema.Int
}) {}

// So long the run and its jobs are known after their ends.
const retention = "2 seconds"

/** The files, which the workers take. Workers die here more often than for the fault of a file. */
export class Files extends Queue.Service<Files>()("files", {
  payload: Schema.String,
  retention,
  letters: { crashes: 100 }
}) {}

/** The most frequent words, the most frequent first. */
export const Top = Schema.Array(Schema.Tuple([Schema.String, Schema.Int]))

/** The words are shared out. Each share, by its number, comes to its most frequent words. */
export const shares = 4
export class Shares extends Queue.Service<Shares>()("shares", { payload: Schema.Int, success: Top, retention }) {}

/** Maps the files to the totals, and then reduces these, share by share. */
export class Indexing extends Flow.Service<Indexing>()(
  "indexing",
  { queues: [Files, Shares], input: Schema.Array(Schema.String), retention },
  (flow, files) => {
    const mapped = files.map((file) => flow.job(Files, file))
    return Array.from({ length: shares }, (_, share) => flow.job(Shares, share, { after: mapped }))
  }
) {}

/** There is one run, whichever leader begins it. */
export const run = "index"

/** What the leader proclaims. */
export const Phase = Schema.Union([Schema.TaggedStruct("Busy", {}), Schema.TaggedStruct("Done", { top: Top })])
export type Phase = typeof Phase.Type

/** Every worker is a candidate. The parent only looks on. */
export class Chief extends Election.Service<Chief>()("chief", { schema: Phase, value: { _tag: "Busy" } }) {}

export const Fate = Schema.Literals(["kill", "freeze"])
export type Fate = typeof Fate.Type

/** What a worker tells the parent. */
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
  Schema.TaggedStruct("Refused", { token: Schema.Int, seen: Schema.Int }),
  /** All files are in the totals, and this worker finds the most frequent words of a share. */
  Schema.TaggedStruct("Reduces", { share: Schema.Int }),
  /** By the parent itself: all workers have ended, so nothing comes behind this. */
  Schema.TaggedStruct("End", {})
])
export type Event = typeof Event.Type

/** The workers publish it, and the parent subscribes: what a killed worker has published is still there. */
export class News extends Topic.Service<News>()("news", { schema: Event, retention: { age: "1 hour" } }) {}

/** How many files are finished. It is set under the lock of the totals. */
export class Finished extends SharedRef.Service<Finished>()("finished", { schema: Schema.Int, initial: 0 }) {}

export const layer = Layer.mergeAll(Chief.layer, News.layer, Finished.layer, Indexing.layer).pipe(
  Layer.provideMerge(Layer.mergeAll(Files.layer, Shares.layer))
)
export const SettingsArgument = Schema.fromJsonString(Settings)
