-- after Queue.lua
-- after QueueNotes.lua
-- after QueueLimits.lua
-- after QueueHandOut.lua
-- Jobs of a queue by their state, its history by minutes, and the removal of jobs and dead letters.

-- Of one call: pending jobs that are looked at.
local LOOKED_AT = 256
-- Behind the sources.
local IN_DEQUES = #FIELD + 1
local STREAMS = { 'u', 'h', 'n', 'l', 'U' }

-- -----------------------------------------------------------------------------
-- Lists of jobs: page by page, each job with the place behind which the next page begins
-- -----------------------------------------------------------------------------

local function addJob(queue, items, place, due, letter, id, count, fields)
  if not fields then return end
  if queue.notes > 0 then
    local job = letter .. id
    reviseFields(fields, noteOf(queue, 'b' .. job), noteOf(queue, 'k' .. job))
    due = noteOf(queue, 'd' .. job) or due
  end
  items[#items + 1] = '[' .. encoded(place) .. ',' .. due .. ',' .. describedJob(letter, id, count, fields) .. ']'
end

local lists = {}

-- Jobs of deques, in the order of their offers. Answers the id behind which there may be more.
local function listStored(queue, from, count, items)
  local found = call('XRANGE', queue.U, from and '(' .. from or '-', '+', 'COUNT', LOOKED_AT)
  local pending, last = {}, #found > 0 and found[#found][1]
  if not last then return nil end
  -- Cancelled jobs that keep their slots have no entry.
  local most = LOOKED_AT + queue.cancelled
  for _, one in ipairs(tryGroup('XPENDING', queue.U, JOBS, found[1][1], last, most) or {}) do pending[one[1]] = true end
  for _, entry in ipairs(found) do
    if not pending[entry[1]] then addJob(queue, items, IN_DEQUES .. ' ' .. entry[1], '0', 'N', entry[1], '0', entry[2]) end
    if #items >= count then return entry[1] end
  end
  return #found == LOOKED_AT and last or nil
end

-- The score in `delayed` of a job that begins before all others of its level.
local function frontScore(letter, id)
  return text((1 - FRONT[letter]) * FRONT_SPAN - tonumber(match(id, '%d+$')))
end

local function isInFront(queue, letter, id)
  local score = frontScore(letter, id)
  return call('ZRANGEBYSCORE', queue.delays, score, score)[1] ~= nil
end

-- Adds up to so many jobs at the front of a level, behind one of these. Answers how many, and the place of the last one.
local function listFront(queue, source, letter, behind, count, items)
  local least = -FRONT[letter] * FRONT_SPAN
  local from = behind and '(' .. frontScore(letter, behind) or text(least)
  local jobs, place = call('ZRANGEBYSCORE', queue.delays, from, '(' .. text(least + FRONT_SPAN), 'LIMIT', 0, count), nil
  for _, job in ipairs(jobs) do
    local id = sub(job, 2)
    place = source .. ' ^' .. id
    addJob(queue, items, place, '0', letter, id, '0', entryAt(queue[letter], id))
  end
  return #jobs, place
end

-- In the order in which they are handed out, level by level: "<source> <id>", or "<source> ^<id>" at the front of a level. Jobs of
-- deques come behind them, as of one more source. Jobs of groups come last, group by group: "g" and the member of their order.
lists.waiting = function(queue, place, count, items)
  local source, first, from = match(place, '^(%d+) (%^?)(%d+%-%d+)$')
  local member = match(place, '^g(.*)$')
  source = member and #FIELD + 1 or tonumber(source) or 1
  while source <= #FIELD do
    local letter, found, last = LETTER[source], 0, nil
    local stream = queue[letter]
    if queue[FIELD[source]] == 0 then
      -- The source has no jobs.
    elseif source % 3 == 0 then
      -- The jobs in front of it have begun.
      if not from or tonumber(match(from, '%d+$')) < queue[LAST[letter]] then
        from = text(queue[AT[letter]]) .. '-' .. text(queue[LAST[letter]])
      end
      local entries = call('XRANGE', stream, '(' .. from, '+', 'COUNT', count)
      for _, entry in ipairs(entries) do addJob(queue, items, source .. ' ' .. entry[1], '0', letter, entry[1], '0', entry[2]) end
      found = #entries
      last = found > 0 and entries[found][1]
    else
      local stacked = queue.stacked > 0 and FRONT[letter]
      if stacked and (not from or first == '^') then
        local some, behind = listFront(queue, source, letter, from, count, items)
        if some == count then return behind end
        count = count - some
      end
      if first == '^' then from = nil end
      local pending = tryGroup('XPENDING', stream, JOBS, from and '(' .. from or '-', '+', count, consumerOf(letter, RETURNED)) or {}
      for _, one in ipairs(pending) do
        local id = one[1]
        if not stacked or not isInFront(queue, letter, id) then
          addJob(queue, items, source .. ' ' .. id, '0', letter, id, text(one[4]), entryAt(stream, id))
        end
      end
      found = #pending
      last = found > 0 and pending[found][1]
    end
    if found == count then return source .. ' ' .. last end
    count, source, first, from = count - found, source + 1, nil, nil
  end
  if source == IN_DEQUES and not member and queue.stored > 0 then
    local before = #items
    from = listStored(queue, from, before + count, items)
    if from then return IN_DEQUES .. ' ' .. from end
    count = count - (#items - before)
  end
  return queue.grouped > 0 and groups.list(queue, member, count, items, addJob) or ''
end

-- In the order in which they are due: "<time> <how many of that time>".
lists.delayed = function(queue, place, count, items)
  local last, ties = match(place, '^(%d+) (%d+)$')
  ties = tonumber(ties) or 0
  -- Those below 0 wait, at the front of their level.
  local found = call('ZRANGEBYSCORE', queue.delays, last or 0, '(+inf', 'WITHSCORES', 'LIMIT', ties, count)
  for at = 1, #found, 2 do
    local letter, id = split(found[at])
    local due = text(tonumber(found[at + 1]))
    if due == last then ties = ties + 1 else last, ties = due, 1 end
    if letter then
      local _, deliveries = holdingOf(queue, letter, id)
      addJob(queue, items, last .. ' ' .. text(ties), due, letter, id, text(deliveries or 0), entryAt(queue[letter], id))
    end
  end
  return #found == 2 * count and last .. ' ' .. text(ties) or ''
end

-- In the order of their offers, level by level: "<stream> <id>".
lists.active = function(queue, place, count, items)
  local at, from = match(place, '^(%d+) (%d+%-%d+)$')
  at = tonumber(at) or 1
  local looked = LOOKED_AT
  while at <= #STREAMS do
    local stream = queue[STREAMS[at]]
    local pending = tryGroup('XPENDING', stream, JOBS, from and '(' .. from or '-', '+', looked) or {}
    for _, one in ipairs(pending) do
      local id, consumer = one[1], one[2]
      -- A worker's claim; in `held`, the letter is behind it.
      if find(consumer, '^[^/]+/') then
        local letter = STREAMS[at] == 'U' and sub(consumer, -1) or STREAMS[at]
        addJob(queue, items, at .. ' ' .. id, '0', letter, id, text(one[4]), entryAt(stream, id))
        if #items == count then return at .. ' ' .. id end
      end
    end
    if #pending == looked then return at .. ' ' .. pending[looked][1] end
    looked, at, from = looked - #pending, at + 1, nil
  end
  return ''
end

-- In the order of their offers, level by level: "<letter> <id>", the letter as a number.
lists.blocked = function(queue, place, count, items)
  local start, from = match(place, '^(%d+) (%d+%-%d+)$')
  for at = tonumber(start) or 1, queue.blocked > 0 and #EVERY_LETTER or 0 do
    local letter, left = EVERY_LETTER[at], count - #items
    local first = from and '(' .. from or '-'
    local pending = LAST[letter] and {}
      or tryGroup('XPENDING', queue[letter], JOBS, first, '+', left, consumerOf(letter, BLOCKED)) or {}
    for _, one in ipairs(pending) do
      addJob(queue, items, at .. ' ' .. one[1], '0', letter, one[1], text(one[4]), entryAt(queue[letter], one[1]))
    end
    if #pending == left then return at .. ' ' .. pending[left][1] end
    from = nil
  end
  return ''
end

-- queue.jobs: some jobs of a state behind a place: each with its own place, when it is due (0 for at once), and as
-- `describedJob` describes it. `place` is behind them; it is empty if there are no more.
-- keys: all
-- args: state string, behind string, count number
-- reply: ["jobs", place string, jobs json] | ["stale"]
-- flags: allow-oom
handlers['queue.jobs'] = function(ctx, key, state, behind, count)
  if isStale(ctx) then return STALE end
  local items = {}
  local place = lists[state](readQueue(ctx, key), behind, tonumber(count), items)
  return reply('jobs', place, json('[' .. concat(items, ',') .. ']'))
end

-- -----------------------------------------------------------------------------
-- History
-- -----------------------------------------------------------------------------

-- `h` has records of this length: what the queue had done at the end of a minute, and how many jobs waited and were in work
-- then. Nothing has changed from there to the minute of the next record.
-- record QueueMinute 1: minute, completed, buried, expired, begun, waited, ran, ready, active

local MINUTE, MINUTES, MINUTE_BYTES = 60000, 61, 1 + 8 * 9

-- How long jobs wait and run is known without the times of each: as many as there are of them, for as long as that is so.
local function passTime(queue, now)
  local passed = now - queue.since
  -- After a fail-over the clock may be a little behind.
  if passed <= 0 then return end
  queue.waited, queue.ran = queue.waited + passed * waitingIn(queue), queue.ran + passed * queue.active
  queue.since = now
end

local function soFar(queue, minute)
  return {
    minute = minute, completed = queue.completed, buried = queue.buried, expired = queue.expired, begun = queue.begun,
    waited = queue.waited, ran = queue.ran, ready = waitingIn(queue), active = queue.active
  }
end

-- Ends the minute in which the queue was used last.
local function minuteOf(queue)
  local minute = floor(queue.since / MINUTE)
  passTime(queue, (minute + 1) * MINUTE)
  return soFar(queue, minute)
end

-- Of each call, before anything changes. Alarms are forgotten when no session was alive for a day, and so are sessions that were not
-- reaped by then: whatever call is the first one after that begins a sweep.
extend.passTime = function(ctx, queue)
  if ctx.now - queue.since > ABANDONED then extend.beginSweep(ctx, queue) end
  if floor(ctx.now / MINUTE) > floor(queue.since / MINUTE) then
    local known = call('HGET', queue.key, 'h') or ''
    call('HSET', queue.key, 'h', sub(known, -MINUTE_BYTES * (MINUTES - 1)) .. packQueueMinute(minuteOf(queue)))
  end
  passTime(queue, ctx.now)
end

local function listedMinute(one)
  return list({
    one.minute, one.completed, one.buried, one.expired, one.begun, one.waited, one.ran, one.ready, one.active
  })[1]
end

-- queue.history: what the queue had done in all at the end of each minute in which it was used, and now
-- keys: all
-- args:
-- reply: ["history", minutes json]
-- flags: allow-oom
handlers['queue.history'] = function(ctx, key)
  local queue, minutes = readQueue(ctx, key), {}
  local known = call('HGET', key, 'h') or ''
  for at = 1, #known, MINUTE_BYTES do
    minutes[#minutes + 1] = listedMinute(unpackQueueMinute(sub(known, at, at + MINUTE_BYTES - 1)))
  end
  local minute = floor(ctx.now / MINUTE)
  if minute > floor(queue.since / MINUTE) then minutes[#minutes + 1] = listedMinute(minuteOf(queue)) end
  passTime(queue, ctx.now)
  minutes[#minutes + 1] = listedMinute(soFar(queue, minute))
  return reply('history', json('[' .. concat(minutes, ',') .. ']'))
end

-- -----------------------------------------------------------------------------
-- Removal
-- -----------------------------------------------------------------------------

-- Removes up to MOVED jobs that are not in work; delayed jobs only with `delayed`. Of groups, it removes jobs behind a member of
-- their order. Answers how many it has removed, and the member behind which there may be more.
local function drainJobs(ctx, queue, delayed, behind)
  local outcome = '["cancelled"]'
  local count = delayed and queue.blocked + queue.awaited > 0 and extend.drainBlocked(ctx, queue, MOVED) or 0
  for source = 1, #FIELD do count = count + removeWaiting(ctx, queue, source, MOVED - count, delayed, outcome) end
  count = count + removeStored(ctx, queue, MOVED - count, delayed, outcome)
  if queue.grouped > 0 then
    if count == MOVED then return count, behind == '' and '-' or behind end
    local from = (behind == '' or behind == '-') and '-' or '(' .. behind
    local removed, looked, last = groups.purge(ctx, queue, from, '+', MOVED - count, not delayed)
    behind, count = looked == MOVED - count and last or '', count + removed
  end
  -- Jobs of groups are removed in their order.
  if delayed and queue.delayed > 0 then count = count + removeDelayed(ctx, queue, MOVED - count, outcome) end
  return count, behind
end

-- Removes blocked jobs that run after removed ones. Answers how many. What ends behind this request has not been removed by it.
local function sweptIn(ctx, queue)
  queue.removed = 0
  if queue.clearing and queue.ending then extend.release(ctx, queue) end
  queue.clearing = false
  return queue.removed
end

-- queue.drain: removes some of the jobs that are not in work, and says whether there are more, and behind which member of the
-- order of groups
-- keys: all
-- args: delayed boolean, behind string
-- reply: ["drained", count number, more boolean, behind string]
-- flags: allow-oom
handlers['queue.drain'] = function(ctx, key, delayed, behind)
  local queue = loadQueue(ctx, key)
  if delayed ~= '1' then queue.drained = {} end
  local count, last = drainJobs(ctx, queue, delayed == '1', behind)
  local swept = sweptIn(ctx, queue)
  local more = readyIn(queue) + queue.stored > 0 or last ~= '' or delayed == '1' and queue.delayed + queue.blocked > 0
  if delayed ~= '1' then
    extend.drainedSome(queue, more)
    if queue.awaited > 0 then extend.removedSome(ctx, queue, more) end
  end
  return reply('drained', count + swept, more, last)
end

-- queue.clean: removes some dead letters that are so many ms old, and says whether there are more
-- keys: all
-- args: age number
-- reply: ["cleaned", count number, more boolean]
-- flags: allow-oom
handlers['queue.clean'] = function(ctx, key, age)
  local queue = loadQueue(ctx, key)
  local old = call('XRANGE', queue.letters, '-', text(ago(ctx, tonumber(age))), 'COUNT', MOVED)
  local ids = {}
  for at, letter in ipairs(old) do ids[at] = letter[1] end
  if #ids > 0 then call('XDEL', queue.letters, unpack(ids)) end
  queue.recount = true
  return reply('cleaned', #ids, #ids == MOVED)
end

-- Removes jobs that are in work, among the next `most` pending jobs behind a place. Answers how many it has removed, and the place
-- behind which there may be more.
local function cancelActive(ctx, queue, behind, most)
  local start, from = match(behind, '^(%d+) (%d+%-%d+)$')
  local count = 0
  for at = tonumber(start) or 1, #STREAMS do
    local name = STREAMS[at]
    local pending = tryGroup('XPENDING', queue[name], JOBS, from and '(' .. from or '-', '+', most) or {}
    for _, one in ipairs(pending) do
      local id, consumer = one[1], one[2]
      -- One that was kept behind another may have been put among those that wait. Of a cancelled job the entry is gone.
      local fields = find(consumer, '^[^/]+/') and entryAt(queue[name], id)
      if fields then
        local letter = name
        if name == 'U' then letter, consumer = sub(consumer, -1), sub(consumer, 1, -2) end
        extend.cancel(ctx, queue, letter, id, fields, consumer)
        count = count + 1
      end
    end
    if #pending == most then return count, at .. ' ' .. pending[most][1] end
    most, from = most - #pending, nil
  end
  return count, ''
end

-- queue.obliterate: removes some jobs, those in work too, and says whether there are more, and behind which place of those in work.
-- With the last jobs, everything but the members of the queue is removed.
-- keys: all
-- args: behind string
-- reply: ["obliterated", count number, more boolean, behind string]
-- flags: allow-oom
handlers['queue.obliterate'] = function(ctx, key, behind)
  local queue = loadQueue(ctx, key)
  local count = drainJobs(ctx, queue, true, '')
  if count < MOVED then
    local cancelled
    cancelled, behind = cancelActive(ctx, queue, behind, MOVED - count)
    count = count + cancelled
  end
  count = count + sweptIn(ctx, queue)
  local active = queue.active - queue.cancelled
  local more = queue.delayed + queue.blocked + active + waitingIn(queue) > 0 or queue.ending ~= nil
  if not more then
    call('UNLINK', queue.letters, queue.ids, queue.schedules, queue.delays, queue.notebook)
    call('HDEL', key, 'h')
    -- The entries that are left belong to finished jobs. A cancelled job whose handler has not ended has none.
    for letter in pairs(LAST) do
      call('XTRIM', queue[letter], 'MAXLEN', '=', 0)
      queue[DONE[letter]], queue[FULL[letter]] = 0, 0
    end
    -- Known ids and outcomes stay where they are: the numbers of offers are there too, and no offer must be stored twice.
    queue.plans, queue.notes, queue.stacked, queue.expiring, queue.cleared, queue.recount = 0, 0, 0, 0, queue.number, true
    queue.completed, queue.buried, queue.expired, queue.dropped = 0, 0, 0, 0
    queue.begun, queue.waited, queue.ran = 0, 0, 0
  end
  return reply('obliterated', count, more, behind)
end
