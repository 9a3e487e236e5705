-- The partition actor's core: session check, exactly-once batches, dispatch, fencing tokens, mailboxes, reaping.
--
-- One call is one message to the actor of one partition:
--   KEYS  1 sessions  zset: session id -> deadline in server ms, and the partition's own numbers (see below)
--         2 record    hash of the session: n (last batch), r (its reply), a (acknowledged mailbox id), who it is
--         3 owned     set of the session: "<hold id>:<kind>:<name>" of everything it holds or waits for
--         4 mailbox   stream of the session
--         5.. the keys of the requests, in order
--   ARGV  1 session id, or "" for requests that need no session (they are idempotent)
--         2 batch number  3 lease_ms  4 mailbox id read so far, or ""  5 requests as JSON: [verb, key count, ...args]
--   reply JSON: ["ok", [reply, ...]] | ["unknown"] | ["expired"] | ["stale"] | ["gap"]
--
-- All sessions of a partition live in one key, declared in every call: while a slot migrates, an undeclared key can
-- look absent, and a live session would look dead. The only undeclared keys are the mailboxes of other sessions: a lost
-- wake-up is only a delay, because coordinators resync.
--
-- Scores of `sessions` that are no deadlines: "protocol" and "partitions" (below 1e9), sessions that have ended (1e9),
-- "token" (microseconds, above 1e14).

local PROTOCOL = 1
local ENDED, DEADLINE_MAX = 1e9, 1e14
-- Events beyond it are dropped: a resync repairs that, an endless stream repairs nothing.
local MAILBOX_LENGTH = 16384
local REAP_SESSIONS, REAP_ENTRIES = 16, 128

local handlers, reapers = {}, {}
local call -- redis.call, which does not exist yet while a library is loaded

local function text(number)
  return string.format('%.0f', number)
end

-- Strictly increasing in the partition, hence per resource, even after the resource was deleted. It starts from the
-- clock, hence also after the partition lost its data.
local function nextToken(ctx)
  local token = ctx.token + 1
  if ctx.micros > token then token = ctx.micros end
  ctx.token, ctx.granted = token, true
  return token
end

local function isAlive(ctx, session)
  if session == ctx.session then return true end
  local deadline = call('ZSCORE', ctx.sessions, session)
  return deadline and tonumber(deadline) > ctx.now
end

local function post(ctx, session, event)
  -- pcall: on a migrating slot another session's mailbox may be out of reach, which is a delay and not a failure.
  redis.pcall('XADD', ctx.prefix .. 'mail:' .. session, 'NOMKSTREAM', 'MAXLEN', '~', MAILBOX_LENGTH, '*',
    'e', cjson.encode(event))
end

-- Milliseconds until the nearest deadline of another session, -1 if there is none.
local function nearest(ctx, after)
  local found = call('ZRANGEBYSCORE', ctx.sessions, after, text(DEADLINE_MAX), 'WITHSCORES', 'LIMIT', 0, 2)
  for i = 1, #found, 2 do
    if found[i] ~= ctx.session then return math.max(0, tonumber(found[i + 1]) - ctx.now) end
  end
  return -1
end

-- When whoever waits should ask for a reaping: at once if a session that is over has not been reaped yet.
local function due(ctx)
  return nearest(ctx, text(ENDED))
end

-- Every command that an actor or a reader needs. What a user may not do has to be known before anything is written.
local NEEDED = {
  { 'DEL' }, { 'GET' }, { 'HDEL', 'f' }, { 'HGET', 'f' }, { 'HLEN' }, { 'HMGET', 'f' }, { 'HSET', 'f', 'v' },
  { 'SADD', 'm' }, { 'SET', 'v' }, { 'SRANDMEMBER' }, { 'SREM', 'm' }, { 'XADD', '*', 'f', 'v' }, { 'XRANGE', '-', '+' },
  { 'XTRIM', 'MINID', '0' }, { 'ZADD', '0', 'm' }, { 'ZMSCORE', 'm' }, { 'ZRANGEBYSCORE', '0', '0' }, { 'ZREM', 'm' },
  { 'ZSCORE', 'm' }
}

