import { Effect, type Scope } from "effect"
import { randomBytes } from "node:crypto"
import * as fs from "node:fs"
import * as path from "node:path"
import { reservePort } from "../../src/internal/testing/ports.ts"
import { type Child, type Workspace, workspace } from "../../src/internal/testing/workspace.ts"
import { serverBinary } from "./binaries.ts"
import { call, type CommandError, type Reply, type Target, textOf } from "./command.ts"
import { eventually } from "./eventually.ts"
import { type TlsMaterial, tlsMaterial } from "./tls.ts"

/** Directives of the configuration file, by name; an array repeats the directive. */
export type Config = Readonly<Record<string, string | number | ReadonlyArray<string>>>

/** A Redis or Valkey process. `stop` and `start` keep its port and configuration file. */
export interface Server {
  readonly host: "127.0.0.1"
  readonly port: number
  /** Of the cluster bus, for a node of a cluster. */
  readonly busPort: number | undefined
  /** Without credentials. */
  readonly url: string
  /** Path of the Unix socket. */
  readonly socket: string
  readonly tls: TlsMaterial | undefined
  /** Of the present or last process: another one after `start`. */
  readonly pid: number
  readonly running: boolean
  /** Between `pause` and `resume`. */
  readonly paused: boolean
  /** Waits for the end of the process; SIGKILL by default. Nothing to do if it is down. */
  readonly stop: (signal?: "SIGKILL" | "SIGTERM") => Effect.Effect<void>
  /** Waits until it answers; with `discard` it comes back empty. Nothing to do if it is up. */
  readonly start: (options?: { readonly data?: "keep" | "discard" }) => Effect.Effect<void>
  /** SIGSTOP: connections stay open, connects succeed, nothing answers. */
  readonly pause: Effect.Effect<void>
  readonly resume: Effect.Effect<void>
  /** Executes one command with full rights. */
  readonly call: (...args: ReadonlyArray<string | number>) => Effect.Effect<Reply, CommandError>
  /** The same, and returns what the command line client prints. */
  readonly cli: (...args: ReadonlyArray<string | number>) => Effect.Effect<string, CommandError>
  /** What the process wrote to its log so far. */
  readonly log: Effect.Effect<string>
}

export interface ServerOptions {
  readonly config?: Config | undefined
  /**
   * Lines of an ACL file, as `user app on >secret ~app:* +@all`. An administrator for `cli` is added; the default user
   * stays open unless a line says otherwise.
   */
  readonly acl?: ReadonlyArray<string> | undefined
  /** `mutual` also demands a client certificate. The plain port is closed. */
  readonly tls?: boolean | "mutual" | undefined
  /**
   * `none` by default. `rdb` saves at SIGTERM and at SAVE only; `aof` is written before each
   * reply, so a process that is killed loses nothing: with `everysec`, Redis delays that while it flushes the file to disk.
   */
  readonly persistence?: "none" | "rdb" | "aof" | undefined
}

const persistence = {
  none: { save: "\"\"", appendonly: "no" },
  rdb: { save: "3600 1", appendonly: "no" },
  aof: { save: "\"\"", appendonly: "yes", appendfsync: "no" }
} satisfies Record<string, Config>

const render = (config: Config): string => {
  const lines: Array<string> = []
  for (const [name, value] of Object.entries(config)) {
    for (const item of Array.isArray(value) ? value : [value]) lines.push(`${name} ${item}`)
  }
  return `${lines.join("\n")}\n`
}

