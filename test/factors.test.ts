/** The service of examples/factors: real processes that are killed and stopped, and a receiver that gets each result. */
import { assert, layer } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import { type ChildProcess, spawn } from "node:child_process"
import { once } from "node:events"
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs"
import { createServer } from "node:http"
import type { AddressInfo } from "node:net"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { make as proxy } from "../src/testing/Proxy.ts"
import { awake, elapsed } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const main = fileURLToPath(new URL("../examples/factors/service.ts", import.meta.url))

/** Large primes, or with a large prime factor: each takes a while. */
const hard = [9007199254740881, 9007195909437503, 9007198285571818]

interface Result {
  readonly number: number
  readonly factors: ReadonlyArray<number>
}

/** Takes what is posted; the first results are refused. While it holds results, nothing is answered. */
const receiver = Effect.gen(function*() {
  const results: Array<Result> = []
  const seen = { refused: 0, holds: false, now: 0, most: 0 }
  const held: Array<() => void> = []
  const server = createServer((request, response) => {
    let text = ""
    seen.most = Math.max(seen.most, ++seen.now)
    response.once("close", () => seen.now--)
    request.on("data", (part) => text += String(part))
    request.on("end", () => {
      const take = () => {
        // Its process has ended.
        if (response.destroyed) return
        results.push(JSON.parse(text) as Result)
        response.end()
      }
      if (seen.holds) held.push(take)
      else if (seen.refused < 2) {
        seen.refused++
        response.writeHead(503).end()
      } else take()
    })
  })
  yield* Effect.acquireRelease(
    Effect.promise(() => once(server.listen(0, "127.0.0.1"), "listening")),
    () => Effect.promise(() => new Promise((resolve) => (server.close(resolve), server.closeAllConnections())))
  )
  const release = () => {
    seen.holds = false
    for (const take of held.splice(0)) take()
  }
  return { results, seen, release, url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/` }
})

interface Service {
  readonly child: ChildProcess
  readonly output: () => string
  readonly ended: Promise<unknown>
  readonly ask: (number: number | string, postBackUrl: string) => Effect.Effect<readonly [status: number, text: string]>
  /** The processes that were started so far. */
  readonly workers: () => ReadonlyArray<number>
}

const start = (env: Record<string, string>): Effect.Effect<Service, never, Scope.Scope> =>
  Effect.gen(function*() {
    const child = spawn(process.execPath, [main], {
      env: { ...process.env, ...env },
      stdio: ["ignore", "pipe", "pipe"]
    })
    yield* Effect.addFinalizer(() => Effect.sync(() => child.kill("SIGKILL")))
    let output = ""
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding("utf8").on("data", (text: string) => output += text)
    }
    const port = yield* eventually(Effect.sync(() => /Listening on http:\/\/.*:(\d+)/.exec(output)?.[1] ?? false), {
      timeout: "30 seconds"
    })
    return {
      child,
      output: () => output,
      ended: once(child, "close"),
      ask: (number, postBackUrl) =>
        Effect.promise(async () => {
          const query = new URLSearchParams({ number: String(number), post_back_url: postBackUrl })
          const response = await fetch(`http://127.0.0.1:${port}/compute_factors?${query}`)
          return [response.status, await response.text()] as const
        }),
      workers: () => [...output.matchAll(/Worker process (\d+) begins/g)].map(([, pid]) => Number(pid))
    }
  })

const isAlive = (pid: number) => {
  try {
    process.kill(pid, 0)
    return !/^\d+ \(.*\) Z/.test(readFileSync(`/proc/${pid}/stat`, "utf8"))
  } catch {
    return false
  }
}

const noneIsLeft = (pids: ReadonlyArray<number>) =>
  eventually(Effect.sync(() => assert.deepStrictEqual(pids.filter(isAlive), [])), { timeout: "30 seconds" })

