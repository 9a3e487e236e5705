/** How a session and its batches are written as calls. */

import { ascii, bulk, type Call, encode } from "../redis/resp.ts"
import { keysOf, kindOf } from "./keys.ts"
import { kinds, roles } from "./lua.ts"

/** A session as calls name it. */
export interface Address {
  readonly key: string
  /** As arguments: the key of all sessions, the keys that are declared only for a cluster, and the session's id. */
  readonly sessions: string
  readonly declared: string
  readonly declaredCount: number
  readonly id: string
}

/**
 * Requests that need no session have an empty id. While a slot of a cluster migrates, a key can look absent that no call names, and a
 * key that a request has deleted is out of reach of the next one in the call. So all calls declare `absent` there, which never exists:
 * Redis refuses a call with a key that it lacks as a whole then, and the call is made again.
 */
export const addressOf = (prefix: string, cluster: boolean, id: string): Address => {
  const key = `${prefix}sessions`
  const declared = cluster ? [`${prefix}absent`] : []
  return {
    key,
    sessions: bulk(key),
    declared: declared.map(bulk).join(""),
    declaredCount: declared.length,
    id: ascii(id)
  }
}

export interface Message {
  readonly verb: string
  /** The hash of the resource that it is about, if it is about one. */
  readonly key?: string | undefined
  /** Those of the other resources, if it is about several of one kind. */
  readonly others?: ReadonlyArray<string> | undefined
  readonly args: ReadonlyArray<string | number | boolean>
}

/** The part that is the same in all requests of a verb. */
interface Spelling {
  /** The roles of the keys that it declares: `null` stands for all of the kind, `undefined` for the hash. */
  readonly needed: ReadonlyArray<string> | null | undefined
  readonly text: string
  /** Behind a request about the same resource, whose keys are not named again. */
  readonly same: string
}

const spellings = new Map<string, Spelling>()

const spell = (verb: string): Spelling => {
  const needed = (roles as { readonly [verb: string]: ReadonlyArray<string> | null })[verb]
  const spelling = { needed, text: ascii(verb), same: ascii(`=${verb}`) }
  spellings.set(verb, spelling)
  return spelling
}

/** The keys of a resource, as arguments. */
interface Named {
  readonly text: string
  readonly count: number
}

const named = (hash: string, roles: ReadonlyArray<string> | undefined): Named => {
  const all = keysOf(hash, roles)
  return { text: all.map(bulk).join(""), count: all.length }
}

// Resources with many keys are few, and are named in every call about them. So many of the last ones are known.
const [manyRoles, mostKnown] = [8, 1024]
const known = new Map<string, Named>()

/** All keys of the resource of a hash. */
const allOf = (hash: string): Named => {
  const found = known.get(hash)
  if (found !== undefined) return found
  const roles = (kinds as { readonly [kind: string]: ReadonlyArray<string> })[kindOf(hash)]
  const all = named(hash, roles)
  if (roles === undefined || roles.length < manyRoles) return all
  if (known.size === mostKnown) known.delete(known.keys().next().value!)
  known.set(hash, all)
  return all
}

/** A batch of requests; the header is its number, and the id of the last event read if that is news, as an argument. */
export const batch = (address: Address, header: string, requests: ReadonlyArray<Message>): Call => {
  let keys = address.sessions
  let args = address.id + header
  let keyCount = 1 + address.declaredCount
  let count = 1 + keyCount + 2
  // Of the request before, where it named all keys of one resource.
  let before: string | undefined = undefined
  for (const { args: own, key, others, verb } of requests) {
    const { needed, text, same: sameText } = spellings.get(verb) ?? spell(verb)
    let same = false
    if (key !== undefined) {
      same = needed === null && key === before && others === undefined
      if (same) {
        // Many requests of one call are about one resource.
      } else if (needed === undefined) {
        keys += bulk(key)
        keyCount++
        count++
      } else {
        for (const hash of others === undefined ? [key] : [key, ...others]) {
          const all = needed === null ? allOf(hash) : named(hash, needed)
          keys += all.text
          keyCount += all.count
          count += all.count
        }
      }
      before = needed === null && others === undefined ? key : undefined
    } else {
      before = undefined
    }
    args += same ? sameText : text
    for (const arg of own) args += encode(arg)
    count += 1 + own.length
  }
  return { key: address.key, count, text: ascii(String(keyCount)) + keys + address.declared + args }
}
