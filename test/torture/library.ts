/** Copies of the library with something changed: another version of it, or a bug that has to be found. */
import * as fs from "node:fs"
import * as path from "node:path"
import { fileURLToPath, pathToFileURL } from "node:url"
import { body, library } from "../../src/internal/actor/lua.ts"

const root = fileURLToPath(new URL("../..", import.meta.url))

export const original = new URL("../../src/index.ts", import.meta.url).href

export interface Patch {
  /** In the script, without comments and indentation. */
  readonly lua?: ReadonlyArray<readonly [from: string, to: string]> | undefined
  /** In the sources. */
  readonly sources?: ReadonlyArray<readonly [file: string, from: string, to: string]> | undefined
}

/** Fails if the text does not have it once. */
export const replaced = (text: string, from: string, to: string): string => {
  if (text.split(from).length !== 2) throw new Error(`the patch does not fit: ${from.slice(0, 200)}`)
  return text.replace(from, () => to)
}

/** Writes the copy into a directory of its own, and returns what to import. */
export const copy = (directory: string, name: string, patch: Patch): string => {
  const folder = path.join(directory, name)
  fs.cpSync(path.join(root, "src"), path.join(folder, "src"), { recursive: true })
  fs.copyFileSync(path.join(root, "package.json"), path.join(folder, "package.json"))
  fs.symlinkSync(path.join(root, "node_modules"), path.join(folder, "node_modules"))
  const edit = (file: string, f: (text: string) => string) => {
    const target = path.join(folder, "src", file)
    fs.writeFileSync(target, f(fs.readFileSync(target, "utf8")))
  }
  const changed = (patch.lua ?? []).reduce((text, [from, to]) => replaced(text, from, to), body)
  edit("internal/actor/lua.ts", (text) =>
    replaced(
      replaced(text, JSON.stringify(body), JSON.stringify(changed)),
      JSON.stringify(library),
      JSON.stringify(`${library}_${name}`)
    ))
  for (const [file, from, to] of patch.sources ?? []) edit(file, (text) => replaced(text, from, to))
  return pathToFileURL(path.join(folder, "src", "index.ts")).href
}

/** A clock that jumps: an offset in seconds that Redis keeps under this key is added to its time. */
export const clockKey = "torture:clock"

export const jumping: Patch = {
  lua: [[
    "local time = call('TIME')",
    `local time = call('TIME')\ntime[1] = format('%d', time[1] + (call('GET', '${clockKey}') or 0))`
  ]]
}

/** A bug, and what provokes it where the usual mixture seldom would. */
export interface Bug extends Patch {
  /** The workloads that can show it, where the others would leave these too little time. */
  readonly only?: ReadonlyArray<string> | undefined
  readonly faults?: ReadonlyArray<string> | undefined
  readonly long?: number | undefined
}

