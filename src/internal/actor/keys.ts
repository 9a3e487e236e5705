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

/** What a resource carries beside its hash: a stream, or another hash. */
export const itemsOf = (key: string): string => {
  const kind = key.indexOf(":", key.indexOf("}"))
  const name = key.indexOf(":", kind + 1)
  return `${key.slice(0, name)}-items${key.slice(name)}`
}

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
