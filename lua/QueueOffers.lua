-- Offers: jobs are stored.
--
-- after Queue.lua

-- Options that are texts.
local TEXTS = 'ixqgypoz'

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
  local held = tryGroup(unpack(args))
  if held then return held end
  startJobs(queue.U)
  return tryGroup(unpack(args))
end

local function offerWish(ctx, queue, id, body, wish, holding)
  local args = { queue[wish.level], id, 'b', body }
  for _, name in ipairs({ 'i', 'a', 'z', 't', 's', 'x', 'q', 'g', 'r', 'p' }) do
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
      local consumer = consumerOf(letter, later and DELAYED or blocked and BLOCKED or RETURNED)
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
  if wish.i then
    call('HSET', queue.ids, wish.i, letter .. id)
    extend.reusedId(ctx, queue, wish.i)
  end
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
  local apart = queue.apart
  local time, added, normal = text(queue.stamp) .. '-', queue.number, queue.n
  -- The next number is one more than the last one there, so Redis counts on: that spares a string.
  local onward, counted = time .. '*', -1
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
        call('XADD', normal, added == counted and onward or time .. text(added), 'b', body)
        counted = added + 1
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
      local job = wish.i and not wish.m and (call('HGET', queue.ids, wish.i) or recalled(ctx, queue, 'i' .. wish.i))
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
        local fits = blocked or unknown or hasRoom()
        -- It cannot wait for room: the jobs before it would not be known any more.
        if wish.p and not unknown and (blocked or not fits) then fits, last, queue.apart = true, last + 1, queue.apart + 1 end
        if wish.behind then extend.checkBehind(queue, wish) end
        if unknown then
          known[#known + 1] = '[' .. text(place) .. ',3,' .. text(unknown) .. ']'
        elseif not fits then
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
  if claim ~= false then queue.offered = queue.offered + added - first + 1 - queue.apart + apart end
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

-- queue.offer: adds jobs in one step, once for the number of a coordinator's offer. `values` has their bodies, each followed by the
-- texts that the job has. `shapes` has for each job the bytes of its body, and letters for its options:
--   u h n l   its level, if that is not n
--   f         it begins before all others of its level
--   d w e t   delay, time, expiry and timeout, in ms
--   a         attempts
--   r         its outcome is kept, as it has to be for a subscriber: for so many ms, or without a number as long as ids are
--   m         no job can have had its id before
--   i x g y   bytes of its id, trace, group and subscriber, which are texts
--   o c       bytes of the worker whose deque it goes to, a text; or the number of a key, and it goes to the deque of that
--   q v       bytes of its id for deduplication, a text with the letter of the mode in front; the window of that, in ms
--   z         bytes of the delays between its attempts, a text
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