local function denied(ctx)
  for i = 1, #NEEDED do
    local command = NEEDED[i]
    if not redis.acl_check_cmd(command[1], ctx.record, unpack(command, 2)) then return command[1] end
  end
  if not redis.acl_check_cmd('XREAD', 'STREAMS', ctx.mailbox, '0') then return 'XREAD' end
end

-- session.open: opens a session and ends those it replaces; every attempt uses an id of its own
-- keys: none
-- args: session string, replaces string, lease number, protocol number, partitions number, about string
-- reply: ["opened", mailbox string] | ["mismatch", protocol number, partitions number] | ["denied", command string]
handlers['session.open'] = function(ctx, _, args)
  local session, replaces, lease, protocol, partitions, about = unpack(args)
  local known = call('ZMSCORE', ctx.sessions, 'protocol', 'partitions')
  if known[1] and (tonumber(known[1]) ~= protocol or tonumber(known[2]) ~= partitions) then
    return { 'mismatch', tonumber(known[1]), tonumber(known[2]) }
  end
  local command = denied(ctx)
  if command then return { 'denied', command } end
  if not known[1] then
    call('ZADD', ctx.sessions, PROTOCOL, 'protocol', partitions, 'partitions')
  end
  for former in string.gmatch(replaces, '%S+') do
    call('ZADD', ctx.sessions, 'XX', ENDED, former)
  end
  call('ZADD', ctx.sessions, ctx.now + lease, session)
  local mailbox = call('XADD', ctx.mailbox, '*', 'e', '["opened"]')
  call('HSET', ctx.record, 'n', 0, 'r', '', 'a', mailbox, 'about', about)
  return { 'opened', mailbox }
end

-- session.renew: does nothing but renew, as every batch does; tells which sessions are due to be reaped
-- keys: none
-- args:
-- reply: ["renewed", nearest number, ended strings]
-- flags: allow-oom
handlers['session.renew'] = function(ctx)
  local ended = call('ZRANGEBYSCORE', ctx.sessions, text(ENDED), text(ctx.now), 'LIMIT', 0, REAP_SESSIONS)
  return { 'renewed', nearest(ctx, '(' .. text(ctx.now)), table.concat(ended, ' ') }
end

-- session.wake: posts an event to the session's own mailbox, so that its reader looks up
-- keys: none
-- args:
-- reply: ["woken"]
-- flags: allow-oom
handlers['session.wake'] = function(ctx)
  post(ctx, ctx.session, { 'wake' })
  return { 'woken' }
end

-- session.end: ends a session at once, on its own word; what it owned is then reaped
-- keys: none
-- args: session string
-- reply: ["ended"]
-- flags: allow-oom
handlers['session.end'] = function(ctx, _, args)
  call('ZADD', ctx.sessions, 'XX', ENDED, args[1])
  return { 'ended' }
end

-- session.owned: a part of what a dead session still owns; when that is nothing, the session is forgotten
-- keys: none
-- args: session string
-- reply: ["alive"] | ["forgotten"] | ["owns", ...entries strings]
-- flags: allow-oom
handlers['session.owned'] = function(ctx, _, args)
  local deadline = call('ZSCORE', ctx.sessions, args[1])
  if deadline and tonumber(deadline) > ctx.now then return { 'alive' } end
  local entries = call('SRANDMEMBER', ctx.owned, REAP_ENTRIES)
  if #entries == 0 then
    call('ZREM', ctx.sessions, args[1])
    call('DEL', ctx.record, ctx.owned, ctx.mailbox)
    return { 'forgotten' }
  end
  return { 'owns', unpack(entries) }
end

