-- How a call is executed: the context of its requests, and the state that is written once for all of them.

-- In microseconds.
local TOKENS_EACH, TOKENS_AHEAD = 10000000, 20000000

-- Additions go first: what was given up is never owned again.
local function writeOwned(ctx)
  if ctx.added then call('SADD', ownedBy(ctx, ctx.session), unpack(ctx.added)) end
  if ctx.removed then call('SREM', ownedBy(ctx, ctx.session), unpack(ctx.removed)) end
end

-- Of the call before, which often was to the same partition: its first key, and what follows from that.
local sessionsKey, prefix, dues

local function context(keys, argv)
  if not call then bind() end
  local time = call('TIME')
  local micros = time[1] * 1e6 + time[2]
  if keys[1] ~= sessionsKey then
    sessionsKey, prefix = keys[1], sub(keys[1], 1, -9) -- without "sessions"
    dues = prefix .. 'due'
  end
  -- Room for the fields that follow: a table that grows is hashed anew.
  return {
    sessions = sessionsKey,
    dues = dues,
    prefix = prefix,
    session = argv[1],
    seconds = time[1],
    micros = micros,
    now = floor(micros / 1000),
    own = false,
    lease = false,
    last = false,
    before = false,
    token = false
  }
end

-- The keys of a request that declares more than one role, by role. Answers how many they are.
local function bindKeys(ctx, keys, at, shape)
  local roles = shape.roles
  if not roles then
    ctx.kind = match(keys[at], '^([^:]*):', #ctx.prefix + 1)
    roles = ROLES[ctx.kind] or ROLES.none
  end
  for index = 2, #roles do ctx[roles[index]] = keys[at + index - 1] end
  return #roles
end

-- The keys of a request about several resources, whose first argument is their number. `ctx.bind` chooses one of them,
-- and answers its hash.
local function bindEach(ctx, keys, at, shape, count)
  local used = bindKeys(ctx, keys, at, shape)
  ctx.bind = function(index)
    local first = at + (index - 1) * used
    bindKeys(ctx, keys, first, shape)
    return keys[first]
  end
  return used * count
end

local function isDenial(message)
  return find(message, 'NOPERM', 1, true) or find(message, 'ACL failure', 1, true)
    or find(message, 'no permission', 1, true) or find(message, 'The user executing the script', 1, true)
end

-- Every request runs by itself: a handler that fails answers "failed", and the others run.
local function dispatch(ctx, keys, requests)
  local replies, count, key, at, length, before = {}, 0, 2, 5, #requests, 0
  ctx.replies = replies
  while at <= length do
    local verb = requests[at]
    local same = SAME[verb]
    if same then verb = same end
    local shape = SHAPES[verb]
    count = count + 1
    if not shape then
      -- The requests behind it cannot be told apart from its arguments.
      replies[count] = '["failed","unknown request"]'
      break
    end
    local used, last = shape.keys, at + shape.args
    if same then
      key, used = key - before, before
    else
      if ctx.items then ctx.items = nil end
      if used == -2 then
        used = bindEach(ctx, keys, key, shape, tonumber(requests[at + 1]))
      elseif used ~= 0 and used ~= 1 then
        used = bindKeys(ctx, keys, key, shape)
      end
    end
    local fine, answer = pcall(handlers[verb], ctx, keys[key], unpack(requests, at + 1, last))
    if fine then
      replies[count] = answer
    else
      redis.log(redis.LOG_WARNING, 'lockstep: a request failed: ' .. verb)
      local message = tostring(type(answer) == 'table' and answer.err or answer)
      replies[count] = isDenial(message) and '["failed","denied"]' or '["failed","defect"]'
    end
    key, at, before = key + used, last + 1, used
  end
  return replies
end

-- One concatenation: Redis's Lua hashes every string that it makes, and events can be long.
local function answer(ctx, replies)
  local count = #replies
  if count == 0 then return '["ok",[]]' end
  local events = ctx.events
  if count == 1 and not events and not ctx.expects then return '["ok",[' .. replies[1] .. ']]' end
  local tail = ctx.expects and '],' .. text(nearest(ctx)) .. ']' or ']]'
  if events then
    local parts = { '["ok",[', concat(replies, ','), '],[', events[1] }
    for index = 2, #events do
      parts[#parts + 1], parts[#parts + 2] = ',', events[index]
    end
    parts[#parts + 1] = tail
    return concat(parts)
  end
  replies[1] = '["ok",[' .. replies[1]
  replies[count] = replies[count] .. (ctx.expects and '],[' or '') .. tail
  return concat(replies, ',')
end

local function finishCall(ctx)
  local at = 1
  while ctx.later and ctx.later[at] do
    local fine, cause = pcall(ctx.later[at])
    if not fine then
      redis.log(redis.LOG_WARNING, 'lockstep: a call could not be finished: ' .. tostring(type(cause) == 'table' and cause.err or cause))
    end
    at = at + 1
  end
end

-- Keeps `floor` above the tokens that are given: it is written when the tokens enter another interval of 10 seconds, for
-- two of them ahead.
local function raiseFloor(ctx)
  local before = ctx.before
  if not before or before % TOKENS_EACH + (ctx.token - before) >= TOKENS_EACH then
    call('SET', ctx.prefix .. 'floor', text(ctx.token + TOKENS_AHEAD))
  end
end

run = function(keys, argv)
  local ctx = context(keys, argv)
  local session = ctx.session
  if session == '' then
    local replies = dispatch(ctx, keys, argv)
    finishCall(ctx)
    writeMail(ctx)
    if ctx.token then
      raiseFloor(ctx)
      call('HSET', keys[1], 'token', ctx.last)
    end
    return answer(ctx, replies)
  end

  local field = 's' .. session
  local packed = call('HGET', keys[1], field)
  local state = packed and unpackSession(packed)
  if not state then return '["unknown"]' end
  ctx.own = state
  if state.deadline <= ctx.now then return '["expired"]' end
  -- Arithmetic turns text into a number for less than a call does.
  ctx.lease = argv[3] + 0
  state.deadline = ctx.now + ctx.lease
  local number, read = argv[2] + 0, argv[4]
  if number == state.number then
    -- Answered already, and renewed all the same: the coordinator counts its trust from this sending of the batch.
    call('HSET', keys[1], field, packSession(state))
    return call('HGET', keys[1], 'r' .. session)
  end
  if number < state.number then return '["stale"]' end
  if number > state.number + 1 then return '["gap"]' end
  if read ~= '' then
    local id = read
    read = tonumber(match(id, '^%d+'))
    -- Read, and not posted: Redis has forgotten what it delivered.
    if read > state.posted or read == state.posted and id ~= text(read) .. '-' .. text(state.stamp) then
      return '["gap"]'
    end
    if floor(read / TRIM_EVERY) > floor(state.read / TRIM_EVERY) then
      call('XTRIM', mailboxOf(ctx, session), 'MINID', text(read) .. '-0')
    end
    state.read = read
  end

  local replies = dispatch(ctx, keys, argv)
  finishCall(ctx)
  writeOwned(ctx)
  writeMail(ctx)
  state.number = number
  local reply = answer(ctx, replies)
  if ctx.token then
    raiseFloor(ctx)
    call('HSET', keys[1], field, packSession(state), 'r' .. session, reply, 'token', ctx.last)
  else
    call('HSET', keys[1], field, packSession(state), 'r' .. session, reply)
  end
  return reply
end

-- Renews sessions of one coordinator that have nothing else to ask, each in a partition of its own, in one call where Redis is no cluster.
--   KEYS  the sessions of each partition
--   ARGV  1 lease_ms, then for each the session id and the number of its last batch
--   reply JSON, for each: [what `session.renew` replies, next number]; null if it has to ask by itself
renew = function(keys, argv)
  local answers = {}
  for index = 1, #keys do
    local session = argv[2 * index]
    local ctx = context({ keys[index] }, { session })
    local field = 's' .. session
    local packed = call('HGET', ctx.sessions, field)
    local state = packed and unpackSession(packed)
    if state and state.deadline > ctx.now and state.number == argv[2 * index + 1] + 0 then
      ctx.own, ctx.lease = state, argv[1] + 0
      state.deadline = ctx.now + ctx.lease
      local renewed = handlers['session.renew'](ctx)
      call('HSET', ctx.sessions, field, packSession(state))
      answers[index] = '[' .. renewed .. ',' .. text(nearest(ctx)) .. ']'
    else
      answers[index] = 'null'
    end
  end
  return '[' .. concat(answers, ',') .. ']'
end

-- Requests that only read, for questions: KEYS and ARGV as above, no session. With the number 1, what an expired session
-- may falsify is answered all the same.
inspect = function(keys, argv)
  local ctx = context(keys, argv)
  ctx.session = ''
  ctx.anyway = argv[2] == '1'
  return answer(ctx, dispatch(ctx, keys, argv))
end
