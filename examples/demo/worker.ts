/** One worker process. It takes files, and then shares of the words, until the leader proclaims the result; see `main.ts`. */
import { NodeRuntime, NodeServices } from "@effect/platform-node"
import { Cause, Effect, Layer, Logger, Option, References, Stream } from "effect"
import { Coordinator, ReadWriteLock, Redis } from "../../src/index.ts"
import { lead } from "./lead.ts"
import { map } from "./map.ts"
import * as protocol from "./protocol.ts"
import { reduce } from "./reduce.ts"
import { settings, tell } from "./self.ts"
import * as words from "./words.ts"

// The parent never writes here. When this ends the parent is gone, however that happened, and so is the work.
process.stdin.once("end", () => process.exit(1)).resume().unref()

const program = Effect.gen(function*() {
  const files = yield* words.list(settings.folder)
  const chief = yield* protocol.Chief
  const shares = yield* protocol.Shares
  // The leader leaves last.
  const done = Stream.runDrain(Stream.takeUntil(
    Stream.map(chief.changes, Option.getOrUndefined),
    (leader) => leader?.value._tag === "Done" && leader.node !== settings.name
  ))

  const work = Effect.gen(function*() {
    yield* tell({ _tag: "Ready" })
    yield* ReadWriteLock.withReadLock(Effect.void, "gate")
    yield* map(files)
    yield* Effect.raceFirst(shares.run(reduce), done)
  })
  yield* Effect.raceFirst(work, lead(files))
})

program.pipe(
  Effect.scoped,
  Effect.provide(
    protocol.layer.pipe(
      Layer.provideMerge(
        Coordinator.layer({ ...protocol.coordinator, namespace: settings.namespace, name: settings.name })
      ),
      Layer.provideMerge(Redis.layer({ url: settings.redis })),
      Layer.merge(NodeServices.layer)
    )
  ),
  // Losses of a session without holds are warnings; here they are of no interest.
  Effect.provideService(Logger.LogToStderr, true),
  Effect.provideService(References.MinimumLogLevel, "Error"),
  Effect.tapCause((cause) => Effect.sync(() => console.error(Cause.pretty(cause)))),
  NodeRuntime.runMain({ disableErrorReporting: true })
)
