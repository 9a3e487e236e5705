-- A queue: jobs that this actor hands to workers, each until its worker has said what has become of it.
--
-- kinds: queue, errands: hash, urgent, high, normal, low, held, delayed, dead, ids, even, odd, notes, order, turns, schedules
-- after QueueNotes.lua
--
-- A job is one entry of a stream, from its offer until it is done. Its id is "<letter><ms>-<number>": the letter says which
-- stream, and of which level the job is. Numbers are those of the queue, so ids differ between its streams too.
--   u h n l   `urgent`, `high`, `normal`, `low`: jobs that can be handed out in the order of their offers
--   U H N L   `held`, for jobs of each level that cannot: they begin with a delay, or in the deque of a worker
--   V I O M   `held`, for jobs of groups: see lua/QueueGroups.lua
-- Fields of an entry: b <JSON>, and where the job has them: i <id of the producer's, or the first id of a job that was replayed>
-- a <attempts> z <delays between them: src/internal/queue/delays.ts> t <timeout in ms>
-- f <the first id of a job that was replayed, if it has one of its producer, too>
-- e <ms after which it is not begun> r <if its outcome is kept: for how many ms> s <tick and name of its schedule> x <trace>
-- k <the checkpoint of a job that was replayed> q <how it is deduplicated, a letter, and the id for that> g <group>
-- p <the jobs that it runs after, as they were offered: no worker needs them>.
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
--   F<id>              of the id of a producer: the first id of its job, if that was replayed; `ids` has that, too
--   x<id>              of an id for deduplication: the first job, and the job that is kept behind it
--   K                  while waiting jobs are removed: the jobs that were kept behind these, each with the time that it has until the end
--   q                  the list of workers that have credit and no job for it: their claims, in the order of their turns
--   z                  of a queue with other shards: the workers to be told when there are jobs that no worker has credit for
--   h                  the history by minutes: lua/QueueLists.lua
--   e                  while `draining` is 1, the workers that are told when no job waits: their claims
--   n                  the member that is asked for ticks when the member that gave them is dead
--   l                  while a lower length than before is enforced: lua/QueueLimits.lua
--   D D<name> E<...>   deques: lua/QueueStealing.lua
-- `ids` has the ids that producers gave to jobs that are not done: the id of each job. `even` and `odd` have, in turns of
-- `window` ms, i<id> and r<job> of jobs that are done: the job, and its outcome as JSON. They also have t<id> "<time> <job>" of jobs
-- that others are duplicates of until then, p<node> "<number> <reply>" of the last offer of a coordinator, and f<id> of jobs that were
-- removed, whose ids are free: offers do not read it.
-- `dead` is a stream of dead letters: j <id> w <reason> n <attempts> c <crashes> m <error>, o <log> if there is one, and the
-- fields of the job. u <letter> is that of a job before it, whose end has made it a dead letter.
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
-- lua/QueueStraight.lua reads the fields before `delayed` without the table of this record: it changes those up to `at3`, and those from
-- `c1` on are 0 for it.
-- record Queue 2: number, stamp, c9, active, idle, since, begun, waited, ran, last3, at3, turn, window, shards, c1, c2, c3,
--   c4, c5, c6, c7, c8, c10, c11, c12, paused, limit, spacing, length, queued, after, grouped, stored, stacked, notes,
--   expiring, draining, bounded, delayed, dead, served, members, workers, burst, tat, completed, buried, expired, named,
--   last1, last2, last4, at1, at2, at4, done1, done2, done3, done4, full1, full2, full3, full4, overflow, told, dropped,
--   armed, plans, cleared, sweep, blocked, awaited, cancelled, orphaned, gaps, kept
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
-- Of one call: jobs that are moved, handed out to one worker at a time, and to all, and bytes of these. A worker's credit. Of a level: jobs
-- that are done before it is trimmed, and those that may stay.
local MOVED, MOST = 256, { hand = 512, handed = 2048, bytes = 1048576, credit = 1024, trimmed = 64, done = 1024 }
-- So many jobs are read before it is known how large they are.
local FEW_JOBS = 8
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

-- A member waits for what may come with the expiry of a job.
local function expectExpiry(ctx, queue)
  if queue.expiring > 0 then expect(ctx) end
end

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
  queue.key, queue.known, queue.loaded, queue.fresh, queue.apart, queue.offered = key, packed and true, {}, {}, 0, 0
  queue.bytes, queue.counted = 0, 0
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
  local queues = sharedIn(ctx, 'queues')
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
  later(ctx, key, function() extend.finish(ctx, queue) end)
  return queue
end

-- Errands are for actors: they are attempted until they have succeeded.
local function isErrands(queue)
  return match(queue.key, '^{[^}]*}:(%a+)') == 'errands'
end

local function policyOf(queue)
  local packed = call('HGET', queue.key, 'm')
  if packed then return unpackQueuePolicy(packed) end
  local policy = { letters = 10000, retain = 0, crashes = 3, grouplimit = 1, groupspacing = 0, groupburst = 0, decided = 0 }
  -- Of a flow's errands, a group has those whose queue is full: so many of them wait for room at a time.
  if isErrands(queue) then policy.crashes, policy.grouplimit = math.huge, 64 end
  return policy
end

-- -----------------------------------------------------------------------------
-- Groups of the streams
-- -----------------------------------------------------------------------------

