/** Requests on their way between a coordinator and Redis, and what they leave in Redis. */
import { Effect } from "effect"
import type { Request } from "../../src/testing/Proxy.ts"
import { awake } from "./awake.ts"
import { eventually } from "./eventually.ts"
import type { Server } from "./servers.ts"

/** A call of the actor that carries this request, perhaps among others. */
export const asks = (verb: string, key = "") => (request: Request): boolean =>
  request.name === "FCALL" && (request.args.includes(verb) || request.args.includes(`=${verb}`)) &&
  (key === "" || request.args.some((arg) => arg.endsWith(`:${key}`)))

/** What the partitions have of a lock in their sessions: its holder, and its waiters if they are few. */
const inlineStates = (server: Server, namespace: string, key: string) =>
  Effect.gen(function*() {
    const names = (yield* server.cli("KEYS", `{${namespace}:*}:sessions`)).split("\n").filter((name) => name !== "")
    const states = yield* Effect.forEach(names, (name) => server.cli("HGET", name, `@${key}`))
    return states.filter((state) => state.trim() !== "")
  })

/** How many there are of what is behind a name: `h` holds, `q` waits, `o` members. */
export const fields = (server: Server, namespace: string, key: string, kind: "h" | "q" | "o") =>
  Effect.gen(function*() {
    const names = (yield* server.cli("KEYS", `{${namespace}:*}:${key}`)).split("\n").filter((name) => name !== "")
    const all = yield* Effect.forEach(names, (name) => server.cli("HKEYS", name))
    // Waiters that are few are in one field.
    const few = kind === "q" ? yield* Effect.forEach(names, (name) => server.cli("HGET", name, "w")) : []
    const waiters = few.flatMap((text) => text.trim().split(" ")).filter((waiter) => waiter !== "").length
    const states = key.startsWith("lock:") ? yield* inlineStates(server, namespace, key) : []
    const inline = {
      h: states.length,
      q: states.reduce((sum, state) => sum + Number(/^S\w(\d+) /.exec(state)?.[1] ?? 0), 0),
      o: 0
    }
    return all.flatMap((text) => text.split("\n")).filter((field) => field.startsWith(kind)).length + inline[kind] +
      waiters
  })

export const waits = (server: Server, namespace: string, key: string, count: number) =>
  eventually(Effect.map(fields(server, namespace, key, "q"), (found) => found === count), {
    message: `${count} wait for ${key}`
  })

export const within = <A, E, R>(effect: Effect.Effect<A, E, R>, millis: number, what: string) =>
  Effect.gen(function*() {
    const started = performance.now()
    const result = yield* Effect.raceFirst(
      effect,
      Effect.andThen(awake(millis), Effect.die(new Error(`${what}: not within ${millis} ms`)))
    )
    return { result, millis: performance.now() - started }
  })