/** Bugs that the checks have to find. */
export const bugs: { readonly [name: string]: Bug } = {
  // A lock that a process keeps is not recalled.
  unrecalled: {
    only: ["lock"],
    lua: [["deliver(ctx, holderOf(lock.claim), reply('recall', idOf(lock.claim)))", ""]]
  },
  // Nor is the leadership that a process keeps.
  unrecalledLeader: {
    only: ["election"],
    lua: [["recallKept(ctx, key, state)\nreturn enqueue", "return enqueue"]]
  },
  // A process takes again what it has released.
  takenFromOthers: {
    only: ["readWriteLock", "semaphore"],
    sources: [[
      "internal/hold/kept.ts",
      "const hold = stretch.resting\n    this.#end(stretch)",
      "const hold = stretch.resting\n    if (hold === undefined) this.#end(stretch)"
    ]]
  },
  // A process that is using what it keeps goes on keeping it when another one wants it.
  unheardRecall: {
    only: ["lock"],
    sources: [[
      "internal/hold/kept.ts",
      "this.surrender(stretch)\n    this.recalled",
      "if (stretch.resting !== undefined) this.surrender(stretch)\n    this.recalled"
    ]]
  },
  // A session that is alive is taken for dead now and then.
  prematureReaping: {
    lua: [[
      "handlers['session.owned'] = function(ctx, _, session)\nif isAlive(ctx, session) or isUnnamed(ctx, session) then return '[\"alive\"]' end",
      "handlers['session.owned'] = function(ctx, _, session)"
    ], [
      "handlers['session.inherit'] = function(ctx, key, session)\nif isAlive(ctx, session) or isUnnamed(ctx, session) then return '[\"alive\"]' end",
      "handlers['session.inherit'] = function(ctx, key, session)"
    ], [
      "handlers['session.reap'] = function(ctx, key, session, entry)\nif isAlive(ctx, session) then return '[\"alive\"]' end",
      "handlers['session.reap'] = function(ctx, key, session, entry)"
    ], [
      "if known and known.deadline > ctx.now then",
      "if known and known.deadline > ctx.now and ctx.micros % 4 > 0 then"
    ], [
      "local function nearest(due, from, session, micros)",
      "local function nearest(due, from, session, micros)\ndo return '50' end"
    ], [
      "call('ZRANGEBYSCORE', ctx.dues, '-inf', text(ctx.now), 'LIMIT', 0, REAP_SESSIONS)",
      "call('ZRANGEBYSCORE', ctx.dues, '-inf', '+inf', 'LIMIT', 0, REAP_SESSIONS)"
    ]]
  },
  // One waiter in ten is forgotten when its turn comes.
  lostWakeUp: {
    lua: [[
      "local token, value = hold(ctx, state, weight)\nputFields(key, state, 'h' .. claim, value)",
      "if ctx.micros % 10 == 0 then return serve(ctx, key, state) end\nlocal token, value = hold(ctx, state, weight)\nputFields(key, state, 'h' .. claim, value)"
    ], ["local function serve(ctx, key, state, changed)", "local serve\nserve = function(ctx, key, state, changed)"]]
  },
  // One take in fifty does not look whether there is room.
  grantedTwice: {
    lua: [[
      "if state.first > state.last and state.taken + weight <= state.capacity then",
      "if ctx.micros % 50 == 0 or state.first > state.last and state.taken + weight <= state.capacity then"
    ]]
  },
  // One take in fifty that is a call of its own does not see that the lock is held.
  overlookedHold: {
    only: ["lock"],
    lua: [["local reply\nif not lock then", "local reply\nif not lock or micros % 50 == 0 then"]]
  },
  // The record of a session does not have the locks that it takes in calls of their own.
  forgottenHold: {
    only: ["lock"],
    lua: [[
      "if not token then return end\nowned = owned .. marked(id .. ':' .. sub(inline, 2))",
      "if not token then return end"
    ]]
  },
  // A release that is a call of its own passes over one waiter in ten.
  skippedWaiter: {
    only: ["lock"],
    lua: [[
      "if not claim or holder ~= mine then return end",
      "if not claim or holder ~= mine then return end\nlocal later, beyond = match(lock, '^ (%S+)()', behind)\nif count and later and micros % 10 == 0 then claim, behind, count = later, beyond, text(count - 1) end"
    ]]
  },
  // Waiters that become many are in the wrong order from then on.
  reversedQueue: {
    only: ["lock", "semaphore", "readWriteLock"],
    lua: [["MOST_INLINE = 64", "MOST_INLINE = 2"], [
      "putWaiter(key, state, claim, detail, at)\nend\nif",
      "putWaiter(key, state, claim, detail, state.last + 1 - at)\nend\nif"
    ]]
  },
  // A batch that is sent again is executed again.
  resentBatch: {
    faults: ["lost replies", "lost and repeated requests"],
    lua: [["if number == state.number then", "if false then"], [
      "if number < state.number then",
      "if number < state.number - 1 then"
    ]]
  },
  // The last in the queue is served first.
  lastInFirstOut: {
    only: ["lock", "semaphore", "readWriteLock"],
    lua: [["match(state.waiters, WAITER)", "match(state.waiters, '([^ :]+):?(%S*)$')"]]
  },
  // A token can be smaller than the one before it.
  smallerToken: {
    lua: [[
      "if ctx.micros > token then token = ctx.micros end",
      "token = ctx.micros - (ctx.micros % 7 == 0 and 3e6 or 0)"
    ]]
  },
  // A process whose session is lost tells a semaphore the number again that it had at first.
  undoneResize: {
    only: ["semaphore"],
    sources: [["Semaphore.ts", "known.joined\n", "false\n"]]
  },
  // Permits that are released go to the next waiter, though there are fewer by now.
  passedOn: {
    only: ["semaphore"],
    lua: [[
      "if isUnused(state) then return false end\nlocal hold",
      "if isUnused(state) then return false end\nlocal before, capacity = state.taken, state.capacity\nlocal hold"
    ], [
      "if call('HDEL', key, 'o' .. claim) == 0 then return false end\nstate.members = state.members - 1\nend\nserve(ctx, key, state)",
      "if call('HDEL', key, 'o' .. claim) == 0 then return false end\nstate.members = state.members - 1\nend\nstate.capacity = math.max(capacity, before)\nserve(ctx, key, state)\nstate.capacity = capacity"
    ]]
  },
  // A latch opens when one is still to come.
  earlyLatch: {
    only: ["latch"],
    lua: [["if left == 0 then openLatch", "if latch.remaining <= 1 then openLatch"]]
  },
  // A latch that is closed stays open now and then.
  openLatch: {
    only: ["gate"],
    lua: [[
      "if (changed or always == '1') and not isFormer(latch, since) then",
      "if (changed or always == '1') and not isFormer(latch, since) and ctx.micros % 3 > 0 then"
    ]]
  },
  // Waiters are not notified of a release now and then.
  deafLatch: {
    only: ["gate"],
    lua: [[
      "latch.passes = latch.passes + 1\nchangeLatch(ctx, key, latch)",
      "if ctx.micros % 3 > 0 then latch.passes = latch.passes + 1\nchangeLatch(ctx, key, latch) end"
    ]]
  },
  // Members of a former run count in the present one.
  mixedRuns: {
    only: ["latch"],
    lua: [["if latch.run ~= '' then return true end", "if latch.run ~= '' then return false end"]]
  },
  // A run that is new finds what the one before has counted.
  inheritedRun: {
    only: ["latch"],
    lua: [[
      "elseif run ~= '' and latch.run ~= run then\nresetLatch(ctx, key, latch, total, remaining, run)",
      "elseif run ~= '' and latch.run ~= run then\nlatch.run = run"
    ]]
  },
  // A latch that is fresh finds what was counted when it was open last.
  staleLatch: {
    only: ["latch"],
    lua: [["if fresh == '1' and not used then", "if fresh == '1' and not used and ctx.micros % 3 == 0 then"]]
  },
  // Now and then a shard that is done can be registered again, and gets another result.
  redoneShard: {
    only: ["tasks"],
    lua: [[
      "if status == 'done' then return reply(",
      "if status == 'done' and ctx.micros % 20 > 0 then return reply("
    ]]
  },
  // A party that asks a barrier again after it has lost its session arrives a second time, for the last generation too.
  countedTwice: {
    only: ["barrier"],
    faults: ["SIGSTOP", "blocked event loop"],
    lua: [[
      "if ended then return ended end",
      ""
    ], [
      "and state.generation > from + RESULTS then",
      "and false then"
    ]]
  },
  // When the last member closes a barrier, its results are gone, though the process of another one may come back and ask.
  resultsOfTheDead: {
    only: ["barrier"],
    lua: [["if not hasLeft(ctx, session) then state.away = 1 end", "state.away = 0"]]
  },
  // A phase opens while others are still inside of the one before.
  overlappingPhases: {
    lua: [["if state.inside > 0 or state.waiting < state.parties then", "if state.waiting < state.parties then"]]
  },
  // Some signals are consumed together with another one.
  lostSignal: {
    only: ["signal"],
    lua: [[
      "addSignals(state, -1)",
      "addSignals(state, ctx.micros % 10 == 0 and state.capacity > state.taken + 1 and -2 or -1)"
    ]]
  },
  // Some items are handed out again after they were acknowledged.
  takenTwice: {
    only: ["rendezvous"],
    lua: [[
      "removeItem(ctx, key, item, entry, claim)\nstate.claims",
      "if ctx.micros % 20 == 0 then\ncall('XCLAIM', ctx.items, GROUP, NO_PARTY, 0, entry, 'JUSTID')\ncall('HSET', key, 'g' .. item, entry .. ' ' .. giver .. ' ' .. NO_PARTY)\nstate.free, state.returned = state.free + 1, state.returned + 1\nelse removeItem(ctx, key, item, entry, claim) end\nstate.claims"
    ]]
  },
  // A candidate leads as soon as it is chosen, and not when its predecessor has ended.
  hastyNominee: {
    only: ["election"],
    lua: [[
      "return '[\"nominated\"]'",
      "state.taken = 0\nserve(ctx, key, state)\nsave(key, state)\nif ctx.served then crown(ctx, key, ctx.served) end\nreturn '[\"nominated\"]'"
    ]]
  },
  // Some writes are accepted that are behind one with a newer token.
  unfenced: {
    only: ["fence"],
    lua: [["if seen and tonumber(seen) > token then", "if seen and tonumber(seen) > token and token % 4 > 0 then"]]
  },
  // Some changes of the leader are not published.
  untoldLeader: {
    only: ["election"],
    lua: [[
      "announce(ctx, key, json(leadership(ctx, key)))",
      "if ctx.micros % 20 > 0 then announce(ctx, key, json(leadership(ctx, key))) end"
    ]]
  },
  // Events that a dead member of a group has not acknowledged go to no other member.
  unreturnedEvents: {
    only: ["topic"],
    lua: [["if #pending == 0 then break end\nlocal ids", "do break end\nlocal ids"]]
  },
  // A member that leaves uses up retries of what it has not begun.
  countedLeave: {
    only: ["topic"],
    lua: [["local change = crashed and CRASH or -1", "local change = crashed and CRASH or 0"]]
  },
  // An event is stored though what it follows was not executed.
  unfollowed: {
    only: ["outbox"],
    lua: [["after ~= '-' and follows(ctx, after)", "after ~= '-'"]]
  },
  // When a release was lost with its session, the next session stores its event.
  lateEvent: {
    only: ["outbox"],
    lua: [["after ~= '-' and follows(ctx, after)", "after == '-' or follows(ctx, after)"]]
  },
  // The event of a release is not stored, now and then.
  lostEvent: {
    only: ["outbox"],
    lua: [[
      "if not fits then return after",
      "if after ~= '' and ctx.micros % 10 == 0 then return reply('published', '0-1') end\nif not fits then return after"
    ]]
  },
  // Some events do not lock their key, so the next one is handed out before they are acknowledged.
  unlockedKey: {
    only: ["topic"],
    lua: [[
      "if lockKey(topic, group, key, id) then",
      "if ctx.micros % 10 == 0 or lockKey(topic, group, key, id) then"
    ]]
  },
  // Some acknowledgements give the member no credit for the next event, until it starves.
  lostCredit: {
    only: ["topic"],
    lua: [[
      "unlockKey(topic, group, key, event)\ncredited(ctx, group, id, 1)",
      "unlockKey(topic, group, key, event)\nif ctx.micros % 3 > 0 then credited(ctx, group, id, 1) end"
    ]]
  },
  // An event whose delivery was put off is not handed out again, now and then.
  lostRetry: {
    only: ["topic"],
    lua: [[
      "if delayed and #delayed > 0 then",
      "if delayed and #delayed > 0 and ctx.micros % 10 > 0 then"
    ]]
  },
  // A publication that is made again by the next session is stored again.
  republished: {
    only: ["topic"],
    faults: ["SIGSTOP", "paused server"],
    lua: [[
      "if tonumber(number) <= last then",
      "if false then"
    ]]
  },
  // Some publications are stored under an id that is known.
  forgottenId: {
    only: ["topic"],
    lua: [[
      "if known then\nif after",
      "if known and ctx.micros % 10 > 0 then\nif after"
    ]]
  },
  // Retention removes what groups have not handled.
  unprotectedEvents: {
    only: ["topic"],
    lua: [["wanted, topic.held = topic.number - number + 1, 1", ""]]
  },
  // A subscriber that has caught up does not read what the shared read was ahead of it.
  skippedPart: {
    only: ["topic"],
    sources: [[
      "internal/topic/subscription.ts",
      "if (compareIds(lane.cursor.id, until) < 0 && !await this.#readUntil(lane, until)) return",
      ""
    ]]
  },
  // A group goes on with a new epoch before it is done with the former one.
  earlyEpoch: {
    only: ["topic"],
    lua: [["local limit = limitOf(topic, group)", "local limit = topic.number"]]
  },
  // A subscriber reads what each shard has, of any epoch.
  mixedEpochs: {
    only: ["topic"],
    sources: [[
      "internal/topic/subscription.ts",
      "if (epochOf(entries[entries.length - 1]!) > epoch)",
      "if (epoch < 0)"
    ]]
  },
  // A shard that is sealed goes on taking in events.
  unsealed: {
    only: ["topic"],
    lua: [[
      "if (origin.epoch ~= topic.epoch or topic.open == 0) and after == '' then",
      "if origin.epoch > topic.epoch and after == '' then"
    ], [
      "if origin.epoch ~= topic.epoch or topic.open == 0 then",
      "if origin.epoch > topic.epoch then"
    ]]
  },
  // What retention removed before a subscriber read it is passed over in silence.
  silentGap: {
    only: ["topic"],
    sources: [[
      "internal/topic/shard.ts",
      "if (last !== undefined && number !== last + 1)",
      "if (last !== undefined && number <= last)"
    ]]
  },
  // Some comparisons of versions are not made.
  uncomparedVersion: {
    only: ["ref"],
    lua: [["if version ~= expected then", "if version ~= expected and ctx.micros % 5 > 0 then"]]
  },
  // Of updates that meet in one process, the last one is written.
  lastUpdateOnly: {
    only: ["ref"],
    sources: [["internal/ref/updates.ts", "present = exit.value.next", ""]]
  },
  // Of updates that meet in one process, the last one is published.
  lastEventOnly: {
    only: ["ref"],
    sources: [["internal/ref/updates.ts", "together(written?.following, following)", "following"]]
  },
  // A transaction compares the version of its last ref only.
  halfCompared: {
    only: ["ref"],
    lua: [["fits = fits and version == expected", "fits = version == expected"]]
  },
  // A part of a transaction is written with a version of its own.
  tornTransaction: {
    only: ["ref"],
    lua: [[
      "storeRef(ctx, ctx.bind(index), version, part.value, part.life)",
      "storeRef(ctx, ctx.bind(index), index > 1 and ctx.micros % 10 == 0 and nextToken(ctx) or version, part.value, part.life)"
    ]]
  },
  // Some writes of former holders are not refused.
  lateFence: {
    only: ["ref"],
    lua: [["if seen > tonumber(token) then", "if seen > tonumber(token) and ctx.micros % 3 > 0 then"]]
  },
  // Some versions are not published.
  untoldVersion: {
    only: ["ref"],
    lua: [[
      "if announce(ctx, key, json(version), json(version), json(value)) and life",
      "if ctx.micros % 20 > 0 and announce(ctx, key, json(version), json(version), json(value)) and life"
    ]]
  },
  // Some deletions are not published.
  untoldDeletion: {
    only: ["ref"],
    lua: [[
      "return reply('absent', asOf(ctx)) end",
      "return reply('absent', asOf(ctx)) end if ctx.micros % 3 == 0 then return reply('deleted', asOf(ctx)) end"
    ]]
  },
  // The next session makes a write again that the one before has made.
  rewritten: {
    only: ["ref"],
    faults: ["SIGSTOP", "paused server"],
    sources: [["internal/ref/cell.ts", "moot: uncertain,", ""]]
  },
  // A cached value is answered however old it is.
  ageless: {
    only: ["ref"],
    faults: ["SIGSTOP", "stall", "blocked event loop"],
    sources: [["internal/ref/watch.ts", "return this.#age < maxAge ? latest : undefined", "return latest"]]
  },
  // A sum that the next session sends again is added again.
  repeatedSum: {
    only: ["ref"],
    faults: ["SIGSTOP", "partition", "lost replies"],
    lua: [["if source ~= '' and lastSum(key, source) >= tonumber(number) then", "if false then"]]
  },
  // Some additions are answered, and not made.
  lostAddition: {
    only: ["ref"],
    lua: [[
      "saveCounter(ctx, key, sum, life)",
      "if ctx.micros % 30 > 0 then saveCounter(ctx, key, sum, life) end"
    ]]
  },
  // What meets a sum that is under way is not sent.
  droppedSum: {
    only: ["ref"],
    sources: [[
      "internal/ref/sums.ts",
      "this.#isSending = false\n    this.#sending = 0",
      "this.#isSending = false\n    this.#sending = 0\n    this.#sum = 0"
    ]]
  },
  // Some jobs that are returned are not counted, so no other worker gets them.
  lostJob: {
    only: ["queue"],
    lua: [[
      "queue[READY[letter]] = queue[READY[letter]] + #ids\nend\nqueue.active = queue.active - #ids",
      "queue[READY[letter]] = queue[READY[letter]] + (queue.number % 3 > 0 and #ids or 0)\nend\nqueue.active = queue.active - #ids"
    ]]
  },
  // Some acknowledgements of jobs give the worker no credit for the next one, until it starves.
  starvedWorker: {
    only: ["queue"],
    lua: [[
      "worker.credit = worker.credit + tonumber(take)",
      "worker.credit = worker.credit + (queue.completed % 10 > 0 and tonumber(take) or 0)"
    ]]
  },
  // Some acknowledgements of jobs give the worker credit for two more.
  crowdedWorker: {
    only: ["queue"],
    lua: [[
      "worker.credit = worker.credit + tonumber(take)",
      "worker.credit = worker.credit + tonumber(take) + (queue.completed % 10 == 0 and 1 or 0)"
    ]]
  },
  // Some jobs whose delay is over are not handed out.
  lostDelayed: {
    only: ["queue"],
    lua: [[
      "sorted[letter], ids[#ids + 1] = ids, id\njobs[#jobs + 1] = job",
      "if ctx.micros % 20 > 0 then sorted[letter], ids[#ids + 1] = ids, id end\njobs[#jobs + 1] = job"
    ]]
  },
  // A retry is not put off.
  hastyRetry: {
    only: ["queue"],
    sources: [[
      "internal/queue/handling.ts",
      "delay: millisOf(delay)",
      "delay: 0 * millisOf(delay)"
    ]]
  },
  // An offer that is made again by the next session is stored again.
  reoffered: {
    only: ["queue"],
    faults: ["SIGSTOP", "paused server"],
    lua: [[
      "if last == number then return before end\nif last and tonumber(last) > tonumber(number) then return '[\"late\"]' end",
      ""
    ]]
  },
  // The id of a job is free as soon as the job is done.
  freedId: {
    only: ["queue"],
    lua: [["noteIn(ctx, queue, 'i' .. given, job)", ""]]
  },
  // Some members that wait for an outcome are not notified.
  untoldOutcome: {
    only: ["queue"],
    lua: [[
      "tellMembers(ctx, waiting, 'outcome', job, json(outcome))",
      "if ctx.micros % 20 > 0 then tellMembers(ctx, waiting, 'outcome', job, json(outcome)) end"
    ]]
  },
  // Jobs expire half a second late.
  unexpired: {
    only: ["queue"],
    lua: [["if not till or tonumber(till) > ctx.now then", "if not till or tonumber(till) > ctx.now - 500 then"], [
      "text(EXPIRY + ctx.now), 'LIMIT', 0, MOVED",
      "text(EXPIRY + ctx.now - 500), 'LIMIT', 0, MOVED"
    ]]
  },
  // The worker of a job that is cancelled is not notified.
  untoldCancel: {
    only: ["queue"],
    lua: [["deliver(ctx, session, reply('changed', worker, 'cancel', job))", ""]]
  },
  // A job that is cancelled while a worker has it stays active.
  uncountedCancel: {
    only: ["queue"],
    lua: [[
      "queue.active, queue.cancelled = queue.active - 1, queue.cancelled - 1",
      "queue.cancelled = queue.cancelled - 1"
    ]]
  },
  // A job that is cancelled while a worker has it frees its slots before its handler has ended.
  hastyCancel: {
    only: ["queue"],
    lua: [[
      "queue.cancelled = queue.cancelled + 1",
      "queue.cancelled = queue.cancelled + 1\nextend.freed(queue, letter, id)"
    ]]
  },
  // Now and then a queue does not look at its limit.
  unlimited: {
    only: ["queue"],
    lua: [[
      "if queue.limit > 0 then allowed",
      "if queue.limit > 0 and ctx.micros % 20 > 0 then allowed"
    ]]
  },
  // The rate is not counted.
  unrated: {
    only: ["queue"],
    faults: ["cut"],
    lua: [["local byRate = allowedByRate(ctx, queue)", "local byRate = MOST.handed"]]
  },
  // Jobs are handed out though the queue is paused.
  unpaused: {
    only: ["queue"],
    faults: ["cut"],
    lua: [["while queue.paused == 0 do", "while true do"]]
  },
  // A schedule forgets some ticks that it has offered jobs of, and offers these again.
  repeatedTick: {
    only: ["queue"],
    faults: ["cut"],
    lua: [[
      "writePlan(ctx, queue, name, plan)\nreturn offered",
      "if offered == 0 or ctx.micros % 4 > 0 then writePlan(ctx, queue, name, plan) end\nreturn offered"
    ]]
  },
  // A schedule offers no job of some ticks.
  lostTick: {
    only: ["queue"],
    faults: ["cut"],
    lua: [[
      "offerTick(ctx, queue, name, shape, body, tick)\nplan.ran",
      "if ctx.micros % 4 > 0 then offerTick(ctx, queue, name, shape, body, tick) end\nplan.ran"
    ]]
  },
  // Jobs of one id go to several shards.
  misplacedId: {
    only: ["queue"],
    faults: ["cut"],
    sources: [[
      "internal/queue/sharded.ts",
      "return named === undefined ? this.#next : this.#home(named)",
      "return this.#next"
    ]]
  },
  // Jobs that are handed out together are in the wrong order.
  reversedJobs: {
    only: ["queue"],
    lua: [[
      "local session, id = match(worker.claim, '^([^/]*)/(.*)$')\nworker.credit",
      "for at = 1, floor(count / 2) do items[at], items[count + 1 - at] = items[count + 1 - at], items[at] end\nlocal session, id = match(worker.claim, '^([^/]*)/(.*)$')\nworker.credit"
    ]]
  },
  // Some jobs that are done stay with their worker, and go to another one when it leaves.
  redoneJob: {
    only: ["queue"],
    lua: [[
      "local count = call('XACK', stream, JOBS, unpack(ids))",
      "if ctx.micros % 10 == 0 then ids[1] = '0-1' end\nlocal count = call('XACK', stream, JOBS, unpack(ids))"
    ]]
  },
  // An attempt that has failed is not counted, now and then.
  uncountedAttempt: {
    only: ["queue"],
    lua: [["if attempted ~= '1' or count", "if attempted ~= '1' or ctx.micros % 5 == 0 or count"]]
  },
  // The end of a worker's session is counted as a failure of its jobs.
  uncountedCrash: {
    only: ["queue"],
    faults: ["SIGSTOP", "kill -9", "partition"],
    lua: [["(crashed and CRASH or -1)", "(crashed and 0 or -1)"]]
  },
  // Some checkpoints are not stored.
  lostCheckpoint: {
    only: ["queue"],
    lua: [["if checkpoint ~= '' then", "if checkpoint ~= '' and ctx.micros % 10 > 0 then"]]
  },
  // Handlers go on when the session is lost.
  ceaseless: {
    only: ["queue"],
    faults: ["SIGSTOP", "partition"],
    sources: [[
      "internal/queue/worker.ts",
      "      this.#abandon(task)\n    }\n    // Others",
      "      task.over = true\n    }\n    this.#working.clear()\n    // Others"
    ]]
  },
  // A worker that leaves interrupts its handlers at once.
  graceless: {
    only: ["queue"],
    sources: [["internal/queue/pool.ts", "addFinalizer(() => leave(usual))", "addFinalizer(() => leave(0 * usual))"]]
  },
  // Now and then a node starts when the first of those before it has ended.
  hastyNode: {
    only: ["flow"],
    lua: [["if node.open == 0 then settleSuccessor", "if node.open == 0 or ctx.micros % 3 == 0 then settleSuccessor"]]
  },
  // A node starts behind a failure that should skip it.
  heedlessEdge: {
    only: ["flow"],
    lua: [["if state == 'd' or policy == 'c' then return 0 end", "if state == 'd' or policy ~= 'f' then return 0 end"]]
  },
  // A node whose compensation is done stays as it is.
  uncompensated: {
    only: ["flow"],
    lua: [[
      "if tag == 'success' then moveNode(flow, node, found, 'x')",
      "if false then moveNode(flow, node, found, 'x')"
    ]]
  },
  // The node that was done first is undone first.
  reversedUndo: {
    only: ["flow"],
    lua: [[
      "call('HSET', flow.items, 'k' .. text(flow.undos), at)",
      "for place = flow.undos, 2, -1 do call('HSET', flow.items, 'k' .. text(place), call('HGET', flow.items, 'k' .. text(place - 1))) end\ncall('HSET', flow.items, 'k1', at)"
    ]]
  },
  // A run that is cancelled goes on to start nodes.
  restlessRun: {
    only: ["flow"],
    lua: [
      [
        "if flow.stop ~= 0 then\nmoveNode(flow, at, node, 'c')\nelseif node.verdict",
        "if false then\nmoveNode(flow, at, node, 'c')\nelseif node.verdict"
      ],
      ["if state == 'b' then\nmoveNode(flow, at, node, 'c')", "if false then\nmoveNode(flow, at, node, 'c')"]
    ]
  },
  // When a conductor tells the end of a node again, the actor counts it again.
  countedEnd: {
    only: ["flow"],
    lua: [
      ["if found.state ~= 'r' and found.state ~= 'a' then return end", ""],
      [
        "storeJobs(ctx, queue, body, #body .. ' ', false)",
        "for _ = 1, 2 do storeJobs(ctx, queue, body, #body .. ' ', false) end"
      ]
    ]
  },
  // A node that is offered twice is two jobs.
  nodeTwice: {
    only: ["flow"],
    lua: [
      [
        "storeJobs(ctx, queue, body, #body .. ' ', false)",
        "for _ = 1, 2 do storeJobs(ctx, queue, body, #body .. ' ', false) end"
      ]
    ],
    sources: [[
      "internal/flow/conducting.ts",
      "const id = jobOf(this.home.name, which, node, generation)\n    const reference = referenceOf(which, node, generation, 0)",
      "const id = jobOf(this.home.name, which, node, generation) + Math.random()\n    const reference = referenceOf(which, node, generation, 0)"
    ]]
  },
  // A node whose job was offered beside its run is offered by a conductor too.
  offeredBeside: {
    only: ["flow"],
    lua: [
      [
        "and offerBeside(ctx, flow, at, node, found[1], found[2]) then",
        "and offerBeside(ctx, flow, at, node, found[1], found[2]) and false then"
      ],
      ["local id = flow.name .. '/' .. flow.run", "local id = flow.name .. '/./' .. flow.run"]
    ]
  },
  // A run is not notified of the end of a job beside it, now and then.
  untoldBeside: {
    only: ["flow"],
    lua: [["if not node then return false end", "if not node or ctx.micros % 8 == 0 then return node end"]]
  },
  // Those that await a run are not notified of its end, now and then.
  untoldRun: {
    only: ["flow"],
    lua: [["if flow.over and flow.waiters > 0 then", "if flow.over and flow.waiters > 0 and ctx.micros % 4 > 0 then"]]
  },
  // An errand whose conductor has died is taken for delivered.
  lostErrand: {
    only: ["flow"],
    faults: ["kill -9", "SIGSTOP", "partition"],
    sources: [[
      "internal/flow/conducting.ts",
      "switch (errand[0]) {",
      "if (crashes > 0) return Effect.void\n    switch (errand[0]) {"
    ]]
  },
  // A batch is over before its last job has ended.
  earlyBatch: {
    only: ["flow"],
    lua: [["if unsettledIn(flow) > 0 or", "if unsettledIn(flow) > (flow.nodes > 1 and 1 or 0) or"]]
  },
  // A batch is over when all jobs have ended that were added so far.
  unsealedBatch: {
    only: ["flow"],
    lua: [[
      "flow.expected < 0 and flow.stop == 0 or flow.nodes < flow.expected and flow.stop == 0 then return",
      "false then return"
    ]]
  },
  // Some callbacks are not offered.
  lostCallback: {
    only: ["flow"],
    lua: [["if told then\nlocal counts", "if told and ctx.micros % 4 > 0 then\nlocal counts"]]
  },
  // A callback is offered again when its errand is delivered again.
  repeatedCallback: {
    only: ["flow"],
    lua: [[
      "storeJobs(ctx, queue, body, #body .. ' ', false)",
      "for _ = 1, 2 do storeJobs(ctx, queue, body, #body .. ' ', false) end"
    ]],
    sources: [[
      "internal/flow/conducting.ts",
      "const id = `${name}/${run}/${stamp}/over${retry",
      "const id = `${name}/${run}/over/${Math.random()}${retry"
    ]]
  },
  // Some permits that are released stay taken.
  leakedPermit: {
    only: ["semaphore"],
    lua: [[
      "state.taken, state.holds = state.taken - tonumber(match(hold, '^%S+')), state.holds - 1",
      "state.taken, state.holds = state.taken - (ctx.micros % 40 == 0 and 0 or tonumber(match(hold, '^%S+'))), state.holds - 1"
    ]]
  },
  // The client does not notice that its lease has run out.
  lateLoss: {
    faults: ["partition"],
    long: 0.3,
    sources: [
      [
        "internal/actor/session.ts",
        "this.#io.now() < this.#until && this.#io.wall() < this.#wallUntil",
        "this.#io.now() < this.#until + 60_000"
      ],
      ["internal/actor/vigil.ts", "Math.max(1, rest)", "60_000"]
    ]
  },
  // One release in fifty is never sent.
  forgottenRelease: {
    sources: [[
      "internal/hold/tenancy.ts",
      "if (state === \"held\" && entry instanceof Hold) this.#released(entry)",
      "if (state === \"held\" && entry instanceof Hold) this.#released(entry)\n    if (Math.random() < 0.02) return done()"
    ]]
  },
  // Some stolen jobs stay in the deque that they were stolen of.
  copiedTheft: {
    only: ["stealing"],
    lua: [[
      "for _, place in ipairs(places) do add(deque, '\\1' .. sub(place, 2)) end",
      "for _, place in ipairs(places) do\nadd(deque, '\\1' .. sub(place, 2))\nif ctx.micros % 3 == 0 then add(victim, place) end\nend"
    ]]
  },
  // Some stolen jobs are in no deque.
  lostTheft: {
    only: ["stealing"],
    lua: [[
      "for _, place in ipairs(places) do add(deque, '\\1' .. sub(place, 2)) end",
      "for _, place in ipairs(places) do if ctx.micros % 20 > 0 then add(deque, '\\1' .. sub(place, 2)) end end"
    ]]
  },
  // When the worker of a deque has gone, its jobs stay there for ever.
  orphanedDeque: {
    only: ["stealing"],
    lua: [["queue.orphaned = queue.orphaned + deque.size\n", ""]]
  },
  // Jobs are stolen though their worker keeps them.
  keepless: {
    only: ["stealing"],
    faults: ["cut"],
    lua: [[
      "local spare = alive and deque.size - deque.keep or math.huge",
      "local spare = alive and deque.size or math.huge"
    ]]
  },
  // A key does not always belong to the same worker.
  homelessKey: {
    only: ["stealing"],
    faults: ["cut"],
    lua: [[
      "local mixed = bit.bxor(key, one.weight) * 48271 % PRIME",
      "local mixed = bit.bxor(key + queue.number % 2, one.weight) * 48271 % PRIME"
    ]]
  },
  // No job is stolen while its worker lives.
  unstolen: {
    only: ["stealing"],
    lua: [["local spare = alive and deque.size - deque.keep or math.huge", "local spare = alive and 0 or math.huge"]]
  },
  // What was being asked for anew when that session was lost too is not asked for again.
  missedReentry: {
    sources: [[
      "internal/hold/tenancy.ts",
      "const again = entry.session === session",
      "const again = entry.session === session\n    Object.assign(entry, { entering: !again && entry.session !== undefined })"
    ], [
      "internal/hold/ending.ts",
      "if (entry instanceof Membership) memberships.push",
      "if ((entry as any).entering && entry.state === \"asked\") continue\n        if (entry instanceof Membership) memberships.push"
    ]]
  },
  // A change that overtakes the answer to joining is forgotten.
  earlyChange: {
    sources: [["internal/hold/membership.ts", "else if (this.state === \"asked\") this.#early.push(change)", ""]]
  },
  // An element that is on its way to a taker that waits no more is as good as handled.
  untakenElement: {
    only: ["persistedQueue"],
    sources: [[
      "effect/PersistedQueue.ts",
      "return Effect.onInterrupt(Effect.interrupt, () => Effect.sync(() => this.#shrink()))",
      "return Effect.void"
    ]]
  },
  // An interrupted take uses up an attempt.
  countedTake: {
    only: ["persistedQueue"],
    sources: [[
      "effect/PersistedQueue.ts",
      "return Effect.succeed({ tag: \"retry\", delay: 0, attempted: false })",
      "return Effect.succeed({ tag: \"retry\", delay: 0, attempted: true })"
    ]]
  },
  // The custom id of an element is only in its body.
  doubledElement: {
    only: ["persistedQueue"],
    sources: [["effect/PersistedQueue.ts", "if (!isCustomId)", "if (element !== undefined)"]]
  }
}

