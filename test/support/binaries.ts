/**
 * The server program that the tests start, and its command line client. `LOCKSTEP_REDIS_SERVER` chooses the server, as
 * it does for `Redis.layerEmbedded`; without it, the tests use the first one on PATH.
 */
import { execFileSync } from "node:child_process"
import * as fs from "node:fs"
import * as path from "node:path"

export const variable = "LOCKSTEP_REDIS_SERVER"

const serverNames = ["redis-server", "valkey-server"]
const cliNames = ["redis-cli", "valkey-cli"]

const isExecutable = (file: string): boolean => {
  try {
    fs.accessSync(file, fs.constants.X_OK)
    return fs.statSync(file).isFile()
  } catch {
    return false
  }
}

/** Every file of these names on PATH, those of the first name first. */
const onPath = (names: ReadonlyArray<string>): ReadonlyArray<string> => {
  const folders = (process.env["PATH"] ?? "").split(path.delimiter).filter((folder) => folder !== "")
  return names.flatMap((name) => folders.map((folder) => path.join(folder, name))).filter(isExecutable)
}

/** Every server on PATH. A file that PATH reaches twice, as /bin/redis-server and /usr/bin/redis-server, counts once. */
export const installedServers = (): ReadonlyArray<string> => {
  const byFile = new Map<string, string>()
  for (const file of onPath(serverNames)) {
    const real = fs.realpathSync(file)
    if (!byFile.has(real)) byFile.set(real, file)
  }
  return Array.from(byFile.values())
}

/** Path of the server. */
export const serverBinary = (): string => {
  const wanted = process.env[variable]
  if (wanted?.includes("/") === true && isExecutable(wanted)) return wanted
  const names = wanted === undefined ? serverNames : [wanted]
  const [file] = onPath(names)
  if (file === undefined) throw new Error(`No server to test with: ${names.join(" or ")} was not found.`)
  return file
}

/** Path of the client: the one beside the server, of the same name if there are two, or else the first one on PATH. */
export const cliBinary = (): string => {
  const server = serverBinary()
  const sameName = path.basename(server).replace(/server$/, "cli")
  const beside = [sameName, ...cliNames].map((name) => path.join(path.dirname(server), name))
  const file = beside.find((file) => file !== server && isExecutable(file)) ?? onPath(cliNames)[0]
  if (file === undefined) throw new Error(`No client for ${server}: ${cliNames.join(" or ")} was not found.`)
  return file
}

/** What `--version` says. Valkey 7.2 leaves its name out, so that the name of the file has to do. */
export const identify = (server: string): { readonly name: string; readonly version: string } => {
  if (!isExecutable(server)) throw new Error(`${server} is not an executable file.`)
  const text = execFileSync(server, ["--version"], { encoding: "utf8" })
  const [, name, version] = /^(?:(\w+) )?server v=(\S+)/i.exec(text) ?? []
  if (version === undefined) {
    throw new Error(`${server} is not a Redis or Valkey server; it said: ${text.split("\n")[0]}`)
  }
  return { name: name?.toLowerCase() ?? path.basename(server).replace(/-server$/, ""), version }
}
