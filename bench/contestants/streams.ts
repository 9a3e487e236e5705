/**
 * Streams as they are. Broadcast: one `XREAD BLOCK` in each process, whose events go to all handlers there, or one for each
 * handler on a connection of its own. Group: `XREADGROUP BLOCK`, and an `XACK` for each event.
 */
import { Redis } from "ioredis"
import { groupPrefetch, type Open, publishing, type Sample, type Traffic } from "../contestant.ts"

type Entries = ReadonlyArray<readonly [id: string, fields: ReadonlyArray<string>]>
type Reply = ReadonlyArray<readonly [key: string, Entries]> | null

const group = "bench"

const entriesOf = (reply: unknown): Entries => (reply as Reply)?.[0]?.[1] ?? []

const sampleOf = (fields: ReadonlyArray<string>): Sample => JSON.parse(fields[1]!) as Sample

const streams =
  (handle: (connect: () => Redis, commands: Redis, traffic: Traffic) => Promise<unknown>): Open => async ({ port }) => {
    const commands = new Redis({ host: "127.0.0.1", port, enableAutoPipelining: true })
    const connect = () => new Redis({ host: "127.0.0.1", port })
    await commands.ping()
    return {
      traffic: async (traffic) => {
        const { handlers, name, opened } = traffic
        const handled = handlers.length === 0 ? new Promise(() => {}) : handle(connect, commands, traffic)
        await opened()
        // As many are kept as lockstep keeps.
        const publish = (body: string) => commands.xadd(name, "MAXLEN", "~", 100_000, "*", "e", body)
        await Promise.all([publishing(traffic, publish), handled])
      }
    }
  }

const read = async (client: Redis, name: string, heard: (event: Sample) => void): Promise<void> => {
  for (let position = "0-0";;) {
    const reply = await client.xread("COUNT", 1024, "BLOCK", 5000, "STREAMS", name, position)
    for (const [id, fields] of entriesOf(reply)) {
      heard(sampleOf(fields))
      position = id
    }
  }
}

export const open = streams((connect, _, { handlers, name }) =>
  read(connect(), name, (event) => {
    for (const handler of handlers) handler(event)
  })
)

export const openEach = streams((connect, _, { handlers, name }) =>
  Promise.all(handlers.map((handler) => read(connect(), name, handler)))
)

export const openGroup = streams(async (connect, commands, { handlers, name }) => {
  const client = connect()
  await commands.xgroup("CREATE", name, group, "0", "MKSTREAM").catch((error: Error) => {
    if (!error.message.startsWith("BUSYGROUP")) throw error
  })
  let acknowledged: Promise<unknown> = Promise.resolve()
  for (;;) {
    const reply = await client.xreadgroup(
      "GROUP",
      group,
      String(process.pid),
      "COUNT",
      groupPrefetch,
      "BLOCK",
      5000,
      "STREAMS",
      name,
      ">"
    )
    // What came before has to be acknowledged by now, so that no more than two pages are under way.
    await acknowledged
    acknowledged = Promise.all(
      entriesOf(reply).map(([id, fields]) => {
        handlers[0]!(sampleOf(fields))
        return commands.xack(name, group, id)
      })
    )
  }
})
