/** The errors of connections to Redis. Public through `Redis`; here so that connections can raise them. */

import * as Schema from "effect/Schema"

const because = (detail: string | undefined): string => detail === undefined ? "" : ` (${detail})`

/** The object that a command was about, if a primitive has sent it. */
export const subject = {
  kind: Schema.optional(Schema.String),
  name: Schema.optional(Schema.String),
  namespace: Schema.optional(Schema.String)
}

type Subject = Schema.Struct.Type<typeof subject>

/** Names it in a message. */
export const about = ({ kind, name, namespace }: Subject, before: string = ""): string =>
  kind === undefined ? "" : `${before} about ${kind} ${JSON.stringify(name)} of namespace ${JSON.stringify(namespace)}`

/**
 * The connection was lost, or treated as lost, while the command was in flight.
 *
 * @category errors
 * @since 0.1.0
 */
export class ConnectionLost extends Schema.Error<ConnectionLost>("lockstep/Redis/ConnectionLost")({
  _tag: Schema.tag("ConnectionLost"),
  address: Schema.String,
  detail: Schema.UndefinedOr(Schema.String),
  ...subject
}) {
  override get message(): string {
    return `The connection to Redis at ${this.address} was lost${because(this.detail)} before the reply` +
      `${about(this, " to a request")} came: the command may or may not have been executed.`
  }
}

/**
 * There is no connection. Nothing was sent.
 *
 * @category errors
 * @since 0.1.0
 */
export class NotConnected extends Schema.Error<NotConnected>("lockstep/Redis/NotConnected")({
  _tag: Schema.tag("NotConnected"),
  address: Schema.String,
  detail: Schema.UndefinedOr(Schema.String),
  ...subject
}) {
  override get message(): string {
    return `There is no connection to Redis at ${this.address}${because(this.detail)}${
      about(this, " for a request")
    }: ` +
      `${advice(this.detail ?? "")}.`
  }
}

const replica = "a read-only replica"

// Of a node that is not listed, but that the Cluster has named.
const announced = "the Cluster announces this address"

/** A node of a Cluster cannot be connected to. */
export const atAnnounced = (address: string, detail: string | undefined): RedisError =>
  fail(new NotConnected({ address, detail: detail === undefined ? announced : `${detail}; ${announced}` }))

/** Of a Cluster whose nodes serve nothing. */
export const withoutSlots = "it serves no slots"

// Instead of the text of a Sentinel, which may quote arguments.
const [deniedBySentinels, unknownToSentinels, noSentinel] = [
  "the Sentinels deny it with ",
  "the Sentinels do not know it by this `name`",
  "what is listed under `sentinels` is none"
]

// Of a connection of a program's own, which is made again without what a command had changed.
const [changedBy, isLost] = ["the one on which ", " was sent is lost"]

/** A command is not sent, because what an earlier one had changed is lost. */
export const changeLost = (address: string, command: string): RedisError =>
  final(fail(new NotConnected({ address, detail: changedBy + command + isLost })))

const advice = (detail: string): string => {
  if (detail.startsWith(changedBy)) return "begin again on the new one"
  if (detail.startsWith("no permission")) return "extend the ACL of its user"
  if (/^(WRONGPASS|NOAUTH)$/.test(detail)) return "check `username` and `password`"
  if (detail.endsWith(announced)) {
    return "check that it can be reached from here, or give the address that can be as `natMap`"
  }
  if (detail === withoutSlots) return "create the Cluster with `redis-cli --cluster create`"
  if (detail.startsWith(deniedBySentinels)) return "check `sentinelUsername` and `sentinelPassword`"
  if (detail === unknownToSentinels) return "check `name`"
  if (detail === noSentinel) return "list the Sentinels there, or use `url` or `host` for a server without them"
  if (detail === replica) return "connect to its primary, or through Sentinel"
  if (/^(LOADING|MASTERDOWN|BUSY|CLUSTERDOWN|TRYAGAIN)$/.test(detail)) return "try again later"
  if (/ERR_(OSSL|TLS_INVALID_PROTOCOL|SSL_NO_|INVALID_ARG_TYPE)/.test(detail)) return "correct `tls`"
  if (/CERT_(HAS_EXPIRED|NOT_YET_VALID)/.test(detail)) return "renew its certificate, and check the clocks"
  if (/ALERT_(CERTIFICATE_REQUIRED|HANDSHAKE|UNKNOWN_CA|BAD_CERT)/.test(detail)) {
    return "give a certificate that it accepts as `tls: { cert, key }`"
  }
  return /CERT|TLS|SSL|SIGN|ISSUER/.test(detail)
    ? "give the authority of its certificate as `tls: { ca }` and connect to a name that is in it"
    : `check that it is running there and can be reached from here${
      /ECONNRESET|EPIPE|closes the connection|timed out/.test(detail)
        ? ", and whether it wants `tls`, or a certificate as `tls: { cert, key }`"
        : ""
    }`
}

