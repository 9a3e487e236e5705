/** Which faults happen when: what the seed decides. */
import { Effect, Exit, Fiber } from "effect"
import { History } from "../../src/testing.ts"
import { realSleep } from "../support/eventually.ts"
import type { Span } from "./checks.ts"
import type { Fault, Scene, Victim } from "./faults.ts"

/** A fault that was injected. */
export interface Injected extends Span {
  readonly fault: Fault
  /** Empty for a fault of servers. */
  readonly client: string
  readonly failure: string | undefined
}

/** One of them. Each side has its share, however many kinds it has. */
const choose = (faults: ReadonlyArray<Fault>, random: () => number): Fault | undefined => {
  const of = random() < 0.7 ? "client" : "server"
  const forgets = random() < 0.3
  const side = faults.filter((fault) => fault.of === of)
  const forgetting = side.filter((fault) => fault.forgets === true)
  const chosen = forgets && forgetting.length > 0 ? forgetting : side
  return chosen[Math.floor(random() * chosen.length)]
}

const overdue = Effect.andThen(realSleep("1 minute"), Effect.fail("it did not end"))

const apply = Effect.fnUntraced(function*(fault: Fault, client: string, scene: Scene) {
  const from = History.now()
  const exit = yield* Effect.exit(Effect.raceFirst(fault.run(scene), overdue))
  const failure = Exit.isFailure(exit) ? String(exit.cause).slice(0, 300) : undefined
  return { fault, client, from, to: History.now(), failure }
})

/** Injects faults for so many milliseconds, and waits for their ends. One thing has one fault at a time. */
export const inject = Effect.fnUntraced(function*(
  faults: ReadonlyArray<Fault>,
  victims: ReadonlyArray<Victim>,
  scene: Omit<Scene, "victim">,
  millis: number
) {
  const { random } = scene
  const end = performance.now() + millis
  const busy = new Set<string>()
  const running: Array<Fiber.Fiber<Injected>> = []
  while (performance.now() < end) {
    yield* realSleep(50 + random() * 900)
    const victim = victims[Math.floor(random() * victims.length)]!
    const fault = choose(faults, random)
    if (fault === undefined) continue
    const client = fault.of === "client" ? victim.name : ""
    if (busy.has(client)) continue
    busy.add(client)
    running.push(
      yield* Effect.forkChild(
        Effect.ensuring(apply(fault, client, { ...scene, victim }), Effect.sync(() => busy.delete(client)))
      )
    )
  }
  return yield* Effect.forEach(running, Fiber.join)
})
