-- Parties that meet: givers hand items over to takers, and two parties exchange their values.
--
-- kinds: rendezvous: hash, items
-- after waiters.lua
--
-- A resource is a hash and a stream, both deleted with the last claim. The hash is a queue of takers (see waiters.lua), and
--   s                  record Rendezvous
--   c<session>/<id>    a claim: "<role> <what> <token>"
--                        q -         a taker that waits       t <item>    a taker that has an item
--                        g <item>    a giver                  e <party>   a party of an exchange
--   g<item>            an item: "<entry> <giver> <taker>"; "-" for a giver that gave up, or for no taker yet
--   x                  the party that waits for another
--   e<party>           "<session>/<id> <other party> <asked>": a party that waited is asked whether it is still there
--   v<party>           what it brings
--   r<item or party>   what has come of it: "<session>/<id> <JSON>", until that claim is given up
--   k<place>           "<until> <item or party>": the result of a claim whose session has ended, for its next session
-- The stream has an entry for each item: i <item> v <JSON>. Items that a taker has are pending in its group, under the
-- taker's claim; items that a taker has failed at are pending under "-".
--
-- `free` counts the items without a taker, `returned` those of them that a taker has failed at. `oldest` and `newest` are
-- the ends of the kept results; `stream` is 1 while there is a stream.
-- record Rendezvous 1: claims, givers, takers, first, last, free, returned, oldest, newest, timeToLive, stream
--
-- Ids of items and parties are unique everywhere, and stay the same in the next session of their coordinator.
-- Invariant: while a taker waits, no item is without a taker, unless the alarm of the resource is set.

local GROUP, NO_PARTY = 'takers', '-'
-- Of kept results that are forgotten in one call.
local SWEPT = 64

local function loadMeeting(key)
  local packed = call('HGET', key, 's')
  return packed and unpackRendezvous(packed) or {
    claims = 0, givers = 0, takers = 0, first = 1, last = 0, free = 0, returned = 0, oldest = 1, newest = 0,
    timeToLive = 0, stream = 0
  }
end

local function saveMeeting(ctx, key, state)
  local swept = 0
  while state.oldest <= state.newest and swept < SWEPT do
    local place = text(state.oldest)
    local till, what = match(call('HGET', key, 'k' .. place), '^(%S+) (%S+)$')
    if tonumber(till) > ctx.now then break end
    call('HDEL', key, 'k' .. place, 'r' .. what)
    state.oldest, swept = state.oldest + 1, swept + 1
  end
  if state.claims == 0 and state.stream == 1 then
    call('DEL', ctx.items)
    state.stream = 0
  end
  if state.claims > 0 then
    call('HSET', key, 's', packRendezvous(state))
  elseif state.oldest > state.newest then
    call('DEL', key)
  else
    call('HSET', key, 's', packRendezvous(state))
    call('PEXPIRE', key, text(state.timeToLive))
  end
end

local function enterMeeting(ctx, key, state, id, role, what, token)
  state.claims = state.claims + call('HSET', key, 'c' .. claimOf(ctx, id), role .. ' ' .. what .. ' ' .. token)
  own(ctx, key, id, state.timeToLive)
end

-- The items of a taker are pending under its claim, and leave the group with that.
local function removeItem(ctx, key, item, entry, taker)
  call('XGROUP', 'DELCONSUMER', ctx.items, GROUP, taker)
  call('XDEL', ctx.items, entry)
  call('HDEL', key, 'g' .. item)
end

