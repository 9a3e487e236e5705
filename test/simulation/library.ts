/** The library that is simulated: this one, or a copy of it with a bug. */
import type * as Lockstep from "../../src/index.ts"
import type * as Lua from "../../src/internal/actor/lua.ts"
import type * as Connections from "../../src/internal/redis/connection.ts"
import type * as Machines from "../../src/internal/simulation/machine.ts"
import type * as Simulations from "../../src/internal/simulation/simulation.ts"
import { type Client, storeOf } from "../torture/client.ts"

export interface Library {
  readonly lockstep: typeof Lockstep
  readonly layerStore: Client["layerStore"]
  readonly connectionsOf: typeof Connections.connectionsOf
  readonly Machine: typeof Machines.Machine
  readonly Simulation: typeof Simulations.Simulation
  /** The name of its functions in Redis. */
  readonly functions: string
}

/** All of it comes from one copy: services and errors are known by their modules. */
export const load = async (index: string): Promise<Library> => {
  const of = async (path: string) => await import(new URL(path, index).href)
  const [lockstep, layerStore, { connectionsOf }, { Machine }, { Simulation }, { library: functions }] = await Promise
    .all([
      of("index.ts") as Promise<typeof Lockstep>,
      storeOf(index),
      of("internal/redis/connection.ts") as Promise<typeof Connections>,
      of("internal/simulation/machine.ts") as Promise<typeof Machines>,
      of("internal/simulation/simulation.ts") as Promise<typeof Simulations>,
      of("internal/actor/lua.ts") as Promise<typeof Lua>
    ])
  return { lockstep, layerStore, connectionsOf, Machine, Simulation, functions }
}
