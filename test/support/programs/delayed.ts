/** Its proxy holds back a request when its scope closes. Then nothing is left to do. */
import { Effect } from "effect"
import * as net from "node:net"
import { argument } from "../../../src/testing/Program.ts"
import { make as proxy } from "../../../src/testing/Proxy.ts"
import { eventually } from "../eventually.ts"

await Effect.runPromise(Effect.scoped(Effect.gen(function*() {
  const front = yield* proxy({ port: argument<number>() })
  yield* front.delay({ requests: 600_000 })
  for (let at = 0; at < 2; at++) {
    net.connect(front.port).on("error", () => undefined).write("*1\r\n$4\r\nPING\r\n".repeat(2))
  }
  yield* eventually(Effect.sync(() => front.counters.open === 2))
})))