-- Gives a taker the oldest item without one, first of those that were returned. Answers a token, the item, how often it was
-- handed out, and its value; nothing if there is no item, or if this has to go on in another call.
local function handOut(ctx, key, state, taker)
  while state.free > 0 do
    ctx.steps = (ctx.steps or 0) + 1
    if ctx.steps > SERVED then
      alarm(ctx, key, 0)
      return nil
    end
    local entry, fields, attempts
    if state.returned > 0 then
      local pending = call('XPENDING', ctx.items, GROUP, '-', '+', 1, NO_PARTY)[1]
      entry, attempts = pending[1], pending[4] + 1
      fields = call('XCLAIM', ctx.items, GROUP, taker, 0, entry)[1][2]
      state.returned = state.returned - 1
    else
      local found = call('XREADGROUP', 'GROUP', GROUP, taker, 'COUNT', 1, 'STREAMS', ctx.items, '>')[1][2][1]
      entry, fields, attempts = found[1], found[2], 1
    end
    state.free = state.free - 1
    local item = fields[2]
    local giver = match(call('HGET', key, 'g' .. item), '^%S+ (%S+)')
    if isAlive(ctx, holderOf(giver)) then
      local token = nextToken(ctx)
      call('HSET', key, 'g' .. item, entry .. ' ' .. giver .. ' ' .. taker, 'c' .. taker, 't ' .. item .. ' ' .. token)
      return token, item, attempts, json(fields[4])
    end
    -- The session of its giver has ended, and the reaper will find nothing.
    removeItem(ctx, key, item, entry, taker)
    state.givers = state.givers - 1
  end
end

-- Hands items to waiting takers, in the order of the queue.
local function serveTakers(ctx, key, state)
  local function dropped(taker)
    state.takers, state.claims = state.takers - 1, state.claims - call('HDEL', key, 'c' .. taker)
  end
  while state.free > 0 do
    local taker = front(ctx, key, state, dropped)
    if not taker then return end
    local token, item, attempts, value = handOut(ctx, key, state, taker)
    if not token then return end
    departFirst(key, state, taker)
    state.takers = state.takers - 1
    inform(ctx, taker, token, item, attempts, value)
  end
end

-- The session of a claim has ended, and the next one may ask what has come of it.
local function keepResult(ctx, key, state, what)
  state.newest = state.newest + 1
  call('HSET', key, 'k' .. text(state.newest), text(ctx.now + state.timeToLive) .. ' ' .. what)
end

-- What a claim of an earlier session has come to already, if anything: from now on it belongs to the claim that asks.
-- Answers a token and the result.
local function recallResult(ctx, key, state, id, role, what, kept)
  local result = match(kept or '', ' (.*)$')
  if not result then return nil end
  local token = nextToken(ctx)
  call('HSET', key, 'r' .. what, claimOf(ctx, id) .. ' ' .. result)
  enterMeeting(ctx, key, state, id, role, what, token)
  saveMeeting(ctx, key, state)
  return token, json(result)
end

-- Ends what a party was about. Its counterpart, if there is one, learns of that when it accepts, or asks anew.
local function separateParty(ctx, key, party)
  local other = match(call('HGET', key, 'e' .. party) or '', '^%S+ (%S+)')
  if not other then return end
  call('HDEL', key, 'e' .. party, 'v' .. party)
  if other == NO_PARTY then
    if call('HGET', key, 'x') == party then call('HDEL', key, 'x') end
    return
  end
  local claim, asked = match(call('HGET', key, 'e' .. other), '^(%S+) %S+ (%d)')
  if asked == '1' then
    call('HSET', key, 'e' .. other, claim .. ' ' .. NO_PARTY .. ' 1')
  else
    call('HDEL', key, 'e' .. other, 'v' .. other)
    deliver(ctx, holderOf(claim), reply('again', idOf(claim)))
  end
end

-- What has become of a claim that has asked before. A party whose counterpart has left meanwhile, while the question to it
-- may still be on its way, is told so, and begins anew under another claim: no party is asked twice under one.
local function recallMeeting(ctx, key, claim)
  local role, what, token = match(call('HGET', key, 'c' .. claim) or '', '^(%a) (%S+) (%S+)$')
  if not role then return nil end
  if role == 'q' then return queued(ctx, tonumber(call('HGET', key, 'q' .. claim)) - loadMeeting(key).first) end
  if role == 't' then
    local entry = match(call('HGET', key, 'g' .. what), '^%S+')
    local attempts = call('XPENDING', ctx.items, GROUP, entry, entry, 1)[1][4]
    return reply('granted', token, what, attempts, json(call('XRANGE', ctx.items, entry, entry)[1][2][4]))
  end
  local result = match(call('HGET', key, 'r' .. what) or '', ' (.*)$')
  if role == 'g' then
    if result then return reply('granted', token, json(result)) end
    return call('HGET', key, 'g' .. what) and queued(ctx, 0) or nil
  end
  if result then return reply('granted', token, 'met', json(result)) end
  local other, asked = match(call('HGET', key, 'e' .. what) or '', '^%S+ (%S+) (%d)')
  if asked ~= '1' then return asked and queued(ctx, 0) or nil end
  if other == NO_PARTY then return reply('granted', token, 'alone', json('null')) end
  return reply('granted', token, 'asked', json(call('HGET', key, 'v' .. other)))
