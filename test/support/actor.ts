/** Handlers driven directly, without any code of the kernel's. */
import { assert } from "@effect/vitest"
import { Effect, identity } from "effect"
import { Redis as IoRedis } from "ioredis"
import { keyOf, kindOf } from "../../src/internal/actor/keys.ts"
import { body, kinds, library, protocol, roles } from "../../src/internal/actor/lua.ts"
import { replaced } from "../torture/library.ts"
import type { Server } from "./servers.ts"

/** A client of a server that has the actors, under a name of their own; perhaps with a clock so many seconds ahead, or changed. */
export const client = (server: Server, ahead = 0, change: (script: string) => string = identity) =>
  Effect.gen(function*() {
    const redis = yield* Effect.acquireRelease(
      Effect.sync(() => new IoRedis(server.port, server.host)),
      (redis) => Effect.sync(() => redis.disconnect())
    )
    const clock = "local time = call('TIME')"
    const later = replaced(body, clock, `${clock}\ntime[1] = format('%d', time[1] + ${ahead})`)
    // Tests have fewer waiters than that.
    const script = change(replaced(later, "MOST_INLINE = 64", "MOST_INLINE = 3"))
    yield* Effect.promise(() =>
      redis.call(
        "FUNCTION",
        "LOAD",
        "REPLACE",
        `#!lua name=${library}_test\n${script}\nredis.register_function('${library}_test', run)\nredis.register_function('${library}_look', inspect)`
      )
    )
    return redis
  })

type Answer = [status: string, replies: Array<Array<any>>, events?: Array<Array<any>>, next?: number]

// The lease of sessions that are opened here, in milliseconds.
const usual = 60_000

/** Gives a session another lease, from its next renewal on. */
const setLease = (redis: IoRedis, sessions: string, session: string, lease: number) =>
  redis.eval(
    "local packed = redis.call('HGET', KEYS[1], ARGV[1]) " +
      "redis.call('HSET', KEYS[1], ARGV[1], packed:sub(1, 41) .. struct.pack('<d', ARGV[2]) .. packed:sub(50))",
    1,
    sessions,
    `s${session}`,
    lease
  )

/** The hash of a resource, and the keys of its other roles. */
export const keysOf = (hash: string): ReadonlyArray<string> =>
  (kinds as { readonly [kind: string]: ReadonlyArray<string> })[kindOf(hash)]!.map((role, at) =>
    at === 0 ? hash : keyOf(hash, role)
  )

/** A request, and the hash of the resource that it is about. */
export type Asked = readonly [verb: string, args: ReadonlyArray<string | number>, hash?: string | undefined]

