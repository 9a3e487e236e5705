/** A topic over several OS processes, which are killed at work. */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { Topic } from "../src/index.ts"
import { type Process, spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/member.ts"
import { elapsed } from "./support/awake.ts"
import { effort } from "./support/effort.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, sturdy, TestServer } from "./support/live.ts"
import { deadForgotten, on } from "./support/several.ts"

const lease = 2000
const timing = { lease: `${lease} millis`, margin: "400 millis" } as const
const count = 600

type Work = Extract<Event, { readonly at: number }>

// So long processes are killed at random, in milliseconds.
const killing = 60_000 * effort

/** What processes at the same post do, one after the other: the next one may go on where the former ones were. */
interface Role {
  readonly name: string
  readonly next: (former: ReadonlyArray<Process<Event>>) => Partial<Argument>
}

interface Post {
  readonly role: Role
  readonly all: Array<Process<Event>>
}

const readOf = (processes: ReadonlyArray<Process<Event>>) =>
  processes.flatMap(({ received }) => received.flatMap((event) => event.event === "read" ? [event] : []))

const workOf = (processes: ReadonlyArray<Process<Event>>) =>
  processes.flatMap(({ received }) => received.filter((event): event is Work => "at" in event))

layer(TestServer.layer, { excludeTestServices: true, timeout: "90 seconds" })("a group of processes", (it) => {
  it.effect("takes over what a killed member was working on when its lease ends, and keeps the order of each key", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const here = yield* node(server.url, { namespace, ...sturdy })
        yield* Effect.scoped(Effect.gen(function*() {
          const topic = yield* on(
            here,
            Topic.make({ name: "shared", schema: Schema.Number, key: (n) => String(n % 10) })
          )
          yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
          const start = spawn<Event>(new URL("./programs/member.ts", import.meta.url), {
            argument: { url: server.url, namespace, ...timing, millis: 10 } satisfies Argument
          })
          const members = yield* Effect.all([start, start, start, start], { concurrency: "unbounded" })
          yield* Effect.forEach(members, (member) => member.waitFor(({ event }) => event === "joined"))
          yield* eventually(Effect.map(topic.state, ({ groups }) => assert.strictEqual(groups[0]?.members, 4)))
          yield* topic.publishAll(Array.from({ length: count }, (_, n) => n))
          const killed = members[0]!
          yield* killed.waitFor(({ event }) => event === "handled")
          yield* killed.kill9
          const killedAt = Date.now()
          yield* killed.exit
          const work = () => workOf(members)
          yield* eventually(Effect.sync(() => {
            const done = new Set(work().flatMap(({ event, value }) => event === "handled" ? [value] : []))
            assert.strictEqual(done.size, count)
          }))
          yield* eventually(
            Effect.map(
              topic.state,
              ({ groups: [group] }) => assert.deepStrictEqual([group?.lag, group?.pending], [0, 0])
            )
          )
          // What was taken over, was so in time.
          const again = work().filter(({ attempt, event }) => event === "begun" && attempt > 1)
          assert.isAbove(again.length, 0)
          for (const { at, value } of again) assert.isAtMost(elapsed(killedAt, at), lease + 100, String(value))
          // Of each key, the first handling of every event comes in order, and none begins while another one is at work.
          const handlings = members.flatMap((member) => {
            const own = workOf([member])
            return own.filter(({ event }) => event === "begun").map(({ at, attempt, value }) => {
              const end = own.find((other) =>
                other.event === "handled" && other.value === value && other.attempt === attempt
              )
              assert.isTrue(end !== undefined || member === killed, String(value))
              return { value, begun: at, ended: end?.at ?? killedAt, isDone: end !== undefined }
            })
          })
          for (let key = 0; key < 10; key++) {
            const of = handlings.filter(({ value }) => value % 10 === key).toSorted((x, y) => x.begun - y.begun)
            const handled = [...new Set(of.flatMap(({ isDone, value }) => isDone ? [value] : []))]
            assert.deepStrictEqual(handled, Array.from({ length: count / 10 }, (_, n) => 10 * n + key))
            for (const [at, next] of of.slice(1).entries()) {
              assert.isAtLeast(next.begun, of[at]!.ended, `${next.value} begins during ${of[at]!.value}`)
            }
          }
          yield* Effect.forEach(members.slice(1), (member) => member.signal("SIGKILL"))
          yield* Effect.forEach(members, (member) => member.exit)
          yield* eventually(Effect.map(topic.state, ({ groups: [group] }) => assert.strictEqual(group?.members, 0)))
        }))
        yield* deadForgotten(here, namespace, server)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect(
    "brings each event that was confirmed to every group and subscriber while all processes are killed at random",
    () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        const seed = Math.floor(Math.random() * 2 ** 31)
        let state = seed
        const random = (below: number) => {
          state = (Math.imul(state, 1_103_515_245) + 12_345) & 0x7fffffff
          return Math.floor(state / 0x7fffffff * below) % below
        }
        yield* Effect.scoped(Effect.gen(function*() {
          const here = yield* node(server.url, { namespace, ...sturdy })
          yield* Effect.scoped(Effect.gen(function*() {
            const topic = yield* on(here, Topic.make({ name: "shared", schema: Schema.Number }))
            yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
            let publishers = 0
            const ordered: Role = { name: "ordered", next: () => ({ group: "ordered" }) }
            const unordered: Role = { name: "unordered", next: () => ({ group: "unordered", ordered: false }) }
            const publishing: Role = { name: "publisher", next: () => ({ publishes: 1_000_000 * publishers++ }) }
            const subscribing: Role = {
              name: "subscriber",
              next: (former) => ({ reads: readOf(former).at(-1)?.id ?? "" })
            }
            const roles = [ordered, unordered, publishing, subscribing]
            const posts: ReadonlyArray<Post> = roles.flatMap((role) => [1, 2].map(() => ({ role, all: [] })))
            const begin = ({ all, role }: Post) =>
              Effect.map(
                spawn<Event>(new URL("./programs/member.ts", import.meta.url), {
                  argument: { url: server.url, namespace, ...timing, millis: 10, ...role.next(all) } satisfies Argument
                }),
                (process) => void all.push(process)
              )
            const isAtWork = ({ event }: Event) => event === "handled" || event === "published" || event === "read"
            const end = ({ all }: Post) =>
              Effect.gen(function*() {
                const process = all.at(-1)!
                yield* process.waitFor(isAtWork, { timeout: "30 seconds" })
                yield* realSleep(random(1000))
                yield* process.kill9
                yield* process.exit
              })
            yield* Effect.forEach(posts, begin, { concurrency: "unbounded" })
            const until = performance.now() + killing
            const of = (role: Role) => posts.filter((post) => post.role === role)
            const processesOf = (role: Role) => of(role).flatMap(({ all }) => all)
            // Of each role, at least one.
            while (performance.now() < until || roles.some((role) => processesOf(role).length < 3)) {
              const post = posts[random(posts.length)]!
              yield* end(post)
              yield* begin(post)
            }
            yield* Effect.forEach(of(publishing), end)
            for (const role of roles) {
              assert.isAbove(processesOf(role).length, 2, `${role.name}s were killed`)
            }
            const published = processesOf(publishing).flatMap(({ received }) =>
              received.flatMap((event) => event.event === "published" ? [event.value] : [])
            )
            assert.isAbove(published.length, 100)
            const reached = (): ReadonlyArray<readonly [string, ReadonlySet<number>]> => [
              ...[ordered, unordered].map((role) =>
                [
                  role.name,
                  new Set(workOf(processesOf(role)).flatMap(({ event, value }) => event === "handled" ? [value] : []))
                ] as const
              ),
              ...of(subscribing).map(({ all, role }) =>
                [role.name, new Set(readOf(all).map(({ value }) => value))] as const
              )
            ]
            yield* eventually(
              Effect.sync(() => {
                for (const [name, values] of reached()) {
                  assert.deepStrictEqual(published.filter((value) => !values.has(value)), [], name)
                }
              }),
              { timeout: "30 seconds", interval: 100 }
            )
            // An event that was not confirmed may have been stored: one for each publisher that was killed.
            const confirmed = new Set(published)
            for (const [name, values] of reached()) {
              const others = [...values].filter((value) => !confirmed.has(value))
              assert.isAtMost(others.length, publishers, `${name}: ${others.join()}`)
            }
            // Subscribers miss nothing, and read nothing twice.
            for (const { all } of of(subscribing)) {
              assert.deepStrictEqual(
                all.flatMap(({ received }) => received.filter(({ event }) => event === "missed")),
                []
              )
              const read = readOf(all)
              assert.strictEqual(new Set(read.map(({ id }) => id)).size, read.length)
            }
            yield* Effect.forEach(posts, ({ all }) => all.at(-1)!.signal("SIGKILL"))
            yield* Effect.forEach(posts, ({ all }) => all.at(-1)!.exit)
            yield* eventually(
              Effect.map(
                topic.state,
                ({ groups }) => assert.deepStrictEqual(groups.map(({ members }) => members), [0, 0])
              )
            )
          }))
          yield* deadForgotten(here, namespace, server)
        })).pipe(Effect.tapCause((cause) => Effect.logError(`seed ${seed}`, cause)))
        yield* assertEmpty(server, namespace)
      }),
    90_000 + killing
  )
})
