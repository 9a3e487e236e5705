/**
 * The counts of a coordinator, as Effect metrics.
 *
 * **Guarantees**
 *
 * - Labels are never keys, so the number of series is fixed. Only the monitors name topics, groups and queues.
 * - Counting sends no request to Redis. Only the monitors of topics and queues ask it.
 *
 * **Gotchas**
 *
 * - A coordinator writes into the context that its layer was built in. Read and export the metrics in the same one.
 * - Metrics are in the memory of the process, so they do not outlive it.
 * - `holds`, `publications` and `deliveries` are written with the next batch: that of a coordinator which
 *   does nothing is a heartbeat, a third of its lease at most.
 *
 * @since 0.1.0
 */

import * as Metric from "effect/Metric"

/**
 * `lockstep_requests`: requests answered by partition actors, in the batches of sessions. Questions such as `Lock.waiting`, which
 * change nothing, are calls of their own and not among them.
 *
 * @category metrics
 * @since 0.1.0
 */
export const requests = Metric.counter("lockstep_requests", {
  description: "Requests answered by partition actors, without questions",
  incremental: true
})

/**
 * `lockstep_batch_size`: requests per call.
 *
 * @category metrics
 * @since 0.1.0
 */
export const batchSize = Metric.histogram("lockstep_batch_size", {
  description: "Requests per call to a partition actor",
  boundaries: Metric.exponentialBoundaries({ start: 1, factor: 2, count: 10 })
})

/**
 * `lockstep_round_trip_millis`: time from sending a batch to its reply, retries included.
 *
 * @category metrics
 * @since 0.1.0
 */
export const roundTrip = Metric.histogram("lockstep_round_trip_millis", {
  description: "Milliseconds from sending a batch to its reply",
  boundaries: Metric.exponentialBoundaries({ start: 0.0625, factor: 2, count: 16 })
})

/**
 * `lockstep_waits`: requests that had to queue for a hold, a party or a signal. Waits at latches, for task groups, values of refs and
 * results are not among them, but updates of a ref that wait for their turn are.
 *
 * @category metrics
 * @since 0.1.0
 */
export const waits = Metric.counter("lockstep_waits", {
  description: "Requests that had to wait for another holder",
  incremental: true
})

/**
 * `lockstep_wait_millis`: time from asking to the grant, of requests that had to queue.
 *
 * @category metrics
 * @since 0.1.0
 */
export const waitTime = Metric.histogram("lockstep_wait_millis", {
  description: "Milliseconds that a granted request waited for another holder",
  boundaries: Metric.exponentialBoundaries({ start: 0.25, factor: 4, count: 12 })
})

/**
 * `lockstep_timeouts`: waits that ended with `WaitTimeout`.
 *
 * @category metrics
 * @since 0.1.0
 */
export const timeouts = Metric.counter("lockstep_timeouts", {
  description: "Requests that were not granted within their time to wait",
  incremental: true
})

/**
 * `lockstep_hold_millis`: time from the grant to the release.
 *
 * @category metrics
 * @since 0.1.0
 */
export const holdTime = Metric.histogram("lockstep_hold_millis", {
  description: "Milliseconds between a grant and its release",
  boundaries: Metric.exponentialBoundaries({ start: 0.25, factor: 4, count: 12 })
})

/**
 * `lockstep_holds`: the holds of this process now. Written with each batch.
 *
 * @category metrics
 * @since 0.1.0
 */
export const holds = Metric.gauge("lockstep_holds", { description: "Leases held by this process" })

/**
 * `lockstep_losses{reason}`: sessions that were lost; `closed` are those whose coordinator was closed under holds.
 *
 * @category metrics
 * @since 0.1.0
 */
export const losses = (reason: "expired" | "unknown" | "rolledBack" | "closed") =>
  Metric.withAttributes(
    Metric.counter("lockstep_losses", { description: "Sessions lost, by reason", incremental: true }),
    { reason }
  )

/**
 * `lockstep_overruns`: protected programs that still ran when the margin after a loss had passed. It also counts handlers of jobs
 * that still ran `overrun` after their interruption, and jobs that callers had taken when their session was lost.
 *
 * @category metrics
 * @since 0.1.0
 */