/** What both kinds of process share, once their files are written. */
const supervise = (spec: {
  readonly space: Workspace
  readonly home: string
  readonly port: number
  readonly busPort?: number | undefined
  readonly args: ReadonlyArray<string>
  readonly credentials?: Target["credentials"]
  readonly tls?: TlsMaterial | undefined
}): Effect.Effect<Server> =>
  Effect.gen(function*() {
    const { home, port, space, tls } = spec
    const command = serverBinary()
    const data = path.join(home, "data")
    const logFile = path.join(home, "log")
    const log = Effect.sync(() => fs.readFileSync(logFile, "utf8"))
    let child: Child | undefined
    let paused = false

    const socket = path.join(home, "socket")
    const ask: Server["call"] = (...args) => call({ socket, credentials: spec.credentials }, args)
    const cli: Server["cli"] = (...args) => Effect.map(ask(...args), textOf)

    // A server that is still loading its data answers PING with an error.
    const ready = Effect.gen(function*() {
      if (child?.running !== true) return "ended" as const
      const answer = yield* cli("PING")
      return answer === "PONG" ? "up" as const : yield* Effect.fail(answer)
    })

    const start: Server["start"] = (options) =>
      Effect.gen(function*() {
        if (child?.running === true) return
        if (options?.data === "discard") fs.rmSync(data, { recursive: true, force: true })
        fs.mkdirSync(data, { recursive: true })
        const output = fs.openSync(logFile, "a")
        child = space.spawn(command, spec.args, { stdio: ["ignore", output, output] })
        fs.closeSync(output)
        const state = yield* eventually(ready, { timeout: "20 seconds", message: `server on port ${port}` })
        if (state === "ended") {
          return yield* Effect.die(new Error(`server on port ${port} ended at once:\n${(yield* log).slice(-2000)}`))
        }
      })

    const stop: Server["stop"] = (signal = "SIGKILL") =>
      Effect.promise(async () => {
        if (child === undefined) return
        child.signal(signal)
        // A stopped process sees no signal but SIGKILL.
        child.signal("SIGCONT")
        paused = false
        await child.ended
      })

    yield* start()
    return {
      host: "127.0.0.1",
      port,
      busPort: spec.busPort,
      url: `${tls === undefined ? "redis" : "rediss"}://127.0.0.1:${port}`,
      socket,
      tls,
      get pid() {
        return child?.pid ?? 0
      },
      get running() {
        return child?.running === true
      },
      get paused() {
        return paused
      },
      stop,
      start,
      pause: Effect.sync(() => {
        child?.signal("SIGSTOP")
        paused = child?.running === true
      }),
      resume: Effect.sync(() => {
        child?.signal("SIGCONT")
        paused = false
      }),
      call: ask,
      cli,
      log
    }
  })

const makeHome = (space: Workspace, port: number): string => {
  const home = path.join(space.directory, String(port))
  fs.mkdirSync(path.join(home, "data"), { recursive: true })
  return home
}

/** Starts a server in a workspace: the building block of the topologies. */
export const launch = (
  space: Workspace,
  options?: ServerOptions & { readonly clusterBus?: boolean | undefined }
): Effect.Effect<Server, never, Scope.Scope> =>
  Effect.gen(function*() {
    const port = yield* reservePort
    const busPort = options?.clusterBus === true ? yield* reservePort : undefined
    const home = makeHome(space, port)
    const tls = options?.tls === undefined || options.tls === false ? undefined : yield* tlsMaterial
    const credentials = options?.acl === undefined
      ? undefined
      : { user: "administrator", password: randomBytes(16).toString("hex") }
    if (credentials !== undefined) {
      const administrator = `user ${credentials.user} on >${credentials.password} ~* &* +@all`
      fs.writeFileSync(path.join(home, "users.acl"), `${[...options?.acl ?? [], administrator].join("\n")}\n`)
    }
    if (tls !== undefined) {
      const files = { "ca.crt": tls.ca, "server.crt": tls.cert, "server.key": tls.key }
      const all = { ...files, "client.crt": tls.clientCert, "client.key": tls.clientKey }
      for (const [name, text] of Object.entries(all)) fs.writeFileSync(path.join(home, name), text)
    }
    const file = path.join(home, "server.conf")
    const config: Config = {
      bind: "127.0.0.1",
      port: tls === undefined ? port : 0,
      dir: path.join(home, "data"),
      unixsocket: path.join(home, "socket"),
      unixsocketperm: 700,
      daemonize: "no",
      "enable-debug-command": "yes",
      "repl-diskless-sync-delay": 0,
      "repl-ping-replica-period": 1,
      "shutdown-timeout": 0,
      ...persistence[options?.persistence ?? "none"],
      ...credentials === undefined ? {} : {
        aclfile: path.join(home, "users.acl"),
        masteruser: credentials.user,
        masterauth: credentials.password
      },
      ...tls === undefined ? {} : {
        "tls-port": port,
        "tls-ca-cert-file": path.join(home, "ca.crt"),
        "tls-cert-file": path.join(home, "server.crt"),
        "tls-key-file": path.join(home, "server.key"),
        "tls-auth-clients": options?.tls === "mutual" ? "yes" : "no"
      },
      // Outside of the data directory: a node that lost its data is still the same node.
      ...busPort === undefined ? {} : { "cluster-port": busPort, "cluster-config-file": path.join(home, "nodes.conf") },
      ...options?.config
    }
    fs.writeFileSync(file, render(config))
    return yield* supervise({ space, home, port, busPort, args: [file], credentials, tls })
  })

