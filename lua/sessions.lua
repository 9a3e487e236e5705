-- Sessions are opened, renewed, ended and reaped, and alarms of resources ring.
--
-- Coordinators that are alive in a namespace speak one protocol and have one number of partitions: otherwise a name would be two
-- locks. Partition 0 decides that, by these rules.
--   1. A coordinator has a session in partition 0 before it opens another one. If that is refused for the settings of others, it
--      gives up the sessions that it has elsewhere.
--   2. `session.open` never changes settings while a session is alive in the partition, nor those of a partition but 0.
--   3. A coordinator that finds partition 0 without a session alive and with other settings has all other partitions, the former ones
--      and its own, adopt its settings: `session.settle`, which a session that is alive there refuses. Then it opens its session in
--      partition 0, which is refused if another one has been opened there meanwhile.
-- So a coordinator that goes on after its sessions have expired finds settings of others in every partition, and so does a request of
-- its that was sent before and comes late. One that is cut off from partition 0 alone keeps its other sessions, and these keep the
-- namespace as it is. If partition 0 has lost its data, what others hold in other partitions is found out by rule 1 only.

-- Ends a session: from now on its batches are refused, and what it owns can be reaped. The deadline says whether another
-- one may follow it.
local function finish(ctx, session, deadline)
  local state = sessionOf(ctx, session)
  if not state then return end
  state.deadline = deadline
  call('HSET', ctx.sessions, 's' .. session, packSession(state))
  call('ZADD', ctx.dues, 0, session)
end

-- Every command that an actor or a reader needs. What a user may not do has to be known before anything is written.
local NEEDED = {
  { 'DEL' }, { 'GET' }, { 'HDEL', 'f' }, { 'HGET', 'f' }, { 'HGETALL' }, { 'HKEYS' }, { 'HLEN' }, { 'HMGET', 'f' },
  { 'HSCAN', '0' }, { 'HSET', 'f', 'v' }, { 'MGET' }, { 'PERSIST' }, { 'PEXPIRE', '1' }, { 'SADD', 'm' }, { 'SET', 'v' }, { 'SRANDMEMBER' }, { 'SREM', 'm' },
  { 'UNLINK' },
  { 'XACK', 'g', '0' }, { 'XADD', '*', 'f', 'v' }, { 'XCLAIM', 'g', 'c', '0', '0' }, { 'XDEL', '0' }, { 'XPENDING', 'g' },
  { 'XLEN' }, { 'XRANGE', '-', '+' }, { 'XREVRANGE', '+', '-' }, { 'XTRIM', 'MINID', '0' }, { 'ZADD', '0', 'm' }, { 'ZRANGEBYLEX', '-', '+' }, { 'ZRANGEBYSCORE', '0', '0' }, { 'ZREM', 'm' },
  { 'ZSCORE', 'm' }
}

-- What stands in the way of a command: it is denied, or the server has no such command, because an operator has renamed it.
local function obstacle(...)
  local fine, allowed = pcall(redis.acl_check_cmd, ...)
  if not fine then return 'lacking' end
  return not allowed and 'denied'
end

-- The first command that cannot be used, and why.
local function unusable(ctx)
  for index = 1, #NEEDED do
    local command = NEEDED[index]
    local why = obstacle(command[1], ctx.sessions, unpack(command, 2))
    if why then return why, command[1] end
  end
  -- Those whose keys come later.
  local why = obstacle('XREAD', 'STREAMS', ctx.sessions, '0')
  if why then return why, 'XREAD' end
  why = obstacle('XREADGROUP', 'GROUP', 'g', 'c', 'STREAMS', ctx.sessions, '>')
  if why then return why, 'XREADGROUP' end
  for _, subcommand in ipairs({ 'CREATE', 'DELCONSUMER', 'DESTROY', 'SETID' }) do
    why = obstacle('XGROUP', subcommand, ctx.sessions, 'g', 'c')
    if why then return why, 'XGROUP|' .. subcommand end
  end
end

