/**
 * Coordination primitives for Effect on Redis: locks, elections, barriers, topics, queues and more. Each is a module of its own.
 *
 * @since 0.1.0
 */

export * as Barrier from "./Barrier.ts"
export * as Batch from "./Batch.ts"
export * as Coordinator from "./Coordinator.ts"
export * as CountDownLatch from "./CountDownLatch.ts"
export * as Counter from "./Counter.ts"
export * as DoubleBarrier from "./DoubleBarrier.ts"
export * as Election from "./Election.ts"
export * as Fence from "./Fence.ts"
export * as Flow from "./Flow.ts"
export * as Latch from "./Latch.ts"
export * as Lease from "./Lease.ts"
export * as Lock from "./Lock.ts"
export * as Metrics from "./Metrics.ts"
export * as Queue from "./Queue.ts"
export * as ReadWriteLock from "./ReadWriteLock.ts"
export * as Redis from "./Redis.ts"
export * as Rendezvous from "./Rendezvous.ts"
export * as Semaphore from "./Semaphore.ts"
export * as SharedRef from "./SharedRef.ts"
export * as Signal from "./Signal.ts"
export * as Singleton from "./Singleton.ts"
export * as TaskGroup from "./TaskGroup.ts"
export * as Topic from "./Topic.ts"
export * as WorkStealing from "./WorkStealing.ts"
