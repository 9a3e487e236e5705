/** Signals of the process. */

import { constants } from "node:os"

// One listener of the process for each signal, as Node.js warns of more than ten.
const listeners = new Map<NodeJS.Signals, Set<() => void>>()

const heard = (signal: NodeJS.Signals): void => {
  for (const listener of [...listeners.get(signal) ?? []]) listener()
}

const isHeard = (signal: string): boolean =>
  Object.hasOwn(constants.signals, signal) && signal !== "SIGKILL" && signal !== "SIGSTOP"

/** Calls the listener at each of these signals. Answers how to end that. */
export const onSignals = (signals: ReadonlyArray<NodeJS.Signals>, told: () => void): () => void => {
  if (!Array.isArray(signals)) throw new RangeError("signals must be an array of signals")
  const unheard = signals.find((signal) => !isHeard(signal))
  if (unheard !== undefined) throw new RangeError(`signals must be ones that a process can hear, not ${unheard}`)
  const listener = () => told()
  for (const signal of signals) {
    const all = listeners.get(signal) ?? new Set()
    if (all.size === 0) {
      listeners.set(signal, all)
      process.on(signal, heard)
    }
    all.add(listener)
  }
  return () => {
    for (const signal of signals) {
      const all = listeners.get(signal)
      if (all?.delete(listener) === true && all.size === 0) process.off(signal, heard)
    }
  }
}