end

-- rendezvous.give: gives an item to the next taker, or offers it, and waits until a taker has acknowledged it
-- keys: hash, items
-- args: id string, item string, timeToLive number, value string
-- reply: ["granted", token string, accepted boolean] | ["queued", ahead number]
handlers['rendezvous.give'] = function(ctx, key, id, item, timeToLive, value)
  local claim = claimOf(ctx, id)
  local known = recallMeeting(ctx, key, claim)
  if known then return known end
  local state = loadMeeting(key)
  state.timeToLive = tonumber(timeToLive)
  local found = call('HMGET', key, 'r' .. item, 'g' .. item)
  local token, result = recallResult(ctx, key, state, id, 'g', item, found[1])
  if token then return reply('granted', token, result) end
  if found[2] then
    -- Of a session that has ended: this one goes on with it.
    local entry, giver, taker = match(found[2], '^(%S+) (%S+) (%S+)$')
    if not call('HGET', key, 'c' .. giver) then state.givers = state.givers + 1 end
    call('HSET', key, 'g' .. item, entry .. ' ' .. claim .. ' ' .. taker)
    enterMeeting(ctx, key, state, id, 'g', item, '0')
  else
    if state.stream == 0 then
      call('XGROUP', 'CREATE', ctx.items, GROUP, '0', 'MKSTREAM')
      state.stream = 1
    end
    local entry = call('XADD', ctx.items, '*', 'i', item, 'v', value)
    call('HSET', key, 'g' .. item, entry .. ' ' .. claim .. ' ' .. NO_PARTY)
    enterMeeting(ctx, key, state, id, 'g', item, '0')
    state.givers, state.free = state.givers + 1, state.free + 1
    serveTakers(ctx, key, state)
  end
  saveMeeting(ctx, key, state)
  return queued(ctx, state.free)
end

-- rendezvous.take: takes the oldest item without a taker, or queues for one
-- keys: hash, items
-- args: id string
-- reply: ["granted", token string, item string, attempts number, value json] | ["queued", ahead number]
handlers['rendezvous.take'] = function(ctx, key, id)
  local claim = claimOf(ctx, id)
  local known = recallMeeting(ctx, key, claim)
  if known then return known end
  local state = loadMeeting(key)
  if state.takers == 0 then
    local token, item, attempts, value = handOut(ctx, key, state, claim)
    if token then
      state.claims = state.claims + 1
      own(ctx, key, id, state.timeToLive)
      saveMeeting(ctx, key, state)
      return reply('granted', token, item, attempts, value)
    end
  end
  enterMeeting(ctx, key, state, id, 'q', NO_PARTY, '0')
  join(key, state, claim, '')
  state.takers = state.takers + 1
  saveMeeting(ctx, key, state)
  return queued(ctx, state.takers - 1)
end