-- The sessions that are alive, of whatever release: records of others cannot be read, but each renewal writes its deadline
-- into `due`. A dead session that was set aside stands there with a later time; its record says that it is dead.
local function sessionsInUse(ctx)
  local sessions = {}
  for _, member in ipairs(call('ZRANGEBYSCORE', ctx.dues, '(' .. text(ctx.now), '+inf')) do
    if sub(member, 1, 1) ~= '@' then
      local known = sessionOf(ctx, member)
      if not known or known.deadline > ctx.now then sessions[#sessions + 1] = member end
    end
  end
  return sessions
end

-- Answers whether its mailbox is there.
local function keepSession(ctx, session, lease)
  local millis = text(lease + ABANDONED)
  call('PEXPIRE', ctx.sessions, millis, 'GT')
  call('PEXPIRE', ctx.dues, millis, 'GT')
  call('PEXPIRE', ownedBy(ctx, session), millis)
  return call('PEXPIRE', mailboxOf(ctx, session), millis) == 1
end

local function noteLibraries(ctx, names)
  call('SET', ctx.prefix .. 'libraries', concat(names, ' '))
end

-- The libraries that coordinators of this namespace have called: those that may be called still, and the others. No session alive
-- has called one of the others.
local function librariesOf(ctx)
  local called, used, unused = {}, {}, {}
  for _, session in ipairs(sessionsInUse(ctx)) do
    local library = call('HGET', ctx.sessions, 'library/' .. session)
    if library then called[library] = true end
  end
  for name in string.gmatch(call('GET', ctx.prefix .. 'libraries') or '', '%S+') do
    local names = called[name] and used or unused
    names[#names + 1] = name
  end
  return used, unused
end

-- A session calls a library. Answers which others can be removed; they are known until that is done.
local function retired(ctx, session, library)
  call('HSET', ctx.sessions, 'library/' .. session, library)
  local used, unused = librariesOf(ctx)
  local known, all = {}, {}
  for _, names in ipairs({ used, unused, { library } }) do
    for _, name in ipairs(names) do
      if not known[name] then all[#all + 1] = name end
      known[name] = true
    end
  end
  noteLibraries(ctx, all)
  return concat(unused, ' ')
end

-- Whether the partition belongs to other settings. What is known of it: the protocol, the number of partitions, how many sessions
-- have been opened, its identity.
local function isForeign(ctx, protocol, partitions)
  local known = call('HMGET', ctx.sessions, 'protocol', 'partitions', 'opened', 'identity')
  return known[1] and (known[1] ~= protocol or known[2] ~= partitions), known
end

-- session.open: opens a session and ends those it replaces; every attempt uses an id of its own. With the name of a library, it
-- answers which others can be removed. `vacant`: after so many openings the partition was found vacant, and all others have adopted these
-- settings since; it adopts them too, and answers how many partitions the namespace has had. Otherwise -1. Two coordinators that are
-- answered one identity are in one namespace of one server, however they reach it.
-- keys: none
-- args: session string, replaces string, lease number, protocol number, partitions number, about string, library string, vacant number
-- reply: ["opened", position string, retired string, former number, identity string] | ["vacant", opened number, partitions number] | ["mismatch", protocol number, partitions number] | ["denied", command string] | ["lacking", command string]
handlers['session.open'] = function(ctx, _, session, replaces, lease, protocol, partitions, about, library, vacant)
  local why, command = unusable(ctx)
  if why == 'lacking' then return reply('lacking', command) end
  if why then return reply('denied', command) end
  local foreign, known = isForeign(ctx, protocol, partitions)
  local opened = tonumber(known[3] or 0)
  for former in string.gmatch(replaces, '%S+') do finish(ctx, former, 0) end
  if foreign then
    if #sessionsInUse(ctx) > 0 then return reply('mismatch', tonumber(known[1]), tonumber(known[2])) end
    if vacant + 0 ~= opened then return reply('vacant', opened, tonumber(known[2])) end
  end
  lease = lease + 0
  local state = { number = 0, deadline = ctx.now + lease, read = 1, posted = 0, stamp = 0, lease = lease, owned = '' }
  local position = postedId(ctx, state)
  call('XADD', mailboxOf(ctx, session), position, 'e', '[]')
  -- Never empty, so that it keeps its time to live.
  call('SADD', ownedBy(ctx, session), '')
  ctx.known = { [session] = state }
  local identity = known[4] or session
  call('HSET', ctx.sessions, 'protocol', protocol, 'partitions', partitions, 'opened', text(opened + 1), 'identity', identity,
    's' .. session, packSession(state), 'about' .. session, about)
  call('ZADD', ctx.dues, text(state.deadline), session)
  -- A key without a time to live counts as one that stays for ever, which GT would not change.
  call('PEXPIRE', ctx.sessions, A_DAY, 'NX')
  call('PEXPIRE', ctx.dues, A_DAY, 'NX')
  keepSession(ctx, session, lease)
  local former = tonumber(known[2] or partitions)
  return reply('opened', position, library == '' and '' or retired(ctx, session, library), former, identity)
end

-- session.settle: has a partition adopt settings unless a session is alive there under others
-- keys: none
-- args: protocol number, partitions number
-- reply: ["settled"] | ["mismatch", protocol number, partitions number]
handlers['session.settle'] = function(ctx, _, protocol, partitions)
  local foreign, known = isForeign(ctx, protocol, partitions)
  if foreign and #sessionsInUse(ctx) > 0 then return reply('mismatch', tonumber(known[1]), tonumber(known[2])) end
  call('HSET', ctx.sessions, 'protocol', protocol, 'partitions', partitions)
  call('PEXPIRE', ctx.sessions, A_DAY, 'NX')
  return '["settled"]'
end

-- session.unloaded: function libraries were removed; those that a session has called since are still known
-- keys: none
-- args: libraries string
-- reply: ["noted"]
-- flags: allow-oom
handlers['session.unloaded'] = function(ctx, _, libraries)
  local removed = {}
  for name in string.gmatch(libraries, '%S+') do removed[name] = true end
  local used, unused = librariesOf(ctx)
  for _, name in ipairs(unused) do
    if not removed[name] then used[#used + 1] = name end
  end
  noteLibraries(ctx, used)
  return '["noted"]'
end

-- session.renew: does nothing but renew, as every batch does; answers which sessions and resources are due
-- keys: none
-- args:
-- reply: ["renewed", posted number, due strings]
-- flags: allow-oom, heard
handlers['session.renew'] = function(ctx)
  local state = sessionOf(ctx, ctx.session)
  if state then
    call('ZADD', ctx.dues, text(state.deadline), ctx.session)
    if not keepSession(ctx, ctx.session, state.lease) then
      -- A mailbox that Redis has dropped is made again; the number says that something is missing.
      call('XADD', mailboxOf(ctx, ctx.session), postedId(ctx, state), 'e', '[]')
      keepSession(ctx, ctx.session, state.lease)
    end
  end
  local due = {}
  for _, member in ipairs(call('ZRANGEBYSCORE', ctx.dues, '-inf', text(ctx.now), 'LIMIT', 0, REAP_SESSIONS)) do
    local known = sub(member, 1, 1) ~= '@' and sessionOf(ctx, member)
    if known and known.deadline > ctx.now then
      call('ZADD', ctx.dues, text(known.deadline), member)
    else
      due[#due + 1] = member
    end
  end
  ctx.due = due
  expect(ctx, '(' .. text(ctx.now))
  return reply('renewed', state and state.posted or 0, list(due))
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

-- session.end: ends a session at once, as its coordinator wishes; what it owned is then reaped
-- keys: none
-- args: session string, closed boolean
-- reply: ["ended"]
-- flags: allow-oom
handlers['session.end'] = function(ctx, _, session, closed)
  finish(ctx, session, closed == '1' and CLOSED or 0)
  return '["ended"]'
end

-- What a session owns beyond its set, as its record has it: each between two bytes that no name has. A record of another release cannot be
-- read, but ends with that too.
local function ownedInRecord(ctx, session)
  local state, entries = sessionOf(ctx, session), {}
  local text = state and state.owned or call('HGET', ctx.sessions, 's' .. session) or ''
  for entry in string.gmatch(text, '\254([^\254\255]*)\255') do
    if match(entry, '^[^:]*:[^:]*:') then entries[#entries + 1] = entry end
  end
  return entries
end

-- Takes an entry out of the record of a dead session. Answers whether it was there.
local function disownInRecord(ctx, session, entry)
  local state = sessionOf(ctx, session)
  local record = not state and call('HGET', ctx.sessions, 's' .. session)
  if state then
    record = unmark(state, entry) and packSession(state)
  elseif record then
    local first, last = find(record, marked(entry), 1, true)
    record = first and sub(record, 1, first - 1) .. sub(record, last + 1)
  end
  if record then call('HSET', ctx.sessions, 's' .. session, record) end
  return record
end

-- Whether a renewal in front of this request has not named the session: then it is not due, or comes later. Where another release keeps
-- it, nothing else says that it is alive.
local function isUnnamed(ctx, session)
  local due = ctx.due
  for index = 1, due and #due or 0 do
    if due[index] == session then return false end
  end
  return due
end

-- session.owned: a part of what a dead session still owns; when that is nothing, the session is forgotten. It is set aside
-- for a while when all the rest is of kinds that this release does not know. Behind a renewal in the same call, it is about a session that
-- is due, or answers that it is alive.
-- keys: none
-- args: session string
-- reply: ["alive"] | ["forgotten"] | ["aside"] | ["owns", entries strings]
-- flags: allow-oom
handlers['session.owned'] = function(ctx, _, session)
  if isAlive(ctx, session) or isUnnamed(ctx, session) then return '["alive"]' end
  local owned, entries, unknown = ownedBy(ctx, session), {}, false
  local function look(sample)
    for _, entry in ipairs(sample) do
      if entry ~= '' then
        if not reapers[match(entry, '^[^:]*:([^:]*):')] then
          unknown = true
        elseif #entries < REAP_ENTRIES then
          entries[#entries + 1] = entry
        end
      end
    end
  end
  look(ownedInRecord(ctx, session))
  look(call('SRANDMEMBER', owned, 4 * REAP_ENTRIES))
  -- What can be released may hide among thousands that cannot: that is worth a look at all of them before a minute's rest.
  if #entries == 0 and unknown then look(call('SRANDMEMBER', owned, '1000000000')) end
  if #entries > 0 then return reply('owns', list(entries)) end
  if unknown then
    call('ZADD', ctx.dues, text(ctx.now + ASIDE), session)
    return '["aside"]'
  end
  call('HDEL', ctx.sessions, 's' .. session, 'r' .. session, 'about' .. session, 'library/' .. session)
  call('ZREM', ctx.dues, session)
  call('DEL', ownedBy(ctx, session), mailboxOf(ctx, session))
  ctx.known = nil
  return '["forgotten"]'
end

-- What fails is set aside for a while: it must neither be forgotten nor stand in the way of what else is due.
local function attempt(ctx, member, f, ...)
  local fine, cause = pcall(f, ctx, ...)
  if not fine then
    call('ZADD', ctx.dues, text(ctx.now + ASIDE), member)
    error(cause, 0)
  end
end

-- Releases one thing that a dead session owned.
local function reap(ctx, key, session, entry)
  local id, kind = match(entry, '^([^:]*):([^:]*):')
  attempt(ctx, session, reapers[kind], key, session, id)
  if not disownInRecord(ctx, session, entry) then call('SREM', ownedBy(ctx, session), entry) end
end

-- session.reap: releases one thing that a dead session owned, and wakes the next waiter
-- keys: all
-- args: session string, entry string
-- reply: ["reaped"] | ["alive"]
-- flags: allow-oom
handlers['session.reap'] = function(ctx, key, session, entry)
  if isAlive(ctx, session) then return '["alive"]' end
  reap(ctx, key, session, entry)
  return '["reaped"]'
end

-- session.inherit: releases what a dead session owned of a resource that the process waits for, as far as its record says; then it is as
-- session.owned
-- keys: all
-- args: session string
-- reply: ["alive"] | ["forgotten"] | ["aside"] | ["owns", entries strings]
-- flags: allow-oom
handlers['session.inherit'] = function(ctx, key, session)
  if isAlive(ctx, session) or isUnnamed(ctx, session) then return '["alive"]' end
  local resource = sub(key, #ctx.prefix + 1)
  for _, entry in ipairs(ownedInRecord(ctx, session)) do
    if match(entry, '^[^:]*:(.*)$') == resource then reap(ctx, key, session, entry) end
  end
  return handlers['session.owned'](ctx, nil, session)
end

-- alarm.ring: does what a resource has asked to be woken for
-- keys: all
-- args:
-- reply: ["rung"]
-- flags: allow-oom
handlers['alarm.ring'] = function(ctx, key)
  local member = '@' .. sub(key, #ctx.prefix + 1)
  local ring = alarms[ctx.kind]
  if ring then
    call('ZREM', ctx.dues, member)
    attempt(ctx, member, ring, key)
  else
    call('ZADD', ctx.dues, text(ctx.now + ASIDE), member)
  end
  expect(ctx)
  return '["rung"]'
end

-- session.leave: gives up a hold or a wait of the session's own, as if the session had ended
-- keys: all
-- args: id string
-- reply: ["left"]
-- flags: allow-oom
handlers['session.leave'] = function(ctx, key, id)
  reapers[ctx.kind](ctx, key, ctx.session, id)
  disown(ctx, key, id)
  return '["left"]'
end

-- session.touch: keeps a resource, with all its keys, of which the session has held or awaited something for long
-- keys: all
-- args:
-- reply: ["touched"]
-- flags: allow-oom
handlers['session.touch'] = function(ctx, key)
  -- One that is kept for longer already stays so. The time to live of what users store is theirs.
  call('PEXPIRE', key, A_DAY, 'GT')
  for index, role in ipairs(ROLES[ctx.kind] or ROLES.none) do
    if index > 1 and role ~= 'value' then call('PEXPIRE', ctx[role], A_DAY, 'GT') end
  end
  return '["touched"]'
end
