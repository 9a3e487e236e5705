/** Which namespace of which server a coordinator is at home in, as Redis has told: two coordinators of one process may share it. */
export class Home {
  /** Empty before Redis has told it. It is another one after a loss of all data. */
  identity = ""
  readonly #known = new Set<string>()

  admitted(identity: string): void {
    this.identity = identity
    this.#known.add(identity)
  }

  /** Whether the other one is the same. Each hears of a loss of data in its own time, so what both were told before counts too. */
  isSame(other: Home): boolean {
    if (this === other) return true
    for (const identity of this.#known) if (other.#known.has(identity)) return true
    return false
  }
}