/**
 * No reply came before the deadline.
 *
 * @category errors
 * @since 0.1.0
 */
export class Timeout extends Schema.Error<Timeout>("lockstep/Redis/Timeout")({
  _tag: Schema.tag("Timeout"),
  command: Schema.String,
  ...subject
}) {
  override get message(): string {
    const next = this.command === "HELLO"
      ? "Check the address, and whether it speaks TLS if `tls` is set."
      : "It may have executed that all the same: retry what is idempotent, and look before you repeat anything else."
    return `Redis did not answer ${this.command}${
      about(this)
    } in time: it is overloaded or unreachable, or not Redis. ${next}`
  }
}

/**
 * Redis does not accept the user name or password.
 *
 * @category errors
 * @since 0.1.0
 */
export class AuthenticationFailed extends Schema.Error<AuthenticationFailed>("lockstep/Redis/AuthenticationFailed")({
  _tag: Schema.tag("AuthenticationFailed"),
  code: Schema.String
}) {
  override get message(): string {
    return this.code === "NOAUTH"
      ? `Redis wants a password and none was given: set \`password\`, and \`username\` for a user other than "default".`
      : `Redis does not accept these credentials (${this.code}): check \`username\` and \`password\`.`
  }
}

/**
 * The user may not run this command, or not on these keys or channels. When a script ran it, `script` is the command
 * that called the script; Redis 7.0 does not say which command inside was refused, so `command` is that of the call
 * too.
 *
 * @category errors
 * @since 0.1.0
 */
export class MissingPermission extends Schema.Error<MissingPermission>("lockstep/Redis/MissingPermission")({
  _tag: Schema.tag("MissingPermission"),
  command: Schema.String,
  script: Schema.optional(Schema.String),
  ...subject
}) {
  override get message(): string {
    const what = this.script === undefined
      ? this.command
      : this.script === this.command
      ? `a command inside ${this.script}`
      : `${this.command} inside ${this.script}`
    return `The Redis user has no permission for ${what}${
      about(this)
    }, or not on these keys or channels: extend its ACL.`
  }
}

/**
 * This is not a server that can be used.
 *
 * @category errors
 * @since 0.1.0
 */
export class UnsupportedServer extends Schema.Error<UnsupportedServer>("lockstep/Redis/UnsupportedServer")({
  _tag: Schema.tag("UnsupportedServer"),
  detail: Schema.String,
  ...subject
}) {
  override get message(): string {
    return `This server cannot be used${about(this, " for a request")}: ${this.detail}.`
  }
}

/**
 * The layer was pointed at a replica.
 *
 * @category errors
 * @since 0.1.0
 */
export class ReadOnlyReplica extends Schema.Error<ReadOnlyReplica>("lockstep/Redis/ReadOnlyReplica")({
  _tag: Schema.tag("ReadOnlyReplica"),
  address: Schema.String
}) {
  override get message(): string {
    return `The server at ${this.address} is a read-only replica: connect to its primary, or through Sentinel.`
  }
}

