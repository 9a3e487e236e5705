-- A semaphore of capacity 1 whose holder is the leader, with a value and with members that observe it.
--
-- A resource is the hash of Semaphore.lua, and besides:
--   l                 the leader: "<session>/<id>"; absent while there is none
--   n                 number of the last change, a token: changes are never confused, also when the resource was deleted
--   v<session>/<id>   the value of a candidate or leader, as JSON
--   o<session>/<id>   an observer, which counts as a hold of weight 0; it hears of every change
-- A leader's term is the token of its hold.

local MOST_CANDIDATES = 1000

local function aboutOf(ctx, owner)
  return call('HGET', ctx.sessions, 'about' .. match(owner, '^[^/]*')) or 'null'
end

-- Number of the change, term, owner, since when in seconds, who it is, value: all of nothing when there is none.
local function describeLeader(ctx, key)
  local found = call('HMGET', key, 'n', 'l')
  local owner = found[2]
  if not owner then return (found[1] or '0') .. ',"0","",0,null,null' end
  local fields = call('HMGET', key, 'h' .. owner, 'v' .. owner)
  local term, since = match(fields[1], '^%S+ (%S+) (%S+)$')
  return found[1] .. ',"' .. term .. '","' .. owner .. '",' .. since .. ',' .. aboutOf(ctx, owner) .. ',' .. (fields[2] or 'null')
end

local function announceLeader(ctx, key)
  call('HSET', key, 'n', nextToken(ctx))
  announce(ctx, key, describeLeader(ctx, key))
end

-- Whoever was served last leads, if anybody was.
local function crown(ctx, key, owner)
  if owner then call('HSET', key, 'l', owner) else call('HDEL', key, 'l') end
  announceLeader(ctx, key)
end

local function leaveLeader(ctx, key, session, id)
  local owner = session .. '/' .. id
  if call('HDEL', key, 'o' .. owner) == 1 then
    local state = load(key, 1)
    state.holds = state.holds - 1
    save(key, state)
    return
  end
  local led = call('HGET', key, 'l') == owner
  call('HDEL', key, 'v' .. owner)
  ctx.served = nil
  drop(ctx, key, session, id)
  if led and call('HLEN', key) > 0 and (ctx.served or load(key, 0).holds > 0) then crown(ctx, key, ctx.served) end
end

-- leader.campaign: leads, or queues to lead
-- keys: resource
-- args: id string, value string, wait boolean
-- reply: ["granted", token string, capacity number] | ["queued", ahead number, nearest number] | ["busy"]
handlers['leader.campaign'] = function(ctx, key, id, value, wait)
  local state = load(key, 1)
  local owner = ctx.session .. '/' .. id
  if state.first > state.last and state.taken == 0 then
    call('HSET', key, 'v' .. owner, value)
    local reply = grant(ctx, key, state, id, 1)
    crown(ctx, key, owner)
    return reply
  end
  if wait == '' then return '["busy"]' end
  call('HSET', key, 'v' .. owner, value)
  return enqueue(ctx, key, state, id, 1)
end

-- leader.observe: hears who leads, from now on; asked again it is told in its mailbox, behind what is there already
-- keys: resource
-- args: id string
-- reply: ["observing", change number, term string, owner string, since number, about json, value json] | ["posted"]
handlers['leader.observe'] = function(ctx, key, id)
  if enrol(ctx, key, id, '') then
    local state = load(key, 1)
    state.holds = state.holds + 1
    save(key, state)
    if call('HGET', key, 'n') == false then call('HSET', key, 'n', nextToken(ctx)) end
    return '["observing",' .. describeLeader(ctx, key) .. ']'
  end
  post(ctx, ctx.session, '["changed","' .. id .. '",' .. describeLeader(ctx, key) .. ']')
  return '["posted"]'
end

-- leader.proclaim: gives the leader another value
-- keys: resource
-- args: id string, value string
-- reply: ["proclaimed"] | ["absent"]
handlers['leader.proclaim'] = function(ctx, key, id, value)
  local owner = ctx.session .. '/' .. id
  if call('HGET', key, 'l') ~= owner then return '["absent"]' end
  call('HSET', key, 'v' .. owner, value)
  announceLeader(ctx, key)
  return '["proclaimed"]'
end

-- leader.nominate: the leader puts a candidate in front of all others
-- keys: resource
-- args: id string, candidate string
-- reply: ["nominated"] | ["gone"] | ["absent"]
handlers['leader.nominate'] = function(ctx, key, id, candidate)
  if call('HGET', key, 'l') ~= ctx.session .. '/' .. id then return '["absent"]' end
  local place = call('HGET', key, 'q' .. candidate)
  if not place or not isAlive(ctx, match(candidate, '^[^/]*')) then return '["gone"]' end
  local state = load(key, 1)
  if tonumber(place) ~= state.first then
    state.first = state.first - 1
    local front = text(state.first)
    call('HDEL', key, 'w' .. place)
    call('HSET', key, 'w' .. front, candidate .. ' 1', 'q' .. candidate, front)
    save(key, state)
  end
  return '["nominated"]'
end

-- leader.state: who leads
-- keys: resource
-- args:
-- reply: ["state", change number, term string, owner string, since number, about json, value json]
-- flags: no-writes
handlers['leader.state'] = function(ctx, key)
  return '["state",' .. describeLeader(ctx, key) .. ']'
end

-- leader.candidates: who waits to lead, in order: the owner, who it is, and its value, for each
-- keys: resource
-- args:
-- reply: ["candidates", list json]
-- flags: no-writes
handlers['leader.candidates'] = function(ctx, key)
  local state = load(key, 1)
  local found, place = {}, state.first
  while place <= state.last and #found < MOST_CANDIDATES do
    local fields, waiting = {}, 0
    for at = place, math.min(place + 99, state.last) do fields[#fields + 1] = 'w' .. text(at) end
    for _, waiter in ipairs(call('HMGET', key, unpack(fields))) do
      if waiter then
        waiting = waiting + 1
        local owner = match(waiter, '^%S+')
        if #found < MOST_CANDIDATES and isAlive(ctx, match(owner, '^[^/]*')) then
          found[#found + 1] = '["' .. owner .. '",' .. aboutOf(ctx, owner) .. ',' .. (call('HGET', key, 'v' .. owner) or 'null') .. ']'
        end
      end
    end
    place = waiting > 0 and place + 100 or nextWaiter(key, place, state.last)
  end
  return '["candidates",[' .. table.concat(found, ',') .. ']]'
end

reapers.leader = leaveLeader
reapers.singleton = leaveLeader
