-- Parties that meet: givers and takers, who hand an item over, and those who exchange one value for another.
--
-- A resource is a hash and a stream, both deleted with the last claim:
--   s                  state, packed: claims, givers, takers that wait, first and last place in their queue, items that
--                      nobody has, those of them that were given back, first and last of the kept results, ms to keep
--                      these, whether the stream is there
--   c<session>/<id>    a claim: "<role> <what> <token>"
--                        q <place>   a taker that waits       t <item>    a taker that has an item
--                        g <item>    a giver                  e <party>   one who exchanges
--   w<place>           a taker that waits: "<session>/<id>"
--   g<item>            an item: "<entry> <giver> <taker>"; "-" for a giver that gave up, or where nobody is yet
--   x                  the party that waits for another
--   e<party>           "<session>/<id> <other party> <asked>": one that waited is asked whether it is still there
--   v<party>           what it brings
--   r<item or party>   what has come of it: "<session>/<id> <JSON>", until that claim is given up
--   k<place>           "<until> <item or party>": the result of a claim whose session is over, for its next session
-- The stream has an entry for each item: i <item> v <JSON>. Those that somebody has are pending in its group, under the
-- taker's claim; those that were given back are pending under "-".
--
-- Ids of items and parties are unique everywhere and stay the same when they are asked for again in another session.
-- Invariant: while a taker waits, there is no item that nobody has.

local MEETING = '<ddddddddddd'
local GROUP, NOBODY, QUEUED = 'takers', '-', 'queued'

local function loadMeeting(key)
  local packed = call('HGET', key, 's')
  if not packed then
    return {
      claims = 0, givers = 0, takers = 0, first = 1, last = 0, free = 0, returned = 0, oldest = 1, newest = 0, keep = 0,
      stream = 0
    }
  end
  local c, g, t, f, l, n, r, o, k, ms, s = unpackStruct(MEETING, packed)
  return {
    claims = c, givers = g, takers = t, first = f, last = l, free = n, returned = r, oldest = o, newest = k, keep = ms,
    stream = s
  }
end

local function saveMeeting(ctx, key, state)
  local idle, kept = state.claims == 0, state.oldest <= state.newest
  while state.oldest <= state.newest do
    local place = text(state.oldest)
    local till, what = match(call('HGET', key, 'k' .. place), '^(%S+) (%S+)$')
    if tonumber(till) > ctx.now then break end
    call('HDEL', key, 'k' .. place, 'r' .. what)
    state.oldest = state.oldest + 1
  end
  if idle and state.stream == 1 then
    call('DEL', ctx.items)
    state.stream = 0
  end
  if idle and state.oldest > state.newest then
    call('DEL', key)
    return
  end
  call('HSET', key, 's',
    pack(MEETING, state.claims, state.givers, state.takers, state.first, state.last, state.free, state.returned,
      state.oldest, state.newest, state.keep, state.stream))
  if kept then
    if idle then call('PEXPIRE', key, text(state.keep)) else call('PERSIST', key) end
  end
end

local function enter(ctx, key, state, id, role, what, token)
  state.claims = state.claims + call('HSET', key, 'c' .. ctx.session .. '/' .. id, role .. ' ' .. what .. ' ' .. token)
  own(ctx, key, id)
end

local function inform(ctx, owner, token, about, value)
  post(ctx, sessionOf(owner), '["granted","' .. idOf(owner) .. '","' .. token .. '",1,' .. about .. ',' .. value .. ']')
end

local function told(token, about, value)
  return '["granted","' .. token .. '",1,' .. about .. ',' .. value .. ']'
end

-- Who has waited longest, taken out of the queue. Those whose sessions are over are passed over.
local function nextTaker(ctx, key, state)
  while state.first <= state.last do
    local place = 'w' .. text(state.first)
    local owner = call('HGET', key, place)
    state.first = state.first + 1
    if owner then
      call('HDEL', key, place)
      state.takers = state.takers - 1
      if isAlive(ctx, sessionOf(owner)) then return owner end
      state.claims = state.claims - call('HDEL', key, 'c' .. owner)
    end
  end
end

-- What a taker has is pending under its claim, and goes from the group with that.
local function removeItem(ctx, key, item, entry, taker)
  call('XGROUP', 'DELCONSUMER', ctx.items, GROUP, taker)
  call('XDEL', ctx.items, entry)
  call('HDEL', key, 'g' .. item)
end

