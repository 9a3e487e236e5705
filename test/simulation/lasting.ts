/** What Redis has of a fleet long after its last process has ended. */

// What users store has a time of its own to live, or none.
const stored: ReadonlySet<string> = new Set(["topic", "sharedRef", "counter", "queue", "errands", "flow"])

const partsOf = (key: string): readonly [prefix: string, kind: string] => {
  const [, prefix = "", kind = ""] = /^(\{[^}]*\}:)([a-zA-Z]+)/.exec(key) ?? []
  return [prefix, kind]
}

const isStored = (key: string): boolean => stored.has(partsOf(key)[1])

/** In milliseconds: all keys expire a day after the last session that needs them, and some are kept for a few days. */
export const longAfter = 8 * 86_400_000

/** The keys that must have expired by then. Only `floor` and `libraries` stay for ever, and `due` as long as the alarms of what is stored. */
export const lasting = (keys: ReadonlyArray<string>): ReadonlyArray<string> => {
  const alarmed = new Set(keys.filter(isStored).map((key) => partsOf(key)[0]))
  return keys.filter((key) => {
    const [prefix, kind] = partsOf(key)
    return !isStored(key) && kind !== "floor" && kind !== "libraries" && !(kind === "due" && alarmed.has(prefix))
  }).sort()
}
