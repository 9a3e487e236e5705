/** From the options of a layer, or the client of a caller, to what connections are made of. */

import * as Redacted from "effect/Redacted"
import type * as IoRedis from "ioredis"
import type { ConnectionOptions } from "node:tls"
import type { Topology } from "./connection.ts"
import type { Address, Options } from "./options.ts"

export interface Source {
  readonly topology: Topology
  /** For messages. */
  readonly address: string
  readonly clientName: string
  readonly single: IoRedis.RedisOptions
  readonly cluster?: {
    readonly nodes: ReadonlyArray<IoRedis.ClusterNode>
    /** How many nodes are listed, here or in the caller's client. */
    readonly listed: number
    readonly base: IoRedis.ClusterOptions
    readonly from?: IoRedis.Cluster
  } | undefined
}

interface ParsedUrl {
  readonly host?: string
  readonly port?: number
  readonly path?: string
  readonly db?: number
  readonly family?: number
  readonly username?: string
  readonly password?: string
  readonly tls?: true
}

const integer = (name: string, text: string): number => {
  if (!/^\d+$/.test(text)) throw new RangeError(`Redis: ${name} must be a number`)
  return Number(text)
}

const familyOf = (text: string): number => {
  if (!/^[046]$/.test(text)) throw new RangeError("Redis: the family in url must be 0, 4 or 6")
  return Number(text)
}

// Addresses of IPv6 have brackets in URLs.
const unbracketed = (host: string): string => host.replace(/^\[(.*)\]$/, "$1")

const decoded = (part: string): string => {
  try {
    return decodeURIComponent(part)
  } catch {
    throw new RangeError("Redis: url has a % that encodes nothing: percent-encode the user name and the password")
  }
}

// Error messages must not quote the URL: it may carry a password.
export const parseUrl = (text: string): ParsedUrl => {
  if (text.startsWith("/")) return { path: text }
  if (!URL.canParse(text)) throw new RangeError("Redis: url is not a URL such as redis://localhost:6379")
  const url = new URL(text)
  // A password with such a character has hidden the host behind it.
  if (url.hash !== "") throw new RangeError("Redis: url has a #: percent-encode the user name and the password (%23)")
  if ([...url.searchParams.keys()].some((name) => name !== "db" && name !== "family")) {
    throw new RangeError(
      "Redis: url may have ?db= and ?family= alone: percent-encode a ? in the password (%3F), and give other options apart"
    )
  }
  // A family is for hosts that want ioredis to try IPv6 too, as it does by default.
  const [db, family] = [url.searchParams.get("db"), url.searchParams.get("family")]
  const common = {
    ...(url.username === "" ? undefined : { username: decoded(url.username) }),
    ...(url.password === "" ? undefined : { password: decoded(url.password) }),
    ...(db === null ? undefined : { db: integer("the database in url", db) }),
    ...(family === null ? undefined : { family: familyOf(family) })
  }
  switch (url.protocol) {
    case "unix:":
    case "redis+unix:":
    case "redis+socket:":
      if (url.host !== "" && url.host !== "localhost") {
        throw new RangeError("Redis: url needs three slashes: unix:///path")
      }
      return { ...common, path: decoded(url.pathname) }
    case "redis:":
    case "rediss:":
    case "valkey:":
    case "valkeys:": {
      // The port of redis:6379 would be read as a database.
      if (!/^\s*\w+:\/\//.test(text)) {
        throw new RangeError("Redis: url must have // behind its protocol: redis://host:6379")
      }
      const database = url.pathname.slice(1)
      return {
        ...common,
        host: url.hostname === "" ? "localhost" : unbracketed(url.hostname),
        ...(url.port === "" ? undefined : { port: Number(url.port) }),
        ...(database === "" ? undefined : { db: integer("the database in url", database) }),
        ...(url.protocol === "rediss:" || url.protocol === "valkeys:" ? { tls: true as const } : undefined)
      }
    }
    default:
      throw new RangeError("Redis: url must begin with redis://, rediss:// or unix://")
  }
}

const tlsOf = (option: boolean | ConnectionOptions | undefined): ConnectionOptions | undefined => {
  if (option === undefined || typeof option === "object" && option !== null) return option
  if (typeof option !== "boolean") throw new RangeError("Redis: tls must be true, false, or the options of node:tls")
  return option ? {} : undefined
}

interface Place {
  readonly host: string
  readonly port: number
}

const named = (places: ReadonlyArray<Place>): string => places.map(({ host, port }) => `${host}:${port}`).join(",")

const definedOnly = <A extends object>(options: A): A => {
  for (const key of Object.keys(options)) if (options[key as keyof A] === undefined) delete options[key as keyof A]
  return options
}

const checkTexts = (texts: { readonly [name: string]: unknown }): void => {
  for (const [name, text] of Object.entries(texts)) {
    if (text === undefined || typeof text === "string" && text !== "") continue
    throw new RangeError(`Redis: ${name} must be a text that is not empty`)
  }
}