-- Gives a taker the oldest item that nobody has, first of those that were given back. Answers the item, how often it was
-- handed out, and its value.
local function handOut(ctx, key, state, taker)
  while state.free > 0 do
    local entry, fields, attempts
    if state.returned > 0 then
      local pending = call('XPENDING', ctx.items, GROUP, '-', '+', 1, NOBODY)[1]
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
    if isAlive(ctx, sessionOf(giver)) then
      local token = nextToken(ctx)
      call('HSET', key, 'g' .. item, entry .. ' ' .. giver .. ' ' .. taker, 'c' .. taker, 't ' .. item .. ' ' .. token)
      return token, '["' .. item .. '",' .. attempts .. ']', fields[4]
    end
    -- Nobody is there to give it any more, and its reaper finds nothing.
    removeItem(ctx, key, item, entry, taker)
    state.givers = state.givers - 1
  end
end

-- The session of a claim is over, and the next one may ask what has come of it.
local function keepResult(ctx, key, state, what)
  state.newest = state.newest + 1
  call('HSET', key, 'k' .. text(state.newest), text(ctx.now + state.keep) .. ' ' .. what)
end

-- A claim of an earlier session has come to this already, which `kept` says, if anything: the claim that asks now hears it.
local function recall(ctx, key, state, id, role, what, about, kept)
  local result = match(kept or '', ' (.*)$')
  if not result then return nil end
  local token = nextToken(ctx)
  call('HSET', key, 'r' .. what, ctx.session .. '/' .. id .. ' ' .. result)
  enter(ctx, key, state, id, role, what, token)
  saveMeeting(ctx, key, state)
  return told(token, about, result)
end

-- rendezvous.give: gives an item to whoever has waited longest, or offers it, and waits until somebody has accepted it
-- keys: resource, items
-- args: id string, item string, keep number, value string
-- reply: ["granted", token string, capacity number, about json, value json] | ["queued", ahead number, nearest number]
handlers['rendezvous.give'] = function(ctx, key, id, item, keep, value)
  local owner = ctx.session .. '/' .. id
  local state = loadMeeting(key)
  state.keep = tonumber(keep)
  local found = call('HMGET', key, 'r' .. item, 'g' .. item)
  local known = recall(ctx, key, state, id, 'g', item, 'null', found[1])
  if known then return known end
  enter(ctx, key, state, id, 'g', item, '0')
  if found[2] then
    -- Of a session that is over: this one goes on with it.
    local entry, giver, taker = match(found[2], '^(%S+) (%S+) (%S+)$')
    if not call('HGET', key, 'c' .. giver) then state.givers = state.givers + 1 end
    call('HSET', key, 'g' .. item, entry .. ' ' .. owner .. ' ' .. taker)
  else
    if state.stream == 0 then
      call('XGROUP', 'CREATE', ctx.items, GROUP, '0', 'MKSTREAM')
      state.stream = 1
    end
    local entry = call('XADD', ctx.items, '*', 'i', item, 'v', value)
    call('HSET', key, 'g' .. item, entry .. ' ' .. owner .. ' ' .. NOBODY)
    state.givers, state.free = state.givers + 1, state.free + 1
    local taker = nextTaker(ctx, key, state)
    if taker then inform(ctx, taker, handOut(ctx, key, state, taker)) end
  end
  saveMeeting(ctx, key, state)
  return queued(ctx, state.free)
end

-- rendezvous.take: takes the oldest item that nobody has, or queues for one
-- keys: resource, items
-- args: id string
-- reply: ["granted", token string, capacity number, about json, value json] | ["queued", ahead number, nearest number]
handlers['rendezvous.take'] = function(ctx, key, id)
  local owner = ctx.session .. '/' .. id
  local state = loadMeeting(key)
  state.claims = state.claims + 1
  own(ctx, key, id)
  local token, about, value = handOut(ctx, key, state, owner)
  if token then
    saveMeeting(ctx, key, state)
    return told(token, about, value)
  end
  state.last, state.takers = state.last + 1, state.takers + 1
  local place = text(state.last)
  call('HSET', key, 'w' .. place, owner, 'c' .. owner, 'q ' .. place .. ' 0')
  saveMeeting(ctx, key, state)
  return queued(ctx, state.takers - 1)
end

-- rendezvous.acknowledge: the taker has accepted the item, or refused it for good; the giver is told
-- keys: resource, items
-- args: id string, accepted boolean
-- reply: ["acknowledged"] | ["absent"]
-- flags: allow-oom
handlers['rendezvous.acknowledge'] = function(ctx, key, id, accepted)
  local owner = ctx.session .. '/' .. id
  local item = match(call('HGET', key, 'c' .. owner) or '', '^t (%S+)')
  if not item then return ABSENT end
  local state = loadMeeting(key)
  local entry, giver = match(call('HGET', key, 'g' .. item), '^(%S+) (%S+)')
  removeItem(ctx, key, item, entry, owner)
  state.claims = state.claims - call('HDEL', key, 'c' .. owner)
  disown(ctx, key, id)
  if giver ~= NOBODY then
    local result = accepted == '1' and 'true' or 'false'
    call('HSET', key, 'r' .. item, giver .. ' ' .. result)
    if call('HGET', key, 'c' .. giver) then
      local token = nextToken(ctx)
      call('HSET', key, 'c' .. giver, 'g ' .. item .. ' ' .. token)
      state.givers = state.givers - 1
      inform(ctx, giver, token, 'null', result)
    else
      keepResult(ctx, key, state, item)
    end
  end
  saveMeeting(ctx, key, state)
  return '["acknowledged"]'
