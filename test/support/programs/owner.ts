import { Effect } from "effect"
import * as path from "node:path"
import { spawn } from "../../../src/testing/Process.ts"
import { emit } from "../../../src/testing/Program.ts"
import { standalone } from "../servers.ts"

// Owns two servers, one of them stopped, and a program until it is killed.
await Effect.runPromise(Effect.scoped(Effect.gen(function*() {
  const server = yield* standalone()
  const stopped = yield* standalone()
  yield* stopped.pause
  const idle = yield* spawn(new URL("./idle.ts", import.meta.url))
  emit({ pids: [server.pid, stopped.pid, idle.pid], directory: path.dirname(path.dirname(server.socket)) })
  yield* Effect.sleep("1 hour")
})))
