/**
 * What Lockstep is tortured with, for torturing your own programs: a proxy that breaks connections at command, processes
 * to kill and to pause, histories that survive both, and a checker for them; and a simulation of whole fleets.
 *
 * @since 0.1.0
 */

export * as History from "./testing/History.ts"
export * as Linearizability from "./testing/Linearizability.ts"
export * as Process from "./testing/Process.ts"
export * as Program from "./testing/Program.ts"
export * as Proxy from "./testing/Proxy.ts"
export * as Simulation from "./testing/Simulation.ts"
