-- How a call is executed: the context of its requests, and the state that is written once for all of them.
--
-- after inline.lua

-- In microseconds.
local TOKENS_EACH, TOKENS_AHEAD = 10000000, 20000000

-- Additions go first: `own` has taken back what the call had given up before. A few of them go into the record of the session, where
-- there is room.
local function writeOwned(ctx)
  local state, added, removed = ctx.own, ctx.added, ctx.removed
  if added then
    local owned = #added <= FEW and #state.owned < SHORT and state.owned
    if owned then
      for index = 1, #added do
        local entry = marked(added[index])
        -- A waiter that was refused, and has not heard of it, asks again.
        if not find(owned, entry, 1, true) then owned = owned .. entry end
      end
      state.owned = owned
    else
      call('SADD', ownedBy(ctx, ctx.session), unpack(added))
    end
  end
  if removed then
    local rest
    for index = 1, #removed do
      local entry = removed[index]
      if not unmark(state, entry) then
        rest = rest or {}
        rest[#rest + 1] = entry
      end
    end
    if rest then call('SREM', ownedBy(ctx, ctx.session), unpack(rest)) end
  end
end

-- What has changed of inline states: those that are there are written with the session.
local function writeInlines(ctx, writes)
  local inline, gone = ctx.inline, nil
  for index = 1, #ctx.changed do
    local key = ctx.changed[index]
    local state = inline[key]
    -- One that has changed twice was written already.
    if state ~= nil then
      local field = inlineField(ctx.sessions, key)
      if state then
        writes[#writes + 1], writes[#writes + 2] = field, state
      else
        gone = gone or {}
        gone[#gone + 1] = field
      end
      inline[key] = nil
    end
  end
  if gone then call('HDEL', ctx.sessions, unpack(gone)) end
end

-- Of the call before, which often was to the same partition: its first key, and what follows from that.
local sessionsKey, prefix, dues

local function readTime()
  if not call then bind() end
  local time = call('TIME')
  return time[1] * 1e6 + time[2], time[1]
end

local function context(keys, argv, micros, seconds)
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
    seconds = seconds,
    micros = micros,
    now = floor(micros / 1000),
    own = false,
    last = false,
    before = false,
    token = false,
    inline = false,
    changed = false
  }
end

-- What `sessions` has of the session that asks, and the last token; behind that, the inline state of each resource that the call names.
-- Resources with several keys have none, and are the most of a call that begins with one. Of very many, each is read when it is asked
-- for.
local function readSessions(keys, field, inline, verb)
  if not keys[3] then return call('HMGET', keys[1], field, 'token', inline) end
  local shape, fields = SHAPES[verb], {}
  if shape and (shape.keys == -1 or shape.keys > 1) or #keys > MOST_ARGUMENTS then return call('HMGET', keys[1], field, 'token') end
  for index = 2, #keys do fields[index - 1] = inlineField(keys[1], keys[index]) end
  return call('HMGET', keys[1], field, 'token', unpack(fields))
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

local function causeOf(cause)
  return tostring(type(cause) == 'table' and cause.err or cause)
end

local function isDenial(message)
  return find(message, 'NOPERM', 1, true) or find(message, 'ACL failure', 1, true)
    or find(message, 'no permission', 1, true) or find(message, 'The user executing the script', 1, true)
end

local function failureOf(cause)
  return isDenial(causeOf(cause)) and '["failed","denied"]' or '["failed","defect"]'
end

-- Every request runs by itself: a handler that fails answers "failed", and the others run.
local function dispatch(ctx, keys, requests)
  local replies, about, count, key, at, length, before = {}, {}, 0, 2, 3, #requests, 0
  ctx.replies, ctx.about = replies, about
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
    about[count] = used > 0 and keys[key]
    local fine, answer = pcall(handlers[verb], ctx, keys[key], unpack(requests, at + 1, last))
    if fine then
      replies[count] = answer
    else
      redis.log(redis.LOG_WARNING, 'lockstep: a request failed: ' .. verb .. ': ' .. causeOf(answer))
      replies[count] = failureOf(answer)
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
  local tail = ctx.expects and '],' .. nearest(ctx.dues, ctx.expects, ctx.session, ctx.micros) .. ']' or ']]'
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

-- What was to be written for all requests about a resource was not, so none of them has succeeded. If none is about it, any may have
-- led to it.
local function failRequests(ctx, key, cause)
  local replies, about, known = ctx.replies, ctx.about, false
  for index = 1, #replies do known = known or about[index] == key end
  for index = 1, #replies do
    if not known or about[index] == key then replies[index] = failureOf(cause) end
  end
end

local function finishCall(ctx)
  local at = 1
  while ctx.later and ctx.later[at] do
    local one = ctx.later[at]
    local fine, cause = pcall(one.act)
    if not fine then
      redis.log(redis.LOG_WARNING, 'lockstep: a call could not be finished: ' .. causeOf(cause))
      failRequests(ctx, one.key, cause)
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

-- Writes what a call has changed of `sessions`, all of it at once.
local function write(ctx, writes)
  if ctx.mail then writeMail(ctx, writes) end
  if ctx.own then writes[#writes + 1], writes[#writes + 2] = 's' .. ctx.session, packSession(ctx.own) end
  if ctx.token then
    raiseFloor(ctx)
    writes[#writes + 1], writes[#writes + 2] = 'token', ctx.last
  end
  if ctx.changed then writeInlines(ctx, writes) end
  for from = 1, #writes, MOST_ARGUMENTS do
    call('HSET', ctx.sessions, unpack(writes, from, math.min(from + MOST_ARGUMENTS - 1, #writes)))
  end
end

-- Whether an event was posted that the session has read. If it was not, Redis has forgotten it, and perhaps posted others since.
local function isPosted(ctx, state, id, read)
  if read >= state.posted then return read == state.posted and id == text(read) .. '-' .. text(state.stamp) end
  if read <= state.read then return true end
  local mailbox = mailboxOf(ctx, ctx.session)
  if call('XRANGE', mailbox, id, id)[1] then return true end
  -- One that was trimmed, because there were too many, is in front of all that are left.
  local first = call('XRANGE', mailbox, '-', '+', 'COUNT', 1)[1]
  return not first or tonumber(match(first[1], '^%d+')) > read
end

run = function(keys, argv)
  local session = argv[1]
  local micros, seconds = readTime()
  -- Without a resource, the field is one that is never there.
  local field, inline = 's' .. session, inlineField(keys[1], keys[2] or '')
  local found = session ~= '' and readSessions(keys, field, inline, argv[3])
  local act = found and straight[argv[3]]
  local reply = act and act(keys, argv, field, inline, found, micros, seconds)
  if reply then return reply end

  local ctx = context(keys, argv, micros, seconds)
  if session == '' then
    local replies = dispatch(ctx, keys, argv)
    finishCall(ctx)
    write(ctx, {})
    return answer(ctx, replies)
  end

  local state = found[1] and unpackSession(found[1])
  if not state then return '["unknown"]' end
  if state.deadline <= ctx.now then return '["expired"]' end
  ctx.own, ctx.before, ctx.inline = state, found[2], {}
  for index = 2, #keys do ctx.inline[keys[index]] = found[index + 1] end
  state.deadline = ctx.now + state.lease
  local number, read = tonumber(argv[2]), nil
  if not number then
    number, read = match(argv[2], '^(%d+) (.*)$')
    number = number + 0
  end
  if number == state.number then
    -- Answered already, and renewed all the same: the coordinator counts its trust from this sending of the batch.
    call('HSET', keys[1], field, packSession(state))
    return call('HGET', keys[1], 'r' .. session)
  end
  if number < state.number then return '["stale"]' end
  if number > state.number + 1 then return '["gap"]' end
  if read then
    local id = read
    read = tonumber(match(id, '^%d+'))
    if not isPosted(ctx, state, id, read) then return '["gap"]' end
    if floor(read / TRIM_EVERY) > floor(state.read / TRIM_EVERY) then
      call('XTRIM', mailboxOf(ctx, session), 'MINID', text(read) .. '-0')
    end
    state.read = read
  end

  local replies = dispatch(ctx, keys, argv)
  finishCall(ctx)
  writeOwned(ctx)
  state.number = number
  reply = answer(ctx, replies)
  write(ctx, { 'r' .. session, reply })
  return reply
end

-- Renews sessions of one coordinator that have nothing else to ask, each in a partition of its own, in one call where Redis is no cluster.
--   KEYS  the sessions of each partition
--   ARGV  for each the session id and the number of its last batch
--   reply JSON, for each: [what `session.renew` replies, next number, ending string]; null if it has to ask by itself
renew = function(keys, argv)
  local answers = {}
  for index = 1, #keys do
    local session = argv[2 * index - 1]
    local ctx = context({ keys[index] }, { session }, readTime())
    local field = 's' .. session
    local packed = call('HGET', ctx.sessions, field)
    local state = packed and unpackSession(packed)
    if state and state.deadline > ctx.now and state.number == argv[2 * index] + 0 then
      ctx.own = state
      state.deadline = ctx.now + state.lease
      local renewed = handlers['session.renew'](ctx)
      call('HSET', ctx.sessions, field, packSession(state))
      answers[index] = '[' .. renewed .. ',' .. nearest(ctx.dues, ctx.expects, ctx.session, ctx.micros) .. ']'
    else
      answers[index] = 'null'
    end
  end
  return '[' .. concat(answers, ',') .. ']'
end

-- Requests that only read, for questions: KEYS and ARGV as above, no session. With the number 1, what an expired session
-- may falsify is answered all the same.
inspect = function(keys, argv)
  local ctx = context(keys, argv, readTime())
  ctx.session = ''
  ctx.anyway = argv[2] == '1'
  return answer(ctx, dispatch(ctx, keys, argv))
end
