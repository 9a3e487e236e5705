/** A program that runs on one process of many, and a schedule whose ticks do. Here both "processes" are in one. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Layer, Queue, Schedule } from "effect"
import assert from "node:assert/strict"
import { Singleton } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const program = Effect.gen(function*() {
  const started = yield* Queue.unbounded<string>()
  const ticks = yield* Queue.unbounded<string>()

  const processOf = (name: string) =>
    Layer.mergeAll(
      Singleton.make("cleaner", Queue.offer(started, name)),
      Singleton.schedule("report", Queue.offer(ticks, name), Schedule.spaced("20 millis"))
    )

  yield* Effect.forkScoped(Layer.launch(processOf("a")))
  yield* Effect.forkScoped(Layer.launch(processOf("b")))

  const who = yield* Queue.take(started)
  yield* Console.log(`the cleaner runs on ${who} only`)
  const reporters = new Set([yield* Queue.take(ticks), yield* Queue.take(ticks), yield* Queue.take(ticks)])
  assert.equal(reporters.size, 1)
  assert.equal(yield* Queue.size(started), 0)
  yield* Console.log(`reports are made by ${[...reporters]} only`)
}).pipe(Effect.scoped)

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
