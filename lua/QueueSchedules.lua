-- after Queue.lua
-- after QueueOffers.lua
-- Recurring jobs of a queue. The actor offers one job for each tick of a schedule when its alarm rings: exactly one, however many
-- processes there are, and however often requests are resent.
--
-- The actor counts intervals by itself. Calendars are for processes: they compute the next ticks, and the actor tells a member
-- when few are left. It never uses up the last tick: from it the member computes the next ticks, and whether any were missed.
--
-- `schedules` has for each schedule:
--   d<name>  "<times>\n<shape>\n<body>": its times as JSON, the options of its jobs as in `queue.offer`, and the body
--   t<name>  "<version> <every> <missed> <last> <ran> <member> <tick> ...": the number of its times; its interval in ms, 0 for a
--            calendar; what becomes of missed ticks; the tick that was dealt with last, the one that had a job last, 0 for none;
--            the member that gave it ticks, '-' if that cannot go on, and the next ticks
-- `delayed` has "@<name>" with the next tick; with infinity if the schedule waits for ticks, or for the queue to be resumed.

local NEVER = '+inf'
-- With few ticks left, a schedule asks for more when it rings. Of rare ones it never has more.
local MOST_PLANS, FEW_TICKS, MOST_TICKS, MOST_MISSED = 1024, 8, 256, 100
-- A tick that is later than this was missed, in ms. So was a tick that is due together with the next one.
local PUNCTUAL = 60000

