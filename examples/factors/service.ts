/**
 * An HTTP service that factors numbers: `GET /compute_factors?number=42&post_back_url=http://...` is answered with "OK" at once,
 * and the factors are posted to the URL as JSON when they are found.
 *
 *   NUMBER_OF_WORKERS=50 PORT=4567 REDIS_URL=redis://127.0.0.1:6379 node examples/factors/service.ts
 *   kill -s QUIT `cat /tmp/factors.pid`
 *
 * The work waits in a queue. Up to WORKER_PROCESSES processes take it, each NUMBER_OF_WORKERS jobs at a time: traffic does not
 * fill the process table. They leave when there is none, and others are started with the next request. The job of a process
 * that was killed goes to another one, also when the service was restarted. On SIGQUIT the service takes no more requests, and ends
 * behind the jobs that wait, for their retry too.
 */
import { NodeHttpServer, NodeRuntime, NodeServices } from "@effect/platform-node"
import {
  Config,
  Console,
  Deferred,
  Effect,
  Exit,
  FiberSet,
  FileSystem,
  Layer,
  Schedule,
  Schema,
  Scope,
  Stream
} from "effect"
import { HttpRouter, HttpServer, HttpServerRequest, HttpServerResponse } from "effect/http"
import { ChildProcess } from "effect/process"
import { createServer } from "node:http"
import { fileURLToPath } from "node:url"
import { layer, Work, WorkQueue } from "./protocol.ts"

const spawn = ChildProcess.make(process.execPath, [fileURLToPath(new URL("worker.ts", import.meta.url))], {
  stdin: "pipe",
  stdout: "inherit",
  stderr: "inherit",
  extendEnv: true
})

/** The worker processes. */
const makeCrew = Effect.gen(function*() {
  const queue = yield* WorkQueue
  const most = yield* Config.Int("WORKER_PROCESSES").pipe(Config.withDefault(1))
  const stopping = yield* Deferred.make<void>()
  const employed = yield* FiberSet.make()
  const run = yield* FiberSet.runtime(employed)<never>()
  let count = 0

  const work = Effect.gen(function*() {
    const worker = yield* spawn
    yield* Console.log(`Worker process ${worker.pid} begins`)
    // Its standard input ends when the service stops, however that happens.
    yield* Effect.forkScoped(Effect.andThen(Deferred.await(stopping), Stream.run(Stream.empty, worker.stdin)))
    yield* Effect.exit(worker.exitCode)
  })

  const hire: Effect.Effect<void> = Effect.sync(() => {
    for (; count < most; count++) run(employ)
  })
  const employ: Effect.Effect<void> = work.pipe(
    Effect.scoped,
    Effect.provide(NodeServices.layer),
    Effect.orDie,
    Effect.andThen(Effect.sync(() => count--)),
    // A request that came as it left, and a job of a process that was killed, are left for others.
    Effect.andThen(Effect.suspend(() => look))
  )
  // Redis may be away.
  const state = Effect.orDie(Effect.retry(queue.state, Schedule.spaced("1 second")))
  // A job that waits for its retry needs a worker later.
  const look: Effect.Effect<void> = Effect.gen(function*() {
    const { active, delayed, waiting } = yield* state
    if (active + waiting > 0) return yield* hire
    if (delayed > 0) yield* Effect.delay(look, "1 second")
  })
  const stop = Effect.gen(function*() {
    yield* Deferred.succeed(stopping, undefined)
    yield* look
    yield* FiberSet.awaitEmpty(employed)
  })
  // Jobs that another service has left.
  run(look)
  return { hire, stop }
})

const Query = Schema.Struct({ number: Schema.NumberFromString, post_back_url: Schema.String })

const service = Effect.gen(function*() {
  const queue = yield* WorkQueue
  const crew = yield* makeCrew
  const computeFactors = Effect.gen(function*() {
    const { number, post_back_url } = yield* HttpServerRequest.schemaSearchParams(Query)
    yield* queue.offer(yield* Schema.decodeEffect(Work)([number, post_back_url]))
    yield* crew.hire
    return HttpServerResponse.text("OK")
  }).pipe(
    Effect.catchTag("SchemaError", ({ message }) => Effect.succeed(HttpServerResponse.text(message, { status: 400 })))
  )
  const quit = yield* Deferred.make<void>()
  process.on("SIGQUIT", () => Deferred.doneUnsafe(quit, Effect.void))

  const files = yield* FileSystem.FileSystem
  const pidFile = yield* Config.String("PID_FILE").pipe(Config.withDefault("/tmp/factors.pid"))
  yield* Effect.acquireRelease(
    files.writeFileString(pidFile, `${process.pid}\n`),
    () => Effect.ignore(files.remove(pidFile))
  )
  yield* Console.log(`Parent process wrote PID to ${pidFile}`)

  const requests = yield* Scope.make()
  const port = yield* Config.Int("PORT").pipe(Config.withDefault(4567))
  const http = HttpRouter.serve(HttpRouter.add("GET", "/compute_factors", computeFactors), {
    disableListenLog: true,
    disableLogger: true
  })
    .pipe(
      Layer.provideMerge(NodeHttpServer.layer(createServer, { port }))
    )
  const server = yield* Scope.provide(Layer.build(http), requests)
  yield* Console.log(
    `Listening on ${HttpServer.formatAddress((yield* Effect.provideContext(HttpServer.HttpServer, server)).address)}`
  )

  yield* Deferred.await(quit)
  // Open requests are answered.
  yield* Scope.close(requests, Exit.void)
  yield* crew.stop
  yield* Console.log("All jobs are done")
})

service.pipe(
  Effect.scoped,
  Effect.provide(Layer.merge(layer, NodeServices.layer)),
  NodeRuntime.runMain()
)
