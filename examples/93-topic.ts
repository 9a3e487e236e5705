/**
 * Orders of a shop. Every subscriber sees all of them; the members of the group "billing" share them out, and bill each customer
 * in order. What they cannot bill is put aside, and replayed when the bug is fixed. What happens to the stock of the shop is published
 * in the same step: no event without its change, and no change without its event.
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Option, Queue, Schedule, Schema, Stream } from "effect"
import assert from "node:assert/strict"
import { Lock, SharedRef, TaskGroup, Topic } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const Order = Schema.Struct({ customer: Schema.String, amount: Schema.Number })
type Order = typeof Order.Type

const decode = Schema.decodeUnknownEffect(Schema.fromJsonString(Schema.toCodecJson(Order)))

class Orders extends Topic.Service<Orders>()("orders", { schema: Order, key: ({ customer }) => customer }) {}

/** Stores events in one step with a release, a write and a result. They live in one partition, by their names and `colocate`. */
const outbox = Effect.gen(function*() {
  const moved = yield* Topic.make({ name: "moved", schema: Schema.String, colocate: "stock" })
  yield* Effect.addFinalizer(() => Effect.orDie(moved.purge))

  // Released with an event. If the lease were lost before, there would be none.
  const outcome = yield* Effect.scoped(Effect.gen(function*() {
    const lease = yield* Lock.acquire("stock")
    return yield* moved.publishOnRelease(lease, "the lock was released")
  }))
  assert.ok(Option.isSome(yield* outcome))

  // Each write of the ref has an event. A write that is not made has none.
  const stock = yield* SharedRef.make({ name: "stock", schema: Schema.Number, initial: 10 })
  const published = stock.publishing((left) => Effect.orDie(moved.publication(`${left} are left`)))
  yield* published.update((left) => left - 1)
  assert.equal(yield* published.compareAndSet(0, 7), false)

  // A result has its event if it is accepted. The second one is not.
  const count = yield* TaskGroup.make({ name: "stock", result: Schema.Number, timeToLive: "1 minute" })
  yield* Effect.scoped(Effect.gen(function*() {
    const task = yield* count.register("shelf 1")
    yield* task.submit(9, { publish: yield* moved.publication("shelf 1 was counted") })
    yield* Effect.flip(task.submit(8, { publish: yield* moved.publication("shelf 1 was counted again") }))
  }))

  const events = yield* moved.subscribe({ from: "beginning" }).pipe(Topic.values, Stream.take(3), Stream.runCollect)
  assert.deepEqual(events, ["the lock was released", "9 are left", "shelf 1 was counted"])
  assert.equal((yield* moved.state).length, 3)
  yield* stock.delete
}).pipe(Effect.scoped)

const program = Effect.gen(function*() {
  const orders = yield* Orders
  const letters = yield* orders.deadLetters("billing")
  // Events outlive the program. Those of an example are not needed.
  yield* Effect.addFinalizer(() => Effect.orDie(Effect.andThen(orders.purge, letters.purge)))

  // Broadcast: each subscriber gets every event.
  const subscriber = Effect.forkScoped(
    orders.subscribe({ from: "beginning" }).pipe(Topic.values, Stream.take(7), Stream.runCollect)
  )
  const subscribers = [yield* subscriber, yield* subscriber]

  const published = [
    { customer: "ann", amount: 10 },
    { customer: "bob", amount: 20 },
    { customer: "ann", amount: 30 },
    { customer: "cy", amount: -5 },
    { customer: "cy", amount: 7 }
  ]
  yield* orders.publishAll(published)
  // With an id, an order that is sent twice is stored once.
  const last = { customer: "bob", amount: 40 }
  const { id } = yield* orders.publish(last, { id: "web/17" })
  assert.deepEqual(yield* orders.publish(last, { id: "web/17" }), { id, duplicate: true })

  // A group: each event goes to one of its members. They are in one process here.
  const billed = yield* Queue.unbounded<Order>()
  let creditNotesWork = false
  const bill = ({ attempt, value }: Topic.Event<Order>) =>
    Effect.gen(function*() {
      if (value.amount < 0 && !creditNotesWork) return yield* Effect.fail("cannot bill a credit note")
      if (value.amount === 10 && attempt === 1) return yield* Effect.fail("the bank is away")
      yield* Queue.offer(billed, value)
    })
  const member = orders.run(bill, {
    group: "billing",
    from: "beginning",
    orderBy: "key",
    concurrency: 2,
    retry: Schedule.spaced("20 millis").pipe(Schedule.upTo({ times: 2 }))
  })
  yield* Effect.forkScoped(member)
  yield* Effect.forkScoped(member)

  const bills = new Map<string, Array<number>>([["ann", []], ["bob", []], ["cy", []]])
  const nextBills = (count: number) =>
    Effect.forEach(
      Array.from({ length: count }),
      () => Effect.map(Queue.take(billed), ({ amount, customer }) => bills.get(customer)!.push(amount)),
      { discard: true }
    )
  // The second order of ann has waited for the retry of her first one.
  yield* nextBills(5)
  assert.deepEqual([...bills], [["ann", [10, 30]], ["bob", [20, 40]], ["cy", [7]]])

  // The credit note of cy has failed three times, and is a dead letter. When the bug is fixed, it is published again.
  creditNotesWork = true
  const [letter] = yield* letters.consume({ group: "replay", from: "beginning" }).pipe(
    Stream.mapEffect(({ acknowledge, element }) =>
      Effect.gen(function*() {
        assert.equal(element._tag, "Event")
        const order = yield* decode(element.value.body)
        yield* orders.publish(order, { id: `replay/${element.value.id}` })
        yield* acknowledge
        return element.value
      })
    ),
    Stream.take(1),
    Stream.runCollect
  )
  assert.deepEqual([letter!.group, letter!.key, letter!.attempts], ["billing", "cy", 3])
  assert.match(letter!.error, /credit note/)
  yield* nextBills(1)
  assert.deepEqual(bills.get("cy"), [7, -5])

  // An event is acknowledged behind its handler.
  const billing = Effect.map(orders.state, ({ groups }) => groups.find(({ name }) => name === "billing")!)
  while ((yield* billing).pending > 0) yield* Effect.yieldNow
  const { lag, members } = yield* billing
  assert.deepEqual([lag, members], [0, 2])

  // A replayed event is a new one, for subscribers as well.
  for (const fiber of subscribers) {
    assert.deepEqual(yield* Fiber.join(fiber), [...published, last, published[3]])
  }
  yield* outbox
  yield* Console.log([...bills].map(([customer, amounts]) => `${customer} ${amounts.join(" ")}`).join(", "))
}).pipe(Effect.scoped)

program.pipe(
  Effect.provide(Orders.layer),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