/** Speaks to one partition actor as the kernel does, without any of its code. */
export const actor = (redis: IoRedis, namespace: string, resource: string) => {
  const prefix = `{${namespace}:00}:`
  const key = prefix + resource
  const sessions = `${prefix}sessions`
  /** The keys of the partition, and of a session. */
  const keys = (id: string) => [sessions, `${prefix}due`, `${prefix}floor`, `${prefix}own:${id}`, `${prefix}mail:${id}`]
  // What a verb declares: the hash, some roles, or all of the kind.
  const rolesOf = (verb: string, hash: string) =>
    roles[verb] === undefined ?
      [hash] :
      roles[verb] === null ?
      keysOf(hash) :
      roles[verb].map((role, at) => at === 0 ? hash : keyOf(hash, role))
  const numbers = new Map<string, number>()
  const last = new Map<string, ReadonlyArray<string | number>>()
  // Events that came with a reply, and how many were in the mailbox by then.
  const answered = new Map<string, Array<readonly [at: number, event: Array<any>]>>()
  const answers = new Map<string, Answer>()
  const mailOf = async (id: string): Promise<Array<Array<any>>> => {
    const entries = await redis.xrange(`${prefix}mail:${id}`, "-", "+")
    return entries.flatMap(([, fields]) => JSON.parse(fields[1]!) as Array<Array<any>>)
  }
  const call = async (args: ReadonlyArray<string | number>): Promise<Answer> =>
    JSON.parse(await redis.call("FCALL", [`${library}_test`, ...args.map(String)]) as string)
  /** A request that needs no session. */
  const ask = async (id: string, verb: string, args: ReadonlyArray<string | number>, hash?: string) => {
    const own = hash === undefined ? [] : rolesOf(verb, hash)
    const [, replies] = await call([1 + own.length, sessions, ...own, "", 0, verb, ...args])
    return replies[0]!
  }
  /** A question, as it is answered when an expired session that was not reaped does not matter. */
  const look = async (verb: string, args: ReadonlyArray<string | number>, hash = key) => {
    const own = rolesOf(verb, hash)
    const message = [1 + own.length, sessions, ...own, "", 1, verb, ...args]
    const [, replies] = JSON.parse(await redis.call("FCALL", [`${library}_look`, ...message.map(String)]) as string)
    return replies[0] as Array<any>
  }
  const batch = async (
    id: string,
    own: ReadonlyArray<string>,
    requests: ReadonlyArray<string | number>,
    lease = usual,
    read: number | "" = ""
  ) => {
    const number = (numbers.get(id) ?? 0) + 1
    numbers.set(id, number)
    if (lease !== usual) await setLease(redis, sessions, id, lease)
    const header = read === "" ? number : `${number} ${read}`
    const message = [1 + own.length, sessions, ...own, id, header, ...requests]
    last.set(id, message)
    const answer = await call(message)
    const [status, replies, events = []] = answer
    assert.strictEqual(status, "ok")
    answers.set(id, answer)
    const before = (await mailOf(id)).length
    answered.set(id, [...answered.get(id) ?? [], ...events.map((event) => [before, event] as const)])
    return replies
  }
  // The requests that programs make while these are gathered: one call sends them.
  let gathered: Array<readonly [id: string, asked: Asked, answered: (reply: Array<any>) => void]> | undefined
  const send = async (
    id: string,
    verb: string,
    args: ReadonlyArray<string | number>,
    lease = usual,
    read: number | "" = "",
    hashes: ReadonlyArray<string> = [key],
    // Behind it, in the same call.
    beside: ReadonlyArray<string> = []
  ): Promise<Array<any>> => {
    if (gathered !== undefined) {
      const { promise, resolve } = Promise.withResolvers<Array<any>>()
      gathered.push([id, [verb, args, hashes[0]], resolve])
      return promise
    }
    const own = verb.startsWith("session.renew") ? [] : hashes.flatMap((hash) => rolesOf(verb, hash))
    return (await batch(id, own, [verb, ...args, ...beside], lease, read))[0]!
  }
  /** As `send`, by a session that has read its mailbox up to an event. Answers the status. */
  const tell = async (
    id: string,
    verb: string,
    args: ReadonlyArray<string | number>,
    read: string
  ): Promise<string> => {
    const own = rolesOf(verb, key)
    const number = (numbers.get(id) ?? 0) + 1
    const [status] = await call([1 + own.length, sessions, ...own, id, `${number} ${read}`, verb, ...args])
    if (status === "ok") numbers.set(id, number)
    return status
  }
  /** Several requests in one call, of this resource where they name none, as the kernel sends them. */
  const sendAll = (id: string, requests: ReadonlyArray<Asked>) => {
    const own: Array<string> = []
    let before: string | undefined
    const texts = requests.flatMap(([verb, args, hash = key]) => {
      const all = roles[verb] === null
      const same = all && hash === before
      before = all ? hash : undefined
      if (!same) own.push(...rolesOf(verb, hash))
      return [same ? `=${verb}` : verb, ...args]
    })
    return batch(id, own, texts)
  }
  /** Begins these programs one after the other: the first request of each goes with the same call, which is one of that session. */
  const together = async (id: string, programs: ReadonlyArray<() => Promise<unknown>>): Promise<void> => {
    const asked: NonNullable<typeof gathered> = gathered = []
    const running = Promise.all(programs.map((program) => program()))
    // The caller observes below that a program has failed.
    running.catch(() => {})
    gathered = undefined
    assert.isTrue(asked.every(([session]) => session === id), "one call is of one session")
    const replies = asked.length === 0 ? [] : await sendAll(id, asked.map(([, request]) => request))
    for (const [at, [, , answered]] of asked.entries()) answered(replies[at]!)
    await running
  }
  return {
    key,
    keys,
    answers,
    open: (id: string) => ask(id, "session.open", [id, "", usual, protocol, 16, "{}", "", -1]),
    send,
    sendAll,
    tell,
    together,
    repeat: async (id: string): Promise<Answer | undefined> => last.has(id) ? await call(last.get(id)!) : undefined,
    end: (id: string, closed = false) => ask(id, "session.end", [id, closed ? "1" : ""]),
    /** What is due, and what a session owns if it is among that: in one call. */
    due: async (id: string): Promise<ReadonlyArray<Array<any>>> => {
      const [, replies] = await call([1, sessions, "", 0, "session.renew", "session.owned", id])
      return replies
    },
    reap: async (id: string, reaped?: (id: string) => void) => {
      for (;;) {
        const [tag, entries] = await ask(id, "session.owned", [id]) as [string, Array<string>]
        if (tag !== "owns") return tag
        for (const entry of entries) {
          await ask(id, "session.reap", [id, entry], prefix + entry.slice(entry.indexOf(":") + 1))
          reaped?.(entry.slice(0, entry.indexOf(":")))
        }
      }
    },
    ring: (hash = key) => ask("", "alarm.ring", [], hash),
    /** All that a session has received, in order, by its mailbox or with a reply. */
    mail: async (id: string): Promise<Array<Array<any>>> => {
      const heard = await mailOf(id)
      for (const [at, event] of (answered.get(id) ?? []).toReversed()) heard.splice(at, 0, event)
      return heard
    },
    ask,
    look,
    /** Another resource of the partition, asked by the same sessions. */
    beside: (resource: string) => {
      const other = prefix + resource
      return {
        key: other,
        send: (id: string, verb: string, args: ReadonlyArray<string | number>) =>
          send(id, verb, args, undefined, "", [other]),
        look: (verb: string, args: ReadonlyArray<string | number>) => look(verb, args, other),
        ring: () => ask("", "alarm.ring", [], other)
      }
    }
  }
}
