/** What the service and its workers have in common. */
import { Config, Duration, Layer, Schema } from "effect"
import { Coordinator, Queue, Redis } from "../../src/index.ts" // In your program: from "lockstep"

/** A number, and where its factors go. */
export const Work = Schema.Tuple([Schema.Int.check(Schema.isGreaterThan(0)), Schema.URLFromString])
export type Work = typeof Work.Type

export class WorkQueue extends Queue.Service<WorkQueue>()("work_queue", { payload: Work }) {}

export const settings = Config.all({
  redis: Config.String("REDIS_URL").pipe(Config.withDefault("redis://127.0.0.1:6379")),
  namespace: Config.String("NAMESPACE").pipe(Config.withDefault("factors")),
  /** How long the job of a process that was killed stays with it. */
  lease: Config.Duration("LEASE").pipe(Config.withDefault(Duration.seconds(15)))
})

export const layer = Layer.unwrap(
  Config.map(settings, ({ lease, namespace, redis }) =>
    WorkQueue.layer.pipe(
      Layer.provide(Coordinator.layer({ namespace, lease, margin: Duration.divideUnsafe(lease, 5) })),
      Layer.provide(Redis.layer({ url: redis }))
    ))
)
