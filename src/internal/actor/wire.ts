/** How a session and its batches are written as calls. */

import { ascii, bulk, type Call, encode } from "../redis/resp.ts"
import { keysOf, kindOf } from "./keys.ts"
import { kinds, roles } from "./lua.ts"

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
  keys: [
    `${prefix}sessions`,
    `${prefix}due`,
    `${prefix}floor`,
    `${prefix}own:${session}`,
    `${prefix}mail:${session}`
  ].map(bulk).join(""),
  id: ascii(id)
})

export interface Message {
  readonly verb: string
  /** The hash of the resource that it is about, if it is about one. */
  readonly key?: string | undefined
  /** Those of the other resources, if it is about several of one kind. */
  readonly others?: ReadonlyArray<string> | undefined
  readonly args: ReadonlyArray<string | number | boolean>
}

// An object answers slowly for names that it does not have, as most verbs are.
const needs = new Map(Object.entries(roles))

/** A batch of requests; the header is its number, the lease and the id of the last event read, as arguments. */
export const batch = (address: Address, header: string, requests: ReadonlyArray<Message>): Call => {
  let { keys } = address
  let args = address.id + header
  let keyCount = 5
  let count = 1 + 5 + 4
  // Of the request before, where it named all keys of one resource.
  let before: string | undefined = undefined
  for (const { args: own, key, others, verb } of requests) {
    let same = false
    if (key !== undefined) {
      const needed = needs.get(verb)
      same = needed === null && key === before && others === undefined
      if (same) {
        // Many requests of one call are about one resource.
      } else if (needed === undefined) {
        keys += bulk(key)
        keyCount++
        count++
      } else {
        for (const hash of others === undefined ? [key] : [key, ...others]) {
          const all = keysOf(hash, needed ?? (kinds as { readonly [kind: string]: ReadonlyArray<string> })[kindOf(key)])
          for (const one of all) keys += bulk(one)
          keyCount += all.length
          count += all.length
        }
      }
      before = needed === null && others === undefined ? key : undefined
    } else {
      before = undefined
    }
    args += ascii(same ? `=${verb}` : verb)
    for (const arg of own) args += encode(arg)
    count += 1 + own.length
  }
  return { key: address.key, count, text: ascii(String(keyCount)) + keys + args }
}