-- session.reap: releases one thing that a dead session owned, and wakes who is next
-- keys: resource
-- args: session string, entry string
-- reply: ["reaped"] | ["alive"]
-- flags: allow-oom
handlers['session.reap'] = function(ctx, keys, args)
  local session, entry = args[1], args[2]
  local deadline = call('ZSCORE', ctx.sessions, session)
  if deadline and tonumber(deadline) > ctx.now then return { 'alive' } end
  local id, kind = string.match(entry, '^([^:]*):([^:]*):')
  reapers[kind](ctx, keys[1], session, id)
  call('SREM', ctx.owned, entry)
  return { 'reaped' }
end

local function context(keys, session)
  call = redis.call
  local time = call('TIME')
  local micros = tonumber(time[1]) * 1e6 + tonumber(time[2])
  return {
    sessions = keys[1],
    record = keys[2],
    owned = keys[3],
    mailbox = keys[4],
    prefix = string.sub(keys[1], 1, -9), -- without "sessions"
    session = session,
    micros = micros,
    now = math.floor(micros / 1000)
  }
end

-- Every request runs by itself: a handler that fails answers "failed", and the others run.
local function dispatch(ctx, keys, requests)
  local replies, at = {}, 5
  for i = 1, #requests do
    local request = requests[i]
    local count = request[2]
    local own, args = {}, {}
    for k = 1, count do own[k] = keys[at + k - 1] end
    at = at + count
    for a = 3, #request do args[a - 2] = request[a] end
    local handler = handlers[request[1]]
    if not handler then
      replies[i] = { 'failed', 'unknown request' }
    else
      local fine, reply = pcall(handler, ctx, own, args)
      if fine then
        replies[i] = reply
      else
        redis.log(redis.LOG_WARNING, 'lockstep: a request failed: ' .. request[1])
        local message = tostring(type(reply) == 'table' and reply.err or reply)
        local denial = string.find(message, 'The user executing the script', 1, true)
        replies[i] = { 'failed', denial and 'denied' or 'defect' }
      end
    end
  end
  return replies
end

local function run(keys, argv)
  local session, number, lease, read = argv[1], tonumber(argv[2]), tonumber(argv[3]), argv[4]
  local ctx = context(keys, session)
  local scores = call('ZMSCORE', ctx.sessions, 'token', session)
  ctx.token = tonumber(scores[1] or 0)
  if session == '' then
    local reply = cjson.encode({ 'ok', dispatch(ctx, keys, cjson.decode(argv[5])) })
    if ctx.granted then call('ZADD', ctx.sessions, text(ctx.token), 'token') end
    return reply
  end

  local deadline = tonumber(scores[2] or -1)
  if deadline < 0 then return '["unknown"]' end
  if deadline <= ctx.now then return '["expired"]' end
  local record = call('HMGET', ctx.record, 'n', 'a')
  local last = tonumber(record[1] or -1)
  if number == last then
    -- Answered already, and renewed all the same: the coordinator counts its trust from this sending of the batch.
    call('ZADD', ctx.sessions, text(ctx.now + lease), session)
    return call('HGET', ctx.record, 'r')
  end
  if number < last then return '["stale"]' end
  if number > last + 1 or last < 0 then return '["gap"]' end
  if read ~= '' and read ~= record[2] then
    -- The entry that was read last is always kept, so its absence means that Redis has forgotten what it delivered.
    if #call('XRANGE', ctx.mailbox, read, read) == 0 then return '["gap"]' end
    call('XTRIM', ctx.mailbox, 'MINID', read)
  end

  local reply = cjson.encode({ 'ok', dispatch(ctx, keys, cjson.decode(argv[5])) })
  if ctx.granted then
    call('ZADD', ctx.sessions, text(ctx.now + lease), session, text(ctx.token), 'token')
  else
    call('ZADD', ctx.sessions, text(ctx.now + lease), session)
  end
  if read ~= '' then
    call('HSET', ctx.record, 'n', number, 'r', reply, 'a', read)
  else
    call('HSET', ctx.record, 'n', number, 'r', reply)
  end
  return reply
end

-- Requests that only read, for inspection: KEYS and ARGV as above, no session.
local function inspect(keys, argv)
  return cjson.encode({ 'ok', dispatch(context(keys, ''), keys, cjson.decode(argv[5])) })
end