/** A URL, or credentials, would be taken for a name, and shown in errors. */
const checkHost = (host: unknown, what: string): string => {
  if (typeof host === "string" && /^[^\s/@#?]+$/.test(host)) return host
  throw new RangeError(`Redis: ${what} must be a name or an address, without a scheme, credentials or a path`)
}

const checkLists = (lists: { readonly [name: string]: unknown }): void => {
  for (const [name, list] of Object.entries(lists)) {
    if (list === undefined || Array.isArray(list)) continue
    throw new RangeError(`Redis: ${name} must be a list of { host, port }`)
  }
}

const checkPlaces = ({ cluster, host, name, path, port, sentinels, url }: Options): void => {
  checkTexts({ name, path, url: Redacted.isRedacted(url) ? Redacted.value(url) : url })
  checkLists({ cluster, sentinels })
  const places = [url, path, host ?? port, sentinels, cluster]
  if (places.filter((place) => place !== undefined).length > 1) {
    throw new RangeError("Redis: give only one of url, path, host and port, sentinels, cluster")
  }
  if (sentinels !== undefined && (sentinels.length === 0 || name === undefined)) {
    throw new RangeError("Redis: sentinels needs at least one address, and the name of the primary as `name`")
  }
  if (cluster !== undefined && cluster.length === 0) throw new RangeError("Redis: cluster needs at least one address")
}

const checkDatabase = (db: number | undefined): void => {
  if (db !== undefined && db !== 0) throw new RangeError("Redis: a Cluster has only database 0")
}

const checkNatMap = (natMap: Options["natMap"]): void => {
  for (const [name, place] of Object.entries(natMap ?? {})) {
    checkHost(place?.host, `the host of natMap["${name}"]`)
    checkPort(place?.port, `the port of natMap["${name}"]`)
  }
}

const checkPort = (port: number, what = "port"): number => {
  if (Number.isInteger(port) && port >= 1 && port <= 65535) return port
  throw new RangeError(`Redis: ${what} must be 1 to 65535`)
}

const placesOf = (addresses: ReadonlyArray<Address>, standard: number): Array<Place> =>
  addresses.map((address: Partial<Address> | null) => ({
    host: unbracketed(checkHost(address?.host, "the host of an address")),
    port: checkPort(address?.port ?? standard)
  }))

/** Of texts such as `host:port,[::1]:port`; a port can be left out. */
export const parseAddresses = (name: string, text: string): ReadonlyArray<Address> =>
  text.split(",").map((part) => part.trim()).filter((part) => part !== "").map((part): Address => {
    // An address of IPv6 has colons of its own.
    const [, bracketed, plain, port] = /^(?:\[([^\]]*)\]|([^:]*))(?::([^:]*))?$/.exec(part) ?? []
    const host = checkHost(bracketed ?? plain ?? part, `a host in ${name}`)
    if (port === undefined) return { host }
    const what = `the port in ${name}`
    return { host, port: checkPort(integer(what, port), what) }
  })

/** A password is redacted, so that no log has it. */
const secretOf = (value: Redacted.Redacted<string>, what: string): string => {
  if (!Redacted.isRedacted(value)) throw new RangeError(`Redis: ${what} must be redacted: Redacted.make(...)`)
  const secret: unknown = Redacted.value(value)
  if (typeof secret !== "string") throw new RangeError(`Redis: ${what} must be a redacted text`)
  return secret
}

export const resolve = (options: Options): Source => {
  if (typeof options !== "object" || options === null) {
    throw new RangeError("Redis: options must be an object, as { url }")
  }
  checkPlaces(options)
  const { clientName = "lockstep", cluster, sentinels, url } = options
  const parsed: ParsedUrl = url === undefined ? {} : parseUrl(Redacted.isRedacted(url) ? Redacted.value(url) : url)
  const path = options.path ?? parsed.path
  const host = checkHost(options.host ?? parsed.host ?? "localhost", "host")
  const port = checkPort(options.port ?? parsed.port ?? 6379)
  const db = options.db ?? parsed.db ?? 0
  if (!Number.isInteger(db) || db < 0) throw new RangeError("Redis: db must be a non-negative integer")
  if (cluster !== undefined) checkDatabase(db)
  checkNatMap(options.natMap)
  if (!/^[!-~]+$/.test(clientName)) throw new RangeError("Redis: clientName must be ASCII without spaces")
  for (const name of ["username", "sentinelUsername"] as const) {
    if (typeof (options[name] ?? "") !== "string") throw new RangeError(`Redis: ${name} must be a text`)
  }
  const common = definedOnly<IoRedis.RedisOptions>({
    username: options.username ?? parsed.username,
    password: options.password === undefined ? parsed.password : secretOf(options.password, "password"),
    tls: tlsOf(options.tls ?? parsed.tls)
  })
  if (cluster !== undefined) return ofCluster(options, placesOf(cluster, 6379), clientName, common)
  if (sentinels !== undefined) return ofSentinels(options, placesOf(sentinels, 26379), clientName, { ...common, db })
  return path === undefined
    ? {
      topology: "standalone",
      clientName,
      address: `${host}:${port}`,
      single: definedOnly({ ...common, host, port, db, family: parsed.family })
    }
    : { topology: "standalone", clientName, address: path, single: { ...common, path, db } }
}

const ofCluster = (
  { natMap }: Options,
  nodes: Array<Place>,
  clientName: string,
  common: IoRedis.RedisOptions
): Source => ({
  topology: "cluster",
  clientName,
  address: named(nodes),
  single: {},
  cluster: {
    nodes,
    listed: nodes.length,
    base: {
      redisOptions: common,
      // The names in the certificate are those of the nodes.
      ...(common.tls === undefined ? undefined : { dnsLookup: (name, callback) => callback(null, name) }),
      ...(natMap === undefined ? undefined : { natMap })
    }
  }
})

// ioredis adds the options of TLS to what it finds.
const copiesOf = (natMap: NonNullable<Options["natMap"]>) => (name: string) => {
  const place = natMap[name]
  return place === undefined ? null : { ...place }
}

const ofSentinels = (
  { name, natMap, sentinelPassword, sentinelTls, sentinelUsername, tls }: Options,
  sentinels: Array<Place>,
  clientName: string,
  common: IoRedis.RedisOptions
): Source => ({
  topology: "sentinel",
  clientName,
  address: `${name} of ${named(sentinels)}`,
  single: {
    ...common,
    role: "master",
    sentinels,
    ...definedOnly<IoRedis.RedisOptions>({
      name,
      sentinelUsername,
      sentinelPassword: sentinelPassword === undefined ? undefined : secretOf(sentinelPassword, "sentinelPassword"),
      sentinelTLS: tlsOf(sentinelTls ?? tls),
      natMap: natMap && copiesOf(natMap)
    }),
    // Without this, ioredis leaves the connection to the primary in plain text.
    enableTLSForSentinelMode: common.tls !== undefined
  }
})

/** Where a Cluster client of the caller's begins. Each is a port, a URL that may have a password, or an object. */
const startupNodes = (client: IoRedis.Cluster): ReadonlyArray<Place> =>
  (client as unknown as { readonly startupNodes: ReadonlyArray<IoRedis.ClusterNode> }).startupNodes.map((node) => {
    if (typeof node === "number") return { host: "127.0.0.1", port: node }
    if (typeof node === "object") return { host: node.host ?? "127.0.0.1", port: node.port ?? 6379 }
    const [, host, port] = /^(?:\w+:\/\/)?(?:[^@]*@)?([^:/?]*)(?::(\d+))?/.exec(node) ?? []
    return { host: host || "127.0.0.1", port: Number(port ?? 6379) }
  })

export const resolveClient = (client: IoRedis.Redis | IoRedis.Cluster): Source => {
  if (typeof (client as Partial<IoRedis.Redis> | undefined)?.duplicate !== "function") {
    throw new RangeError("Redis: client must be a client of ioredis: new Redis() or new Cluster([...])")
  }
  if (client.isCluster) {
    const from = client as IoRedis.Cluster
    const options = from.options
    checkDatabase(options.redisOptions?.db)
    const nodes = startupNodes(from)
    if (options.keyPrefix || options.redisOptions?.keyPrefix) {
      throw new RangeError("Redis: a client with keyPrefix cannot be used, as it does not reach all names: remove it")
    }
    if (options.scaleReads !== undefined && options.scaleReads !== "master") {
      throw new RangeError("Redis: a client with scaleReads cannot be used, as replicas are behind: use \"master\"")
    }
    return {
      topology: "cluster",
      clientName: options.redisOptions?.connectionName ?? "lockstep",
      address: named(nodes),
      single: {},
      cluster: { nodes: [], listed: nodes.length, base: {}, from }
    }
  }
  const options = (client as IoRedis.Redis).options
  if (options.keyPrefix) {
    throw new RangeError("Redis: a client with keyPrefix cannot be used, as it does not reach all names: remove it")
  }
  if (options.readOnly || options.role === "slave") {
    throw new RangeError("Redis: a client that reads from replicas cannot be used: connect it to the primary")
  }
  const sentinel = options.sentinels !== undefined && options.sentinels !== null
  if (sentinel && options.tls !== undefined && !options.enableTLSForSentinelMode) {
    throw new RangeError("Redis: this client sends its password in plain text: set enableTLSForSentinelMode with tls")
  }
  const places = (options.sentinels ?? []).map((one) => ({ host: one.host ?? "localhost", port: one.port ?? 26379 }))
  const place = options.path ?? `${options.host}:${options.port}`
  return {
    topology: sentinel ? "sentinel" : "standalone",
    clientName: options.connectionName ?? "lockstep",
    address: sentinel ? `${options.name} of ${named(places)}` : place,
    single: options
  }
}
