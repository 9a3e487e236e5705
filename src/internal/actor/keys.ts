/**
 * The one place that spells keys: `{namespace:NN}:` + kind + `:` + name, the name last and raw, so that no name can
 * imitate another key.
 */

const polynomial = 0x1021

const table = Uint16Array.from({ length: 256 }, (_, byte) => {
  let crc = byte << 8
  for (let bit = 0; bit < 8; bit++) crc = (crc & 0x8000) === 0 ? crc << 1 : (crc << 1) ^ polynomial
  return crc
})

const encoder = new TextEncoder()
const scratch = new Uint8Array(3 * 512)

const maxNameBytes = 512

/** The partition of a name: CRC16 (XMODEM, as Redis Cluster's) of its UTF-8 bytes, modulo the number of partitions. */
export const partitionOf = (name: string, partitions: number): number => {
  const { written } = encoder.encodeInto(name, scratch)
  let crc = 0
  for (let at = 0; at < written; at++) crc = ((crc << 8) ^ table[((crc >>> 8) ^ scratch[at]!) & 0xff]!) & 0xffff
  return crc % partitions
}

export const prefixOf = (namespace: string, partition: number): string =>
  `{${namespace}:${partition < 10 ? "0" : ""}${partition}}:`

/** The key of another role than the hash: `{namespace:NN}:kind-role:name`. */
export const keyOf = (hash: string, role: string): string => {
  const kind = hash.indexOf(":", hash.indexOf("}"))
  const name = hash.indexOf(":", kind + 1)
  return `${hash.slice(0, name)}-${role}${hash.slice(name)}`
}

/** The keys of a resource of any kind, its hash first; of a kind that is not known here, only its hash. */
export const keysOf = (hash: string, roles: ReadonlyArray<string> | undefined): ReadonlyArray<string> =>
  roles === undefined ? [hash] : roles.map((role, at) => at === 0 ? hash : keyOf(hash, role))

export const kindOf = (hash: string): string => {
  const kind = hash.indexOf(":", hash.indexOf("}"))
  return hash.slice(kind + 1, hash.indexOf(":", kind + 1))
}

/** The names of batches, as their runs and errands have them, begin with it: a batch is a flow. */
export const batches = "batch:"

/** The resource of a key of any role, as its user knows it: of a run, the flow or the batch. */
export const resourceOf = (key: string) => {
  const end = key.indexOf("}")
  const role = kindOf(key)
  const kind = role.replace(/-.*/, "")
  const name = key.slice(end + role.length + 3)
  const namespace = key.slice(1, key.lastIndexOf(":", end))
  if (kind !== "flow") return { kind, name, namespace }
  const flow = name.replace(/\/.*/s, "")
  return flow.startsWith(batches)
    ? { kind: "batch", name: flow.slice(batches.length), namespace }
    : { kind, name: flow, namespace }
}

/** The subject of an error or a log line. */
export const describe = (kind: string, name: string, namespace: string): string =>
  `${kind} ${JSON.stringify(name)} of namespace ${JSON.stringify(namespace)}`

/** A request in a log line: some are about no resource. */
export const describeRequest = (
  { key, verb }: { readonly key?: string | undefined; readonly verb: string }
): string => {
  if (key === undefined) return verb
  const { kind, name, namespace } = resourceOf(key)
  return `${verb} about ${describe(kind, name, namespace)}`
}

/** A key of the user's own as the key of a resource, for errors. */
export const guardedKey = (namespace: string, key: string): string => `${prefixOf(namespace, 0)}key:${key}`

/** Checks a name that a user gave, as a defect. */
export const checkName = (name: string, what: string): string => {
  if (typeof name !== "string" || name.length === 0) {
    throw new RangeError(`${what} must be a non-empty string`)
  }
  // A lone surrogate would become U+FFFD on the way to Redis, and two names one key.
  if (!name.isWellFormed()) throw new RangeError(`${what} must be well-formed Unicode`)
  // A UTF-16 unit is at most three bytes of UTF-8.
  if (name.length * 3 > maxNameBytes && Buffer.byteLength(name) > maxNameBytes) {
    throw new RangeError(`${what} must not be longer than ${maxNameBytes} bytes of UTF-8`)
  }
  return name
}

export const checkNamespace = (namespace: string): string => {
  if (typeof namespace !== "string" || !/^[\w.:-]{1,64}$/.test(namespace)) {
    throw new RangeError("namespace must be 1 to 64 characters of A-Z a-z 0-9 _ . : -")
  }
  return namespace
}