/**
 * Redis is over its `maxmemory`. Nothing was executed.
 *
 * @category errors
 * @since 0.1.0
 */
export class OutOfMemory extends Schema.Error<OutOfMemory>("lockstep/Redis/OutOfMemory")({
  _tag: Schema.tag("OutOfMemory"),
  command: Schema.String,
  ...subject
}) {
  override get message(): string {
    return `Redis refused ${this.command}${
      about(this)
    } because it is over its maxmemory: free memory or raise the limit.`
  }
}

/**
 * The request is larger than the server takes: it says so, or the connection is lost each time that the request is sent. A gateway
 * may be the reason, too. Nothing was executed.
 *
 * @category errors
 * @since 0.1.0
 */
export class RequestTooLarge extends Schema.Error<RequestTooLarge>("lockstep/Redis/RequestTooLarge")({
  _tag: Schema.tag("RequestTooLarge"),
  command: Schema.String,
  ...subject
}) {
  override get message(): string {
    return `${this.command}${about(this)} is larger than the server, or a gateway before it, takes: make it smaller, ` +
      `or raise \`proto-max-bulk-len\`.`
  }
}

/**
 * Redis refuses for the time being: it is loading, busy, failing over, moving slots or short of replicas or of
 * connections. Nothing was executed.
 *
 * @category errors
 * @since 0.1.0
 */
export class Unavailable extends Schema.Error<Unavailable>("lockstep/Redis/Unavailable")({
  _tag: Schema.tag("Unavailable"),
  code: Schema.String,
  ...subject
}) {
  override get message(): string {
    return this.code === "MAXCLIENTS"
      ? `Redis has no connection to spare${about(this, " for a request")}: raise its maxclients or open fewer.`
      : `Redis cannot serve ${about(this, "a request") || "this"} now (${this.code}): try again later.`
  }
}

/**
 * The server does not have the function or script (yet). Nothing was executed.
 *
 * @category errors
 * @since 0.1.0
 */
export class FunctionMissing extends Schema.Error<FunctionMissing>("lockstep/Redis/FunctionMissing")({
  _tag: Schema.tag("FunctionMissing"),
  code: Schema.String,
  ...subject
}) {
  override get message(): string {
    return `Redis does not have this function or script (${this.code})${about(this, " for a request")}: ` +
      `load it and repeat the call.`
  }
}

/**
 * Redis answered with another error.
 *
 * @category errors
 * @since 0.1.0
 */
export class CommandFailed extends Schema.Error<CommandFailed>("lockstep/Redis/CommandFailed")({
  _tag: Schema.tag("CommandFailed"),
  command: Schema.String,
  code: Schema.String,
  /** The beginning of the error text when it is one of a few that cannot quote an argument. */
  detail: Schema.UndefinedOr(Schema.String),
  ...subject
}) {
  override get message(): string {
    return `Redis answered ${this.command}${about(this)} with the error ${this.code}${because(this.detail)}.`
  }
}

/**
 * The private server of `layerEmbedded` could not be started.
 *
 * @category errors
 * @since 0.1.0
 */
export class EmbeddedFailed extends Schema.Error<EmbeddedFailed>("lockstep/Redis/EmbeddedFailed")({
  _tag: Schema.tag("EmbeddedFailed"),
  detail: Schema.String
}) {
  override get message(): string {
    return `The embedded Redis server could not be started: ${this.detail}.`
  }
}

/** The reasons for which a command can fail, for other modules to include in their own. */
export const commandReasons = [
  ConnectionLost,
  NotConnected,
  Timeout,
  MissingPermission,
  UnsupportedServer,
  OutOfMemory,
  RequestTooLarge,
  Unavailable,
  FunctionMissing,
  CommandFailed
] as const

/** Those of commands, and those for which a layer cannot connect. */
export const redisReasons = [...commandReasons, AuthenticationFailed, ReadOnlyReplica, EmbeddedFailed] as const

/**
 * Schema of all reasons that a `RedisError` can have.
 *
 * @category errors
 * @since 0.1.0
 */
