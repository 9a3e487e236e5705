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
