/**
 * Milliseconds on the one clock that all processes of a machine share. `performance.timeOrigin` is not shared: it is off
 * by some milliseconds in a process that was preempted while it started.
 */
export const now = (): number => Number(process.hrtime.bigint()) / 1e6
