-- The partition actor's core: session check, exactly-once batches, dispatch, fencing tokens, mailboxes, reaping.
--
-- One call is one message to the actor of one partition:
--   KEYS  1 sessions  hash of all sessions of the partition (see below)
--         2 due       zset: session -> a time in server ms before which it cannot be due to be reaped
--         3 owned     set of the session: "<hold id>:<kind>:<name>" of everything it holds or waits for
--         4 mailbox   stream of the session
--         5.. the keys of the requests, in order; a resource that carries items has two, its hash and those
--   ARGV  1 session id, or "" for requests that need no session (they are idempotent)
--         2 batch number  3 lease_ms  4 mailbox id read so far, or ""
--         5.. the requests: verb, its arguments, verb, its arguments, ... (text: parsing JSON would cost more than the rest)
--   reply JSON: ["ok", [reply, ...]] | ["ok", [reply, ...], [event, ...]] | ["unknown"] | ["expired"] | ["stale"] | ["gap"]
--
-- Fields of `sessions`:
--   protocol, partitions, token   numbers of the partition; the token is the last one given
--   s<session>   number of the last batch, deadline in server ms (0 when it has been ended, -1 when its coordinator was
--                closed), mailbox id acknowledged
--   r<session>   the reply to the last batch
--   about<session>   who it is, as JSON
--
-- All sessions live in one key, declared in every call: while a slot migrates, an undeclared key can look absent, and a
-- live session would look dead. The only undeclared keys are the mailboxes of other sessions: a lost wake-up is only a
-- delay, because coordinators resync. `due` only says where to look; `sessions` has the word.
--
-- A handler gets the context, its key and its arguments, and returns its reply as JSON. Calls of Redis and the formatting
-- of numbers are what this costs, so there are as few of them as possible.
--
-- PROTOCOL 1: to be raised when coordinators of two releases must not share a namespace any more.

-- Events beyond it are dropped: a resync repairs that, an endless stream repairs nothing.
local MAILBOX_LENGTH = 16384
local REAP_SESSIONS, REAP_ENTRIES = 16, 128
local STATE = '<dds'
local CLOSED = -1

local handlers, reapers = {}, {}

-- What a library cannot reach while it is loaded, bound when it is first called.
local call, format, match, pack, unpackStruct, WHOLE

local function bind()
  call, format, match = redis.call, string.format, string.match
  pack, unpackStruct = struct.pack, struct.unpack
  -- Integers print several times faster than doubles, where they are wide enough for a token.
  WHOLE = format('%d', 2 ^ 52 + 1) == '4503599627370497' and '%d' or '%.0f'
end

local function text(number)
  return format(WHOLE, number)
end

-- Strictly increasing in the partition, hence per resource, even after the resource was deleted. It starts from the
-- clock, hence also after the partition lost its data.
local function nextToken(ctx)
  local token = ctx.token + 1
  if ctx.micros > token then token = ctx.micros end
  ctx.token, ctx.granted = token, true
  return text(token)
end