export const RedisErrorReason: Schema.Union<typeof redisReasons> = Schema.Union(redisReasons)

/**
 * Why a `RedisError` happened.
 *
 * @category errors
 * @since 0.1.0
 */
export type RedisErrorReason = typeof RedisErrorReason.Type

const scripts = new Set(["EVAL", "EVALSHA", "EVALSHA_RO", "EVAL_RO", "FCALL", "FCALL_RO"])

/**
 * Whether the command can have been executed: after a lost connection, a deadline, or an error or a missing permission
 * in the middle of a script.
 */
export const isExecutedUnknown = (reason: RedisErrorReason): boolean => {
  switch (reason._tag) {
    case "ConnectionLost":
    case "Timeout":
      return true
    case "MissingPermission":
      return reason.script !== undefined
    case "CommandFailed":
      return scripts.has(reason.command.toUpperCase())
    default:
      return false
  }
}

/**
 * A command or a connection failed. It has the name of the command, an error code and the address of the server, never
 * arguments or credentials.
 *
 * @category errors
 * @since 0.1.0
 */
export class RedisError extends Schema.Error<RedisError>("lockstep/Redis/RedisError")({
  _tag: Schema.tag("RedisError"),
  reason: RedisErrorReason
}) {
  override get message(): string {
    return this.reason.message
  }

  /**
   * Whether the command can have been executed: `"unknown"` after a lost connection, a deadline, or an error or a
   * missing permission in the middle of a script.
   */
  get executed(): "no" | "unknown" {
    return isExecutedUnknown(this.reason) ? "unknown" : "no"
  }
}

// -----------------------------------------------------------------------------
// From ioredis
// -----------------------------------------------------------------------------

const unavailable = new Set([
  "ASK",
  "BUSY",
  "CLUSTERDOWN",
  "LOADING",
  "MASTERDOWN",
  "MISCONF",
  "MOVED",
  "NOREPLICAS",
  "READONLY",
  "TRYAGAIN",
  "UNBLOCKED"
])

// Texts of Redis that help and cannot quote an argument. Everything else is dropped: an error text may carry names,
// payloads and, for HELLO and AUTH, the password.
const harmless =
  /^(syntax error|no such key|unknown command|unknown subcommand|wrong number of arguments|value is not an integer or out of range|value is not a valid float|timeout is (negative|not an integer or out of range)|index out of range|Operation against a key holding the wrong kind of value|DB index is out of range|Consumer Group name already exists|No such key|Invalid stream ID|The ID specified in XADD|Bad file format|Library '[^']*' already exists|Library not found|Missing library meta)/i

const safeDetail = (message: string): string | undefined => harmless.exec(message)?.[0]

export const fail = (reason: RedisError["reason"]): RedisError => new RedisError({ reason })

// After these a command must not be sent again: it was answered, or is not the same on the next connection.
const finals = new WeakSet<RedisError>()

const final = (error: RedisError): RedisError => {
  finals.add(error)
  return error
}

/** Whether the command was never sent, and can be sent as soon as there is a connection. */
export const isUnsent = (error: unknown): boolean =>
  error instanceof RedisError && error.reason._tag === "NotConnected" && !finals.has(error)

export const notCluster = (): UnsupportedServer =>
  new UnsupportedServer({ detail: "it is not a Redis Cluster: use `url` or `host` instead of `cluster`" })

// The messages of Redis 7.0, of Redis 7.2 and later with Valkey, and of RM_Call of modules when a script runs a refused
// command.
const refusedInScript = /^(The user executing the script|ACL failure in script:|acl verification failed)/

// The name of the command is one of the server's own, and no user's name has spaces: this never quotes a text of theirs.
const refusedCommand = /: User \S+ has no permissions to run the '([\w.|-]+)' command/

const permissionError = (text: string, command: string): RedisError => {
  if (!refusedInScript.test(text)) return fail(new MissingPermission({ command }))
  const inner = refusedCommand.exec(text)?.[1]?.toUpperCase().replace("|", " ")
  return fail(new MissingPermission({ command: inner ?? command, script: command }))
}

