/** One worker process. It takes files until all are finished, and then its share of the words; see `main.ts`. */
import { NodeRuntime, NodeServices } from "@effect/platform-node"
import { Cause, Effect, Layer, Logger, References } from "effect"
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
  const mapped = yield* protocol.mapped(files.length)

  const work = Effect.gen(function*() {
    yield* tell({ _tag: "Ready" })
    yield* ReadWriteLock.withReadLock(Effect.void, "gate")
    yield* reduce(yield* map(files, mapped))
  })
  yield* Effect.raceFirst(work, lead(mapped))
})

program.pipe(
  Effect.scoped,
  Effect.provide(
    Layer.mergeAll(protocol.Chief.layer, protocol.News.layer, protocol.Finished.layer, protocol.Files.layer).pipe(
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
