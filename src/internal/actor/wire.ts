/** How a session and its batches are written as calls. */
import { ascii, bulk, type Call, encode } from "../redis/resp.ts"
import { itemsOf } from "./keys.ts"
import { carriers } from "./lua.ts"

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
