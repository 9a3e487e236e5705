/**
 * Claims by their ids. A `Map` in which one claim comes as another one goes makes a new table for every few of them, and each
 * table keeps the next one alive until the next major collection, with all that is in it.
 */

interface Named {
  readonly id: string
}

const least = 16

// So many slots stay: as many claims may come again in the next turn.
const kept = 1024

/** Open addressing with linear probing. */
export class Table<A extends Named> {
  #slots: Array<A | undefined> = new Array(least).fill(undefined)
  #size = 0

  get size(): number {
    return this.#size
  }

  get(id: string): A | undefined {
    const slots = this.#slots
    const mask = slots.length - 1
    for (let at = hash(id) & mask;; at = (at + 1) & mask) {
      const found = slots[at]
      if (found === undefined || found.id === id) return found
    }
  }

  /** Its id must not change while it is in here. */
  add(item: A): void {
    if (2 * this.#size >= this.#slots.length) this.#resize(2 * this.#slots.length)
    if (put(this.#slots, item)) this.#size++
  }

  /** Does nothing if another one has this id. */
  delete(item: A): void {
    const slots = this.#slots
    const mask = slots.length - 1
    let at = hash(item.id) & mask
    while (slots[at] !== item) {
      if (slots[at] === undefined) return
      at = (at + 1) & mask
    }
    this.#size--
    // Those behind it move up, because an empty slot ends a search.
    for (let next = (at + 1) & mask;; next = (next + 1) & mask) {
      const moved = slots[next]
      if (moved === undefined) break
      const home = hash(moved.id) & mask
      if (((next - home) & mask) < ((next - at) & mask)) continue
      slots[at] = moved
      at = next
    }
    slots[at] = undefined
    if (slots.length > kept && 8 * this.#size < slots.length) this.#resize(slots.length / 2)
  }

  /** One that fits, if any does. */
  find(fits: (item: A) => boolean): A | undefined {
    return this.#slots.find((item) => item !== undefined && fits(item))
  }

  /** A copy, in no order. */
  values(): Array<A> {
    return this.filter(() => true)
  }

  /** A copy of those that fit, in no order. */
  filter(fits: (item: A) => boolean): Array<A> {
    const found: Array<A> = []
    for (const item of this.#slots) if (item !== undefined && fits(item)) found.push(item)
    return found
  }

  #resize(length: number): void {
    const slots: Array<A | undefined> = new Array(length).fill(undefined)
    for (const item of this.#slots) if (item !== undefined) put(slots, item)
    this.#slots = slots
  }
}

/** Answers whether it is new. */
const put = <A extends Named>(slots: Array<A | undefined>, item: A): boolean => {
  const mask = slots.length - 1
  let at = hash(item.id) & mask
  while (slots[at] !== undefined && slots[at]!.id !== item.id) at = (at + 1) & mask
  const isNew = slots[at] === undefined
  slots[at] = item
  return isNew
}

const hash = (id: string): number => {
  let found = 0
  for (let at = 0; at < id.length; at++) found = (Math.imul(found, 31) + id.charCodeAt(at)) | 0
  // Ids that follow each other must not lie side by side: a removal looks at all of a row.
  found = Math.imul(found ^ (found >>> 15), 0x9e3779b1)
  return found ^ (found >>> 16)
}
