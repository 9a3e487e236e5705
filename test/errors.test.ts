/** How replies of Redis become reasons. The texts are those of the servers' sources. */

import { assert, describe, it } from "@effect/vitest"
import * as fs from "node:fs"
import * as lockstep from "../src/index.ts"
import { coordinatorReasons } from "../src/internal/actor/errors.ts"
import { errorFrom, isExecutedUnknown, redisReasons } from "../src/internal/redis/errors.ts"
import { RedisError, RedisErrorReason } from "../src/Redis.ts"

const secret = "s3cret-passw0rd"

const reasonOf = (text: string, command: string) => {
  const error = errorFrom(new Error(text), command, true, "localhost:6379")
  assert.notInclude(error.message, secret)
  assert.notInclude(JSON.stringify(error), secret)
  return error.reason
}

describe("errors", () => {
  describe("a TLS handshake that fails says what to do", () => {
    const [authority, renew, client, options] = ["`tls: { ca }`", "renew", "`tls: { cert, key }`", "correct `tls`"]
    const codes = [
      ["SELF_SIGNED_CERT_IN_CHAIN", authority],
      ["UNABLE_TO_VERIFY_LEAF_SIGNATURE", authority],
      ["UNABLE_TO_GET_ISSUER_CERT_LOCALLY", authority],
      ["ERR_TLS_CERT_ALTNAME_INVALID", authority],
      ["CERT_HAS_EXPIRED", renew],
      ["CERT_NOT_YET_VALID", renew],
      ["ERR_SSL_TLSV13_ALERT_CERTIFICATE_REQUIRED", client],
      ["ERR_SSL_SSLV3_ALERT_HANDSHAKE_FAILURE", client],
      ["ECONNRESET", client],
      ["ERR_OSSL_PEM_NO_START_LINE", options],
      ["ERR_SSL_NO_CIPHER_MATCH", options],
      ["ERR_INVALID_ARG_TYPE", options]
    ] as const
    for (const [code, advice] of codes) {
      it(code, () => {
        const failure = Object.assign(new Error("of Node"), { code })
        const { message } = errorFrom(failure, "HELLO", false, "localhost:6379")
        assert.include(message, code)
        const others = [authority, renew, client, options].filter((other) => other !== advice)
        assert.include(message, advice)
        for (const other of others) assert.notInclude(message, other)
        // ioredis says only that the connection to the last Sentinel was closed.
        const unreachable = new Error(
          "All sentinels are unreachable and retry is disabled. Last error: Connection is closed.",
          { cause: failure }
        )
        const ofSentinels = errorFrom(unreachable, "HELLO", false, "p of localhost:26379").message
        assert.include(ofSentinels, `no Sentinel answers: ${code}`)
        assert.include(ofSentinels, advice)
      })
    }
  })

  describe("a permission that is missing", () => {
    // [server, reply, command sent, command that the error names]
    const replies: ReadonlyArray<readonly [string, string, string, string]> = [
      ["Redis 7.0", "NOPERM this user has no permissions to run the 'get' command", "GET", "GET"],
      ["Redis 7.0", "NOPERM this user has no permissions to access one of the keys used as arguments", "GET", "GET"],
      [
        "Redis 7.0, in a script",
        "ERR The user executing the script can't run this command or subcommand script: lockstep, on @user_function:9.",
        "FCALL",
        "FCALL"
      ],
      [
        "Redis 7.0, in a script",
        "ERR The user executing the script can't access at least one of the keys mentioned in the command arguments " +
        "script: 2fd8, on @user_script:1.",
        "EVALSHA",
        "EVALSHA"
      ],
      ["Redis 7.2 and Valkey 7.2", `NOPERM User ${secret} has no permissions to run the 'get' command`, "GET", "GET"],
      ["Redis 7.2 and Valkey 7.2", "NOPERM No permissions to access a key", "GET", "GET"],
      ["Redis 7.2 and Valkey 7.2", "NOPERM No permissions to access a channel", "PUBLISH", "PUBLISH"],
      [
        "Redis 7.2, 7.4, 8.0, Valkey 7.2 and 8.0, in a script",
        `ERR ACL failure in script: User ${secret} has no permissions to run the 'hmget' command script: lockstep, ` +
        "on @user_function:9.",
        "FCALL",
        "HMGET"
      ],
      [
        "Redis 7.2, 7.4, 8.0, Valkey 7.2 and 8.0, in a script",
        `ERR ACL failure in script: User ${secret} has no permissions to run the 'script|load' command script: 2fd8, ` +
        "on @user_script:1.",
        "EVALSHA",
        "SCRIPT LOAD"
      ],
      [
        "without the script's name",
        `ERR ACL failure in script: User ${secret} has no permissions to run the 'get' command`,
        "EVAL",
        "GET"
      ],
      [
        "Redis 7.2 and later, in a script",
        "ERR ACL failure in script: No permissions to access a key script: 2fd8, on @user_script:1.",
        "EVAL",
        "EVAL"
      ],
      [
        "Redis 7.2 and later, in a script",
        "ERR ACL failure in script: No permissions to access a channel script: 2fd8, on @user_script:1.",
        "EVAL",
        "EVAL"
      ],
      [
        "Valkey 9, in a script",
        "ERR ACL failure in script: No permissions to access database script: 2fd8, on @user_script:1.",
        "EVAL",
        "EVAL"
      ],
      [
        "another server",
        `NOPERM ACL failure in script: User ${secret} has no permissions to run the 'get' command`,
        "EVAL",
        "GET"
      ],
      ["a module", `ERR acl verification failed, can't run this command or subcommand.`, "EVAL", "EVAL"]
    ]
    for (const [server, text, command, named] of replies) {
      it(`${server}: ${text.replace(secret, "USER").slice(0, 90)}`, () => {
        const reason = reasonOf(text, command)
        assert.strictEqual(reason._tag, "MissingPermission")
        assert.strictEqual(reason._tag === "MissingPermission" && reason.command, named)
      })
    }

    it("is not what a script merely says", () => {
      for (
        const text of [
          `ERR ${secret} has no permissions to run the 'get' command`,
          `ERR User ${secret} is unhappy script: 2fd8, on @user_script:1.`,
          `FAILURE ACL failure in script: ${secret}`
        ]
      ) assert.strictEqual(reasonOf(text, "EVAL")._tag, "CommandFailed", text)
    })
  })

  describe("the reply to a script call", () => {
    // [servers, reply, reason]
    const replies: ReadonlyArray<readonly [string, string, string]> = [
      ["Redis 7 and Valkey 7.2", "NOSCRIPT No matching script. Please use EVAL.", "FunctionMissing"],
      ["Valkey 9", "NOSCRIPT No matching script.", "FunctionMissing"],
      ["all", "ERR Function not found", "FunctionMissing"],
      ["all", "ERR max number of clients reached", "Unavailable"],
      ["all", "ERR max number of clients + cluster connections reached", "Unavailable"],
      ["Redis", "LOADING Redis is loading the dataset in memory", "Unavailable"],
      ["Valkey", "LOADING Valkey is loading the dataset in memory", "Unavailable"],
      [
        "Redis",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "Unavailable"
      ],
      [
        "Valkey",
        "BUSY Valkey is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.",
        "Unavailable"
      ],
      ["all", "BUSY Redis is busy running a module command.", "Unavailable"],
      [
        "all",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "Unavailable"
      ],
      [
        "all, by flags",
        "MASTERDOWN Link with MASTER is down, replica-serve-stale-data is set to 'no' and 'allow-stale' flag is not set on " +
        "the script.",
        "Unavailable"
      ],
      ["all", "READONLY You can't write against a read only replica.", "Unavailable"],
      [
        "all, in the script",
        "READONLY You can't write against a read only replica. script: 2fd8, on @user_script:1.",
        "Unavailable"
      ],
      ["all, by flags", "READONLY Can not run script with write flag on readonly replica", "Unavailable"],
      [
        "all",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk. Commands that may " +
        "modify the data set are disabled",
        "Unavailable"
      ],
      [
        "all, by flags",
        "MISCONF Valkey is configured to persist data to AOF, but it's currently unable to persist to disk. Writable scripts " +
        "are blocked. Use 'no-writes' flag for read only scripts. AOF error: No space left on device",
        "Unavailable"
      ],
      ["all", "MISCONF Errors writing to the AOF file: No space left on device", "Unavailable"],
      ["all", "NOREPLICAS Not enough good replicas to write.", "Unavailable"],
      ["all", "CLUSTERDOWN The cluster is down", "Unavailable"],
      ["all", "CLUSTERDOWN Hash slot not served", "Unavailable"],
      ["all", "TRYAGAIN Multiple keys request during rehashing of slot", "Unavailable"],
      ["all", "MOVED 3999 127.0.0.1:6381", "Unavailable"],
      ["all", "ASK 3999 [::1]:6381", "Unavailable"],
      ["all", "ASK 3999 :6381", "Unavailable"],
      ["all", "NOAUTH Authentication required.", "NotConnected"],
      ["all", "OOM command not allowed when used memory > 'maxmemory'.", "OutOfMemory"],
      [
        "all, in the script",
        "OOM command not allowed when used memory > 'maxmemory'. script: 2fd8, on @user_script:1.",
        "OutOfMemory"
      ],
      [
        "all, by flags",
        "OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'",
        "OutOfMemory"
      ],
      ["all", "ERR Protocol error: invalid bulk length", "RequestTooLarge"],
      ["Redis 7.0", "NOPERM this user has no permissions to run the 'fcall' command", "MissingPermission"],
      ["Redis 7.2", "NOPERM User app has no permissions to run the 'fcall' command", "MissingPermission"],
      ["Redis 7.2", "NOPERM No permissions to access a key", "MissingPermission"]
    ]
    for (const [servers, text, tag] of replies) {
      it(`${servers}: ${text.slice(0, 90)}`, () => {
        for (const command of ["FCALL", "evalsha", "EVAL_RO"]) {
          const reason = reasonOf(text, command)
          assert.strictEqual(reason._tag, tag)
          assert.isFalse(isExecutedUnknown(reason))
        }
      })
    }

    it("can be the script's own, which has run then", () => {
      for (const code of new Set(replies.map(([, text]) => text.split(" ")[0]!)).add("WRONGPASS").add("NOPROTO")) {
        const text = `${code} ${secret}`
        for (const command of ["EVAL", "fcall", "FCALL_RO"]) {
          const reason = reasonOf(text, command)
          assert.deepInclude(reason, { _tag: "CommandFailed", code })
          assert.isTrue(isExecutedUnknown(reason), text)
        }
      }
      assert.isTrue(isExecutedUnknown(reasonOf("ERR max number of clients", "EVAL")))
      // To another command it can only be one of the server.
      assert.strictEqual(reasonOf(`BUSY ${secret}`, "GET")._tag, "Unavailable")
    })
  })

  it("a password where none is wanted is refused as credentials", () => {
    const texts = [
      "ERR Client sent AUTH, but no password is set",
      "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?"
    ]
    for (const text of texts) assert.strictEqual(reasonOf(text, "AUTH")._tag, "AuthenticationFailed", text)
  })

  it("every reason is in the tuple, and says whether the command can have been executed", () => {
    assert.deepStrictEqual(RedisErrorReason.members, redisReasons)
    const unknown = (text: string, command: string) => {
      const reason = reasonOf(text, command)
      const error = new RedisError({ reason })
      assert.strictEqual(error.executed === "unknown", isExecutedUnknown(reason))
      return isExecutedUnknown(reason)
    }
    assert.isTrue(unknown("WRONGTYPE Operation against a key holding the wrong kind of value", "FCALL"))
    assert.isTrue(unknown("read ECONNRESET", "GET"))
    assert.isFalse(unknown("WRONGTYPE Operation against a key holding the wrong kind of value", "GET"))
    assert.isFalse(unknown("NOPERM No permissions to access a key", "GET"))
  })

  describe("the reasons of the errors of modules", () => {
    const errors = Object.values(lockstep).flatMap((module) => Object.entries(module)).flatMap(([name, error]) => {
      if (!name.endsWith("Error")) return []
      const reasons: ReadonlyArray<{ readonly name: string }> = error.fields.reason.members
      return [[name, reasons.map(({ name }) => name)] as const]
    })
    const shared = coordinatorReasons.map(({ name }) => name)

    it("are those that the docs list, and those of the coordinator", () => {
      const [, rows] = fs.readFileSync("docs/errors.md", "utf8").split("## Which error has which reasons")
      const listed = new Map(
        rows!.split("\n## ")[0]!.split("\n").flatMap((row) => {
          const [error, ...reasons] = [...row.matchAll(/`(\w+)`/g)].map(([, name]) => name!)
          return row.startsWith("| `") ? [[error!, reasons] as const] : []
        })
      )
      for (const [name, reasons] of errors) {
        if (name === "RedisError") continue
        assert.sameMembers(reasons, [...new Set([...listed.get(name)!, ...shared])], name)
      }
      assert.sameMembers([...listed.keys()], errors.map(([name]) => name))
    })

    it("are none of those that only connecting has", () => {
      assert.isAtLeast(errors.length, 20)
      for (const [name, reasons] of errors) {
        if (name === "RedisError") continue
        for (const reason of ["AuthenticationFailed", "ReadOnlyReplica", "EmbeddedFailed"]) {
          assert.notInclude(reasons, reason, name)
        }
      }
    })
  })
})
