/**
 * A worker process of the service: it factors up to NUMBER_OF_WORKERS numbers at a time, and posts the factors back. It ends when it
 * had no job for IDLE.
 *
 * After SIGQUIT, or the end of its standard input, it ends behind the jobs that wait. After SIGTERM its jobs have ten seconds to end,
 * and then go back to the queue. A second SIGTERM gives them back at once.
 */
import { NodeHttpClient, NodeRuntime } from "@effect/platform-node"
import { Config, Console, Duration, Effect, Layer } from "effect"
import { HttpClient, HttpClientRequest } from "effect/http"
import { layer, type Work, WorkQueue } from "./protocol.ts"

/** By trial division, which lets other jobs go on now and then. */
const factorsOf = Effect.fnUntraced(function*(number: number) {
  const factors: Array<number> = []
  let rest = number
  let steps = 0
  for (let by = 2; by * by <= rest; by += by === 2 ? 1 : 2) {
    for (; rest % by === 0; rest /= by) factors.push(by)
    if (++steps % 100_000 === 0) yield* Effect.yieldNow
  }
  if (rest > 1) factors.push(rest)
  return factors
})

const factor = Effect.fnUntraced(function*([number, postBackUrl]: Work) {
  const factors = yield* factorsOf(number)
  // A receiver that is away gets it later: a job that has failed is attempted again. So it may come twice.
  const client = HttpClient.filterStatusOk(yield* HttpClient.HttpClient)
  yield* client.execute(HttpClientRequest.post(postBackUrl).pipe(HttpClientRequest.bodyJsonUnsafe({ number, factors })))
})

const program = Effect.gen(function*() {
  const queue = yield* WorkQueue
  const pool = yield* queue.pool(factor, {
    concurrency: yield* Config.Int("NUMBER_OF_WORKERS").pipe(Config.withDefault(50)),
    idle: yield* Config.Duration("IDLE").pipe(Config.withDefault(Duration.seconds(30))),
    grace: "10 seconds",
    signals: ["SIGTERM"],
    timeout: "5 minutes"
  })
  const run = Effect.runForkWith(yield* Effect.context())
  const drain = () => void run(pool.drain)
  process.on("SIGQUIT", drain)
  process.stdin.once("end", drain).resume()
  yield* pool.await
  yield* Console.log(`Process: ${process.pid} is signing off`)
  process.stdin.destroy()
})

program.pipe(
  Effect.scoped,
  Effect.provide(Layer.merge(layer, NodeHttpClient.layerUndici)),
  NodeRuntime.runMain()
)