// The commands that say who it is, or are the first on the connection.
const authenticating = new Set(["HELLO", "AUTH", "CLUSTER"])

const redirection = /^\d+ \S*:\d+$/

// The errors that a server answers to the call of a script that it does not run, or when a command in it would be the first to change
// anything: those of Redis and Valkey, and what servers that speak their protocol are likely to say under these codes.
const ofServer: ReadonlyMap<string, RegExp> = new Map([
  ["ASK", redirection],
  ["BUSY", /^\w+ is busy running /],
  ["CLUSTERDOWN", /cluster|slot/i],
  [
    "ERR",
    /^(Function not found|max number of clients (reached|\+)|Protocol error: |The user executing the script|ACL failure in script:|acl verification failed)/
  ],
  ["LOADING", /loading/i],
  ["MASTERDOWN", /master|primary/i],
  ["MISCONF", /configured|disk|RDB|AOF/i],
  ["MOVED", redirection],
  ["NOAUTH", /authenticat/i],
  ["NOPERM", /permission|ACL/i],
  ["NOREPLICAS", /replica|slave/i],
  ["NOSCRIPT", /script/i],
  ["OOM", /memory|oom/i],
  ["READONLY", /read.?only|replica|slave/i],
  ["TRYAGAIN", /slot|rehash/i]
])

/** Whether an error reply is one that a script has made, whatever its code says. */
const isOfScript = (command: string, code: string, text: string): boolean =>
  scripts.has(command.toUpperCase()) && ofServer.get(code)?.test(text) !== true

const replyError = (message: string, code: string, command: string, address: string): RedisError => {
  const text = message.slice(code.length + 1)
  switch (code) {
    case "NOAUTH":
    case "WRONGPASS":
      // To any other command this only says that the node of a Cluster for which it was meant lets no connection in.
      return fail(
        authenticating.has(command.toUpperCase())
          ? new AuthenticationFailed({ code })
          : new NotConnected({ address, detail: code })
      )
    case "NOPERM":
      return permissionError(text, command)
    case "NOPROTO":
      return fail(new UnsupportedServer({ detail: "it refuses the protocol" }))
    case "NOSCRIPT":
      return fail(new FunctionMissing({ code }))
    case "OOM":
      return fail(new OutOfMemory({ command }))
    case "ERR":
      if (/^Protocol error: (invalid|too big) /.test(text)) return fail(new RequestTooLarge({ command }))
      if (text.startsWith("Function not found")) return fail(new FunctionMissing({ code }))
      if (text.startsWith("max number of clients")) return fail(new Unavailable({ code: "MAXCLIENTS" }))
      if (text.startsWith("This instance has cluster support disabled")) return fail(notCluster())
      // As a Sentinel does.
      if (command === "CLUSTER" && text.startsWith("unknown command")) return fail(notCluster())
      if (refusedInScript.test(text)) return permissionError(text, command)
      if (/^(Client sent AUTH|AUTH <password> called)/.test(text)) return fail(new AuthenticationFailed({ code }))
  }
  return unavailable.has(code)
    ? fail(new Unavailable({ code }))
    : fail(new CommandFailed({ command, code, detail: safeDetail(text) }))
}

// ioredis names the command that was answered in the errors of its connections.
const askedOf = (error: Error): string | undefined =>
  (error as { readonly command?: { readonly name?: string } }).command?.name

const replyCode = (error: Error): string | undefined =>
  "code" in error ? undefined : /^[A-Z][A-Z0-9_]+(?=\s|$)/.exec(error.message)?.[0]

/**
 * Reads an error of ioredis or of the socket. `sent` is whether the command may have left: only then is an outcome that
 * is not a reply of Redis unknown.
 */
