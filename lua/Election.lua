-- An election: a semaphore of capacity 1 whose holder is the leader, with a value, and with members that hear of changes.
--
-- kinds: election, singleton: hash
-- after Semaphore.lua
-- after waiters.lua
--
-- A resource is the hash of Semaphore.lua, and besides:
--   l                 the claim of the leader; absent while there is none
--   n                 number of the last change, a token: changes are never confused, also when the resource was deleted
--   v<session>/<id>   the value of a candidate or leader, as JSON
--   o<session>/<id>   an observer
-- A leader's term is the token of its hold.

local NOBODY = '0,"0","",0,null,null'

-- Number of the change, term, claim, since when in seconds, its process, value: empty while there is no leader.
local function leadership(ctx, key)
  local found = call('HMGET', key, 'n', 'l')
  local claim = found[2]
  if not claim then return continued(json(found[1] or '0'), '0', '', 0, json('null'), json('null')) end
  local fields = call('HMGET', key, 'h' .. claim, 'v' .. claim)
  local term, since = match(fields[1], '^%S+ (%S+) (%S+)')
  return continued(json(found[1]), term, claim, json(since), aboutOf(ctx, claim), json(fields[2] or 'null'))
end

-- The claim leads from now on; without one, there is no leader.
local function crown(ctx, key, claim)
  call('HSET', key, 'n', nextToken(ctx))
  if claim then call('HSET', key, 'l', claim) else call('HDEL', key, 'l') end
  announce(ctx, key, json(leadership(ctx, key)))
end

-- Ends a term, a candidature or an observation, and lets the next candidate succeed.
local function retire(ctx, key, session, id)
  local claim = session .. '/' .. id
  local led = call('HGET', key, 'l') == claim
  call('HDEL', key, 'v' .. claim)
  ctx.served = nil
  drop(ctx, key, session, id, load(key, 1))
  if (led or ctx.served) and call('HLEN', key) > 0 then crown(ctx, key, ctx.served) end
end

-- election.campaign: leads, or queues to lead. With "k", its process may keep the leadership when its term has ended, as it may keep a
-- lock: see `lock.take`. The terms that follow are those of one leader to all others.
-- keys: hash
-- args: id string, value string, how string
-- reply: ["granted", token string] | ["kept", token string, tokens number] | ["queued", ahead number]
handlers['election.campaign'] = function(ctx, key, id, value, how)
  local state = load(key, 1)
  local known = recallClaim(ctx, key, state, id)
  if known then return known end
  local claim = claimOf(ctx, id)
  call('HSET', key, 'v' .. claim, value)
  if state.first <= state.last or state.taken > 0 then
    recallKept(ctx, key, state)
    return enqueue(ctx, key, state, id, 1)
  end
  local answer = grant(ctx, key, state, id, 1, how == 'k' and hasTokens(ctx))
  crown(ctx, key, claim)
  return answer
end

-- election.observe: hears of the leader, from now on. Asked again, an observer hears it through its mailbox, behind the changes
-- that are there already; the reply says nothing then, as change 0.
-- keys: hash
-- args: id string
-- reply: ["joined", change number, term string, claim string, since number, about json, value json]
handlers['election.observe'] = function(ctx, key, id)
  local state = load(key, 1)
  if not enrol(ctx, key, id) then
    post(ctx, ctx.session, '["changed","' .. id .. '",' .. leadership(ctx, key) .. ']')
    return reply('joined', json(NOBODY))
  end
  state.members = state.members + 1
  save(key, state)
  if not call('HGET', key, 'n') then call('HSET', key, 'n', nextToken(ctx)) end
  return reply('joined', json(leadership(ctx, key)))
end

-- election.proclaim: gives the leader another value; the same one changes nothing
-- keys: hash
-- args: id string, value string
-- reply: ["proclaimed"] | ["absent"]
handlers['election.proclaim'] = function(ctx, key, id, value)
  local claim = claimOf(ctx, id)
  if call('HGET', key, 'l') ~= claim then return ABSENT end
  if call('HGET', key, 'v' .. claim) ~= value then
    call('HSET', key, 'v' .. claim, value)
    crown(ctx, key, claim)
  end
  return '["proclaimed"]'
end

-- election.nominate: the leader puts a candidate in front of all others
-- keys: hash
-- args: id string, candidate string
-- reply: ["nominated"] | ["gone"] | ["absent"]
handlers['election.nominate'] = function(ctx, key, id, candidate)
  if call('HGET', key, 'l') ~= claimOf(ctx, id) then return ABSENT end
  local state = load(key, 1)
  -- Nothing but a claim: a part of the queue, or several claims, would be taken out of it too.
  local isClaim = find(candidate, '^[^/ :]+/[^/ :]+$')
  if not (isClaim and isAlive(ctx, holderOf(candidate)) and depart(key, state, candidate)) then return '["gone"]' end
  join(key, state, candidate, '', true)
  save(key, state)
  return '["nominated"]'
end

-- election.state: the leader
-- keys: hash
-- args:
-- reply: ["state", change number, term string, claim string, since number, about json, value json] | ["stale"]
-- flags: no-writes
handlers['election.state'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  return reply('state', json(leadership(ctx, key)))
end

-- election.candidates: up to 1,000 candidates, the next first: for each its claim, who it is, and its value
-- keys: hash
-- args:
-- reply: ["candidates", candidates json] | ["stale"]
-- flags: no-writes
handlers['election.candidates'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local claims, candidates = waitersOf(ctx, key, load(key, 1), MOST_LISTED), {}
  for index, claim in ipairs(claims) do
    candidates[index] = list({ claim, aboutOf(ctx, claim), json(call('HGET', key, 'v' .. claim) or 'null') })
  end
  return reply('candidates', list(candidates))
end

-- Goes on with what `retire` could not finish in one call.
local function succeed(ctx, key)
  ctx.served = nil
  serveOn(ctx, key, load(key, 1))
  if ctx.served then crown(ctx, key, ctx.served) end
end

reapers.election, alarms.election = retire, succeed
reapers.singleton, alarms.singleton = retire, succeed
