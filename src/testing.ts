/**
 * The tools that torture Lockstep, to torture your own programs. They are a proxy that breaks connections at command,
 * processes to kill and to pause, histories that survive both, and a checker for those histories. `Simulation` simulates
 * whole fleets.
 *
 * **Guarantees**
 *
 * - A proxy ends with its scope. A process that `Process.spawn` has started ends with its scope, and with the process that
 *   started it.
 * - A record of `History` survives a SIGKILL right after it.
 *
 * **Gotchas**
 *
 * - Times of a history compare between processes of one machine only.
 *
 * @since 0.1.0
 */

export * as History from "./testing/History.ts"
export * as Linearizability from "./testing/Linearizability.ts"
export * as Process from "./testing/Process.ts"
export * as Program from "./testing/Program.ts"
export * as Proxy from "./testing/Proxy.ts"
export * as Simulation from "./testing/Simulation.ts"