/** Starts a sentinel in a workspace. */
export const launchSentinel = (space: Workspace, config: Config): Effect.Effect<Server, never, Scope.Scope> =>
  Effect.gen(function*() {
    const port = yield* reservePort
    const home = makeHome(space, port)
    const file = path.join(home, "sentinel.conf")
    const base = { bind: "127.0.0.1", port, dir: path.join(home, "data"), daemonize: "no" }
    fs.writeFileSync(file, render({ ...base, unixsocket: path.join(home, "socket"), ...config }))
    return yield* supervise({ space, home, port, args: [file, "--sentinel"] })
  })

/** One server on its own. */
export const standalone = (options?: ServerOptions): Effect.Effect<Server, never, Scope.Scope> =>
  Effect.flatMap(workspace, (space) => launch(space, options))

/** The value of one field of INFO. */
const info = (server: Server, field: string): Effect.Effect<string, CommandError> =>
  Effect.map(server.cli("INFO", "everything"), (text) => {
    const line = text.split(/\r?\n/).find((line) => line.startsWith(`${field}:`))
    return line === undefined ? "" : line.slice(field.length + 1)
  })

/** Waits until every one of `replicas` is connected to `primary` and has all it wrote so far. */
export const awaitInSync = (primary: Server, replicas: ReadonlyArray<Server>): Effect.Effect<void> => {
  const caughtUp = Effect.gen(function*() {
    const offset = Number(yield* info(primary, "master_repl_offset"))
    for (const replica of replicas) {
      const port = yield* info(replica, "master_port")
      const link = yield* info(replica, "master_link_status")
      const own = Number(yield* info(replica, "slave_repl_offset"))
      if (port !== String(primary.port) || link !== "up" || own < offset) {
        return yield* Effect.fail(`replica ${replica.port}: of ${port}, link ${link}, offset ${own} of ${offset}`)
      }
    }
    // What WAIT and min-replicas count is what the primary sees.
    const seen = (yield* primary.cli("INFO", "replication")).match(/state=online/g)?.length ?? 0
    return seen >= replicas.length
  })
  return Effect.asVoid(eventually(caughtUp, { timeout: "20 seconds", message: `replicas of ${primary.port}` }))
}

/** Starts a primary and its replicas in one workspace. */
export const launchReplicated = (
  space: Workspace,
  replicas: number,
  options?: ServerOptions
): Effect.Effect<{ readonly primary: Server; readonly replicas: ReadonlyArray<Server> }, never, Scope.Scope> =>
  Effect.gen(function*() {
    const primary = yield* launch(space, options)
    const config = { ...options?.config, replicaof: `127.0.0.1 ${primary.port}` }
    const tls: Config = primary.tls === undefined ? {} : { "tls-replication": "yes" }
    const followers = yield* Effect.forEach(
      Array.from({ length: replicas }),
      () => launch(space, { ...options, config: { ...config, ...tls } }),
      { concurrency: "unbounded" }
    )
    yield* awaitInSync(primary, followers)
    return { primary, replicas: followers }
  })

/** A primary with replicas, and nothing that promotes them. */
export const replicated = (replicas: number, options?: ServerOptions) =>
  Effect.flatMap(workspace, (space) => launchReplicated(space, replicas, options))