end

-- Ends what a party was about. The other one, if there is one already, learns of that when it answers, or asks anew.
local function separate(ctx, key, party)
  local other = match(call('HGET', key, 'e' .. party) or '', '^%S+ (%S+)')
  if not other then return end
  call('HDEL', key, 'e' .. party, 'v' .. party)
  if other == NOBODY then
    if call('HGET', key, 'x') == party then call('HDEL', key, 'x') end
    return
  end
  local owner, asked = match(call('HGET', key, 'e' .. other), '^(%S+) %S+ (%d)')
  if asked == '1' then
    call('HSET', key, 'e' .. other, owner .. ' ' .. NOBODY .. ' 1')
  else
    call('HDEL', key, 'e' .. other, 'v' .. other)
    post(ctx, sessionOf(owner), '["again","' .. idOf(owner) .. '"]')
  end
end

-- How it stands with a party that was asked for before by the same claim. One whose other has gone meanwhile, while what asks
-- it may still be on its way, is told so, and begins anew under another claim: nobody is asked twice under one.
local function standing(key, party, token)
  local other, asked = match(call('HGET', key, 'e' .. party) or '', '^%S+ (%S+) (%d)')
  if asked ~= '1' then return asked and QUEUED or nil end
  if other == NOBODY then return told(token, 'null', 'null') end
  return told(token, 'false', call('HGET', key, 'v' .. other))
end

-- rendezvous.exchange: meets the party that waits, which is asked whether it is still there, or waits for another
-- keys: resource, items
-- args: id string, party string, keep number, value string
-- reply: ["granted", token string, capacity number, about json, value json] | ["queued", ahead number, nearest number]
handlers['rendezvous.exchange'] = function(ctx, key, id, party, keep, value)
  local owner = ctx.session .. '/' .. id
  local state = loadMeeting(key)
  state.keep = tonumber(keep)
  local known = recall(ctx, key, state, id, 'e', party, 'true', call('HGET', key, 'r' .. party))
  if known then return known end
  if match(call('HGET', key, 'e' .. party) or '', '^%S+') == owner then
    local answer = standing(key, party, match(call('HGET', key, 'c' .. owner), '%S+$'))
    return answer == QUEUED and queued(ctx, 0) or answer
  end
  separate(ctx, key, party)
  local other = call('HGET', key, 'x')
  local there = other and match(call('HGET', key, 'e' .. other), '^%S+')
  if there and isAlive(ctx, sessionOf(there)) then
    local token = nextToken(ctx)
    call('HDEL', key, 'x')
    call('HSET', key, 'e' .. party, owner .. ' ' .. other .. ' 0', 'v' .. party, value,
      'e' .. other, there .. ' ' .. party .. ' 1', 'c' .. there, 'e ' .. other .. ' ' .. token)
    inform(ctx, there, token, 'false', value)
  else
    -- The claim of one whose session is over is left to its reaper.
    if other then call('HDEL', key, 'e' .. other, 'v' .. other) end
    call('HSET', key, 'e' .. party, owner .. ' ' .. NOBODY .. ' 0', 'v' .. party, value, 'x', party)
  end
  enter(ctx, key, state, id, 'e', party, '0')
  saveMeeting(ctx, key, state)
  return queued(ctx, 0)
end

-- rendezvous.accept: the party that was asked is there, so that both have met, unless the other one has gone meanwhile
-- keys: resource, items
-- args: id string
-- reply: ["accepted"] | ["alone"]
-- flags: allow-oom
handlers['rendezvous.accept'] = function(ctx, key, id)
  local owner = ctx.session .. '/' .. id
  local party = match(call('HGET', key, 'c' .. owner) or '', '^e (%S+)')
  if not party then return '["alone"]' end
  local other = match(call('HGET', key, 'e' .. party) or '', '^%S+ (%S+)')
  local there = other and match(call('HGET', key, 'e' .. other) or '', '^%S+')
  if there and isAlive(ctx, sessionOf(there)) then
    local brought = call('HMGET', key, 'v' .. party, 'v' .. other)
    local token = nextToken(ctx)
    call('HDEL', key, 'e' .. party, 'v' .. party, 'e' .. other, 'v' .. other)
    call('HSET', key, 'r' .. party, owner .. ' ' .. brought[2], 'r' .. other, there .. ' ' .. brought[1],
      'c' .. there, 'e ' .. other .. ' ' .. token)
    inform(ctx, there, token, 'true', brought[1])
    return '["accepted"]'
  end
  local state = loadMeeting(key)
  separate(ctx, key, party)
  state.claims = state.claims - call('HDEL', key, 'c' .. owner)
  disown(ctx, key, id)
  saveMeeting(ctx, key, state)
  return '["alone"]'
