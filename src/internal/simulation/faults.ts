/** The faults of a simulation. */

import type { Process } from "./process.ts"
import type { Wire } from "./wire.ts"
import type { World } from "./world.ts"

/** An event that has happened to a process, or to Redis. Times are milliseconds since the beginning. */
export interface Incident {
  readonly fault: Fault
  /** The name of the process, or nothing for all of them. */
  readonly process: string | undefined
  readonly from: number
  /** When its direct consequences are over at the latest: not known while it lasts. */
  to: number
  /** Redis may have forgotten what it had acknowledged. */
  readonly forgets: boolean
}

/** The part of the simulation that a fault needs. */
export interface Scene {
  readonly world: World
  /** Starts a process in the place of one that has crashed. */
  readonly restart: (process: Process) => void
}

/** An incident, or when the lasting incidents of this fault end. */
type Struck = Omit<Incident, "fault" | "from"> | { readonly end: number }

/** Answers what has happened, or nothing where nothing could. */
type Strike = (scene: Scene) => Promise<Struck | undefined> | Struck | undefined

const pick = <A>({ world }: Scene, all: ReadonlyArray<A>): A | undefined =>
  all.length === 0 ? undefined : all[world.choices.among(all.length)]

const oneOf = <A>({ world }: Scene, all: readonly [A, ...Array<A>]): A => all[world.choices.among(all.length)]!

// One whose program has ended is not there any more.
const awake = ({ world }: Scene): ReadonlyArray<Process> =>
  world.processes.filter((process) => world.isAwake(process) && !process.ended)

const ofWire = (millis: number, happen: (wire: Wire) => void): Strike => (scene) => {
  const found = pick(
    scene,
    awake(scene).flatMap((process) => process.wires.filter((wire) => wire.isReady()).map((wire) => ({ process, wire })))
  )
  if (found === undefined) return undefined
  happen(found.wire)
  return { process: found.process.name, to: scene.world.now + millis, forgets: false }
}

const ofProcess = (
  happen: (scene: Scene, process: Process) => number | Promise<number>
): Strike =>
async (scene) => {
  const process = pick(scene, awake(scene))
  if (process === undefined) return undefined
  return { process: process.name, to: scene.world.now + await happen(scene, process), forgets: false }
}

const ofServer = (forgets: boolean, happen: (scene: Scene) => Promise<void> | void): Strike => async (scene) => {
  const { world } = scene
  // Tokens go by the clock: where Redis has forgotten them, it must not be behind what it was before.
  if (forgets) {
    world.now += world.server.behind
    world.server.forgotAt = world.server.now
  }
  await happen(scene)
  return { process: undefined, to: scene.world.now, forgets }
}

// In milliseconds, at most: until a connection that does not answer, or an event that does not come, is noticed, and until all that was
// refused is tried again.
const [noticed, retried] = [7000, 7000]

const isMailbox = (stream: string): boolean => stream.includes("}:mail:")

const cutAll = ({ processes }: World): void => {
  for (const process of processes) for (const wire of process.wires) wire.cut("the server is gone")
}

// Until it is switched back, or all is healed.
const switched = ({ world: { now, server } }: Scene, name: "full" | "migrating"): Struck => {
  server[name] = !server[name]
  return server[name] ? { process: undefined, to: Number.POSITIVE_INFINITY, forgets: false } : { end: now + retried }
}

// In parts, and each time it may be the last.
const migrated = async (scene: Scene) => {
  const { choices, server } = scene.world
  const migration = server.migration
  if (migration !== undefined && choices.among(2) === 1) {
    await server.endMigration()
    return { end: scene.world.now + retried }
  }
  const slot = pick(scene, migration === undefined ? await server.slots() : [""])
  if (slot === undefined) return undefined
  await (migration ?? server.beginMigration(slot)).move(() => choices.among(2) === 1)
  return { process: undefined, to: Number.POSITIVE_INFINITY, forgets: false }
}

