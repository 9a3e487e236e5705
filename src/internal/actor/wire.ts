/**
 * Calls of scripts as RESP text. What is the same in every call of a session is encoded once, and nothing is kept twice
 * while a call is under way: encoding is most of what a request costs in the client.
 */

import { itemsOf } from "./keys.ts"
import { carriers } from "./lua.ts"

const heads = Array.from({ length: 512 }, (_, length) => `$${length}\r\n`)

const head = (length: number): string => heads[length] ?? `$${length}\r\n`

/** One argument of any text. */
const bulk = (text: string): string => `${head(Buffer.byteLength(text))}${text}\r\n`

/** One argument of ASCII text. */
export const ascii = (text: string): string => `${head(text.length)}${text}\r\n`

const yes = ascii("1")
const empty = ascii("")

/** One argument of any kind. */
const encode = (arg: string | number | boolean): string =>
  typeof arg === "string" ? bulk(arg) : typeof arg === "number" ? ascii(String(arg)) : arg ? yes : empty

/** The call of a script, without the command's and the script's names. */
export interface Call {
  /** The first key: a cluster finds its way by it. */
  readonly key: string
  /** How many arguments there are, the number of keys included. */
  readonly count: number
  readonly text: string
}

/** What is sent for it. `script` is the name of the function, the digest, or the source. */
export const message = (command: string, script: string, { count, text }: Call): string =>
  `*${count + 2}\r\n${ascii(command)}${bulk(script)}${text}`

export const call = (keys: ReadonlyArray<string>, args: ReadonlyArray<string | number>): Call => ({
  key: keys[0]!,
  count: 1 + keys.length + args.length,
  text: [keys.length, ...keys, ...args].map(encode).join("")
})

/** A session as calls name it. */
export interface Address {
  readonly key: string
  /** The keys that the kernel needs, and the session's id, as arguments. */
  readonly keys: string
  readonly id: string
}

/** Requests that need no session have an empty id; the keys of one have to be declared all the same. */
export const addressOf = (prefix: string, session: string, id = session): Address => ({
  key: `${prefix}sessions`,
  keys: [`${prefix}sessions`, `${prefix}due`, `${prefix}own:${session}`, `${prefix}mail:${session}`].map(bulk).join(""),
  id: ascii(id)
})

/** A batch of requests; the header is its number, the lease and the mailbox id read so far, as arguments. */
export const batch = (
  address: Address,
  header: string,
  requests: ReadonlyArray<{
    readonly verb: string
    readonly key?: string | undefined
    readonly args: ReadonlyArray<string | number | boolean>
  }>
): Call => {
  let { keys } = address
  let args = address.id + header
  let keyCount = 4
  let count = 1 + 4 + 4
  for (const { args: own, key, verb } of requests) {
    if (key !== undefined) {
      keys += bulk(key)
      keyCount++
      count++
      if (carriers.has(verb)) {
        keys += bulk(itemsOf(key))
        keyCount++
        count++
      }
    }
    args += ascii(verb)
    for (const arg of own) args += encode(arg)
    count += 1 + own.length
  }
  return { key: address.key, count, text: ascii(String(keyCount)) + keys + args }
}