end

-- rendezvous.check: what has become of a request to give, to take, or to exchange
-- keys: resource, items
-- args: id string
-- reply: ["granted", token string, capacity number, about json, value json] | ["queued", ahead number, nearest number] | ["absent"]
-- flags: allow-oom
handlers['rendezvous.check'] = function(ctx, key, id)
  local owner = ctx.session .. '/' .. id
  local role, what, token = match(call('HGET', key, 'c' .. owner) or '', '^(%a) (%S+) (%S+)$')
  if not role then return ABSENT end
  if role == 'q' then return queued(ctx, tonumber(what) - loadMeeting(key).first) end
  if role == 't' then
    local entry = match(call('HGET', key, 'g' .. what), '^%S+')
    local attempts = call('XPENDING', ctx.items, GROUP, entry, entry, 1)[1][4]
    return told(token, '["' .. what .. '",' .. attempts .. ']', call('XRANGE', ctx.items, entry, entry)[1][2][4])
  end
  local result = match(call('HGET', key, 'r' .. what) or '', ' (.*)$')
  if role == 'g' then
    if result then return told(token, 'null', result) end
    return call('HGET', key, 'g' .. what) and queued(ctx, 0) or ABSENT
  end
  if result then return told(token, 'true', result) end
  local answer = standing(key, what, token)
  return answer == QUEUED and queued(ctx, 0) or answer or ABSENT
end

-- rendezvous.state: how many give, and how many wait to take and to exchange
-- keys: resource, items
-- args:
-- reply: ["state", givers number, takers number, exchangers number]
-- flags: no-writes
handlers['rendezvous.state'] = function(_, key)
  local state = loadMeeting(key)
  return format('["state",%d,%d,%d]', state.givers, state.takers, call('HGET', key, 'x') and 1 or 0)
end

-- An item goes to who has waited longest, or is kept for who comes, if its giver is still there.
local function giveBack(ctx, key, state, taker, item)
  local entry, giver = match(call('HGET', key, 'g' .. item), '^(%S+) (%S+)')
  if giver == NOBODY or not isAlive(ctx, sessionOf(giver)) then
    if call('HGET', key, 'c' .. giver) then state.givers = state.givers - 1 end
    return removeItem(ctx, key, item, entry, taker)
  end
  call('XCLAIM', ctx.items, GROUP, NOBODY, 0, entry, 'JUSTID')
  call('XGROUP', 'DELCONSUMER', ctx.items, GROUP, taker)
  call('HSET', key, 'g' .. item, entry .. ' ' .. giver .. ' ' .. NOBODY)
  state.free, state.returned = state.free + 1, state.returned + 1
  local following = nextTaker(ctx, key, state)
  if following then inform(ctx, following, handOut(ctx, key, state, following)) end
end

-- An item that nobody has goes with its giver. One that somebody has stays there.
local function withdraw(ctx, key, state, giver, item)
  local entry, owner, taker = match(call('HGET', key, 'g' .. item) or '', '^(%S+) (%S+) (%S+)$')
  if owner ~= giver then return end
  state.givers = state.givers - 1
  if taker == NOBODY then
    state.returned = state.returned - call('XACK', ctx.items, GROUP, entry)
    state.free = state.free - 1
    call('XDEL', ctx.items, entry)
    call('HDEL', key, 'g' .. item)
  elseif hasLeft(ctx, sessionOf(giver)) then
    call('HSET', key, 'g' .. item, entry .. ' ' .. NOBODY .. ' ' .. taker)
  end
end

reapers.rendezvous = function(ctx, key, session, id)
  local owner = session .. '/' .. id
  local role, what = match(call('HGET', key, 'c' .. owner) or '', '^(%a) (%S+)')
  if not role then return end
  local state = loadMeeting(key)
  state.claims = state.claims - call('HDEL', key, 'c' .. owner)
  if role == 'q' then
    call('HDEL', key, 'w' .. what)
    state.takers = state.takers - 1
  elseif role == 't' then
    giveBack(ctx, key, state, owner, what)
  elseif match(call('HGET', key, 'r' .. what) or '', '^%S+') == owner then
    if hasLeft(ctx, session) then call('HDEL', key, 'r' .. what) else keepResult(ctx, key, state, what) end
  elseif role == 'g' then
    withdraw(ctx, key, state, owner, what)
  elseif match(call('HGET', key, 'e' .. what) or '', '^%S+') == owner then
    separate(ctx, key, what)
  end
  saveMeeting(ctx, key, state)
end