const strikes = {
  /** A connection breaks. Requests and replies under way on it are lost, and the requests may be executed later. */
  cut: ofWire(500, (wire) => wire.cut("cut")),
  /** The requests of a process get lost, and nothing says so. */
  "lost requests": ofWire(noticed, (wire) => {
    wire.deaf = true
  }),
  /** The replies of Redis get lost, and nothing says so. */
  "lost replies": ofWire(noticed, (wire) => {
    wire.mute = true
  }),
  /** An event does not reach the mailbox that it was posted to. */
  "lost event": async (scene) => {
    const { world } = scene
    const unread = world.processes.filter(({ crashed }) => !crashed).flatMap((process) =>
      process.wires.flatMap((wire) => world.unread(wire)).filter(isMailbox).map((mailbox) => ({ mailbox, process }))
    )
    const found = pick(scene, unread)
    if (found === undefined) return undefined
    await world.server.loseNewest(found.mailbox)
    return { process: found.process.name, to: world.now + noticed, forgets: false }
  },
  /** A process ends at once, and another one is started in its place. */
  crash: ofProcess(async (scene, process) => {
    // Before the first step, promises of its program may not have gone on yet: they would do so behind the crash.
    await scene.world.settle()
    scene.world.crash(process)
    scene.restart(process)
    return 0
  }),
  /** A process stands still, for longer than its lease perhaps. */
  pause: ofProcess((scene, process) => {
    const millis = oneOf(scene, [50, 500, 2500, 5000])
    process.pausedUntil = scene.world.now + millis
    return millis
  }),
  /** Something that a process does is interrupted. */
  interrupt: (scene) => {
    const process = pick(scene, awake(scene).filter(({ interrupts }) => interrupts.size > 0))
    if (process === undefined) return undefined
    pick(scene, [...process.interrupts])!()
    return { process: process.name, to: scene.world.now, forgets: false }
  },
  /** The wall clock of a process is set. */
  clock: ofProcess((scene, process) => {
    process.skew += oneOf(scene, [-3000, 3000])
    return 0
  }),
  /** The clock of Redis is set back. */
  "server clock": ofServer(false, (scene) => {
    const { server } = scene.world
    const millis = oneOf(scene, [10, 100])
    if (server.now - server.forgotAt > millis) server.behind += millis
  }),
  /** Redis starts again, with all that it knew: every connection breaks. */
  restart: ofServer(false, ({ world }) => cutAll(world)),
  /** `FUNCTION FLUSH` */
  library: ofServer(false, ({ world }) => world.server.forgetLibrary()),
  /** Redis is over its `maxmemory`. */
  memory: (scene) => switched(scene, "full"),
  /** A slot of a cluster moves to another server. Where there is no cluster, Redis refuses calls. */
  migration: (scene) => scene.world.cluster ? migrated(scene) : switched(scene, "migrating"),
  /** Redis loses its data. */
  flush: ofServer(true, async ({ world }) => await world.server.flush()),
  /** Fail-over to a replica that has missed the last calls. */
  "fail-over": ofServer(true, async ({ world }) => {
    cutAll(world)
    await world.server.failOver(1 + world.choices.among(8))
  }),
  /** Redis starts again with nothing: every connection breaks. */
  "empty restart": ofServer(true, async ({ world }) => {
    cutAll(world)
    world.server.forgetLibrary()
    await world.server.flush()
  })
} satisfies { readonly [name: string]: Strike }

/** The faults by their names. */
export type Fault = keyof typeof strikes

/** All of them. */
export const faults = Object.keys(strikes) as ReadonlyArray<Fault>

/** Breaks or repairs something, and notes that among the incidents. Answers nothing where there is nothing to break. */
export const strike = async (
  fault: Fault,
  scene: Scene,
  incidents: Array<Incident>
): Promise<{ readonly process?: string | undefined } | undefined> => {
  const { world } = scene
  const from = world.now
  const end = (fault: Fault, at: number) => {
    for (const incident of incidents) {
      if (incident.fault === fault && incident.to === Number.POSITIVE_INFINITY) incident.to = at
    }
  }
  const found: Struck | undefined = await strikes[fault](scene)
  if (found === undefined) return undefined
  if ("end" in found) {
    end(fault, found.end)
    return {}
  }
  incidents.push({ fault, from, ...found })
  // Of a slot that was moving, nothing is left either.
  if (found.forgets && world.cluster) end("migration", world.now + retried)
  return found
}