local function planOf(queue, name)
  local packed = call('HGET', queue.schedules, 't' .. name)
  if not packed then return nil end
  local version, every, missed, last, ran, member, rest = match(packed, '^(%d+) (%d+) (%a+) (%d+) (%d+) (%S+)(.*)$')
  local ticks = {}
  for tick in string.gmatch(rest, '%d+') do ticks[#ticks + 1] = tonumber(tick) end
  return {
    version = tonumber(version), every = tonumber(every), missed = missed, last = tonumber(last), ran = tonumber(ran),
    member = member, ticks = ticks
  }
end

-- Whether a schedule has to be given ticks before it goes on.
local function isShort(ctx, plan)
  return plan.every == 0 and (#plan.ticks < 2 or plan.ticks[#plan.ticks] <= ctx.now)
end

local function needsTicks(ctx, plan)
  return plan.every == 0 and (#plan.ticks <= FEW_TICKS or plan.ticks[#plan.ticks] <= ctx.now)
end

local function writePlan(ctx, queue, name, plan)
  local parts = {
    text(plan.version), text(plan.every), plan.missed, text(plan.last), text(plan.ran), plan.member
  }
  for at, tick in ipairs(plan.ticks) do parts[6 + at] = text(tick) end
  call('HSET', queue.schedules, 't' .. name, concat(parts, ' '))
  local waits = queue.paused == 1 and (plan.ticks[1] or 0) <= ctx.now or isShort(ctx, plan)
  call('ZADD', queue.delays, waits and NEVER or text(plan.ticks[1]), '@' .. name)
  if not waits then soonerDue(ctx, queue, plan.ticks[1]) end
end

local function definitionOf(queue, name)
  return match(call('HGET', queue.schedules, 'd' .. name), '^([^\n]*)\n([^\n]*)\n(.*)$')
end

-- A member that may be told to give ticks, if it lives.
local function livingMember(ctx, queue, claim)
  return claim and isAlive(ctx, holderOf(claim)) and call('HGET', queue.key, 'o' .. claim) and claim
end

-- Tells a member to give a schedule ticks: the member that did so last, or another. When that member dies, or joins again
-- because it may have missed news, the actor tells another member. A sweep looks for one, and wakes the schedule.
local function askForTicks(ctx, queue, name, plan)
  local member = livingMember(ctx, queue, plan.member) or livingMember(ctx, queue, call('HGET', queue.key, 'n'))
  if not member then return extend.beginSweep(ctx, queue) end
  plan.member = member
  local times = definitionOf(queue, name)
  deliver(ctx, holderOf(member),
    reply('changed', idOf(member), 'ticks', name, plan.version, plan.last, ctx.now, plan.missed, json(times)))
end

-- The ticks that are due now, at most MOST_MISSED of the newest. They are not next any more.
local function takeDue(plan, now)
  local ticks, due = plan.ticks, {}
  if plan.every > 0 then
    local passed = floor((now - ticks[1]) / plan.every)
    for back = math.min(passed, MOST_MISSED - 1), 0, -1 do due[#due + 1] = ticks[1] + (passed - back) * plan.every end
    ticks[1] = ticks[1] + (passed + 1) * plan.every
  else
    local count = 0
    while count < #ticks and ticks[count + 1] <= now do count = count + 1 end
    for at = math.max(1, count - MOST_MISSED + 1), count do due[#due + 1] = ticks[at] end
    plan.ticks = { unpack(ticks, count + 1) }
  end
  return due
end

local function offerTick(ctx, queue, name, shape, body, tick)
  local wish = wishOf('', 1, shape)
  wish.s = text(tick) .. ' ' .. name
  queue.number, queue.stamp = queue.number + 1, math.max(queue.stamp, ctx.now)
  offerWish(ctx, queue, text(queue.stamp) .. '-' .. text(queue.number), body, wish, {})
end

-- Offers the jobs of the ticks that are due. Answers how many they are.
local function tickPlan(ctx, queue, name)
  local plan, offered = planOf(queue, name), 0
  if queue.paused == 0 and not isShort(ctx, plan) and plan.ticks[1] <= ctx.now then
    local _, shape, body = definitionOf(queue, name)
    local due = takeDue(plan, ctx.now)
    plan.last = due[#due]
    for at, tick in ipairs(due) do
      local last = at == #due
      if plan.missed == 'all' or last and (plan.missed == 'once' or ctx.now - tick <= PUNCTUAL) then
        offerTick(ctx, queue, name, shape, body, tick)
        plan.ran, offered = tick, offered + 1
      end
    end
  end
  if needsTicks(ctx, plan) then askForTicks(ctx, queue, name, plan) end
  writePlan(ctx, queue, name, plan)
  return offered
end

-- Schedules that remain when a call has offered enough jobs stay due.
extend.tickPlans = function(ctx, queue, names)
  local offered = 0
  for _, name in ipairs(names) do
    if offered < MOVED then offered = offered + tickPlan(ctx, queue, sub(name, 2)) end
  end
end

-- The queue was resumed, a member has joined, or one has left: schedules that wait for that are due.
extend.wakePlans = function(ctx, queue)
  local waiting = call('ZRANGEBYSCORE', queue.delays, NEVER, NEVER, 'LIMIT', 0, MOST_PLANS)
  if #waiting == 0 then return end
  local args = { queue.delays }
  for at, name in ipairs(waiting) do args[2 * at], args[2 * at + 1] = text(ctx.now), name end
  call('ZADD', unpack(args))
  soonerDue(ctx, queue, ctx.now)
end

-- queue.schedule: has a job offered at each tick from now on; a schedule of that name is replaced. With the same times it
-- keeps its next tick. `short` says that the schedule needs ticks: those behind `last`.
-- keys: all
-- args: id string, name string, times string, shape string, body string, every number, missed string
-- reply: ["scheduled", version number, last number, now number, short boolean] | ["full"]
handlers['queue.schedule'] = function(ctx, key, id, name, times, shape, body, every, missed)
  local queue = loadQueue(ctx, key)
  local plan = planOf(queue, name)
  if not plan and queue.plans >= MOST_PLANS then return '["full"]' end
  if not plan or definitionOf(queue, name) ~= times then
    every, queue.number = tonumber(every), queue.number + 1
    if not plan then queue.plans = queue.plans + 1 end
    plan = {
      version = queue.number, every = every, last = ctx.now, ran = plan and plan.ran or 0,
      ticks = every > 0 and { ctx.now + every } or {}
    }
  end
  plan.missed, plan.member = missed, claimOf(ctx, id)
  call('HSET', queue.schedules, 'd' .. name, times .. '\n' .. shape .. '\n' .. body)
  writePlan(ctx, queue, name, plan)
  return reply('scheduled', plan.version, plan.last, ctx.now, isShort(ctx, plan))
end

-- queue.ticks: gives a schedule all ticks behind `last`, in order. Nothing changes when its times were replaced, or it was given
-- other ticks meanwhile. A member that cannot count them gives none: all others are asked, once.
-- keys: all
-- args: id string, name string, version number, last number, ticks string
-- reply: ["given"] | ["missing"]
handlers['queue.ticks'] = function(ctx, key, id, name, version, last, ticks)
  local queue = loadQueue(ctx, key)
  local plan = planOf(queue, name)
  if not plan or plan.version ~= tonumber(version) or tonumber(last) > plan.last then return MISSING end
  if ticks == '' and plan.member == claimOf(ctx, id) then
    plan.member = '-'
    announce(ctx, key, 'ticks', name, plan.version, plan.last, ctx.now, plan.missed, json((definitionOf(queue, name))))
    writePlan(ctx, queue, name, plan)
  end
  local given = {}
  for tick in string.gmatch(ticks, '%d+') do
    tick = tonumber(tick)
    if tick > plan.last and #given < MOST_TICKS then given[#given + 1] = tick end
  end
  if #given == 0 or given[#given] <= (plan.ticks[#plan.ticks] or 0) then return MISSING end
  plan.ticks, plan.member = given, claimOf(ctx, id)
  -- They took long to come.
  if isShort(ctx, plan) then askForTicks(ctx, queue, name, plan) end
  writePlan(ctx, queue, name, plan)
  return '["given"]'
end

-- queue.unschedule: removes a schedule; the jobs that it has offered stay
-- keys: all
-- args: name string
-- reply: ["removed"] | ["missing"]
-- flags: allow-oom
handlers['queue.unschedule'] = function(ctx, key, name)
  local queue = loadQueue(ctx, key)
  if call('HDEL', queue.schedules, 'd' .. name, 't' .. name) == 0 then return MISSING end
  call('ZREM', queue.delays, '@' .. name)
  queue.plans = queue.plans - 1
  return '["removed"]'
end

local function describedPlan(queue, name, plan)
  local times, _, body = definitionOf(queue, name)
  local parts = {
    encoded(name), times, encoded(plan.missed), body, text(plan.last), text(plan.ran), text(plan.ticks[1] or 0)
  }
  return '[' .. concat(parts, ',') .. ']'
end

-- queue.scheduled: a schedule: its name, times, what becomes of missed ticks, the body, the last tick, the last one that had a
-- job, and the next one, 0 for none
-- keys: all
-- args: name string
-- reply: ["schedule", schedule json] | ["missing"]
-- flags: allow-oom
handlers['queue.scheduled'] = function(ctx, key, name)
  local queue = readQueue(ctx, key)
  local plan = planOf(queue, name)
  return plan and reply('schedule', json(describedPlan(queue, name, plan))) or MISSING
end

-- queue.schedules: the schedules behind a name, in the order of their names, as `queue.scheduled` describes each
-- keys: all
-- args: behind string, count number
-- reply: ["schedules", schedules json]
-- flags: allow-oom
handlers['queue.schedules'] = function(ctx, key, behind, count)
  local queue, names, found = readQueue(ctx, key), {}, {}
  for _, field in ipairs(call('HKEYS', queue.schedules)) do
    local name = match(field, '^t(.*)$')
    if name and name > behind then names[#names + 1] = name end
  end
  table.sort(names)
  for at = 1, math.min(#names, tonumber(count)) do found[at] = describedPlan(queue, names[at], planOf(queue, names[at])) end
  return reply('schedules', json('[' .. concat(found, ',') .. ']'))
end
