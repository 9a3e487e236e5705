-- A queue: jobs that this actor hands to workers, each until its worker has said what has become of it.
--
-- kinds: queue, errands: hash, urgent, high, normal, low, held, delayed, dead, ids, even, odd, notes, order, turns, schedules, absent
-- after QueueNotes.lua
--
-- A job is one entry of a stream, from its offer until it is done. Its id is "<letter><ms>-<number>": the letter says which
-- stream, and of which level the job is. Numbers are those of the queue, so ids differ between its streams too.
--   u h n l   `urgent`, `high`, `normal`, `low`: jobs that can be handed out in the order of their offers
--   U H N L   `held`, for jobs of each level that cannot: they begin with a delay, or in the deque of a worker
--   V I O M   `held`, for jobs of groups: see lua/QueueGroups.lua
-- Fields of an entry: b <JSON>, and where the job has them: i <id of the producer's, or the first id of a job that was replayed>
-- a <attempts> t <timeout in ms>
-- e <ms after which it is not begun> r <if its outcome is kept: for how many ms> s <tick and name of its schedule> x <trace>
-- k <the checkpoint of a job that was replayed> q <how it is deduplicated, a letter, and the id for that> g <group>.
--
-- Each stream has one consumer group. Jobs in work are pending under the claim of their worker (in `held`, followed by the
-- letter), so a claim lasts as long as the session does. Other pending jobs have these consumers:
--   -    returned, to be handed out again (in `held`, "-<letter>")
--   ^    blocked by jobs that come before them: "^<letter>", see lua/QueueAfter.lua
--   ~    delayed: their time is in `delayed`, a zset of ids; lua/QueueSchedules.lua has other members there
-- Jobs that begin before all others of their level count as returned. `delayed` has them too, with scores below 0: the newest
-- job has the smallest score of its level. Below these are the jobs that expire: see lua/QueueExpiry.lua.
-- The count of deliveries of a pending job is its attempts, and CRASH for each attempt that ended with its worker's session.
--
-- The hash:
--   s                  record Queue
--   m                  record QueuePolicy
--   o<session>/<id>    a member: it offers or works
--   w<session>/<id>    a worker: "<credit> <deliveries so far> <1 if it is in the list>", and with a deque "<jobs in hand> <name>"
--   a<job>             the members that wait for the outcome of a job: their claims
--   y<job>             the subscriber of a job: lua/QueueErrands.lua
--   j<job>             a cancelled job that keeps its slots: lua/QueueCancel.lua
--   x<id>              of an id for deduplication: the first job, and the job that is kept behind it
--   q                  the list of workers that have credit and no job for it: their claims, in the order of their turns
--   z                  of a queue with other shards: the workers to be told when there are jobs that no worker has credit for
--   h                  the history by minutes: lua/QueueLists.lua
--   e                  while `draining` is 1, the workers that are told when no job waits: their claims
--   n                  the member that is asked for ticks when the member that gave them is dead
--   D D<name> E<...>   deques: lua/QueueStealing.lua
-- `ids` has the ids that producers gave to jobs that are not done: the id of each job. `even` and `odd` have, in turns of
-- `window` ms, i<id> and r<job> of jobs that are done: the job, and its outcome as JSON. They also have t<id> "<time> <job>" of jobs
-- that others are duplicates of until then, and p<node> "<number> <reply>" of the last offer of a coordinator.
-- `dead` is a stream of dead letters: j <id> w <reason> n <attempts> c <crashes> m <error>, o <log> if there is one, and the
-- fields of the job.
--
-- Jobs come from sources, three for each level: returned jobs, jobs whose delay is over, and jobs that wait. c1 to c12 count
-- them, the highest level first.
-- Entries of finished jobs are trimmed in front of the first pending entry, many at a time: deleting each by itself would be most
-- of the cost of a job. `last1` and `at1` are the id of the last job of the first level that was handed out; `done1` counts
-- jobs of it that were done since it was trimmed. When too many stay behind a job that is not done, `full1` is 1, and jobs
-- that are done are deleted at once.
--
-- `waited` and `ran` are the ms that all jobs together have waited and were in work until `since`. Ids and outcomes of jobs up to
-- the number `cleared` are not known any more. `plans` counts schedules. `sweep` is for lua/QueueSweep.lua. `stored` counts jobs in
-- deques, `orphaned` places in deques that no worker has, and `gaps` places without a job.
-- record Queue 1: number, stamp, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, delayed, active, dead, paused, turn, served,
--   members, workers, idle, limit, spacing, burst, tat, window, completed, buried, expired, bounded, named, last1, last2,
--   last3, last4, at1, at2, at3, at4, done1, done2, done3, done4, full1, full2, full3, full4, notes, stacked,
--   length, overflow, queued, told, dropped, shards, armed, grouped, after,
--   since, begun, waited, ran, plans, cleared, sweep, draining, blocked, awaited, cancelled, stored, orphaned, gaps,
--   expiring, kept
-- record QueuePolicy 2: letters, retain, crashes, grouplimit, groupspacing, groupburst, decided

local RETURNED, DELAYED, BLOCKED, JOBS, CRASH = '-', '~', '^', 'workers', 65536
local FIELD = { 'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7', 'c8', 'c9', 'c10', 'c11', 'c12' }
-- The letter of the jobs of each source, and the source that a returned or due job of a letter goes to.
local LETTER = { 'u', 'U', 'u', 'h', 'H', 'h', 'n', 'N', 'n', 'l', 'L', 'l' }
local READY = { u = 'c1', U = 'c2', h = 'c4', H = 'c5', n = 'c7', N = 'c8', l = 'c10', L = 'c11' }
local WAITING = { u = 'c3', h = 'c6', n = 'c9', l = 'c12' }
local LOWER = {
  u = 'u', h = 'h', n = 'n', l = 'l', U = 'u', H = 'h', N = 'n', L = 'l', V = 'u', I = 'h', O = 'n', M = 'l'
}
local HELD = { u = 'U', h = 'H', n = 'N', l = 'L' }
local EVERY_LETTER = { 'u', 'U', 'V', 'h', 'H', 'I', 'n', 'N', 'O', 'l', 'L', 'M' }
local LAST = { u = 'last1', h = 'last2', n = 'last3', l = 'last4' }
local AT = { u = 'at1', h = 'at2', n = 'at3', l = 'at4' }
local DONE = { u = 'done1', h = 'done2', n = 'done3', l = 'done4' }
local FULL = { u = 'full1', h = 'full2', n = 'full3', l = 'full4' }
-- Of jobs that begin before all others of their level: the scores of each level have a span of their own.
local FRONT, FRONT_SPAN = { U = 1, H = 2, N = 3, L = 4 }, 2 ^ 50
-- While several sources have jobs, one of so many is not from the first of them.
local TURNS = 8
-- Of one call: jobs that are moved, handed out to one worker at a time, and to all. A worker's credit. Of a level: jobs that are
-- done before it is trimmed, and those that may stay.
local MOVED, MOST = 256, { hand = 512, handed = 2048, credit = 1024, trimmed = 64, done = 1024 }
-- Functions of the files that come behind this file.
local extend = {}

-- -----------------------------------------------------------------------------
-- State: read once in a call, and written at its end
-- -----------------------------------------------------------------------------

local function consumerOf(letter, consumer)
  return LOWER[letter] == letter and consumer or consumer .. letter
end

local function workerFrom(claim, packed)
  local credit, sent, listed, more = match(packed, '^(%S+) (%S+) (%S+)(.*)$')
  local worker = { claim = claim, credit = tonumber(credit), sent = tonumber(sent), listed = listed == '1' }
  if more ~= '' then
    local busy, deque = match(more, '(%S+) (%S+)')
    worker.busy, worker.deque = tonumber(busy), deque
  end
  return worker
end

local function workerOf(queue, claim)
  local worker = queue.loaded[claim]
  if worker == nil then
    local packed = call('HGET', queue.key, 'w' .. claim)
    worker = packed and workerFrom(claim, packed) or false
    queue.loaded[claim] = worker
  end
  return worker
end

local function soonerDue(ctx, queue, at)
  if not queue.next or at < queue.next then queue.next = at end
end

local finishQueue
-- What lua/QueueGroups.lua does. It is asked about jobs with letters of groups, and, for all, while `queue.grouped` is not 0.
-- The letter of a job of a group by that of its level, and the level, from 1 on, by the former.
local groups = { letters = { u = 'V', h = 'I', n = 'O', l = 'M' }, levels = { V = 1, I = 2, O = 3, M = 4 } }