local function startJobs(stream)
  local made = redis.pcall('XGROUP', 'CREATE', stream, JOBS, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not find(made.err, 'BUSYGROUP', 1, true) then error(made) end
end

local function pendingOf(stream, count, consumer, from)
  return tryGroup('XPENDING', stream, JOBS, from or '-', '+', count, consumer) or {}
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
  tryGroup('XCLAIM', unpack(args))
end

-- The worker that a pending job is with, or what else its consumer stands for; nothing if it is not pending, and false if its letter is
-- another one.
local function holdingOf(queue, letter, id)
  local pending = (tryGroup('XPENDING', queue[letter], JOBS, id, id, 1) or {})[1]
  if not pending then return nil end
  local consumer = pending[2]
  -- In `held`, consumers end with the letter.
  if LOWER[letter] ~= letter then
    if sub(consumer, -1) ~= letter then return false end
    consumer = sub(consumer, 1, -2)
  end
  return consumer, tonumber(pending[4])
end

local function entryAt(stream, id)
  local entry = call('XRANGE', stream, id, id)[1]
  return entry and entry[2]
end

-- A job that is not done: its fields, and as `holdingOf`.
local function jobAt(queue, letter, id)
  local holder, count = holdingOf(queue, letter, id)
  if holder == false then return nil end
  -- An entry that was handed out and is not pending was not trimmed yet. In `held` it is in a deque, whose jobs have the letter N.
  local last = LAST[letter]
  if not holder and last and tonumber(match(id, '%d+$')) <= queue[last] then return nil end
  if not holder and not last and letter ~= 'N' then return nil end
  return entryAt(queue[letter], id), holder, count
end

-- Nothing for what cannot be an id. Redis refuses longer numbers.
local function split(job)
  local letter, id, ms, number = match(job, '^([uhnlUHNLVIOM])((%d+)%-(%d+))$')
  if letter and #ms <= 16 and #number <= 16 then return letter, id end
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

-- The id that a producer gave is not that of a job any more. Answers the first id of the job, if it was replayed.
local function freeId(queue, given)
  call('HDEL', queue.ids, given)
  local first = queue.buried > 0 and call('HGET', queue.key, 'F' .. given)
  if not first then return nil end
  call('HDEL', queue.ids, first)
  call('HDEL', queue.key, 'F' .. given)
  return first
end

-- The id that a producer gave is free again when the job is done and the window has passed.
local function releaseId(ctx, queue, given, job, deduped)
  if deduped and deduped ~= '' then extend.released(ctx, queue, deduped, job) end
  if not given or given == '' then return end
  local first = freeId(queue, given)
  noteIn(ctx, queue, 'i' .. given, job)
  if first then
    noteIn(ctx, queue, 'i' .. first, job)
    queue.firsts = queue.firsts or {}
    queue.firsts[job] = first
  end
  queue.named = ctx.now
end

-- Keeps the outcome of a job, if that is wanted, and tells its subscriber, and the jobs and members that wait for it.
local function conclude(ctx, queue, job, given, wanted, outcome, how)
  if queue.awaited > 0 then extend.settled(ctx, queue, { job }, how or 'f') end
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
  local buried = call('XADD', unpack(args))
  queue.buried = queue.buried + 1
  queue.recount = true
  local given = fieldOf(fields, 'i')
  releaseId(ctx, queue, given, job, fieldOf(fields, 'q'))
  conclude(ctx, queue, job, given, fieldOf(fields, 'r'), outcome, 'f' .. buried)
  if policy.retain > 0 then
    call('XTRIM', queue.letters, 'MINID', '=', text(ago(ctx, policy.retain)) .. '-0')
    soonerDue(ctx, queue, ctx.now + policy.retain)
  end
end

local function removeJob(queue, letter, id)
  call('XDEL', queue[letter], id)
  -- It may have kept finished jobs behind it from being trimmed.
  if LAST[letter] then queue[DONE[letter]] = queue[DONE[letter]] + 1 end
  return call('XACK', queue[letter], JOBS, id)
end

-- A job is not at the front of its level any more.
local function unstack(queue, job)
  if queue.stacked > 0 then queue.stacked = queue.stacked - call('ZREM', queue.delays, job) end
end

-- The id that a producer gave is free at once. While the outcome of the job is known, it is found by that id all the same, but by no offer.
local function removeId(ctx, queue, given, job, wanted)
  local first = freeId(queue, given)
  -- It may be known from before a replay, or of a job that was removed before.
  extend.forgetIds(ctx, queue, { 'i' .. given, 'f' .. given })
  if not wanted then return end
  extend.noteId(ctx, queue, (split(given) and 'i' or 'f') .. given, job, wanted)
  if first then extend.noteId(ctx, queue, 'i' .. first, job, wanted) end
end

-- Removes a job that was not in work, for another reason than that it is done.
extend.remove = function(ctx, queue, letter, id, fields, outcome)
  removeJob(queue, letter, id)
  unstack(queue, letter .. id)
  dropNotes(ctx, queue, { letter .. id })
  if not fields then return end
  local given, deduped, wanted = fieldOf(fields, 'i'), fieldOf(fields, 'q'), fieldOf(fields, 'r')
  if given then removeId(ctx, queue, given, letter .. id, wanted) end
  if deduped then extend.released(ctx, queue, deduped, letter .. id) end
  conclude(ctx, queue, letter .. id, nil, wanted, outcome)
end
