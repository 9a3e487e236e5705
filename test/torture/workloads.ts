/** All workloads. One is a small file: what clients do, and what must be true of the history. */
import type { Workload } from "./workload.ts"
import { barrier } from "./workloads/barrier.ts"
import { doubleBarrier } from "./workloads/doubleBarrier.ts"
import { election } from "./workloads/election.ts"
import { fence } from "./workloads/fence.ts"
import { flow } from "./workloads/flow.ts"
import { gate } from "./workloads/gate.ts"
import { latch } from "./workloads/latch.ts"
import { lock } from "./workloads/lock.ts"
import { outbox } from "./workloads/outbox.ts"
import { persistedQueue } from "./workloads/persistedQueue.ts"
import { queue } from "./workloads/queue.ts"
import { readWriteLock } from "./workloads/readWriteLock.ts"
import { ref } from "./workloads/ref.ts"
import { rendezvous } from "./workloads/rendezvous.ts"
import { semaphore } from "./workloads/semaphore.ts"
import { signal } from "./workloads/signal.ts"
import { singleton } from "./workloads/singleton.ts"
import { stealing } from "./workloads/stealing.ts"
import { tasks } from "./workloads/tasks.ts"
import { topic } from "./workloads/topic.ts"

export const workloads: ReadonlyArray<Workload> = [
  lock,
  readWriteLock,
  semaphore,
  latch,
  gate,
  tasks,
  barrier,
  doubleBarrier,
  signal,
  rendezvous,
  election,
  topic,
  ref,
  queue,
  stealing,
  flow,
  outbox,
  singleton,
  fence,
  persistedQueue
]