-- rendezvous.acknowledge: the taker has accepted the item, or refused it for good; the giver is told
-- keys: hash, items
-- args: id string, accepted boolean
-- reply: ["acknowledged"] | ["absent"]
-- flags: allow-oom, heard
handlers['rendezvous.acknowledge'] = function(ctx, key, id, accepted)
  local claim = claimOf(ctx, id)
  local item = match(call('HGET', key, 'c' .. claim) or '', '^t (%S+)')
  if not item then return ABSENT end
  local state = loadMeeting(key)
  local entry, giver = match(call('HGET', key, 'g' .. item), '^(%S+) (%S+)')
  removeItem(ctx, key, item, entry, claim)
  state.claims = state.claims - call('HDEL', key, 'c' .. claim)
  disownNow(ctx, key, id)
  if giver ~= NO_PARTY then
    call('HSET', key, 'r' .. item, giver .. ' ' .. tostring(accepted == '1'))
    if call('HGET', key, 'c' .. giver) then
      local token = nextToken(ctx)
      call('HSET', key, 'c' .. giver, 'g ' .. item .. ' ' .. token)
      state.givers = state.givers - 1
      inform(ctx, giver, token, accepted == '1')
    else
      keepResult(ctx, key, state, item)
    end
  end
  saveMeeting(ctx, key, state)
  return '["acknowledged"]'
end

-- rendezvous.exchange: meets the party that waits, which is asked whether it is still there, or waits for another. A party
-- is granted when it is "asked", when both have "met", or when it is "alone": its counterpart has left before it answered.
-- keys: hash, items
-- args: id string, party string, timeToLive number, value string
-- reply: ["granted", token string, stage string, value json] | ["queued", ahead number]
handlers['rendezvous.exchange'] = function(ctx, key, id, party, timeToLive, value)
  local claim = claimOf(ctx, id)
  local known = recallMeeting(ctx, key, claim)
  if known then return known end
  local state = loadMeeting(key)
  state.timeToLive = tonumber(timeToLive)
  local token, result = recallResult(ctx, key, state, id, 'e', party, call('HGET', key, 'r' .. party))
  if token then return reply('granted', token, 'met', result) end
  separateParty(ctx, key, party)
  local other = call('HGET', key, 'x')
  local there = other and match(call('HGET', key, 'e' .. other), '^%S+')
  if there and isAlive(ctx, holderOf(there)) then
    token = nextToken(ctx)
    call('HDEL', key, 'x')
    call('HSET', key, 'e' .. party, claim .. ' ' .. other .. ' 0', 'v' .. party, value,
      'e' .. other, there .. ' ' .. party .. ' 1', 'c' .. there, 'e ' .. other .. ' ' .. token)
    inform(ctx, there, token, 'asked', json(value))
  else
    -- The claim of a party whose session has ended is left to its reaper.
    if other then call('HDEL', key, 'e' .. other, 'v' .. other) end
    call('HSET', key, 'e' .. party, claim .. ' ' .. NO_PARTY .. ' 0', 'v' .. party, value, 'x', party)
  end
  enterMeeting(ctx, key, state, id, 'e', party, '0')
  saveMeeting(ctx, key, state)
  return queued(ctx, 0)
end

-- rendezvous.accept: the party that was asked is there, so that both have met, unless the other one has left meanwhile
-- keys: hash, items
-- args: id string
-- reply: ["accepted"] | ["alone"]
-- flags: allow-oom, heard
handlers['rendezvous.accept'] = function(ctx, key, id)
  local claim = claimOf(ctx, id)
  local party = match(call('HGET', key, 'c' .. claim) or '', '^e (%S+)')
  if not party then return '["alone"]' end
  local other = match(call('HGET', key, 'e' .. party) or '', '^%S+ (%S+)')
  local there = other and match(call('HGET', key, 'e' .. other) or '', '^%S+')
  if there and isAlive(ctx, holderOf(there)) then
    local brought = call('HMGET', key, 'v' .. party, 'v' .. other)
    local token = nextToken(ctx)
    call('HDEL', key, 'e' .. party, 'v' .. party, 'e' .. other, 'v' .. other)
    call('HSET', key, 'r' .. party, claim .. ' ' .. brought[2], 'r' .. other, there .. ' ' .. brought[1],
      'c' .. there, 'e ' .. other .. ' ' .. token)
    inform(ctx, there, token, 'met', json(brought[1]))
    return '["accepted"]'
  end
  separateParty(ctx, key, party)
  -- Its claim may be asked for again behind this, and must not meet another party then: it is given up, and its party begins anew under
  -- another one.
  call('HSET', key, 'e' .. party, claim .. ' ' .. NO_PARTY .. ' 1')
  return '["alone"]'