export const overruns = Metric.counter("lockstep_overruns", {
  description: "Protected programs and handlers of jobs that ran on long after their interruption",
  incremental: true
})

/**
 * `lockstep_publications`: events that were published to topics. Written with each batch.
 *
 * @category metrics
 * @since 0.1.0
 */
export const publications = Metric.counter("lockstep_publications", {
  description: "Events published to topics",
  incremental: true
})

/**
 * `lockstep_deliveries`: events that were delivered to this process as a member of a group, and jobs as a worker. Written with
 * each batch.
 *
 * @category metrics
 * @since 0.1.0
 */
export const deliveries = Metric.counter("lockstep_deliveries", {
  description: "Events delivered to members of groups, and jobs to workers",
  incremental: true
})

/**
 * `lockstep_redeliveries`: those of them that were delivered before.
 *
 * @category metrics
 * @since 0.1.0
 */
export const redeliveries = Metric.counter("lockstep_redeliveries", {
  description: "Events and jobs delivered again",
  incremental: true
})

/**
 * `lockstep_dead_letters`: events and jobs that became dead letters in this process.
 *
 * @category metrics
 * @since 0.1.0
 */
export const deadLetters = Metric.counter("lockstep_dead_letters", {
  description: "Events and jobs that handlers could not handle, put aside",
  incremental: true
})

/**
 * `lockstep_missed_events`: events that subscribers and groups have missed, where it is known how many.
 *
 * @category metrics
 * @since 0.1.0
 */
export const missedEvents = Metric.counter("lockstep_missed_events", {
  description: "Events that were trimmed before they were read, or left out for slow subscribers",
  incremental: true
})

/**
 * `lockstep_topic_length`: events that a topic keeps. `Topic.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const topicLength = (topic: string) =>
  Metric.withAttributes(Metric.gauge("lockstep_topic_length", { description: "Events that a topic keeps" }), { topic })

/**
 * `lockstep_topic_bytes`: their bytes. `Topic.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const topicBytes = (topic: string) =>
  Metric.withAttributes(
    Metric.gauge("lockstep_topic_bytes", { description: "Bytes of the events that a topic keeps" }),
    { topic }
  )

/**
 * `lockstep_topic_members`: members of a group. `Topic.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const groupMembers = (topic: string, group: string) =>
  Metric.withAttributes(Metric.gauge("lockstep_topic_members", { description: "Members of a group of a topic" }), {
    topic,
    group
  })

/**
 * `lockstep_topic_lag`: events that are still to be delivered to a group. `Topic.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const groupLag = (topic: string, group: string) =>
  Metric.withAttributes(
    Metric.gauge("lockstep_topic_lag", { description: "Events that a group has still to be given" }),
    { topic, group }
  )

/**
 * `lockstep_topic_pending`: events that members of a group have not acknowledged. `Topic.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const groupPending = (topic: string, group: string) =>
  Metric.withAttributes(
    Metric.gauge("lockstep_topic_pending", { description: "Events that members of a group have not acknowledged" }),
    { topic, group }
  )

/**
 * `lockstep_topic_oldest_millis`: age of the oldest event that a group has not acknowledged, delivered or not. It is in
 * milliseconds by the clock of this process; 0 for none. `Topic.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const groupAge = (topic: string, group: string) =>
  Metric.withAttributes(
    Metric.gauge("lockstep_topic_oldest_millis", {
      description: "Age of the oldest event that a group has not acknowledged"
    }),
    { topic, group }
  )

/**
 * `lockstep_queue_jobs{state}`: jobs of a queue. `Queue.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const queueJobs = (queue: string, state: "waiting" | "delayed" | "blocked" | "active" | "dead") =>
  Metric.withAttributes(Metric.gauge("lockstep_queue_jobs", { description: "Jobs of a queue, by state" }), {
    queue,
    state
  })

/**
 * `lockstep_queue_oldest_millis`: age of the oldest job that waits in the order of the offers, in milliseconds by the clock of this
 * process; 0 for none. `Queue.monitor` writes it.
 *
 * @category metrics
 * @since 0.1.0
 */
export const queueAge = (queue: string) =>
  Metric.withAttributes(
    Metric.gauge("lockstep_queue_oldest_millis", { description: "Age of the oldest job of a queue that waits" }),
    { queue }
  )
