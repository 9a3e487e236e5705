-- The actor hands jobs out: the worker whose turn it is gets the next job.
--
-- after Queue.lua
-- after QueueNotes.lua

-- The actor trusts bodies to be JSON, because producers encode them: they stand in the answer as they are.
local function describedJob(letter, id, count, fields)
  if #fields == 2 then return '["' .. letter .. id .. '",' .. count .. ',' .. fields[2] .. ']' end
  local parts = { '["' .. letter .. id .. '",' .. count .. ',' .. fields[2] }
  for at = 3, #fields, 2 do
    if fields[at] ~= 'p' then parts[#parts + 1], parts[#parts + 2] = encoded(fields[at]), encoded(fields[at + 1]) end
  end
  return concat(parts, ',') .. ']'
end

local function readWaiting(stream, claim, count)
  local args = { 'XREADGROUP', 'GROUP', JOBS, claim, 'COUNT', count, 'STREAMS', stream, '>' }
  local found = tryGroup(unpack(args))
  if not found then
    startJobs(stream)
    found = tryGroup(unpack(args))
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

-- The work of a call is bounded in bytes, too: how many of so many jobs it may read now, by the size of those before.
local function mayRead(queue, count)
  if queue.counted == 0 then return math.min(count, FEW_JOBS) end
  return math.min(count, math.max(1, floor((MOST.bytes - queue.bytes) * queue.counted / queue.bytes)))
end

local function weigh(queue, entries, from)
  for at = from, #entries do
    local fields = entries[at][2]
    for index = 1, fields and #fields or 0 do queue.bytes = queue.bytes + #fields[index] end
  end
  queue.counted = queue.counted + #entries - from + 1
end

-- Answers entries, and how many it has asked for: a few first, and then as many as the call may still hand out.
local function readSome(queue, stream, consumer, count)
  local asked = mayRead(queue, count)
  local entries = readWaiting(stream, consumer, asked)
  weigh(queue, entries, 1)
  if asked == count or #entries < asked or queue.bytes >= MOST.bytes then return entries, asked end
  local more = mayRead(queue, count - asked)
  for _, entry in ipairs(readWaiting(stream, consumer, more)) do entries[#entries + 1] = entry end
  weigh(queue, entries, asked + 1)
  return entries, asked + more
end

local function claimInto(stream, consumer, pending, entries, counts)
  if #pending == 0 then return end
  local args = { stream, JOBS, consumer, 0 }
  for at, one in ipairs(pending) do args[4 + at], counts[one[1]] = one[1], one[4] + 1 end
  for _, entry in ipairs(call('XCLAIM', unpack(args))) do entries[#entries + 1] = entry end
end

-- Takes up to so many jobs of a source for a consumer: their entries, and how often each was delivered. Fewer are found if
-- others were deleted, and then there are no more. With `aged`, they are the oldest ones.
local function takeSource(queue, source, claim, count, aged, bounded)
  local letter, field = LETTER[source], FIELD[source]
  local stream, consumer = queue[letter], consumerOf(letter, claim)
  local entries, counts, found
  if source % 3 == 0 then
    if bounded then
      entries, count = readSome(queue, stream, consumer, count)
    else
      entries = readWaiting(stream, consumer, count)
    end
    found = #entries
    if found > 0 then
      local at, last = match(entries[found][1], '^(%d+)%-(%d+)$')
      queue[AT[letter]], queue[LAST[letter]] = tonumber(at), tonumber(last)
    end
  else
    if bounded then count = mayRead(queue, count) end
    local pending = aged and {} or frontOf(queue, letter, count)
    entries, counts, found = {}, {}, #pending
    claimInto(stream, consumer, pending, entries, counts)
    if found < count then
      pending = pendingOf(stream, count - found, consumerOf(letter, RETURNED))
      claimInto(stream, consumer, pending, entries, counts)
      found = found + #pending
    end
    if bounded then weigh(queue, entries, 1) end
  end
  queue[field] = found < count and 0 or queue[field] - found
  return entries, counts, letter
end

-- A job is not handed out before that time.
local function delayJob(ctx, queue, letter, id, due, count)
  moveJobs(queue[letter], consumerOf(letter, DELAYED), { id }, count)
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

local function takeInto(ctx, queue, source, claim, count, items, aged)
  local entries, counts, letter = takeSource(queue, source, claim, count, aged, true)
  if aged then
    for _, entry in ipairs(entries) do unstack(queue, letter .. entry[1]) end
  end
  addTaken(ctx, queue, letter, entries, counts, items)
end

-- The first job of a level that waits in its order.
local function firstWaiting(queue, letter)
  local last = '(' .. text(queue[AT[letter]]) .. '-' .. text(queue[LAST[letter]])
  return call('XRANGE', queue[letter], last, '+', 'COUNT', 1)[1]
end

-- The number of the oldest job of a source: jobs are numbered as they are offered.
local function oldestIn(queue, source)
  local letter, first = LETTER[source], nil
  if source % 3 == 0 then
    first = firstWaiting(queue, letter)
  else
    first = pendingOf(queue[letter], 1, consumerOf(letter, RETURNED))[1]
  end
  return first and tonumber(match(first[1], '%d+$')) or 0
end

-- The source whose oldest job was offered before those of the others. `numberOf` answers the number of a source's.
local function eldest(sources, numberOf)
  local found, least
  for _, source in ipairs(sources) do
    local number = #sources > 1 and numberOf(source) or 0
    if not found or number < least then found, least = source, number end
  end
  return found
end

-- Whether jobs begin before older ones of their source.
local function hidesOlder(queue, source)
  return queue.stacked > 0 and FRONT[LETTER[source]] and queue[FIELD[source]] > queue.stacked
end

-- Takes jobs of the first source that has any. While others have some too, or jobs begin before older ones of that source, one of
-- TURNS is the oldest of those.
local function takeJobs(ctx, queue, claim, count)
  local items, first, others = {}, nil, {}
  for source = 1, #FIELD do
    if queue[FIELD[source]] > 0 then
      if first then others[#others + 1] = source else first = source end
    end
  end
  if hidesOlder(queue, first) then others[#others + 1] = first end
  if #others == 0 then
    takeInto(ctx, queue, first, claim, math.min(count, queue[FIELD[first]]), items)
    return items
  end
  local turn = queue.served % TURNS
  if turn == TURNS - 1 then
    takeInto(ctx, queue, eldest(others, function(source) return oldestIn(queue, source) end), claim, 1, items, true)
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
    list = queue.idle > 0 and wordsIn(queue.key, 'q') or {}
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
  -- It is later only when the rate was lower before, or the clock goes back.
  queue.tat = math.min(queue.tat, ctx.now + queue.burst)
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
    if handed >= MOST.handed or queue.bytes >= MOST.bytes then return soonerDue(ctx, queue, ctx.now) end
    local worker = queue.stored > 0 and extend.owner(ctx, queue) or nextWorker(ctx, queue)
    if not worker then
      queue.lacking = true
      return
    end
    local some = math.min(worker.credit, MOST.hand, allowed, byRate)
    local isElsewhere = queue.stored > 0 or inGroups > 0
    if isElsewhere then some = mayRead(queue, some) end
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
    if isElsewhere then
      for _, item in ipairs(items or {}) do queue.bytes, queue.counted = queue.bytes + #item, queue.counted + 1 end
    end
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