-- What stands in the set of a session for something that it owns.
local function entryOf(ctx, key, id)
  return id .. ':' .. string.sub(key, #ctx.prefix + 1)
end

local function own(ctx, key, id)
  ctx.added[#ctx.added + 1] = entryOf(ctx, key, id)
end

local function disown(ctx, key, id)
  ctx.removed[#ctx.removed + 1] = entryOf(ctx, key, id)
end

-- Nothing for a session that is forgotten.
local function deadlineOf(ctx, session)
  local state = call('HGET', ctx.sessions, 's' .. session)
  if not state then return nil end
  local _, deadline = unpackStruct(STATE, state)
  return deadline
end

local function isAlive(ctx, session)
  return session == ctx.session or (deadlineOf(ctx, session) or 0) > ctx.now
end

-- Whether nobody will come back for what a session has owned: it gives that up itself, or its coordinator was closed.
local function hasLeft(ctx, session)
  return session == ctx.session or deadlineOf(ctx, session) == CLOSED
end

-- Of a claim, which is named "<session>/<id>".
local function sessionOf(claim)
  return match(claim, '^[^/]*')
end

local function idOf(claim)
  return match(claim, '/(.*)$')
end

local function post(ctx, session, event)
  -- pcall: on a migrating slot another session's mailbox may be out of reach, which is a delay and not a failure.
  redis.pcall('XADD', ctx.prefix .. 'mail:' .. session, 'NOMKSTREAM', 'MAXLEN', '~', MAILBOX_LENGTH, '*', 'e', event)
end

-- Members of a resource hear of its changes: a field of its hash for each, "o<session>/<id>". Answers whether it is new.
local function enrol(ctx, key, id, about)
  if call('HSET', key, 'o' .. ctx.session .. '/' .. id, about) == 0 then return false end
  own(ctx, key, id)
  return true
end

-- One event for each member, however many fibers wait behind it. The detail is JSON, without the brackets.
local function announce(ctx, key, detail)
  for _, field in ipairs(call('HKEYS', key)) do
    local session, id = match(field, '^o([^/]*)/(.*)$')
    if session then post(ctx, session, '["changed","' .. id .. '",' .. detail .. ']') end
  end
end

-- Answers claims that wait, each named "<session>/<id>", by one event for each session however many of its claims hear it;
-- that of the session which asks comes with the reply. The reply is JSON, without the brackets; `single` has what only one of
-- them is told, if anything is.
local function tell(ctx, claims, reply, single)
  local heard = {}
  for index, claim in ipairs(claims) do
    local session, id = match(claim, '^([^/]*)/(.*)$')
    local told = heard[session]
    if not told then
      told = { ids = {}, single = {} }
      heard[session] = told
    end
    local count = #told.ids + 1
    told.ids[count], told.single[count] = id, single and single[index]
  end
  for session, told in pairs(heard) do
    local ids, singles = table.concat(told.ids, '","'), table.concat(told.single, ',')
    local event = '["each",["' .. ids .. '"],[' .. singles .. '],' .. reply .. ']'
    if session == ctx.session then
      ctx.events = ctx.events and ctx.events .. ',' .. event or event
    else
      post(ctx, session, event)
    end
  end
end

-- What a claim holds is ended by somebody else.
local function revoke(ctx, claim)
  post(ctx, sessionOf(claim), '["revoked","' .. idOf(claim) .. '"]')
end

-- Whether any session can have ended that is not forgotten yet.
local function isAnyDue(ctx)
  return #call('ZRANGEBYSCORE', ctx.due, 0, text(ctx.now), 'LIMIT', 0, 1) > 0
end

-- Milliseconds until another session may be due, of those that are due later than `after`: 0 if it may be already, -1 if
-- there is none.
local function nearest(ctx, after)
  local found = call('ZRANGEBYSCORE', ctx.due, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
  for i = 1, #found, 2 do
    if found[i] ~= ctx.session then return math.max(0, tonumber(found[i + 1]) - ctx.now) end
  end
  return -1
end

-- Ends a session: from now on its batches are refused, and what it owns can be reaped. The deadline says whether another
-- one may follow it.
local function finish(ctx, session, deadline)
  local state = call('HGET', ctx.sessions, 's' .. session)
  if not state then return end
  local number, _, read = unpackStruct(STATE, state)
  call('HSET', ctx.sessions, 's' .. session, pack(STATE, number, deadline, read))
  call('ZADD', ctx.due, 0, session)
end

-- Every command that an actor or a reader needs. What a user may not do has to be known before anything is written.
local NEEDED = {
  { 'DEL' }, { 'HDEL', 'f' }, { 'HGET', 'f' }, { 'HGETALL' }, { 'HKEYS' }, { 'HLEN' }, { 'HMGET', 'f' }, { 'HSET', 'f', 'v' },
  { 'PERSIST' }, { 'PEXPIRE', '1' }, { 'SADD', 'm' }, { 'SRANDMEMBER' }, { 'SREM', 'm' }, { 'XACK', 'g', '0' },
  { 'XADD', '*', 'f', 'v' }, { 'XCLAIM', 'g', 'c', '0', '0' }, { 'XDEL', '0' }, { 'XLEN' }, { 'XPENDING', 'g' },
  { 'XRANGE', '-', '+' }, { 'XTRIM', 'MINID', '0' }, { 'ZADD', '0', 'm' }, { 'ZRANGEBYSCORE', '0', '0' }, { 'ZREM', 'm' }
}

local function denied(ctx)
  for i = 1, #NEEDED do
    local command = NEEDED[i]
    if not redis.acl_check_cmd(command[1], ctx.sessions, unpack(command, 2)) then return command[1] end
  end
  -- Those whose keys come later.
  if not redis.acl_check_cmd('XREAD', 'STREAMS', ctx.mailbox, '0') then return 'XREAD' end
  if not redis.acl_check_cmd('XREADGROUP', 'GROUP', 'g', 'c', 'STREAMS', ctx.mailbox, '>') then return 'XREADGROUP' end
  for _, subcommand in ipairs({ 'CREATE', 'DELCONSUMER' }) do
    if not redis.acl_check_cmd('XGROUP', subcommand, ctx.mailbox, 'g', 'c') then return 'XGROUP|' .. subcommand end
  end
end

-- session.open: opens a session and ends those it replaces; every attempt uses an id of its own
-- keys: none
-- args: session string, replaces string, lease number, protocol number, partitions number, about string
-- reply: ["opened", mailbox string] | ["mismatch", protocol number, partitions number] | ["denied", command string]
handlers['session.open'] = function(ctx, _, session, replaces, lease, protocol, partitions, about)
  local known = call('HMGET', ctx.sessions, 'protocol', 'partitions')
  if known[1] and (known[1] ~= protocol or known[2] ~= partitions) then
    return '["mismatch",' .. known[1] .. ',' .. known[2] .. ']'
  end
  local command = denied(ctx)
  if command then return '["denied","' .. command .. '"]' end
  for former in string.gmatch(replaces, '%S+') do finish(ctx, former, 0) end
  local mailbox = call('XADD', ctx.mailbox, '*', 'e', '["opened"]')
  local deadline = ctx.now + lease
  call('HSET', ctx.sessions, 'protocol', protocol, 'partitions', partitions,
    's' .. session, pack(STATE, 0, deadline, mailbox), 'about' .. session, about)
  call('ZADD', ctx.due, text(deadline), session)
  return '["opened","' .. mailbox .. '"]'
end

-- session.renew: does nothing but renew, as every batch does; tells which sessions are due to be reaped
-- keys: none
-- args:
-- reply: ["renewed", nearest number, ended strings]
-- flags: allow-oom
handlers['session.renew'] = function(ctx)
  if ctx.deadline then call('ZADD', ctx.due, text(ctx.deadline), ctx.session) end
  local ended = {}
  for _, session in ipairs(call('ZRANGEBYSCORE', ctx.due, 0, text(ctx.now), 'LIMIT', 0, REAP_SESSIONS)) do
    local deadline = deadlineOf(ctx, session) or 0
    if deadline > ctx.now then
      call('ZADD', ctx.due, text(deadline), session)
    else
      ended[#ended + 1] = session
    end
  end
  return format('["renewed",%d,"%s"]', nearest(ctx, '(' .. text(ctx.now)), table.concat(ended, ' '))
end

-- session.wake: posts an event to the session's own mailbox, so that its reader looks up
-- keys: none
-- args:
-- reply: ["woken"]
-- flags: allow-oom
handlers['session.wake'] = function(ctx)
  post(ctx, ctx.session, '["wake"]')
  return '["woken"]'
end

-- session.end: ends a session at once, on its own word; what it owned is then reaped
-- keys: none
-- args: session string, closed boolean
-- reply: ["ended"]
-- flags: allow-oom
handlers['session.end'] = function(ctx, _, session, closed)
  finish(ctx, session, closed == '1' and CLOSED or 0)
  return '["ended"]'
end

-- session.owned: a part of what a dead session still owns; when that is nothing, the session is forgotten
-- keys: none
-- args: session string
-- reply: ["alive"] | ["forgotten"] | ["owns", ...entries strings]
-- flags: allow-oom
handlers['session.owned'] = function(ctx, _, session)
  if isAlive(ctx, session) then return '["alive"]' end
  local entries = call('SRANDMEMBER', ctx.owned, REAP_ENTRIES)
  if #entries == 0 then
    call('HDEL', ctx.sessions, 's' .. session, 'r' .. session, 'about' .. session)
    call('ZREM', ctx.due, session)
    call('DEL', ctx.owned, ctx.mailbox)
    return '["forgotten"]'
  end
  return cjson.encode({ 'owns', unpack(entries) })
end

-- session.reap: releases one thing that a dead session owned, and wakes who is next
-- keys: resource, items
-- args: session string, entry string
-- reply: ["reaped"] | ["alive"]
-- flags: allow-oom
handlers['session.reap'] = function(ctx, key, session, entry)
  if isAlive(ctx, session) then return '["alive"]' end
  local id, kind = match(entry, '^([^:]*):([^:]*):')
  reapers[kind](ctx, key, session, id)
  call('SREM', ctx.owned, entry)
  return '["reaped"]'
end

-- session.leave: gives up something of the session's own, as if the session had ended
-- keys: resource, items
-- args: id string
-- reply: ["left"]
-- flags: allow-oom
handlers['session.leave'] = function(ctx, key, id)
  reapers[match(key, '^([^:]*):', #ctx.prefix + 1)](ctx, key, ctx.session, id)
  disown(ctx, key, id)
  return '["left"]'
end

-- What the session owns is written once a call. An id is never owned again after it was removed, so additions go first.
local function writeOwned(ctx)
  if ctx.added[1] then call('SADD', ctx.owned, unpack(ctx.added)) end
  if ctx.removed[1] then call('SREM', ctx.owned, unpack(ctx.removed)) end
end

local function context(keys, session)
  if not call then bind() end
  local time = call('TIME')
  local micros = time[1] * 1e6 + time[2]
  return {
    sessions = keys[1],
    due = keys[2],
    owned = keys[3],
    mailbox = keys[4],
    prefix = string.sub(keys[1], 1, -9), -- without "sessions"
    session = session,
    added = {},
    removed = {},
    seconds = time[1],
    micros = micros,
    now = math.floor(micros / 1000)
  }
end

-- Every request runs by itself: a handler that fails answers "failed", and the others run.
local function dispatch(ctx, keys, requests)
  local replies, count, key, at, length = {}, 0, 5, 5, #requests
  while at <= length do
    local verb = requests[at]
    local shape = SHAPES[verb]
    count = count + 1
    if not shape then
      -- Whatever comes behind it cannot be told apart from its arguments.
      replies[count] = '["failed","unknown request"]'
      break
    end
    ctx.items = keys[key + 1]
    -- No handler has more arguments than six; those that belong to the next request are ignored.
    local fine, reply = pcall(handlers[verb], ctx, keys[key], requests[at + 1], requests[at + 2], requests[at + 3],
      requests[at + 4], requests[at + 5], requests[at + 6])
    if fine then
      replies[count] = reply
    else
      redis.log(redis.LOG_WARNING, 'lockstep: a request failed: ' .. verb)
      local message = tostring(type(reply) == 'table' and reply.err or reply)
      local denial = string.find(message, 'The user executing the script', 1, true)
      replies[count] = denial and '["failed","denied"]' or '["failed","defect"]'
    end
    key = key + shape[1]
    at = at + 1 + shape[2]
  end
  -- One concatenation: Redis's Lua hashes every string that it makes.
  if count > 0 then
    replies[1] = '["ok",[' .. replies[1]
    replies[count] = replies[count] .. (ctx.events and '],[' .. ctx.events .. ']]' or ']]')
    return table.concat(replies, ',')
  end
  return '["ok",[]]'
end

local function run(keys, argv)
  local session, number, lease, read = argv[1], tonumber(argv[2]), tonumber(argv[3]), argv[4]
  local ctx = context(keys, session)
  local known = call('HMGET', keys[1], 'token', 's' .. session)
  ctx.token = tonumber(known[1] or 0)
  if session == '' then
    local reply = dispatch(ctx, keys, argv)
    if ctx.granted then call('HSET', keys[1], 'token', text(ctx.token)) end
    return reply
  end

  if not known[2] then return '["unknown"]' end
  local last, deadline, acknowledged = unpackStruct(STATE, known[2])
  if deadline <= ctx.now then return '["expired"]' end
  ctx.deadline = ctx.now + lease
  if number == last then
    -- Answered already, and renewed all the same: the coordinator counts its trust from this sending of the batch.
    call('HSET', keys[1], 's' .. session, pack(STATE, number, ctx.deadline, acknowledged))
    return call('HGET', keys[1], 'r' .. session)
  end
  if number < last then return '["stale"]' end
  if number > last + 1 then return '["gap"]' end
  if read ~= '' and read ~= acknowledged then
    -- The entry that was read last is always kept, so its absence means that Redis has forgotten what it delivered.
    -- In a full mailbox it may have been dropped instead.
    if #call('XRANGE', ctx.mailbox, read, read) == 0 and call('XLEN', ctx.mailbox) < MAILBOX_LENGTH then return '["gap"]' end
    call('XTRIM', ctx.mailbox, 'MINID', read)
    acknowledged = read
  end

  local reply = dispatch(ctx, keys, argv)
  writeOwned(ctx)
  local state = pack(STATE, number, ctx.deadline, acknowledged)
  if ctx.granted then
    call('HSET', keys[1], 's' .. session, state, 'r' .. session, reply, 'token', text(ctx.token))
  else
    call('HSET', keys[1], 's' .. session, state, 'r' .. session, reply)
  end
  return reply
end

-- Requests that only read, for inspection: KEYS and ARGV as above, no session.
local function inspect(keys, argv)
  return dispatch(context(keys, ''), keys, argv)
end
