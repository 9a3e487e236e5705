/**
 * Looks at each event of a history as it comes, so that a schedule ends at the step that is wrong: a token that is given twice, and a
 * body that goes on when a newer holder has entered. The other checks look at whole histories.
 */
import type { Event } from "../torture/history.ts"

// One body at a time has them.
const exclusive: ReadonlySet<string> = new Set(["lock", "election", "singleton", "fence"])

interface Body {
  readonly resource: string
  hasLeft: boolean
  /** A newer holder has entered. */
  isOver: boolean
  /** How often it has done something since. */
  late: number
}

export class Bodies {
  /** What has gone wrong first. */
  violation: string | undefined = undefined
  readonly #resources = new Map<string, string>()
  readonly #inside = new Map<string, Body>()
  readonly #tokens = new Set<string>()

  hear(client: string, event: Event): void {
    if (event.event === "lost") return
    const hold = `${client}/${event.id}`
    if (event.event === "ask") {
      if (exclusive.has(event.kind)) this.#resources.set(hold, `${event.kind} ${JSON.stringify(event.key)}`)
      return
    }
    const body = this.#inside.get(hold)
    switch (event.event) {
      case "enter":
        return this.#enter(hold, event.token)
      case "step":
      case "write":
      case "leave":
        if (body === undefined) return
        // One operation can be under way when a process is stopped, and ends when the process goes on.
        if (body.isOver && ++body.late > 1) this.#fail(hold, body)
        if (event.event === "leave") body.hasLeft = true
        return
      case "end":
        this.#resources.delete(hold)
        this.#inside.delete(hold)
        if (body !== undefined && body.late > 0 && event.outcome === "released") this.#fail(hold, body)
    }
  }

  #enter(hold: string, token: number): void {
    const resource = this.#resources.get(hold)
    if (resource === undefined) return
    const given = `${resource} ${token}`
    if (this.#tokens.has(given)) this.violation ??= `token ${token} of ${resource} was given twice`
    this.#tokens.add(given)
    for (const body of this.#inside.values()) {
      if (body.resource === resource && !body.hasLeft) body.isOver = true
    }
    this.#inside.set(hold, { resource, hasLeft: false, isOver: false, late: 0 })
  }

  #fail(hold: string, { resource }: Body): void {
    this.violation ??= `hold ${hold} of ${resource} went on when a newer holder had entered`
  }
}