local function readQueue(ctx, key, claim)
  local packed, known
  if claim then
    local found = call('HMGET', key, 's', 'w' .. claim)
    packed, known = found[1], found[2]
  else
    packed = call('HGET', key, 's')
  end
  local queue = packed and unpackQueue(packed)
  if not queue then
    queue = {
      number = 0, stamp = 0, delayed = 0, active = 0, dead = 0, paused = 0, turn = 0, served = 0, members = 0, workers = 0,
      idle = 0, limit = 0, spacing = 0, burst = 0, tat = 0, window = 0, completed = 0, buried = 0, expired = 0, bounded = 0,
      named = 0, notes = 0, stacked = 0, length = 0, overflow = 0, queued = 0, told = 0, dropped = 0,
      shards = 1, armed = 0, grouped = 0, after = 0, since = ctx.now, begun = 0, waited = 0, ran = 0, plans = 0, cleared = 0, sweep = 0,
      draining = 0, blocked = 0, awaited = 0, cancelled = 0, stored = 0, orphaned = 0, gaps = 0,
      expiring = 0, kept = 0
    }
    for source = 1, #FIELD do queue[FIELD[source]] = 0 end
    for letter, last in pairs(LAST) do
      queue[last], queue[AT[letter]], queue[DONE[letter]], queue[FULL[letter]] = 0, 0, 0, 0
    end
  end
  queue.key, queue.known, queue.loaded, queue.fresh, queue.apart = key, packed and true, {}, {}, 0
  if known then queue.loaded[claim] = workerFrom(claim, known) end
  for letter in pairs(LOWER) do queue[letter] = ctx.held end
  queue.u, queue.h, queue.n, queue.l = ctx.urgent, ctx.high, ctx.normal, ctx.low
  queue.delays, queue.letters, queue.ids, queue.even, queue.odd = ctx.delayed, ctx.dead, ctx.ids, ctx.even, ctx.odd
  queue.order, queue.turns = ctx.order, ctx.turns
  queue.noted, queue.notebook, queue.schedules = {}, ctx.notes, ctx.schedules
  return queue
end

local function readyIn(queue)
  local ready = 0
  for source = 1, #FIELD do ready = ready + queue[FIELD[source]] end
  return ready
end

local function waitingIn(queue)
  return readyIn(queue) + groups.waiting(queue) + queue.stored
end

-- What keeps a queue in Redis: dead letters and schedules too, and jobs that have to hear of the end of another.
local function jobsOf(queue)
  return queue.plans + queue.delayed + queue.blocked + queue.awaited + queue.dead + queue.active + waitingIn(queue)
end

local function loadQueue(ctx, key, claim)
  local queues = ctx.queues
  if not queues then
    queues = {}
    ctx.queues = queues
  end
  local queue = queues[key]
  if not queue then
    queue = readQueue(ctx, key, claim)
    queues[key] = queue
    extend.passTime(ctx, queue)
  elseif not queue.finished then
    return queue
  end
  -- The end of a call may load a queue that was finished already.
  queue.finished = false
  later(ctx, key, function() finishQueue(ctx, queue) end)
  return queue
end

-- Errands are for actors: they are attempted until they have succeeded.
local function isErrands(queue)
  return match(queue.key, '^{[^}]*}:(%a+)') == 'errands'
end

local function policyOf(queue)
  local packed = call('HGET', queue.key, 'm')
  local crashes = isErrands(queue) and math.huge or 3
  return packed and unpackQueuePolicy(packed)
    or { letters = 10000, retain = 0, crashes = crashes, grouplimit = 1, groupspacing = 0, groupburst = 0, decided = 0 }
end

-- -----------------------------------------------------------------------------
-- Groups of the streams
-- -----------------------------------------------------------------------------

