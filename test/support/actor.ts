/** Handlers driven directly, without any code of the kernel's. */
import { assert } from "@effect/vitest"
import { Effect } from "effect"
import { Redis as IoRedis } from "ioredis"
import { body, library } from "../../src/internal/actor/lua.ts"
import type { Server } from "./servers.ts"

/** A client of a server that has the actors, under a name of their own. */
export const client = (server: Server) =>
  Effect.gen(function*() {
    const redis = yield* Effect.acquireRelease(
      Effect.sync(() => new IoRedis(server.port, server.host)),
      (redis) => Effect.sync(() => redis.disconnect())
    )
    yield* Effect.promise(() =>
      redis.call(
        "FUNCTION",
        "LOAD",
        "REPLACE",
        `#!lua name=${library}_test\n${body}\nredis.register_function('${library}_test', run)`
      )
    )
    return redis
  })

type Answer = [status: string, replies: Array<Array<any>>, events?: Array<Array<any>>]

/** Speaks to one partition actor as the kernel does, without any of its code. `items` are those of the resource, if any. */
export const actor = (redis: IoRedis, namespace: string, resource: string, items?: string) => {
  const prefix = `{${namespace}:00}:`
  const key = prefix + resource
  const itemKeys = items === undefined ? [] : [prefix + items]
  const keys = (id: string) => [`${prefix}sessions`, `${prefix}due`, `${prefix}own:${id}`, `${prefix}mail:${id}`]
  const numbers = new Map<string, number>()
  const last = new Map<string, ReadonlyArray<string | number>>()
  // Events that came with a reply, and how many were in the mailbox by then.
  const answered = new Map<string, Array<readonly [at: number, event: Array<any>]>>()
  const answers = new Map<string, Answer>()
  const call = async (args: ReadonlyArray<string | number>): Promise<Answer> =>
    JSON.parse(await redis.call("FCALL", [`${library}_test`, ...args.map(String)]) as string)
  const ask = async (
    id: string,
    verb: string,
    args: ReadonlyArray<string | number>,
    own: ReadonlyArray<string> = []
  ) => {
    const [, replies] = await call([4 + own.length, ...keys(id), ...own, "", 0, 0, "", verb, ...args])
    return replies[0]!
  }
  const send = async (id: string, verb: string, args: ReadonlyArray<string | number>, lease = 60_000) => {
    const number = (numbers.get(id) ?? 0) + 1
    numbers.set(id, number)
    const message = [5 + itemKeys.length, ...keys(id), key, ...itemKeys, id, number, lease, "", verb, ...args]
    last.set(id, message)
    const answer = await call(message)
    const [status, replies, events = []] = answer
    assert.strictEqual(status, "ok")
    answers.set(id, answer)
    const before = await redis.xlen(`${prefix}mail:${id}`)
    answered.set(id, [...answered.get(id) ?? [], ...events.map((event) => [before, event] as const)])
    return replies[0]!
  }
  return {
    key,
    itemKeys,
    keys,
    answers,
    open: (id: string) => ask(id, "session.open", [id, "", 60_000, 1, 16, "{}"]),
    send,
    repeat: async (id: string): Promise<Answer | undefined> => last.has(id) ? await call(last.get(id)!) : undefined,
    end: (id: string, closed = false) => ask(id, "session.end", [id, closed ? "1" : ""]),
    reap: async (id: string, reaped?: (id: string) => void) => {
      for (;;) {
        const [tag, ...entries] = await ask(id, "session.owned", [id]) as Array<string>
        if (tag !== "owns") return tag
        for (const entry of entries) {
          await ask(id, "session.reap", [id, entry], [prefix + entry.slice(entry.indexOf(":") + 1), ...itemKeys])
          reaped?.(entry.slice(0, entry.indexOf(":")))
        }
      }
    },
    /** All that a session has heard, in order, by its mailbox or with a reply. */
    mail: async (id: string): Promise<Array<Array<any>>> => {
      const entries = await redis.xrange(`${prefix}mail:${id}`, "-", "+")
      const heard: Array<Array<any>> = entries.map(([, fields]) => JSON.parse(fields[1]!))
      for (const [at, event] of (answered.get(id) ?? []).toReversed()) heard.splice(at, 0, event)
      return heard
    },
    ask
  }
}
