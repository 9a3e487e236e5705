-- A queue of claims that wait for a resource, and the fields of its hash that a call changes.
--
-- First in, first out. A resource with a queue has `first` and `last`, the places at the ends. In its hash:
--   w<place>            a waiter: "<session>/<id> <what it waits for>"
--   q<session>/<id>     its place
-- A waiter that leaves makes an empty place. The work of one call is bounded: the rest is done when the resource's alarm
-- rings, which is at once. A record with `fields` has those of the hash that the call has changed, and writes them at its end.
--
-- While waiters are few, a resource may have all of them in a text of its own, `waiters`: " <session>/<id>" for each, and behind that
-- ":<what it waits for>" if that is not empty. Then `first` is 1, and `last` is their number.

local EMPTY_PLACES = 128
-- So many waiters are in a text. With another one, all of them go into the hash, until the queue is empty.
local MOST_INLINE = 64
-- One in a text: its claim, and what it waits for.
local WAITER = ' ([^ :]+):?(%S*)'

-- From now on, what is changed is written by `writeFields`.
local function collectFields(state)
  state.fields, state.touched = {}, {}
end

local function readField(key, state, field)
  local value = state.fields and state.fields[field]
  if value == nil then return call('HGET', key, field) end
  return value
end

-- False removes it.
local function setField(state, field, value)
  local fields = state.fields
  if fields[field] == nil then state.touched[#state.touched + 1] = field end
  fields[field] = value
end

-- Sets one field or two.
local function putFields(key, state, field, value, other, its)
  if state.fields then
    setField(state, field, value)
    if other then setField(state, other, its) end
  elseif other then
    call('HSET', key, field, value, other, its)
  else
    call('HSET', key, field, value)
  end
end

-- Removes one field or two.
local function removeFields(key, state, field, other)
  if state.fields then
    setField(state, field, false)
    if other then setField(state, other, false) end
  elseif other then
    call('HDEL', key, field, other)
  else
    call('HDEL', key, field)
  end
end

local function writeFields(key, state)
  local fields, set, gone = state.fields, { key }, { key }
  for _, field in ipairs(state.touched) do
    local value = fields[field]
    if value then
      set[#set + 1], set[#set + 2] = field, value
    else
      gone[#gone + 1] = field
    end
    if #set > MOST_ARGUMENTS then
      call('HSET', unpack(set))
      set = { key }
    end
  end
  for from = 2, #gone, MOST_ARGUMENTS do
    call('HDEL', key, unpack(gone, from, math.min(from + MOST_ARGUMENTS - 1, #gone)))
  end
  if #set > 1 then call('HSET', unpack(set)) end
  collectFields(state)
end

local function isQueueEmpty(state)
  return state.first > state.last
end

-- Its waiters may be in a text: this one, if there is one.
local function collectWaiters(state, waiters)
  if waiters then
    state.waiters = waiters
  elseif isQueueEmpty(state) then
    state.waiters, state.first, state.last = '', 1, 0
  end
end

local function eachWaiter(waiters)
  return string.gmatch(waiters, WAITER)
end

local function putWaiter(key, state, claim, detail, at)
  at = text(at)
  putFields(key, state, 'w' .. at, claim .. ' ' .. detail, 'q' .. claim, at)
end

-- The waiters go into the hash, as they have become many.
local function lengthen(key, state)
  local waiters, collects, at = state.waiters, state.fields, 0
  state.waiters = nil
  if not collects then collectFields(state) end
  for claim, detail in eachWaiter(waiters) do
    at = at + 1
    putWaiter(key, state, claim, detail, at)
  end
  if not collects then
    writeFields(key, state)
    state.fields = nil
  end
end

-- Joins the queue, or its front.
local function join(key, state, claim, detail, first)
  if state.waiters and state.last >= MOST_INLINE then lengthen(key, state) end
  if state.waiters then
    local waiter = ' ' .. (detail == '' and claim or claim .. ':' .. detail)
    state.waiters, state.last = first and waiter .. state.waiters or state.waiters .. waiter, state.last + 1
  elseif first then
    state.first = state.first - 1
    putWaiter(key, state, claim, detail, state.first)
  else
    state.last = state.last + 1
    putWaiter(key, state, claim, detail, state.last)
  end
end

-- How many waiters are ahead of one, or places; nothing if it does not wait.
local function aheadOf(key, state, claim)
  if not state.waiters then
    local at = readField(key, state, 'q' .. claim)
    return at and tonumber(at) - state.first
  end
  local ahead = 0
  for waiter in eachWaiter(state.waiters) do
    if waiter == claim then return ahead end
    ahead = ahead + 1
  end
end

-- Takes a waiter out of the queue. Answers whether it was there.
local function depart(key, state, claim, at)
  local waiters = state.waiters
  if waiters then
    local from = find(waiters .. ' ', ' ' .. claim .. ' ', 1, true) or find(waiters, ' ' .. claim .. ':', 1, true)
    if not from then return false end
    local to = find(waiters, ' ', from + 1, true)
    state.waiters, state.last = sub(waiters, 1, from - 1) .. (to and sub(waiters, to) or ''), state.last - 1
    return true
  end
  at = at or readField(key, state, 'q' .. claim)
  if not at then return false end
  removeFields(key, state, 'q' .. claim, 'w' .. at)
  if tonumber(at) == state.first then state.first = state.first + 1 end
  return true
end

local function departFirst(key, state, claim)
  local waiters = state.waiters
  if not waiters then return depart(key, state, claim, text(state.first)) end
  state.waiters, state.last = sub(waiters, find(waiters, ' ', 2, true) or #waiters + 1), state.last - 1
end

-- The places from one on that are waiters', in order. Behind a waiter that stays there can be millions of empty places, and
-- this is for those.
local function placesOf(key, from)
  local places = {}
  for _, field in ipairs(call('HKEYS', key)) do
    local place = tonumber(match(field, '^w(%-?%d+)$'))
    if place and place >= from then places[#places + 1] = place end
  end
  table.sort(places)
  return places
end

-- Whether this call has looked at as many waiters as it may: the rest is done in another one.
local function isTired(ctx, key)
  ctx.steps = (ctx.steps or 0) + 1
  if ctx.steps <= SERVED then return false end
  alarm(ctx, key, 0)
  return true
end

-- Jumps to the next place that is a waiter's. Answers what stands there; nothing when the queue is empty, or when this has
-- to go on in another call.
local function nextWaiter(ctx, key, state)
  while state.first <= state.last do
    if isTired(ctx, key) then return nil end
    local waiter = readField(key, state, 'w' .. text(state.first))
    if waiter then return waiter end
    if state.fields then writeFields(key, state) end
    local fields, last = {}, math.min(state.first + EMPTY_PLACES, state.last)
    for place = state.first + 1, last do fields[#fields + 1] = 'w' .. text(place) end
    local found = fields[1] and call('HMGET', key, unpack(fields)) or {}
    state.first = last + 1
    for index = 1, #fields do
      if found[index] then
        state.first = last - #fields + index
        break
      end
    end
    -- Looking at what there is costs less than looking at all that there was.
    if state.first == last + 1 and call('HLEN', key) < math.min(state.last - last, EMPTY_PLACES * SERVED) then
      state.first = placesOf(key, state.first)[1] or state.last + 1
    end
  end
end

-- The waiter in front: its claim, and what it waits for. Waiters of dead sessions leave the queue, and `dropped` hears of
-- them.
local function front(ctx, key, state, dropped)
  while true do
    local claim, detail
    if state.waiters then
      claim, detail = match(state.waiters, WAITER)
      -- One waiter for each request is as bounded as the requests of a call are.
      if claim and state.served and isTired(ctx, key) then return nil end
      state.served = true
    else
      claim, detail = match(nextWaiter(ctx, key, state) or '', '^(%S+) (.*)$')
    end
    if not claim then return nil end
    if isAlive(ctx, holderOf(claim)) then return claim, detail end
    departFirst(key, state, claim)
    if dropped then dropped(claim) end
  end
end

-- Up to so many waiters that are alive, in order: their claims, and what they wait for.
local function waitersOf(ctx, key, state, most)
  local claims, details, at = {}, {}, state.first
  local function add(claim, detail)
    if claim and #claims < most and isAlive(ctx, holderOf(claim)) then
      claims[#claims + 1], details[#details + 1] = claim, detail
    end
  end
  if state.waiters then
    for claim, detail in eachWaiter(state.waiters) do add(claim, detail) end
    return claims, details
  end
  while at <= state.last and #claims < most do
    local fields, last = {}, math.min(at + EMPTY_PLACES, state.last)
    for to = at, last do fields[#fields + 1] = 'w' .. text(to) end
    local found, empty = call('HMGET', key, unpack(fields)), #fields > EMPTY_PLACES
    for index = 1, #fields do
      empty = empty and not found[index]
      add(match(found[index] or '', '^(%S+) (.*)$'))
    end
    at = last + 1
    if empty then at = placesOf(key, at)[1] or state.last + 1 end
  end
  return claims, details
end