export const errorFrom = (error: unknown, command: string, sent: boolean, address: string): RedisError => {
  if (error instanceof RedisError) return error
  const failure = error instanceof Error ? error : new Error(String(error))
  const message = failure.message
  if (message.startsWith("Too many Cluster redirections")) {
    const last = /Last error: (?:\w+: )?([A-Z]+)/.exec(message)?.[1] ?? ""
    return fail(new Unavailable({ code: unavailable.has(last) ? last : "CLUSTERDOWN" }))
  }
  // A Cluster says why none of its nodes could be asked in a property of its own. That was no answer to this command.
  const { lastNodeError } = failure as { readonly lastNodeError?: unknown }
  if (lastNodeError instanceof Error) {
    const code = replyCode(lastNodeError)
    return code === undefined
      ? errorFrom(lastNodeError, command, sent, address)
      : replyError(lastNodeError.message, code, command, address)
  }
  const code = replyCode(failure)
  if (code !== undefined) {
    // A node of a Cluster that lets no connection in answers a step of the handshake instead.
    const asked = askedOf(failure) ?? command
    if (asked.toUpperCase() !== command.toUpperCase()) return replyError(message, code, command, address)
    const text = message.slice(code.length + 1)
    return isOfScript(command, code, text)
      ? fail(new CommandFailed({ command, code, detail: safeDetail(text) }))
      : final(replyError(message, code, command, address))
  }
  if (message.includes("Unknown RESP type")) {
    const detail = "it does not answer in the Redis protocol"
    // In the place of a later reply, as from a gateway, it says nothing about the command.
    return fail(
      sent && !authenticating.has(command.toUpperCase())
        ? new ConnectionLost({ address, detail })
        : new UnsupportedServer({ detail })
    )
  }
  const detail = systemCode(failure)
  return sent
    ? fail(new ConnectionLost({ address, detail }))
    : fail(new NotConnected({ address, detail }))
}

/** What ioredis says of Sentinels that it has asked in vain, and of the last one. */
export const unreachable = /^All sentinels are unreachable.*?(?:Last error: (.*))?$/

const bySentinels = (last: string | undefined): string => {
  if (last === undefined) return "no Sentinel answers"
  const code = /^[A-Z]+(?= )/.exec(last)?.[0]
  if (code === undefined) return `no Sentinel answers: ${last}`
  if (code === "WRONGPASS" || code === "NOAUTH" || code === "NOPERM") return deniedBySentinels + code
  if (last.startsWith("ERR No such master")) return unknownToSentinels
  return last.startsWith("ERR unknown command") ? noSentinel : `no Sentinel answers: ${code}`
}

const systemCode = (error: Error & { readonly code?: unknown }): string | undefined => {
  if (typeof error.code === "string") return error.code
  const sentinels = unreachable.exec(error.message)
  if (sentinels !== null) {
    const why = error.cause instanceof Error ? systemCode(error.cause) : undefined
    return bySentinels(why ?? sentinels[1])
  }
  const inner = error instanceof AggregateError ? error.errors[0] : undefined
  return inner instanceof Error ? systemCode(inner) : undefined
}

/** The code at the beginning of an error reply, if it says something about the server. */
export const codeOf = (error: unknown): string => {
  if (!(error instanceof Error)) return ""
  const code = /^\w+/.exec(error.message)?.[0] ?? ""
  return isOfScript(askedOf(error) ?? "", code, error.message.slice(code.length + 1)) ? "" : code
}

/** For the log: what happened, without advice. */
export const summary = (error: RedisError): string => {
  const detail = detailOf(error) ?? ("code" in error.reason ? error.reason.code : undefined)
  return detail === undefined ? error.reason._tag : `${error.reason._tag}: ${detail}`
}

export const detailOf = (error: RedisError | undefined): string | undefined => {
  if (error === undefined) return undefined
  const reason = error.reason
  if (reason._tag === "MissingPermission") return `no permission for ${reason.command}`
  if (reason._tag === "AuthenticationFailed" || reason._tag === "Unavailable") return reason.code
  if (reason._tag === "ReadOnlyReplica") return replica
  return "detail" in reason ? reason.detail : undefined
}