local function startJobs(stream)
  local made = redis.pcall('XGROUP', 'CREATE', stream, JOBS, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not find(made.err, 'BUSYGROUP', 1, true) then error(made) end
end

-- A command about a group; false if there is none.
local function tryJobs(...)
  local answered = redis.pcall(...)
  if type(answered) ~= 'table' or not answered.err then return answered or {} end
  if find(answered.err, 'NOGROUP', 1, true) or find(answered.err, 'requires the key to exist', 1, true) then return false end
  error(answered)
end

local function pendingOf(stream, count, consumer)
  return tryJobs('XPENDING', stream, JOBS, '-', '+', count, consumer) or {}
end

local function fieldOf(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then return fields[at + 1] end
  end
end

-- Jobs of one stream go to another consumer, without counting that as a delivery.
local function moveJobs(stream, consumer, ids, count)
  if #ids == 0 then return end
  local args = { stream, JOBS, consumer, 0 }
  for at, id in ipairs(ids) do args[4 + at] = id end
  if count then
    args[#args + 1], args[#args + 2] = 'RETRYCOUNT', text(count)
  end
  args[#args + 1] = 'JUSTID'
  tryJobs('XCLAIM', unpack(args))
end

-- The worker that a pending job is with, or what else its consumer stands for; nothing if it is not pending.
local function holdingOf(queue, letter, id)
  local pending = (tryJobs('XPENDING', queue[letter], JOBS, id, id, 1) or {})[1]
  if not pending then return nil end
  local consumer = pending[2]
  -- In `held`, consumers end with the letter.
  if LOWER[letter] ~= letter and consumer ~= DELAYED then consumer = sub(consumer, 1, -2) end
  return consumer, tonumber(pending[4])
end

local function entryAt(stream, id)
  local entry = call('XRANGE', stream, id, id)[1]
  return entry and entry[2]
end

-- A job that is not done: its fields, and as `holdingOf`.
local function jobAt(queue, letter, id)
  local holder, count = holdingOf(queue, letter, id)
  -- An entry that was handed out and is not pending was not trimmed yet. In `held` it is in a deque.
  local last = LAST[letter]
  if not holder and last and tonumber(match(id, '%d+$')) <= queue[last] then return nil end
  return entryAt(queue[letter], id), holder, count
end

local function split(job)
  return match(job, '^([uhnlUHNLVIOM])(%d+%-%d+)$')
end

-- -----------------------------------------------------------------------------
-- What is known for a while
-- -----------------------------------------------------------------------------

local function recalled(ctx, queue, field)
  local noted = queue.noted[field]
  if noted then return noted end
  local now, before = turnsOf(ctx, queue)
  local found = call('HGET', now, field) or call('HGET', before, field) or extend.keptAs(ctx, queue, field)
  if found and queue.cleared > 0 then
    local job = match(field, '^r(.*)$') or match(field, '^[it]') and found
    if job and tonumber(match(job, '%d+$')) <= queue.cleared then return nil end
  end
  return found
end

local function noteIn(ctx, queue, field, value)
  turnsOf(ctx, queue)
  queue.noted[field] = value
end

-- The id that a producer gave is free again when the job is done and the window has passed.
local function releaseId(ctx, queue, given, job, deduped)
  if deduped and deduped ~= '' then extend.released(ctx, queue, deduped, job) end
  if not given or given == '' then return end
  call('HDEL', queue.ids, given)
  noteIn(ctx, queue, 'i' .. given, job)
  queue.named = ctx.now
end

-- Keeps the outcome of a job, if that is wanted, and tells its subscriber, and the jobs and members that wait for it.
local function conclude(ctx, queue, job, given, wanted, outcome, done)
  if queue.awaited > 0 then extend.settled(ctx, queue, { job }, done and 's' or 'f') end
  if not wanted then return end
  local life = tonumber(wanted) or 0
  if life > 0 then
    extend.keepOutcome(ctx, queue, job, given, outcome, life)
  else
    noteIn(ctx, queue, 'r' .. job, outcome)
    queue.named = ctx.now
  end
  local found = call('HMGET', queue.key, 'a' .. job, 'y' .. job)
  local waiting, subscriber = found[1], found[2]
  if not waiting and not subscriber then return end
  call('HDEL', queue.key, 'a' .. job, 'y' .. job)
  if subscriber then extend.ended(ctx, queue, subscriber, job, outcome) end
  if waiting then tellMembers(ctx, waiting, 'outcome', job, json(outcome)) end
end

-- -----------------------------------------------------------------------------
-- Dead letters
-- -----------------------------------------------------------------------------

-- Puts a job aside. It is gone from its stream by then, or will be.
local function bury(ctx, queue, job, fields, reason, count, message, outcome)
  local policy = policyOf(queue)
  local log
  if queue.notes > 0 then
    local notes = call('HMGET', queue.notebook, 'b' .. job, 'k' .. job, 'l' .. job)
    reviseFields(fields, notes[1], notes[2])
    log = notes[3]
  end
  dropNotes(ctx, queue, { job })
  queue.stamp = math.max(queue.stamp, ctx.now)
  -- Redis counts letters: numbers of the queue are for jobs, and those of an offer, which may be half stored here, are consecutive.
  local args = {
    queue.letters, 'MAXLEN', '=', text(policy.letters), text(queue.stamp) .. '-*', 'j', job, 'w', reason,
    'n', text(count % CRASH), 'c', text(floor(count / CRASH)), 'm', message
  }
  if log then args[#args + 1], args[#args + 2] = 'o', log end
  for at = 1, #fields do args[#args + 1] = fields[at] end
  call('XADD', unpack(args))
  queue.buried = queue.buried + 1
  queue.recount = true
  local given = fieldOf(fields, 'i')
  releaseId(ctx, queue, given, job, fieldOf(fields, 'q'))
  conclude(ctx, queue, job, given, fieldOf(fields, 'r'), outcome)
  if policy.retain > 0 then
    call('XTRIM', queue.letters, 'MINID', '=', text(ctx.now - policy.retain) .. '-0')
    soonerDue(ctx, queue, ctx.now + policy.retain)
  end
end

local function removeJob(queue, letter, id)
  call('XDEL', queue[letter], id)
  return call('XACK', queue[letter], JOBS, id)
end

-- A job is not at the front of its level any more.
local function unstack(queue, job)
  if queue.stacked > 0 then queue.stacked = queue.stacked - call('ZREM', queue.delays, job) end
end

-- Removes a job that was not in work, for another reason than that it is done.
extend.remove = function(ctx, queue, letter, id, fields, outcome)
  removeJob(queue, letter, id)
  unstack(queue, letter .. id)
  dropNotes(ctx, queue, { letter .. id })
  if not fields then return end
  local given, deduped = fieldOf(fields, 'i'), fieldOf(fields, 'q')
  if given then call('HDEL', queue.ids, given) end
  if deduped then extend.released(ctx, queue, deduped, letter .. id) end
  conclude(ctx, queue, letter .. id, nil, fieldOf(fields, 'r'), outcome)
end

-- -----------------------------------------------------------------------------
-- Hand out
-- -----------------------------------------------------------------------------

-- The actor trusts bodies to be JSON, because producers encode them: they stand in the answer as they are.
local function describedJob(letter, id, count, fields)
  local head = '["' .. letter .. id .. '",' .. count .. ','
  if #fields == 2 then return head .. fields[2] .. ']' end
  local parts = { head .. fields[2] }
  for at = 3, #fields do parts[#parts + 1] = encoded(fields[at]) end
  return concat(parts, ',') .. ']'
end

local function readWaiting(stream, claim, count)
  local args = { 'XREADGROUP', 'GROUP', JOBS, claim, 'COUNT', count, 'STREAMS', stream, '>' }
  local found = tryJobs(unpack(args))
  if not found then
    startJobs(stream)
    found = tryJobs(unpack(args))
  end
  return found and found[1] and found[1][2] or {}
end

-- Takes up to so many jobs of the front of a level, the newest first: as `pendingOf`.
local function frontOf(queue, letter, count)
  if queue.stacked == 0 or not FRONT[letter] then return {} end
  local least = -FRONT[letter] * FRONT_SPAN
  local jobs = call('ZRANGEBYSCORE', queue.delays, text(least), '(' .. text(least + FRONT_SPAN), 'LIMIT', 0, count)
  if #jobs == 0 then return jobs end
  queue.stacked = queue.stacked - call('ZREM', queue.delays, unpack(jobs))
  local pending = {}
  for at, job in ipairs(jobs) do pending[at] = { sub(job, 2), nil, nil, 0 } end
  return pending
end

local function claimInto(stream, consumer, pending, entries, counts)
  if #pending == 0 then return end
  local args = { stream, JOBS, consumer, 0 }
  for at, one in ipairs(pending) do args[4 + at], counts[one[1]] = one[1], one[4] + 1 end
  for _, entry in ipairs(call('XCLAIM', unpack(args))) do entries[#entries + 1] = entry end
end

-- Takes up to so many jobs of a source for a consumer: their entries, and how often each was delivered. Fewer are found if
-- others were deleted, and then there are no more.
local function takeSource(queue, source, claim, count)
  local letter, field = LETTER[source], FIELD[source]
  local stream, consumer = queue[letter], consumerOf(letter, claim)
  local entries, counts, found
  if source % 3 == 0 then
    entries = readWaiting(stream, consumer, count)
    found = #entries
    if found > 0 then
      local at, last = match(entries[found][1], '^(%d+)%-(%d+)$')
      queue[AT[letter]], queue[LAST[letter]] = tonumber(at), tonumber(last)
    end
  else
    -- Of those that are removed, the oldest ones come first.
    local pending = claim == '/' and {} or frontOf(queue, letter, count)
    entries, counts, found = {}, {}, #pending
    claimInto(stream, consumer, pending, entries, counts)
    if found < count then
      pending = pendingOf(stream, count - found, consumerOf(letter, RETURNED))
      claimInto(stream, consumer, pending, entries, counts)
      found = found + #pending
    end
  end
  queue[field] = found < count and 0 or queue[field] - found
  return entries, counts, letter
end

-- A job is not handed out before that time.
local function delayJob(ctx, queue, letter, id, due, count)
  moveJobs(queue[letter], DELAYED, { id }, count)
  call('ZADD', queue.delays, text(due), letter .. id)
  queue.delayed = queue.delayed + 1
  soonerDue(ctx, queue, due)
end

-- The delays of jobs are over.
local function endDelays(queue, letter, ids)
  if groups.levels[letter] then
    groups.due(queue, letter, ids)
  else
    queue[READY[letter]] = queue[READY[letter]] + #ids
  end
  moveJobs(queue[letter], consumerOf(letter, RETURNED), ids)
  queue.delayed = queue.delayed - #ids
end

-- Removes a job, whose id stays known for a while, and says what has become of it. One that is `kept` stays pending.
local function endJob(ctx, queue, letter, id, fields, outcome, kept)
  local job = letter .. id
  if kept then call('XDEL', queue[letter], id) else removeJob(queue, letter, id) end
  dropNotes(ctx, queue, { job })
  local given = fieldOf(fields, 'i')
  releaseId(ctx, queue, given, job, fieldOf(fields, 'q'))
  conclude(ctx, queue, job, given, fieldOf(fields, 'r'), outcome)
end

-- Removes a job that may not begin any more. Answers whether it is one.
local function expireJob(ctx, queue, letter, id, fields)
  local till = #fields > 2 and fieldOf(fields, 'e')
  if not till or tonumber(till) > ctx.now then return false end
  endJob(ctx, queue, letter, id, fields, '["expired"]')
  queue.expired = queue.expired + 1
  return true
end

-- Adds the jobs of entries that a worker has taken, but for those that have expired, or begin later.
local function addTaken(ctx, queue, letter, entries, counts, items)
  local notes = notesOf(queue, letter, entries)
  for at = 1, #entries do
    local id, fields = entries[at][1], entries[at][2]
    local due = notes and tonumber(notes[3 * at - 1])
    if notes then reviseFields(fields, notes[3 * at - 2], notes[3 * at]) end
    if due then unsetNote(queue, 'd' .. letter .. id) end
    if due and due > ctx.now then
      delayJob(ctx, queue, letter, id, due, 0)
    elseif not expireJob(ctx, queue, letter, id, fields) then
      items[#items + 1] = describedJob(letter, id, counts and text(counts[id]) or '1', fields)
    end
  end
end

local function takeInto(ctx, queue, source, claim, count, items)
  local entries, counts, letter = takeSource(queue, source, claim, count)
  addTaken(ctx, queue, letter, entries, counts, items)
end

-- Takes jobs of the first source that has any; while others have some too, one of TURNS comes from those in turn.
local function takeJobs(ctx, queue, claim, count)
  local items, first, others = {}, nil, {}
  for source = 1, #FIELD do
    if queue[FIELD[source]] > 0 then
      if first then others[#others + 1] = source else first = source end
    end
  end
  if #others == 0 then
    takeInto(ctx, queue, first, claim, math.min(count, queue[FIELD[first]]), items)
    return items
  end
  local turn = queue.served % TURNS
  if turn == TURNS - 1 then
    takeInto(ctx, queue, others[1 + floor(queue.served / TURNS) % #others], claim, 1, items)
    queue.served = queue.served + 1
  else
    local some = math.min(count, queue[FIELD[first]], TURNS - 1 - turn)
    takeInto(ctx, queue, first, claim, some, items)
    queue.served = queue.served + some
  end
  return items
end

-- The workers that wait for jobs, in the order of their turns.
local function listOfWorkers(queue)
  local list = queue.list
  if not list then
    list = {}
    if queue.idle > 0 then
      for claim in string.gmatch(call('HGET', queue.key, 'q') or '', '%S+') do list[#list + 1] = claim end
    end
    queue.list, queue.head = list, 1
  end
  for at = 1, #queue.fresh do list[#list + 1] = queue.fresh[at] end
  if #queue.fresh > 0 then queue.fresh, queue.relisted = {}, true end
  return list
end

local function enlist(queue, worker)
  worker.changed = true
  if worker.credit <= 0 or worker.listed then return end
  worker.listed = true
  queue.fresh[#queue.fresh + 1] = worker.claim
end

-- The worker whose turn it is leaves the list. One whose session has ended is reaped soon.
local function nextWorker(ctx, queue)
  local list = listOfWorkers(queue)
  while queue.head <= #list do
    local worker = workerOf(queue, list[queue.head])
    queue.head, queue.relisted = queue.head + 1, true
    if worker then
      worker.listed, worker.changed = false, true
      if worker.credit > 0 and isAlive(ctx, holderOf(worker.claim)) then return worker end
    end
  end
end

-- How many jobs the rate allows now.
local function allowedByRate(ctx, queue)
  if queue.spacing == 0 then return MOST.handed end
  return floor((ctx.now + queue.burst - math.max(queue.tat, ctx.now)) / queue.spacing + 1e-9)
end

local function handOutTo(ctx, queue, worker, items)
  local count = #items
  if count == 0 then return end
  local session, id = match(worker.claim, '^([^/]*)/(.*)$')
  worker.credit, worker.sent = worker.credit - count, worker.sent + 1
  if worker.deque then extend.handed(ctx, queue, worker, count) end
  queue.active, queue.begun = queue.active + count, queue.begun + count
  if queue.spacing > 0 then queue.tat = math.max(queue.tat, ctx.now) + count * queue.spacing end
  local token = nextTokens(ctx, count)
  -- Redis's Lua hashes every string that it makes, so the jobs are concatenated once.
  items[1] = '["changed","' .. id .. '","deliver",' .. text(worker.sent) .. ',' .. token .. ',[' .. items[1]
  items[count] = items[count] .. ']]'
  deliver(ctx, session, concat(items, ','))
end

-- Hands jobs out for as long as there are any, the limits allow it, and a worker has credit.
local function dispatchJobs(ctx, queue)
  local handed = 0
  while queue.paused == 0 do
    -- A job that expires may have another one begin.
    if queue.ending then extend.release(ctx, queue) end
    if queue.touched then groups.place(ctx, queue) end
    local ready = readyIn(queue)
    local inGroups = queue.grouped > 0 and groups.ready(queue) or 0
    ready = ready + inGroups
    if ready + queue.stored == 0 then return end
    if queue.after > ctx.now then return soonerDue(ctx, queue, queue.after) end
    local allowed = MOST.handed
    if queue.limit > 0 then allowed = queue.limit - queue.active end
    if allowed <= 0 then return end
    local byRate = allowedByRate(ctx, queue)
    if byRate <= 0 then return soonerDue(ctx, queue, math.ceil(queue.tat + queue.spacing - queue.burst)) end
    if handed >= MOST.handed then return soonerDue(ctx, queue, ctx.now) end
    local worker = queue.stored > 0 and extend.owner(ctx, queue) or nextWorker(ctx, queue)
    if not worker then
      queue.lacking = true
      return
    end
    local some = math.min(worker.credit, MOST.hand, allowed, byRate)
    local before, items = queue.expired + queue.delayed, nil
    if queue.stored > 0 then
      items = extend.deal(ctx, queue, worker, some, ready, inGroups)
    else
      some = math.min(some, math.ceil(ready / (#queue.list - queue.head + 2)))
      items = inGroups > 0 and groups.take(ctx, queue, worker.claim, some)
        or takeJobs(ctx, queue, worker.claim, some)
    end
    -- Jobs that have expired, or begin later, are work too.
    handed = handed + math.max(1, #(items or {}) + queue.expired + queue.delayed - before)
    handOutTo(ctx, queue, worker, items or {})
    enlist(queue, worker)
    -- No worker of the list may have the other jobs.
    if not items then return end
  end
end

local function arm(queue, claim)
  if queue.shards == 1 then return end
  queue.arming = queue.arming or {}
  queue.arming[claim] = true
end

-- -----------------------------------------------------------------------------
-- The end of a call
-- -----------------------------------------------------------------------------

local function everyKey(queue, act)
  for _, key in ipairs({
    queue.key, queue.u, queue.h, queue.n, queue.l, queue.U, queue.delays, queue.letters, queue.ids, queue.notebook,
    queue.order, queue.turns, queue.schedules
  }) do act(key) end
end

-- A queue without jobs and members is removed, but for the ids and offers that are still known, and what holds back the next jobs.
local function forgetQueue(ctx, queue)
  -- What else the end of the call may do must find it as later calls will.
  ctx.queues[queue.key] = nil
  call('ZREM', ctx.dues, '@' .. sub(queue.key, #ctx.prefix + 1))
  local named = queue.named > 0 and queue.named + windowOf(queue) or 0
  local held = queue.grouped > 0 and groups.heldFor(queue) or 0
  local known = math.ceil(math.max(named - ctx.now, queue.kept - ctx.now, queue.tat - ctx.now, queue.after - ctx.now, held))
  if known <= 0 then
    call('DEL', queue.even, queue.odd)
    return everyKey(queue, function(key) call('DEL', key) end)
  end
  everyKey(queue, function(key) if key ~= queue.key and key ~= queue.turns then call('DEL', key) end end)
  for source = 1, #FIELD do queue[FIELD[source]] = 0 end
  queue.bounded, queue.expiring = 1, 0
  call('HSET', queue.key, 's', packQueue(queue))
  call('PEXPIRE', queue.key, text(known))
  call('PEXPIRE', queue.turns, text(known))
end

local function writeNoted(ctx, queue)
  if not next(queue.noted) then return end
  -- The window may have changed in this call.
  local now = turnsOf(ctx, queue)
  local args = { now }
  for field, value in pairs(queue.noted) do
    args[#args + 1], args[#args + 2] = field, value
    if #args > 2000 then
      call('HSET', unpack(args))
      args = { now }
    end
  end
  if #args > 1 then call('HSET', unpack(args)) end
  call('PEXPIRE', now, text(2 * windowOf(queue)))
end

-- Trims the finished jobs of a level.
local function trimLevel(queue, letter)
  local stream = queue[letter]
  queue[DONE[letter]] = 0
  local pending = tryJobs('XPENDING', stream, JOBS)
  if not pending then return end
  local first = pending[2] or text(queue[AT[letter]]) .. '-' .. text(queue[LAST[letter]] + 1)
  call('XTRIM', stream, 'MINID', '=', first)
  local left = call('XLEN', stream) - queue[WAITING[letter]] - pending[1]
  queue[FULL[letter]] = left >= MOST.done and 1 or 0
end

-- What the requests of a call have led to: jobs begin, and members and subscribers hear of it.
extend.endCall = function(ctx, queue)
  -- What runs offer now is handed out below.
  if queue.ended then extend.tellSubscribers(ctx, queue, true) end
  queue.finished = true
  if queue.workers > 0 then dispatchJobs(ctx, queue) end
  if queue.length > 0 or queue.queued > 0 then extend.bound(ctx, queue) end
  if queue.ending then extend.release(ctx, queue) end
  if queue.ending then extend.suspend(ctx, queue) end
  if queue.shards > 1 then extend.tellOfMore(ctx, queue) end
  if queue.draining > 0 then extend.tellDrained(ctx, queue) end
  for letter, done in pairs(DONE) do
    if queue[done] >= MOST.trimmed or queue[done] > 0 and queue.active == 0 then trimLevel(queue, letter) end
  end
  if queue.ended then extend.tellSubscribers(ctx, queue, false) end
end

local function writeQueue(ctx, queue)
  if queue.recount then queue.dead = call('XLEN', queue.letters) end
  writeNoted(ctx, queue)
  groups.finish(ctx, queue)
  local jobs = jobsOf(queue)
  if jobs == 0 and queue.members == 0 and queue.workers == 0 then return forgetQueue(ctx, queue) end
  if #queue.fresh > 0 then listOfWorkers(queue) end
  if queue.relisted then queue.idle = #queue.list - queue.head + 1 end
  -- Jobs stay until they are done; a queue that never had one does not.
  local bounded = queue.bounded
  if jobs > 0 then queue.bounded = 0 elseif not queue.known then queue.bounded = 1 end
  local args = { queue.key, 's', packQueue(queue) }
  if queue.relisted then args[4], args[5] = 'q', concat(queue.list, ' ', queue.head) end
  for claim, worker in pairs(queue.loaded) do
    if worker and worker.changed then
      args[#args + 1] = 'w' .. claim
      local packed = text(worker.credit) .. ' ' .. text(worker.sent) .. (worker.listed and ' 1' or ' 0')
      if worker.deque then packed = packed .. ' ' .. text(worker.busy) .. ' ' .. worker.deque end
      args[#args + 1] = packed
    end
  end
  if queue.deques then extend.writeDeques(queue, args) end
  call('HSET', unpack(args))
  if queue.bounded < bounded then
    everyKey(queue, function(key) call('PERSIST', key) end)
  elseif queue.bounded > bounded or queue.bounded == 1 and queue.joined then
    keep(queue.key)
    if queue.grouped > 0 then keep(queue.turns) end
  end
  if queue.next then alarm(ctx, queue.key, math.max(0, queue.next - ctx.now)) end
end

-- The record is written in any case: without it, all that the call has done until an error would be unknown.
finishQueue = function(ctx, queue)
  local fine, cause = pcall(extend.endCall, ctx, queue)
  queue.finished = true
  writeQueue(ctx, queue)
  if not fine then error(cause, 0) end
end

-- The alarm rings when the next job or schedule of `delayed` is due.
local function expectDelayed(ctx, queue)
  if queue.expiring > 0 then extend.expectExpired(ctx, queue) end
  if queue.delayed + queue.plans == 0 then return end
  local first = call('ZRANGEBYSCORE', queue.delays, 0, '(+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if first then soonerDue(ctx, queue, tonumber(first)) end
end

-- Removes dead letters that are too old. The alarm rings when the next one is.
local function expectLetters(ctx, queue)
  local retain = queue.dead > 0 and policyOf(queue).retain or 0
  if retain == 0 then return end
  call('XTRIM', queue.letters, 'MINID', '=', text(ctx.now - retain) .. '-0')
  queue.recount = true
  local oldest = call('XRANGE', queue.letters, '-', '+', 'COUNT', 1)[1]
  if oldest then soonerDue(ctx, queue, tonumber(match(oldest[1], '^%d+')) + retain + 1) end
end

-- -----------------------------------------------------------------------------
-- Offer
-- -----------------------------------------------------------------------------

-- Options that are texts.
local TEXTS = 'ixqgypo'

-- The options of an offer: letters with numbers, see `queue.offer`. Texts stand behind the body.
local function wishOf(values, at, more)
  local wish = { level = 'n', at = at }
  for letter, number in string.gmatch(more, '(%a)(%d*)') do
    if LOWER[letter] and number == '' then
      wish.level = letter
    elseif find(TEXTS, letter, 1, true) then
      local behind = wish.at + tonumber(number)
      wish[letter], wish.at = sub(values, wish.at, behind - 1), behind
    else
      wish[letter] = number
    end
  end
  return wish
end

-- Jobs of `held` become pending as they are offered: nothing else reads that stream. Answers those that are there.
local function holdJobs(queue, consumer, ids)
  if #ids == 0 then return {} end
  local args = { 'XCLAIM', queue.U, JOBS, consumer, 0 }
  for at, id in ipairs(ids) do args[5 + at] = id end
  for _, last in ipairs({ 'RETRYCOUNT', 0, 'FORCE', 'JUSTID' }) do args[#args + 1] = last end
  local held = tryJobs(unpack(args))
  if held then return held end
  startJobs(queue.U)
  return tryJobs(unpack(args))
end

local function offerWish(ctx, queue, id, body, wish, holding)
  local args = { queue[wish.level], id, 'b', body }
  for _, name in ipairs({ 'i', 'a', 't', 's', 'x', 'q', 'g', 'r' }) do
    if wish[name] then args[#args + 1], args[#args + 2] = name, wish[name] end
  end
  local till = wish.e and ctx.now + tonumber(wish.e)
  if till then args[#args + 1], args[#args + 2] = 'e', text(till) end
  local due = wish.f and 0 or wish.d and ctx.now + tonumber(wish.d) or wish.w and tonumber(wish.w)
  local letter = wish.level
  local dealt = wish.o or wish.c
  if due or wish.g or wish.p or dealt then
    letter = (wish.g and groups.letters or HELD)[wish.level]
    args[1] = queue.U
    local later, blocked = due and due > ctx.now, wish.p and extend.isBlocked(wish)
    dealt = dealt and not (due or blocked)
      and extend.push(queue, wish.o or extend.home(queue, tonumber(wish.c)), match(id, '(%d+)%-(%d+)'))
    if not dealt then
      local consumer = later and DELAYED or consumerOf(letter, blocked and BLOCKED or RETURNED)
      local ids = holding[consumer] or {}
      holding[consumer], ids[#ids + 1] = ids, id
    end
    if wish.f then
      local number = tonumber(match(id, '%d+$'))
      call('ZADD', queue.delays, text((1 - FRONT[letter]) * FRONT_SPAN - number), letter .. id)
      queue.stacked = queue.stacked + 1
    end
    if wish.g and not blocked then groups.offered(queue, letter, id, wish.g, later) end
    if later then
      call('ZADD', queue.delays, text(due), letter .. id)
      queue.delayed = queue.delayed + 1
      soonerDue(ctx, queue, due)
    elseif not wish.g and not blocked and not dealt then
      queue[READY[letter]] = queue[READY[letter]] + 1
    end
  else
    queue[WAITING[letter]] = queue[WAITING[letter]] + 1
  end
  call('XADD', unpack(args))
  if till then extend.expires(ctx, queue, letter .. id, till) end
  if wish.i then call('HSET', queue.ids, wish.i, letter .. id) end
  if wish.y then call('HSET', queue.key, 'y' .. letter .. id, wish.y) end
  return letter .. id
end

-- The jobs of `held` that were offered so far become pending.
local function holdAll(queue, holding)
  for consumer, ids in pairs(holding) do
    holdJobs(queue, consumer, ids)
    holding[consumer] = nil
  end
end

-- Stores jobs, see `queue.offer`: the number of the first one, and the jobs that others were in the way of.
-- When the queue has a length, `claim` says of whom, and false that it does not matter.
local function storeJobs(ctx, queue, values, shapes, claim)
  queue.stamp = math.max(queue.stamp, ctx.now)
  local first, place, at, known, holding = queue.number + 1, 0, 1, {}, {}
  local time, added, normal = text(queue.stamp) .. '-', queue.number, queue.n
  -- The number of the last job that there is room for.
  local last, full = math.huge, false
  if queue.length > 0 and claim ~= false then last = added end
  local function hasRoom()
    if added < last then return true end
    if full then return false end
    holdAll(queue, holding)
    last = added + extend.room(ctx, queue, claim)
    full = added == last
    return not full
  end
  for size, more in string.gmatch(shapes, '(%d+)(%S*)') do
    local behind = at + size
    local body = sub(values, at, behind - 1)
    if more == '' then
      if added < last or hasRoom() then
        added = added + 1
        call('XADD', normal, time .. text(added), 'b', body)
        queue.c9 = queue.c9 + 1
      else
        known[#known + 1] = extend.refusal(queue, place)
      end
      at = behind
    elseif find(more, '^o%d+$') then
      -- As most jobs of deques are.
      at = behind + sub(more, 2)
      if added < last or hasRoom() then
        added = added + 1
        extend.place(queue, sub(values, behind, at - 1), time .. text(added), added, body, holding)
      else
        known[#known + 1] = extend.refusal(queue, place)
      end
    else
      local wish = wishOf(values, behind, more)
      local job = wish.i and (call('HGET', queue.ids, wish.i) or recalled(ctx, queue, 'i' .. wish.i))
      if wish.q then
        holdAll(queue, holding)
        job = extend.duplicated(ctx, queue, wish, body)
      end
      if job then
        known[#known + 1] = '[' .. text(place) .. ',"' .. job .. '"]'
      else
        if wish.p then holdAll(queue, holding) end
        local unknown = wish.p and extend.precede(ctx, queue, wish)
        local blocked = wish.p and not unknown and extend.isBlocked(wish)
        -- It takes no room, and cannot wait for any: the jobs before it would not be known any more.
        if blocked then last, queue.apart = last + 1, queue.apart + 1 end
        if unknown then
          known[#known + 1] = '[' .. text(place) .. ',3,' .. text(unknown) .. ']'
        elseif not blocked and not hasRoom() then
          known[#known + 1] = extend.refusal(queue, place)
        else
          added = added + 1
          job = offerWish(ctx, queue, time .. text(added), body, wish, holding)
          if wish.q then extend.placed(ctx, queue, wish, job) end
          if blocked then
            holdAll(queue, holding)
            extend.blocked(ctx, queue, job, wish)
          end
          if wish.behind then known[#known + 1] = '[' .. text(place) .. ',"' .. job .. '",1]' end
        end
      end
      at = wish.at
    end
    place = place + 1
  end
  queue.number = added
  holdAll(queue, holding)
  return first, known
end

local function offerOnce(ctx, queue, values, shapes, node, number, claim)
  local field = 'p' .. node
  local last, before = match(recalled(ctx, queue, field) or '', '^(%d+) (.*)$')
  if last == number then return before end
  if last and tonumber(last) > tonumber(number) then return '["late"]' end
  -- They would be in the way of these.
  if queue.expiring > 0 then extend.expire(ctx, queue) end
  local first, known = storeJobs(ctx, queue, values, shapes, claim)
  local answered = reply('offered', queue.stamp, first, json('[' .. concat(known, ',') .. ']'))
  noteIn(ctx, queue, field, number .. ' ' .. answered)
  return answered
end

-- queue.offer: adds jobs, all or none, once for the number of a coordinator's offer. `values` has their bodies, each followed by
-- the texts that the job has. `shapes` has for each job the bytes of its body, and letters for its options:
--   u h n l   its level, if that is not n
--   f         it begins before all others of its level
--   d w e t   delay, time, expiry and timeout, in ms
--   a         attempts
--   r         its outcome is kept, as it has to be for a subscriber: for so many ms, or without a number as long as ids are
--   i x g y   bytes of its id, trace, group and subscriber, which are texts
--   o c       bytes of the worker whose deque it goes to, a text; or the number of a key, and it goes to the deque of that
--   q v       bytes of its id for deduplication, a text with the letter of the mode in front; the window of that, in ms
--   p         bytes of the jobs that it runs after, see lua/QueueAfter.lua
-- The jobs have consecutive numbers from `first` on. `known` has the exceptions, each with its place, from 0 on: the former job of
-- a duplicate; a job with a 1 behind it, which was stored under this id; 0 if the queue is full, and 2 if the job waits for room;
-- 3 and the place of a job that it runs after and that is not known.
-- keys: all
-- args: values string, shapes string, node string, number number
-- reply: ["offered", stamp number, first number, known json] | ["late"]
handlers['queue.offer'] = function(ctx, key, values, shapes, node, number)
  return offerOnce(ctx, loadQueue(ctx, key), values, shapes, node, number)
end

-- -----------------------------------------------------------------------------
-- Members and workers
-- -----------------------------------------------------------------------------

-- queue.join: becomes a member, and says how the queue works: how many jobs may be in work (0 for no
-- limit), how many ms are between two jobs, and how many ms of that may be saved up for a burst (0 for no limit), how long
-- ids are known, how many dead letters are kept, and for how long (0 for ever), after how many crashes a job is one, how many
-- jobs may wait (0 for no limit), and what becomes of offers beyond that: see lua/QueueLimits.lua. Of each group: how many jobs
-- may be in work, how many ms are between two, and how many of these may be saved up. It also says how many shards there are
-- (0: as many as there were), among which the limits but those of groups are divided, and which one this is. Another number than
-- that of a member before is refused while there are jobs or members. The last member decides how the queue works: `decided` is 1
-- for one that does so now, the number that it was answered for one that did so before, and 0 for one that leaves that as it is.
-- It answers how many shards there are, whether the queue has schedules, and errands, when the member decided, and how long ids are known.
-- When that changes, all members are told by a sweep.
-- keys: all
-- args: id string, decided number, limit number, spacing number, burst number, window number, letters number, retain number, crashes number, length number, overflow number, grouplimit number, groupspacing number, groupburst number, shards number, shard number
-- reply: ["joined", shards number, scheduled boolean, errands boolean, decided number, window number] | ["mismatch", shards number]
handlers['queue.join'] = function(ctx, key, id, decided, limit, spacing, burst, window, letters, retain, crashes, length, overflow, grouplimit, groupspacing, groupburst, shards, shard)
  local queue = loadQueue(ctx, key)
  shards = tonumber(shards)
  if shards > 0 and shards ~= queue.shards then
    -- After a loss of data, workers and offers can come before any member.
    local used = queue.window > 0 and queue.members + queue.workers + jobsOf(queue) > 0
    if used then return reply('mismatch', queue.shards) end
    queue.shards = shards
  end
  local before = policyOf(queue)
  decided = decided == '1' and math.max(before.decided + 1, ctx.now) or tonumber(decided) or 0
  if decided > before.decided or queue.window == 0 then
    queue.limit = extend.shareOf(queue, tonumber(limit), tonumber(shard))
    queue.spacing = tonumber(spacing) * queue.shards
    queue.burst = math.max(tonumber(burst), queue.spacing)
    if queue.window ~= tonumber(window) then
      if queue.window > 0 then extend.beginSweep(ctx, queue) end
      queue.window, queue.current = tonumber(window), nil
      -- What is known stays so for one of the new turns at least: they do not follow the former ones.
      queue.turn = floor(ctx.now / queue.window) + 1
    end
    queue.length = extend.shareOf(queue, tonumber(length), tonumber(shard))
    queue.overflow = tonumber(overflow)
    queue.policy = {
      letters = tonumber(letters), retain = tonumber(retain), crashes = tonumber(crashes),
      grouplimit = tonumber(grouplimit), groupspacing = tonumber(groupspacing), groupburst = tonumber(groupburst),
      decided = decided
    }
    call('HSET', key, 'm', packQueuePolicy(queue.policy))
    if queue.grouped > 0 and extend.haveChanged(before, queue.policy) then extend.beginSweep(ctx, queue) end
  end
  queue.joined = true
  if enrol(ctx, key, id, PERMANENT) then queue.members = queue.members + 1 end
  if queue.plans > 0 then
    call('HSET', key, 'n', claimOf(ctx, id))
    extend.wakePlans(ctx, queue)
  end
  -- Alarms are forgotten when no session was alive for a day, and so are sessions that were not reaped by then.
  if queue.rested > ABANDONED then extend.beginSweep(ctx, queue) end
  if queue.sweep > 0 then soonerDue(ctx, queue, ctx.now) end
  if queue.awaited > 0 then extend.resume(ctx, queue) end
  expectDelayed(ctx, queue)
  expectLetters(ctx, queue)
  if queue.grouped > 0 then groups.ring(ctx, queue) end
  return reply('joined', queue.shards, queue.plans > 0, extend.hasErrands(ctx, key), math.max(before.decided, decided), queue.window)
end

-- The jobs that a worker has in hand, as `describedJob` describes them, and those of them that were cancelled.
local function inHandOf(queue, claim)
  local items, cancelled = {}, {}
  for _, letter in ipairs(EVERY_LETTER) do
    for _, pending in ipairs(pendingOf(queue[letter], MOST.credit, consumerOf(letter, claim))) do
      local fields = entryAt(queue[letter], pending[1])
      if fields then
        local job = letter .. pending[1]
        if queue.notes > 0 then reviseFields(fields, noteOf(queue, 'b' .. job), noteOf(queue, 'k' .. job)) end
        items[#items + 1] = describedJob(letter, pending[1], text(pending[4]), fields)
      else
        cancelled[#cancelled + 1] = letter .. pending[1]
      end
    end
  end
  return items, cancelled
end

-- queue.work: becomes a worker, with credit for so many jobs. A worker that asks again hears of all jobs that it has in
-- hand, with new tokens from `token` on, and how many deliveries it was sent so far: a delivery among these that comes later
-- is old. It also hears of cancelled jobs whose slots it has not freed.
-- keys: all
-- args: id string, credit number
-- reply: ["joined", sent number, token number, jobs json, cancelled strings]
handlers['queue.work'] = function(ctx, key, id, credit)
  local claim = claimOf(ctx, id)
  local queue = loadQueue(ctx, key, claim)
  local worker = workerOf(queue, claim)
  if worker then
    arm(queue, claim)
    local items, cancelled = inHandOf(queue, claim)
    local token = json(nextTokens(ctx, #items))
    return reply('joined', worker.sent, token, json('[' .. concat(items, ',') .. ']'), list(cancelled))
  end
  -- As for a member that joins: errands have workers only.
  if queue.rested > ABANDONED then
    extend.beginSweep(ctx, queue)
    expectDelayed(ctx, queue)
  end
  worker = { claim = claim, credit = tonumber(credit), sent = 0, listed = false }
  queue.loaded[claim], queue.workers = worker, queue.workers + 1
  own(ctx, key, id, PERMANENT)
  enlist(queue, worker)
  arm(queue, claim)
  return reply('joined', 0, 0, json('[]'), json('[]'))
end

-- The queue, the worker that asks, if it is one still, and its claim.
local function askingWorker(ctx, key, id)
  local claim = claimOf(ctx, id)
  local queue = loadQueue(ctx, key, claim)
  local worker = workerOf(queue, claim)
  if worker then worker.before = queue.active end
  return queue, worker, claim
end

-- A worker takes so many jobs more. What has become of jobs that it had in hand is done by then.
local function giveCredit(ctx, queue, worker, take)
  worker.credit = worker.credit + tonumber(take)
  if worker.deque then extend.relieved(ctx, queue, worker, worker.before - queue.active) end
  if tonumber(take) > 0 then arm(queue, worker.claim) end
  enlist(queue, worker)
end

-- queue.done: a worker has done plain jobs, and takes so many more. The jobs are their ids without the letter, which stands
-- before those of each stream.
-- keys: all
-- args: id string, jobs string, take number
-- reply: ["done"] | ["missing"]
-- flags: allow-oom
handlers['queue.done'] = function(ctx, key, id, jobs, take)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  local sorted, done, letter = {}, 0, nil
  for part in string.gmatch(jobs, '%S+') do
    if #part == 1 then
      letter = part
    elseif queue.cancelled == 0 or not extend.freed(queue, letter, part) then
      local ids = sorted[letter] or {}
      sorted[letter], ids[#ids + 1] = ids, part
    end
  end
  for letter, ids in pairs(sorted) do
    local stream = queue[letter]
    if groups.levels[letter] then groups.done(queue, letter, ids) end
    local count = call('XACK', stream, JOBS, unpack(ids))
    done = done + count
    if not LAST[letter] or queue[FULL[letter]] == 1 then
      call('XDEL', stream, unpack(ids))
    end
    if LAST[letter] then queue[DONE[letter]] = queue[DONE[letter]] + count end
    if queue.notes + queue.awaited + queue.expiring > 0 then
      for at = 1, #ids do ids[at] = letter .. ids[at] end
      dropNotes(ctx, queue, ids)
      if queue.awaited > 0 then extend.settled(ctx, queue, ids, 's') end
    end
  end
  queue.active, queue.completed = queue.active - done, queue.completed + done
  giveCredit(ctx, queue, worker, take)
  return '["done"]'
end

-- A job is done. Answers whether it was there.
local function finishJob(ctx, queue, job, given, deduped, outcome, life)
  local letter, at = split(job)
  if queue.cancelled > 0 and extend.freed(queue, letter, at) then return false end
  if groups.levels[letter] then groups.done(queue, letter, { at }) end
  if removeJob(queue, letter, at) == 0 then return false end
  queue.active, queue.completed = queue.active - 1, queue.completed + 1
  dropNotes(ctx, queue, { job })
  releaseId(ctx, queue, given, job, deduped)
  conclude(ctx, queue, job, given, outcome ~= '' and life, outcome, true)
  return true
end

-- queue.finish: a worker has done a job whose id its producer gave, or whose outcome is kept: for so many ms, or with `life` 0 as long as
-- ids are
-- keys: all
-- args: id string, job string, given string, deduped string, outcome string, life number, take number
-- reply: ["done"] | ["missing"]
-- flags: allow-oom
handlers['queue.finish'] = function(ctx, key, id, job, given, deduped, outcome, life, take)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  finishJob(ctx, queue, job, given, deduped, outcome, life)
  giveCredit(ctx, queue, worker, take)
  return '["done"]'
end

-- Jobs that a worker gives up go back, each with a count of its own.
local function returnJobs(queue, letter, counted)
  for count, ids in pairs(counted) do
    moveJobs(queue[letter], consumerOf(letter, RETURNED), ids, count)
    if groups.levels[letter] then
      groups.returned(queue, letter, ids, count)
    else
      queue[READY[letter]] = queue[READY[letter]] + #ids
    end
    queue.active = queue.active - #ids
  end
end

-- queue.retry: a worker gives a job back, to be handed out again in so many ms; `attempted` says whether that was an attempt
-- keys: all
-- args: id string, job string, delay number, attempted boolean, take number
-- reply: ["returned"] | ["missing"]
-- flags: allow-oom
handlers['queue.retry'] = function(ctx, key, id, job, delay, attempted, take)
  local queue, worker, claim = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  local letter, at = split(job)
  local freed = queue.cancelled > 0 and extend.freed(queue, letter, at)
  local holder, count = holdingOf(queue, letter, at)
  if holder == claim and not freed then
    if attempted ~= '1' then count = count - 1 end
    if tonumber(delay) > 0 then
      if groups.levels[letter] then groups.postponed(queue, letter, at, count) end
      delayJob(ctx, queue, letter, at, ctx.now + tonumber(delay), count)
      queue.active = queue.active - 1
    else
      returnJobs(queue, letter, { [count] = { at } })
    end
    if queue.expiring > 0 then extend.lapse(ctx, queue, job) end
  end
  giveCredit(ctx, queue, worker, take)
  return '["returned"]'
end

-- queue.bury: a worker puts a job aside as a dead letter
-- keys: all
-- args: id string, job string, reason string, message string, outcome string, take number
-- reply: ["buried"] | ["missing"]
-- flags: allow-oom
handlers['queue.bury'] = function(ctx, key, id, job, reason, message, outcome, take)
  local queue, worker, claim = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  local letter, at = split(job)
  local freed = queue.cancelled > 0 and extend.freed(queue, letter, at)
  local holder, count = holdingOf(queue, letter, at)
  if holder == claim and not freed then
    local fields = entryAt(queue[letter], at)
    if fields then bury(ctx, queue, job, fields, reason, count, message, outcome) end
    if groups.levels[letter] then groups.done(queue, letter, { at }) end
    removeJob(queue, letter, at)
    queue.active = queue.active - 1
  end
  giveCredit(ctx, queue, worker, take)
  return '["buried"]'
end

-- queue.credit: a worker takes more jobs at a time, or fewer; with `stop`, none from now on
-- keys: all
-- args: id string, change number, stop boolean
-- reply: ["credited"] | ["missing"]
-- flags: allow-oom
handlers['queue.credit'] = function(ctx, key, id, change, stop)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  if stop == '1' then worker.credit, worker.changed = 0, true else giveCredit(ctx, queue, worker, change) end
  return '["credited"]'
end

-- -----------------------------------------------------------------------------
-- Jobs
-- -----------------------------------------------------------------------------

-- A job by its own id, or by that of its producer.
local function jobNamed(queue, name)
  local job = call('HGET', queue.ids, name) or name
  local letter, at = split(job)
  return job, letter, at
end

-- Removes a job that no worker has, and says what has become of it.
extend.removeUnbegun = function(ctx, queue, job, fields, holder, count, outcome)
  local letter, at = split(job)
  endJob(ctx, queue, letter, at, fields, outcome)
  if holder == BLOCKED then return extend.unblocked(queue, job) end
  if groups.levels[letter] then groups.cancelled(queue, letter, at, fields, holder, count) end
  if not holder then
    local field = WAITING[letter] or 'stored'
    queue[field] = math.max(0, queue[field] - 1)
    if field == 'stored' then queue.gaps = queue.gaps + 1 end
  elseif holder == RETURNED then
    unstack(queue, job)
    if not groups.levels[letter] then queue[READY[letter]] = math.max(0, queue[READY[letter]] - 1) end
  else
    call('ZREM', queue.delays, job)
    queue.delayed = queue.delayed - 1
  end
end

-- queue.cancel: removes a job. One that is in work is interrupted, see lua/QueueCancel.lua. With `unbegun`, a job stays that was attempted.
-- keys: all
-- args: name string, unbegun boolean
-- reply: ["cancelled", active boolean] | ["begun"] | ["missing"]
-- flags: allow-oom
handlers['queue.cancel'] = function(ctx, key, name, unbegun)
  local queue = loadQueue(ctx, key)
  local job, letter, at = jobNamed(queue, name)
  if not letter then return MISSING end
  local fields, holder, count = jobAt(queue, letter, at)
  if not fields then return MISSING end
  if unbegun == '1' and (count or 0) % CRASH > 0 then return '["begun"]' end
  local active = holder and find(holder, '/', 1, true)
  if active then
    extend.cancel(ctx, queue, letter, at, fields, holder)
  else
    extend.removeUnbegun(ctx, queue, job, fields, holder, count, '["cancelled"]')
  end
  return reply('cancelled', active and true or false)
end

-- queue.status: what has become of a job
-- keys: all
-- args: name string
-- reply: ["status", state string, attempts number] | ["missing"]
-- flags: allow-oom
handlers['queue.status'] = function(ctx, key, name)
  local queue = readQueue(ctx, key)
  local job, letter, at = jobNamed(queue, name)
  if not letter then return MISSING end
  local fields, holder, count = jobAt(queue, letter, at)
  if not fields then return MISSING end
  local state = 'active'
  if not holder then
    state = tonumber(noteOf(queue, 'd' .. job) or 0) > ctx.now and 'delayed' or 'waiting'
  elseif holder == RETURNED then
    state = 'waiting'
  elseif holder == DELAYED then
    state = 'delayed'
  elseif holder == BLOCKED then
    state = 'blocked'
  end
  return reply('status', state, (count or 0) % CRASH)
end

-- queue.watch: a member waits for the outcome of a job, by its own id, or by that of its producer
-- keys: all
-- args: id string, name string
-- reply: ["outcome", job string, outcome json] | ["watching", job string] | ["missing"]
handlers['queue.watch'] = function(ctx, key, id, name)
  local queue = loadQueue(ctx, key)
  local job = call('HGET', queue.ids, name) or recalled(ctx, queue, 'i' .. name) or name
  local outcome = recalled(ctx, queue, 'r' .. job)
  if outcome then return reply('outcome', job, json(outcome)) end
  local letter, at = split(job)
  local fields = letter and jobAt(queue, letter, at)
  if not fields or not fieldOf(fields, 'r') then return MISSING end
  local claim, waiting = claimOf(ctx, id), call('HGET', key, 'a' .. job) or ''
  if not find(waiting .. ' ', claim .. ' ', 1, true) then call('HSET', key, 'a' .. job, waiting .. claim .. ' ') end
  return reply('watching', job)
end

-- queue.pause: no jobs are handed out from now on, or again, also if a worker has asked for less haste
-- keys: all
-- args: paused boolean
-- reply: ["paused"]
-- flags: allow-oom
handlers['queue.pause'] = function(ctx, key, paused)
  local queue = loadQueue(ctx, key)
  if paused == '1' then queue.paused = 1 else queue.paused, queue.after = 0, 0 end
  if queue.plans > 0 and paused ~= '1' then extend.wakePlans(ctx, queue) end
  return '["paused"]'
end

-- queue.state: how many jobs and workers there are, and when the oldest job that waits in its order was offered, 0 for none
-- keys: all
-- args:
-- reply: ["state", ready strings, delayed number, active number, dead number, workers number, paused boolean, completed number, buried number, expired number, dropped number, oldest number, blocked number] | ["stale"] | ["missing"]
-- flags: allow-oom
handlers['queue.state'] = function(ctx, key)
  local queue = readQueue(ctx, key)
  if not queue.known then return MISSING end
  if isStale(ctx) then return STALE end
  local ready, oldest = {}, nil
  for letter, field in pairs(WAITING) do
    local from = '(' .. text(queue[AT[letter]]) .. '-' .. text(queue[LAST[letter]])
    local first = queue[field] > 0 and call('XRANGE', queue[letter], from, '+', 'COUNT', 1)[1]
    if first then oldest = math.min(oldest or math.huge, tonumber(match(first[1], '^%d+'))) end
  end
  for level = 1, 4 do
    ready[level] = queue[FIELD[3 * level - 2]] + queue[FIELD[3 * level - 1]] + queue[FIELD[3 * level]]
      + groups.waiting(queue, level)
  end
  ready[3] = ready[3] + queue.stored
  return reply('state', list(ready), queue.delayed, queue.active, queue.dead, queue.workers, queue.paused == 1,
    queue.completed, queue.buried, queue.expired, queue.dropped, oldest or 0, queue.blocked)
end

-- -----------------------------------------------------------------------------
-- Dead letters
-- -----------------------------------------------------------------------------

-- queue.letters: dead letters behind an id, the oldest first: id, job, reason, attempts, crashes, error, body, id of the
-- producer, group, lines of the log
-- keys: all
-- args: behind string, count number
-- reply: ["letters", letters json]
-- flags: allow-oom
handlers['queue.letters'] = function(ctx, key, behind, count)
  local found = call('XRANGE', ctx.dead, behind == '' and '-' or '(' .. behind, '+', 'COUNT', count)
  local letters = {}
  for at, entry in ipairs(found) do
    local fields = entry[2]
    local parts = { encoded(entry[1]) }
    for _, name in ipairs({ 'j', 'w', 'n', 'c', 'm', 'b', 'i', 'g' }) do parts[#parts + 1] = encoded(fieldOf(fields, name) or '') end
    parts[#parts + 1] = encoded(linesOf(fieldOf(fields, 'o')))
    letters[at] = '[' .. concat(parts, ',') .. ']'
  end
  return reply('letters', json('[' .. concat(letters, ',') .. ']'))
end

-- queue.replay: offers the job of a dead letter again, at the end of its level; its attempts begin anew. It has a new id of its own, and
-- is known by its former one as by that of a producer. Another job that has its id is in the way.
-- keys: all
-- args: id string
-- reply: ["replayed", job string] | ["missing"] | ["taken"]
handlers['queue.replay'] = function(ctx, key, id)
  local queue = loadQueue(ctx, key)
  local fields = entryAt(queue.letters, id)
  if not fields then return MISSING end
  local given = fieldOf(fields, 'i') or fieldOf(fields, 'j')
  if call('HGET', queue.ids, given) then return '["taken"]' end
  local group = fieldOf(fields, 'g')
  local letter = LOWER[sub(fieldOf(fields, 'j'), 1, 1)]
  if group then letter = groups.letters[letter] end
  queue.number, queue.stamp = queue.number + 1, math.max(queue.stamp, ctx.now)
  local at = text(queue.stamp) .. '-' .. text(queue.number)
  local args, own = { queue[letter], at }, false
  for place = 1, #fields, 2 do
    -- The letter's own fields end with the first one of the job.
    own = own or fields[place] == 'b'
    if own and not find('eiq', fields[place], 1, true) then args[#args + 1], args[#args + 2] = fields[place], fields[place + 1] end
  end
  args[#args + 1], args[#args + 2] = 'i', given
  call('XADD', unpack(args))
  if group then
    holdJobs(queue, consumerOf(letter, RETURNED), { at })
    groups.offered(queue, letter, at, group, false)
  else
    queue[WAITING[letter]] = queue[WAITING[letter]] + 1
  end
  call('HSET', queue.ids, given, letter .. at)
  call('XDEL', queue.letters, id)
  queue.recount = true
  return reply('replayed', letter .. at)
end

-- queue.discard: removes dead letters: those with these ids, or all
-- keys: all
-- args: ids string
-- reply: ["discarded", count number]
-- flags: allow-oom
handlers['queue.discard'] = function(ctx, key, ids)
  local queue = loadQueue(ctx, key)
  local count = 0
  if ids == '' then
    count = call('XLEN', queue.letters)
    call('UNLINK', queue.letters)
  else
    for id in string.gmatch(ids, '%S+') do count = count + call('XDEL', queue.letters, id) end
  end
  queue.recount = true
  return reply('discarded', count)
end

-- -----------------------------------------------------------------------------
-- The end of a session, and alarms
-- -----------------------------------------------------------------------------

-- The jobs that a worker has in hand go back. After a crash they count it, and a job with too many crashes becomes a dead letter.
local function dismissWorker(ctx, queue, claim, crashed)
  local most = crashed and policyOf(queue).crashes
  for _, letter in ipairs(EVERY_LETTER) do
    local stream, consumer = queue[letter], consumerOf(letter, claim)
    repeat
      local pending, counted = pendingOf(stream, MOVED, consumer), {}
      for _, one in ipairs(pending) do
        local id, count = one[1], tonumber(one[4]) + (crashed and CRASH or -1)
        local freed = queue.cancelled > 0 and extend.freed(queue, letter, id)
        local fields = crashed and not freed and floor(count / CRASH) >= most and entryAt(queue[letter], id)
        if fields then
          bury(ctx, queue, letter .. id, fields, 'crashed', count, '', '["crashed"]')
          if groups.levels[letter] then groups.done(queue, letter, { id }) end
          removeJob(queue, letter, id)
          queue.active = queue.active - 1
        elseif not freed then
          local ids = counted[count] or {}
          counted[count], ids[#ids + 1] = ids, id
          if queue.expiring > 0 then extend.lapse(ctx, queue, letter .. id) end
        end
      end
      returnJobs(queue, letter, counted)
    until #pending == 0
    tryJobs('XGROUP', 'DELCONSUMER', stream, JOBS, consumer)
  end
  call('HDEL', queue.key, 'w' .. claim)
  if queue.loaded[claim].deque then extend.bereave(ctx, queue, queue.loaded[claim]) end
  local list = queue.loaded[claim].listed and listOfWorkers(queue) or {}
  for at = #list, queue.head or 1, -1 do
    if list[at] == claim then
      table.remove(list, at)
      queue.relisted = true
    end
  end
  queue.loaded[claim] = false
  queue.workers = queue.workers - 1
end

-- A member or worker is not there any more. Answers whether it was a worker.
local function dropClaim(ctx, queue, claim, crashed)
  if call('HDEL', queue.key, 'o' .. claim) == 1 then queue.members = math.max(0, queue.members - 1) end
  if queue.queued > 0 then extend.depart(queue, claim) end
  local works = workerOf(queue, claim)
  if works then dismissWorker(ctx, queue, claim, crashed) end
  return works
end

reapers.queue = function(ctx, key, session, id)
  local claim = session .. '/' .. id
  local queue, crashed = loadQueue(ctx, key, claim), not hasLeft(ctx, session)
  dropClaim(ctx, queue, claim, crashed)
  -- Its process may live, and send an offer again: that stays known for the window, also if the queue is forgotten before that.
  if crashed and call('HLEN', queue.even) + call('HLEN', queue.odd) > 0 then queue.named = ctx.now end
  if queue.plans > 0 then extend.wakePlans(ctx, queue) end
end

alarms.queue = function(ctx, key)
  local queue = loadQueue(ctx, key)
  local due, sorted, jobs, plans = call('ZRANGEBYSCORE', queue.delays, 0, text(ctx.now), 'LIMIT', 0, MOVED), {}, {}, {}
  for _, job in ipairs(due) do
    local letter, id = split(job)
    if letter then
      local ids = sorted[letter] or {}
      sorted[letter], ids[#ids + 1] = ids, id
      jobs[#jobs + 1] = job
    else
      plans[#plans + 1] = job
    end
  end
  for letter, ids in pairs(sorted) do
    endDelays(queue, letter, ids)
  end
  if queue.grouped > 0 then groups.ring(ctx, queue) end
  if queue.awaited > 0 then extend.resume(ctx, queue) end
  if #jobs > 0 then call('ZREM', queue.delays, unpack(jobs)) end
  if queue.expiring > 0 then extend.expire(ctx, queue) end
  if #plans > 0 then extend.tickPlans(ctx, queue, plans) end
  if queue.sweep > 0 then extend.sweep(ctx, queue) end
  expectDelayed(ctx, queue)
  expectLetters(ctx, queue)
end
