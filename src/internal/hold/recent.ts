/** The objects that were used last, by name: the rest is forgotten. */

export class Recent<A> {
  readonly #most: number
  #recent = new Map<string, A>()
  #before = new Map<string, A>()

  constructor(most: number) {
    this.#most = most
  }

  get(name: string): A | undefined {
    const found = this.#recent.get(name)
    if (found !== undefined) return found
    const older = this.#before.get(name)
    return older && this.add(name, older)
  }

  // When there are too many, the older half of them is forgotten at once: no order has to be kept.
  add(name: string, value: A): A {
    if (this.#recent.size >= this.#most) {
      this.#before = this.#recent
      this.#recent = new Map()
    }
    this.#recent.set(name, value)
    return value
  }
}
