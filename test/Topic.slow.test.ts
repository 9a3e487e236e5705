/** Subscribers whose connection is slow. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Fiber, Schema, Stream } from "effect"
import * as net from "node:net"
import { Topic } from "../src/index.ts"
import { node, TestServer } from "./support/live.ts"
import { on, promptly, several } from "./support/several.ts"

/** Lets so many bytes of a server through each second. */
const narrow = (port: number, rate: number) =>
  Effect.acquireRelease(
    Effect.promise(() =>
      new Promise<net.Server>((resolve) => {
        const server = net.createServer((client) => {
          const upstream = net.connect(port, "127.0.0.1")
          client.pipe(upstream)
          upstream.on("data", (chunk) => {
            client.write(chunk)
            upstream.pause()
            setTimeout(() => upstream.resume(), chunk.length / rate * 1000)
          })
          for (const [one, other] of [[client, upstream], [upstream, client]] as const) {
            one.on("error", () => other.destroy()).on("close", () => other.destroy())
          }
        }).listen(0, "127.0.0.1", () => resolve(server))
      })
    ),
    (server) => Effect.sync(() => server.close())
  )

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("a topic on a slow connection", (it) => {
  it.effect("is read in pages that arrive in time", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const options = { name: "large", schema: Schema.String } as const
        const topic = yield* on(a!, Topic.make(options))
        yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
        const event = "x".repeat(100_000)
        for (let count = 0; count < 40; count++) yield* topic.publish(event)
        const line = yield* narrow(server.port, 2_000_000)
        const { port } = line.address() as net.AddressInfo
        const slow = { namespace, partitions: 1, lease: "10 seconds", requestTimeout: "1 second" } as const
        const theirs = yield* on(yield* node(`redis://127.0.0.1:${port}`, slow), Topic.make(options))
        const reading = yield* Effect.forkChild(
          Stream.runCollect(Stream.take(theirs.subscribe({ from: "beginning" }), 40))
        )
        const seen = yield* Effect.timeout(Fiber.join(reading), "30 seconds")
        assert.strictEqual(Array.from(seen).length, 40)
        yield* promptly(topic.publish("small"), "an event")
      })))

  it.effect("is read in smaller parts when Redis cuts the connection over a large answer", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const options = { name: "large", schema: Schema.String } as const
        const [topic, theirs] = [yield* on(a!, Topic.make(options)), yield* on(b!, Topic.make(options))]
        yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
        const limit = (bytes: number) =>
          server.cli("CONFIG", "SET", "client-output-buffer-limit", `normal ${bytes} 0 0`)
        yield* Effect.addFinalizer(() => Effect.orDie(limit(0)))
        const first = yield* Deferred.make<void>()
        const reading = yield* theirs.subscribe({ from: "beginning" }).pipe(
          Stream.tap(() => Deferred.succeed(first, undefined)),
          Stream.take(41),
          Stream.runCollect,
          Effect.forkChild
        )
        yield* topic.publish("first")
        yield* promptly(Deferred.await(first), "the first event")
        yield* limit(1_000_000)
        yield* topic.publishAll(Array.from({ length: 40 }, () => "x".repeat(100_000)))
        assert.strictEqual((yield* promptly(Fiber.join(reading), "the events")).length, 41)
      })))
})
