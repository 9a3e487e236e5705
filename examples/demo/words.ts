/** The work itself: which files there are, and how often each word occurs in one. */
import { Effect, FileSystem, Path } from "effect"

export type Counts = Map<string, number>

const text = /\.(c|cpp|css|csv|go|h|html|java|js|json|lua|md|py|rs|rst|scala|sh|sql|ts|tsx|txt|xml|ya?ml)$/
const skipped = /(^|[\\/])(node_modules|\.[^\\/]+)[\\/]/

export const list = Effect.fnUntraced(function*(folder: string) {
  const fs = yield* FileSystem.FileSystem
  const names = yield* fs.readDirectory(folder, { recursive: true })
  return names.filter((name) => text.test(name) && !skipped.test(name)).sort()
})

export const count = Effect.fnUntraced(function*(folder: string, file: string) {
  const fs = yield* FileSystem.FileSystem
  const path = yield* Path.Path
  const content = yield* fs.readFileString(path.join(folder, file))
  const counts: Counts = new Map()
  for (const [word] of content.toLowerCase().matchAll(/[\p{L}\p{N}_]+/gu)) counts.set(word, (counts.get(word) ?? 0) + 1)
  return counts
})

/**
 * Always the same parts for the same file, so that a successor can go on where the predecessor has stopped: two at least,
 * as something has to happen between them, and none of more words than one command should carry.
 */
export const partsOf = (counts: Counts): ReadonlyArray<ReadonlyArray<readonly [word: string, times: number]>> => {
  const entries = [...counts].sort(([a], [b]) => a < b ? -1 : 1)
  const size = Math.min(400, Math.max(1, Math.ceil(entries.length / 2)))
  const parts = [entries.slice(0, size)]
  for (let at = size; at < entries.length; at += size) parts.push(entries.slice(at, at + size))
  return parts
}

/**
 * The most frequent words; digits and single letters say little about a text. Of two that are equally frequent the
 * alphabet decides, so that there is one right answer.
 */
export const top = (counts: Iterable<readonly [word: string, times: number]>) =>
  [...counts].filter(([word]) => /^\p{L}{2,}$/u.test(word))
    .sort(([a, m], [b, n]) => n - m || (a < b ? -1 : 1))
    .slice(0, 5)

/** Which one of so many shares a word belongs to. */
export const shareOf = (word: string, shares: number) =>
  [...word].reduce((hash, letter) => (hash * 31 + letter.codePointAt(0)!) >>> 0, 0) % shares

/** How the counts differ, for people: empty when they are the same. */
export const differences = (expected: Counts, actual: Counts): ReadonlyArray<string> =>
  [...new Set([...expected.keys(), ...actual.keys()])].flatMap((word) => {
    const [right, found] = [expected.get(word) ?? 0, actual.get(word) ?? 0]
    return right === found ? [] : [`"${word}" occurs ${right} times, and ${found} were counted`]
  })
