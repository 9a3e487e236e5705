/**
 * Which namespace of which server a coordinator is at home in, by Redis's word: two coordinators of one process may
 * share it.
 */
export class Home {
  // After a loss of all data, the coordinator receives another one from Redis.
  readonly #known = new Set<string>()

  admitted(identity: string): void {
    this.#known.add(identity)
  }

  /**
   * Whether the other one is the same. Each observes a loss of data in its own time, so an identity that both received
   * before counts too.
   */
  isSame(other: Home): boolean {
    if (this === other) return true
    for (const identity of this.#known) if (other.#known.has(identity)) return true
    return false
  }
}
