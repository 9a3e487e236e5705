/** What locks protect here: a table outside of Redis that refuses a token older than one that it has seen. */
import { Deferred, Effect, type Scope } from "effect"
import * as net from "node:net"
import { createInterface } from "node:readline"
import { DatabaseSync } from "node:sqlite"

/** Starts it on a unix socket. */
export const resource = (path: string): Effect.Effect<void, never, Scope.Scope> =>
  Effect.gen(function*() {
    const database = yield* Effect.acquireRelease(
      Effect.sync(() => new DatabaseSync(":memory:")),
      (database) => Effect.sync(() => database.close())
    )
    database.exec("CREATE TABLE protected (name TEXT PRIMARY KEY, token INTEGER NOT NULL)")
    const insert = database.prepare("INSERT INTO protected VALUES (?, 0) ON CONFLICT DO NOTHING")
    const update = database.prepare("UPDATE protected SET token = ? WHERE name = ? AND token <= ?")
    const sockets = new Set<net.Socket>()
    yield* Effect.acquireRelease(
      Effect.callback<net.Server>((resume) => {
        const server = net.createServer((socket) => {
          sockets.add(socket)
          socket.on("close", () => sockets.delete(socket)).on("error", () => socket.destroy())
          const lines = createInterface({ input: socket })
          // A killed client resets its connection, and the interface reports that too.
          lines.on("error", () => socket.destroy())
          lines.on("line", (line) => {
            const [id, key, token] = JSON.parse(line) as [number, string, number]
            insert.run(key)
            const accepted = update.run(token, key, token).changes === 1
            socket.write(`${id} ${accepted ? 1 : 0}\n`)
          })
        })
        server.listen(path, () => resume(Effect.succeed(server)))
      }),
      (server) =>
        Effect.callback<void>((resume) => {
          for (const socket of sockets) socket.destroy()
          server.close(() => resume(Effect.void))
        })
    )
  })

/** A client of it: whether the write was accepted. */
export const writer = (
  path: string
): Effect.Effect<(key: string, token: number) => Effect.Effect<boolean>, never, Scope.Scope> =>
  Effect.gen(function*() {
    const waiting = new Map<number, Deferred.Deferred<boolean>>()
    const socket = yield* Effect.acquireRelease(
      Effect.callback<net.Socket>((resume) => {
        const socket = net.connect(path, () => resume(Effect.succeed(socket)))
      }),
      (socket) => Effect.sync(() => socket.destroy())
    )
    createInterface({ input: socket }).on("line", (line) => {
      const [id, accepted] = line.split(" ").map(Number)
      const found = waiting.get(id!)
      waiting.delete(id!)
      if (found !== undefined) Deferred.doneUnsafe(found, Effect.succeed(accepted === 1))
    })
    let last = 0
    return (key, token) =>
      Effect.gen(function*() {
        const id = ++last
        const answer = yield* Deferred.make<boolean>()
        waiting.set(id, answer)
        socket.write(`${JSON.stringify([id, key, token])}\n`)
        return yield* Deferred.await(answer)
      })
  })
