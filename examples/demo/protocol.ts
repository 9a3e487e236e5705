/** What the demo's processes have in common: their settings, what the leader proclaims, and what the workers tell. */
import { Schema } from "effect"
import { type Coordinator, CountDownLatch, Election, Queue, SharedRef, Topic } from "../../src/index.ts"

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

/** The files, which the parent offers, and the workers take. Workers die here more often than for the fault of a file. */
export class Files extends Queue.Service<Files>()("files", { payload: Schema.String, letters: { crashes: 100 } }) {}

/** The most frequent words, the most frequent first. */
export const Top = Schema.Array(Schema.Tuple([Schema.String, Schema.Int]))

/** What there is to do, as the leader proclaims it. */
export const Phase = Schema.Union([
  Schema.TaggedStruct("Map", {}),
  /** So many parties have to meet, and to share the words among them. */
  Schema.TaggedStruct("Reduce", { parties: Schema.Int }),
  Schema.TaggedStruct("Done", { top: Top })
])
export type Phase = typeof Phase.Type

/** Every worker is a candidate. The parent only looks on. */
export class Chief extends Election.Service<Chief>()("chief", { schema: Phase, value: { _tag: "Map" } }) {}

/** Ends the first phase: it opens when all files are in the totals. */
export const mapped = (files: number) => CountDownLatch.make({ name: "mapped", count: files, timeToLive: "1 second" })

/** Ends the second phase of a term: it opens when each party has found the most frequent words of its share. */
export const reduced = (term: number, parties: number) =>
  CountDownLatch.make({ name: `reduced in term ${term}`, count: parties, timeToLive: "1 second" })

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
  /** The barrier's action, before anybody passes: so many have met, and have written so many words between them. */
  Schema.TaggedStruct("Met", { parties: Schema.Int, words: Schema.Int }),
  /** By the parent itself: all workers have ended, so nothing comes behind this. */
  Schema.TaggedStruct("End", {})
])
export type Event = typeof Event.Type

/** The workers publish it, and the parent subscribes: what a killed worker has published is still there. */
export class News extends Topic.Service<News>()("news", { schema: Event, retention: { age: "1 hour" } }) {}

/** How many files are finished. It is set under the lock of the totals. */
export class Finished extends SharedRef.Service<Finished>()("finished", { schema: Schema.Int, initial: 0 }) {}
export const SettingsArgument = Schema.fromJsonString(Settings)
