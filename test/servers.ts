/**
 * Runs the test suite once for each server:
 *
 *     npm run test:servers -- [path of a server ...] [-- test file ...]
 *
 * Without paths, `LOCKSTEP_SERVERS` names the servers (paths separated by colons), and without that, PATH does.
 */
import * as path from "node:path"
import { startVitest } from "vitest/node"
import { identify, installedServers, variable } from "./support/binaries.ts"

const words = process.argv.slice(2)
const split = words.includes("--") ? words.indexOf("--") : words.length
const files = words.slice(split + 1)

const find = (): ReadonlyArray<string> => {
  const given = words.slice(0, split)
  if (given.length > 0) return given
  const listed = (process.env["LOCKSTEP_SERVERS"] ?? "").split(":").filter((file) => file !== "")
  return listed.length > 0 ? listed : installedServers()
}

const run = async (server: string) => {
  process.env[variable] = server
  // The examples would use the server that this names.
  delete process.env["REDIS_URL"]
  const vitest = await startVitest(files, { config: ".vitest.config.ts", watch: false })
  let [passed, failed] = [0, vitest.state.getUnhandledErrors().length]
  for (const module of vitest.state.getTestModules()) {
    // A hook that fails, or a file that does not load, fails no test.
    let failures = 0
    for (const test of module.children.allTests()) {
      const { state } = test.result()
      if (state === "passed") passed++
      if (state === "failed") failures++
    }
    failed += module.ok() ? failures : Math.max(1, failures)
  }
  await vitest.close()
  return { passed, failed }
}

const servers = find().map((file) => path.resolve(file)).map((file) => ({ file, ...identify(file) }))
if (servers.length === 0) {
  throw new Error("No server found: give the paths of server programs, or set LOCKSTEP_SERVERS, or PATH.")
}

const lines: Array<string> = []
for (const { file, name, version } of servers) {
  console.log(`\n== ${name} ${version} (${file})`)
  const { failed, passed } = await run(file)
  if (failed > 0 || passed === 0) process.exitCode = 1
  lines.push(`${name} ${version}: ${passed} passed, ${failed} failed`)
}
console.log(`\n${lines.join("\n")}`)