const scenario = <E>(
  env: Record<string, string>,
  self: (
    service: Service & { readonly begin: Effect.Effect<Service, never, Scope.Scope> },
    posted: Effect.Success<typeof receiver>,
    pidFile: string
  ) => Effect.Effect<void, E, Scope.Scope>
) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    const folder = yield* Effect.acquireRelease(
      Effect.sync(() => mkdtempSync(join(tmpdir(), "lockstep-factors-"))),
      (folder) => Effect.sync(() => rmSync(folder, { recursive: true }))
    )
    const pidFile = join(folder, "factors.pid")
    const posted = yield* receiver
    const begin = start({
      REDIS_URL: server.url,
      NAMESPACE: namespace,
      PORT: "0",
      PID_FILE: pidFile,
      LEASE: "2 seconds",
      ...env
    })
    const service = yield* begin
    yield* self({ ...service, begin }, posted, pidFile).pipe(
      Effect.tapCause(() => Effect.sync(() => console.error(service.output())))
    )
    yield* noneIsLeft(service.workers())
  })

layer(TestServer.layer, { excludeTestServices: true, timeout: "90 seconds" })("the factor service", (it) => {
  it.effect("answers at once, posts factors back, and lets idle workers go", () =>
    scenario(
      { NUMBER_OF_WORKERS: "2", IDLE: "1 second" },
      ({ ask, output, workers }, { results, url }) =>
        Effect.gen(function*() {
          assert.deepStrictEqual(workers(), [])
          for (const number of [1, 2, 12, 97, 5040]) assert.deepStrictEqual(yield* ask(number, url), [200, "OK"])
          // Two of them were refused at first, and come again.
          yield* eventually(Effect.sync(() =>
            assert.deepStrictEqual(results.toSorted((x, y) => x.number - y.number), [
              { number: 1, factors: [] },
              { number: 2, factors: [2] },
              { number: 12, factors: [2, 2, 3] },
              { number: 97, factors: [97] },
              { number: 5040, factors: [2, 2, 2, 2, 3, 3, 5, 7] }
            ])
          ))
          for (const [number, to] of [["x", url], [-1, url], [1.5, url], [6, "nowhere"]] as const) {
            assert.strictEqual((yield* ask(number, to))[0], 400)
          }
          // On a busy machine the first one leaves before a refused result comes again: then there was another one.
          yield* noneIsLeft(workers())
          const gone = workers()
          for (const pid of gone) {
            yield* eventually(Effect.sync(() => assert.include(output(), `Process: ${pid} is signing off`)))
          }
          // Another one comes with the next request.
          yield* ask(10, url)
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(results.at(-1), { number: 10, factors: [2, 5] })))
          assert.strictEqual(workers().length, gone.length + 1)
        })
    ))

  it.effect("loses nothing when worker processes are killed, and stops behind the jobs that wait", () =>
    scenario(
      { NUMBER_OF_WORKERS: "4", WORKER_PROCESSES: "2" },
      ({ ask, child, ended, output, workers }, { results, url }, pidFile) =>
        Effect.gen(function*() {
          assert.strictEqual(readFileSync(pidFile, "utf8"), `${child.pid}\n`)
          const numbers = [...hard, ...Array.from({ length: 57 }, (_, at) => 1_000_000_007 + 2 * at)]
          yield* Effect.forEach(numbers, (number) => ask(number, url), { concurrency: 10 })
          yield* eventually(Effect.sync(() => assert.isAbove(results.length, 0)), { timeout: "20 seconds" })
          process.kill(workers()[0]!, "SIGKILL")
          process.kill(Number(readFileSync(pidFile, "utf8")), "SIGQUIT")
          yield* Effect.promise(() => ended)
          assert.strictEqual(child.exitCode, 0, output())
          assert.include(output(), "All jobs are done")
          assert.isFalse(existsSync(pidFile))
          for (const number of numbers) {
            const found = results.find((result) => result.number === number)
            assert.strictEqual(found?.factors.reduce((product, factor) => product * factor, 1), number)
          }
        })
    ))

  it.effect("stops behind jobs that wait for a retry, and goes on with those that it finds", () =>
    scenario(
      { NUMBER_OF_WORKERS: "1", IDLE: "1 second" },
      ({ ask, begin, child, ended, workers }, { results, seen, url }) =>
        Effect.gen(function*() {
          yield* ask(12, url)
          yield* eventually(Effect.sync(() => assert.strictEqual(seen.refused, 1)))
          child.kill("SIGKILL")
          yield* noneIsLeft(workers())
          yield* Effect.promise(() => ended)
          assert.deepStrictEqual(results, [])
          const next = yield* begin
          yield* eventually(Effect.sync(() => assert.strictEqual(seen.refused, 2)))
          next.child.kill("SIGQUIT")
          yield* Effect.promise(() => next.ended)
          assert.include(next.output(), "All jobs are done")
          assert.deepStrictEqual(results, [{ number: 12, factors: [2, 2, 3] }])
          yield* noneIsLeft(next.workers())
        })
    ))

  it.effect("stops behind its jobs also when Redis is away meanwhile", () =>
    Effect.gen(function*() {
      const line = yield* proxy(yield* TestServer)
      yield* scenario(
        { NUMBER_OF_WORKERS: "1", IDLE: "1 second", REDIS_URL: line.url },
        ({ ask, child, ended, output }, { release, results, seen, url }) =>
          Effect.gen(function*() {
            seen.holds = true
            yield* ask(12, url)
            yield* eventually(Effect.sync(() => assert.strictEqual(seen.now, 1)))
            yield* line.refuse
            yield* line.closeAll
            child.kill("SIGQUIT")
            // For longer than questions wait.
            yield* awake("3 seconds")
            assert.isNull(child.exitCode, output())
            yield* line.pass
            release()
            yield* Effect.promise(() => ended)
            assert.strictEqual(child.exitCode, 0, output())
            assert.include(output(), "All jobs are done")
            assert.deepStrictEqual(results.at(-1), { number: 12, factors: [2, 2, 3] })
          })
      )
    }))

  it.effect("runs only so many jobs at a time, and returns them at once at a second SIGTERM of a worker", () =>
    scenario(
      { NUMBER_OF_WORKERS: "3", WORKER_PROCESSES: "2", IDLE: "1 second" },
      ({ ask, workers }, { release, results, seen, url }) =>
        Effect.gen(function*() {
          seen.holds = true
          const numbers = Array.from({ length: 20 }, (_, at) => at + 1)
          yield* Effect.forEach(numbers, (number) => ask(number, url), { concurrency: 10 })
          yield* eventually(Effect.sync(() => assert.strictEqual(seen.now, 6)))
          assert.strictEqual(workers().length, 2)
          const [first] = workers() as [number]
          process.kill(first, "SIGTERM")
          const began = Date.now()
          yield* awake("500 millis")
          assert.isTrue(isAlive(first))
          assert.strictEqual(seen.now, 6)
          process.kill(first, "SIGTERM")
          yield* noneIsLeft([first])
          // Well before their time is over.
          assert.isBelow(elapsed(began), 6000)
          // Another process has come for the jobs that went back.
          yield* eventually(Effect.sync(() => assert.strictEqual(workers().length, 3)))
          yield* eventually(Effect.sync(() => assert.strictEqual(seen.now, 6)))
          assert.strictEqual(seen.most, 6)
          release()
          yield* eventually(Effect.sync(() => assert.sameMembers(results.map(({ number }) => number), numbers)))
          assert.isAtMost(seen.most, 6)
        })
    ))

  it.effect("leaves no worker behind when it is killed itself", () =>
    scenario({ NUMBER_OF_WORKERS: "1" }, ({ ask, child, workers }, { url }) =>
      Effect.gen(function*() {
        yield* ask(7, url)
        yield* eventually(Effect.sync(() => assert.strictEqual(workers().length, 1)))
        child.kill("SIGKILL")
        yield* noneIsLeft(workers())
      })))
})