/** Bugs that the simulation has to find. They need a coincidence that ten minutes of torture seldom have. */
export const rareBugs: typeof bugs = {
  // The lease is counted from the reply, and not from the request.
  trustedFromReply: {
    only: ["lock"],
    faults: ["pause", "lost requests"],
    sources: [[
      "internal/actor/channel.ts",
      "this.#renewed(session, sentAt, sentAtWall)\n    hooks.metrics",
      "this.#renewed(session, io.now(), io.wall())\n    hooks.metrics"
    ]]
  },
  // An event under a number that Redis has given before, and forgotten, is taken for that one.
  reusedNumber: {
    only: ["lock", "semaphore"],
    faults: ["flush", "fail-over", "empty restart", "lost event", "pause", "cut"],
    lua: [[
      "if not isPosted(ctx, state, id, read) then",
      "if false then"
    ]],
    sources: [[
      "internal/actor/mailbox.ts",
      "if (number <= session.read) return this.#forgotten()",
      "if (number <= session.read) return"
    ]]
  },
  // A question that Redis did not answer in time is not taken back.
  expiredQuestion: {
    only: ["lock", "semaphore"],
    sources: [[
      "internal/hold/tenancy.ts",
      "this.release(entry, ignore)\n    entry.settle([\"failed\", error])\n  }\n\n  /** Questions",
      "this.#finish(entry, [\"failed\", error])\n  }\n\n  /** Questions"
    ]]
  },
  // Batches that Redis has forgotten are not missed.
  gapless: {
    lua: [["if number > state.number + 1 then return '[\"gap\"]' end", ""]]
  },
  // Calls do not keep a cluster from executing them while their slot migrates.
  undeclared: {
    sources: [[
      "internal/actor/wire.ts",
      "const declared = cluster ?",
      "const declared = cluster && prefix === \"\" ?"
    ]]
  }
}