end

-- rendezvous.withdraw: a party does not wait any more, unless both have met
-- keys: hash, items
-- args: id string
-- reply: ["departed"] | ["met", token string, answer json]
-- flags: allow-oom
handlers['rendezvous.withdraw'] = function(ctx, key, id)
  local role, what, token = match(call('HGET', key, 'c' .. claimOf(ctx, id)) or '', '^([eg]) (%S+) (%S+)$')
  local result = role and match(call('HGET', key, 'r' .. what) or '', ' (.*)$')
  if result then return reply('met', token, json(role == 'e' and '["met",' .. result .. ']' or '[' .. result .. ']')) end
  reapers.rendezvous(ctx, key, ctx.session, id)
  disown(ctx, key, id)
  return '["departed"]'
end

-- rendezvous.state: how many give, and how many wait to take and to exchange
-- keys: hash
-- args:
-- reply: ["state", givers number, takers number, exchangers number] | ["stale"]
-- flags: no-writes
handlers['rendezvous.state'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local state = loadMeeting(key)
  return reply('state', state.givers, state.takers, call('HGET', key, 'x') and 1 or 0)
end

-- An item goes to the next taker, or is offered again, if its giver is still there.
local function returnItem(ctx, key, state, taker, item)
  local entry, giver = match(call('HGET', key, 'g' .. item), '^(%S+) (%S+)')
  if giver == NO_PARTY or not isAlive(ctx, holderOf(giver)) then
    if call('HGET', key, 'c' .. giver) then state.givers = state.givers - 1 end
    return removeItem(ctx, key, item, entry, taker)
  end
  call('XCLAIM', ctx.items, GROUP, NO_PARTY, 0, entry, 'JUSTID')
  call('XGROUP', 'DELCONSUMER', ctx.items, GROUP, taker)
  call('HSET', key, 'g' .. item, entry .. ' ' .. giver .. ' ' .. NO_PARTY)
  state.free, state.returned = state.free + 1, state.returned + 1
  serveTakers(ctx, key, state)
end

-- An item without a taker leaves with its giver. An item that a taker has stays there.
local function withdrawItem(ctx, key, state, giver, item)
  local entry, claim, taker = match(call('HGET', key, 'g' .. item) or '', '^(%S+) (%S+) (%S+)$')
  if claim ~= giver then return end
  state.givers = state.givers - 1
  if taker == NO_PARTY then
    state.returned = state.returned - call('XACK', ctx.items, GROUP, entry)
    state.free = state.free - 1
    call('XDEL', ctx.items, entry)
    call('HDEL', key, 'g' .. item)
  elseif hasLeft(ctx, holderOf(giver)) then
    call('HSET', key, 'g' .. item, entry .. ' ' .. NO_PARTY .. ' ' .. taker)
  end
end

reapers.rendezvous = function(ctx, key, session, id)
  local claim = session .. '/' .. id
  local role, what = match(call('HGET', key, 'c' .. claim) or '', '^(%a) (%S+)')
  if not role then return end
  local state = loadMeeting(key)
  state.claims = state.claims - call('HDEL', key, 'c' .. claim)
  if role == 'q' then
    if depart(key, state, claim) then state.takers = state.takers - 1 end
  elseif role == 't' then
    returnItem(ctx, key, state, claim, what)
  elseif match(call('HGET', key, 'r' .. what) or '', '^%S+') == claim then
    if hasLeft(ctx, session) then call('HDEL', key, 'r' .. what) else keepResult(ctx, key, state, what) end
  elseif role == 'g' then
    withdrawItem(ctx, key, state, claim, what)
  elseif match(call('HGET', key, 'e' .. what) or '', '^%S+') == claim then
    separateParty(ctx, key, what)
  end
  saveMeeting(ctx, key, state)
end

alarms.rendezvous = function(ctx, key)
  local state = loadMeeting(key)
  if state.claims == 0 then return end
  serveTakers(ctx, key, state)
  saveMeeting(ctx, key, state)
end
