/** Which namespace of which server a coordinator is at home in, as Redis has told: two coordinators of one process may share it. */
export class Home {
  // After a loss of all data, Redis tells the coordinator another one.
  readonly #known = new Set<string>()

  admitted(identity: string): void {
    this.#known.add(identity)
  }

  /** Whether the other one is the same. Each hears of a loss of data in its own time, so what both were told before counts too. */
  isSame(other: Home): boolean {
    if (this === other) return true
    for (const identity of this.#known) if (other.#known.has(identity)) return true
    return false
  }
}
