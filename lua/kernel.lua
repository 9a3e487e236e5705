-- The partition actor's core: sessions, exactly-once batches, dispatch, fencing tokens, mailboxes, alarms, reaping.
--
-- One call is one message to the actor of one partition:
--   KEYS  1 sessions, see below
--         2.. the keys of the requests, in order: for each role that the verb declares, one
--         On a cluster, all others that the call may need follow: each key of a call costs more than most that is done with it.
--   ARGV  1 session id, or "" for requests that need no session (they are idempotent)
--         2 batch number; behind that, after a blank, the id of the last event read from the mailbox, if that is news
--         3.. the requests: verb, its arguments, verb, its arguments, ... (text: parsing JSON would cost more than the rest);
--             "=" before a verb: its keys are those of the request before it
--   reply JSON: ["ok", [reply, ...], [event, ...], next number, ending string] | ["unknown"] | ["expired"] | ["stale"] | ["gap"]
--         The events are for claims of the session that asks. `next` is in how many ms the partition has something to do, -1
--         for nothing, and `ending` the session that may end then, if it is one. They are left out where they are not needed.
--
-- The keys of a partition:
--   sessions        hash of all sessions of the partition
--   due             zset: a session, or "@<kind>:<name>" for the alarm of a resource -> server ms before which nothing is to be
--                   done about it
--   floor           a fencing token that is larger than all that were given
--   libraries       in partition 0, the function libraries that coordinators of this namespace have called, and that were not
--                   removed since
--   own:<session>   set of "<claim id>:<kind>:<name>" of what the session holds or waits for, beyond what its record has
--   mail:<session>  its mailbox, a stream
--
-- Fields of `sessions`:
--   protocol, partitions    settings of the namespace, see sessions.lua
--   opened                  how many sessions have been opened
--   identity                the id of the first of them
--   token                   the last token given
--   s<session>              record Session
--   r<session>              the reply to its last batch
--   about<session>          who it is, as JSON
--   library/<session>       the library that its coordinator calls
--   @<kind>:<name>          inline state of a resource, see inline.lua
--
-- All sessions live in one key, declared in every call; the others of a partition are not. While a slot migrates, an undeclared key can
-- look absent, so Redis refuses calls as a whole then, see src/internal/actor/wire.ts. A lost event is only a delay, because events are
-- numbered and coordinators resync. `due` only says where to look; `sessions` has the word.
--
-- Every key expires a day after the last session that needs it has done anything, except `floor`, `libraries` and what users
-- store; `due` also outlives its last alarm by a day.
--
-- A handler gets the context, its first key and its arguments, and returns what `reply` makes. The keys of its other roles
-- are in the context, by role. Calls of Redis and the formatting of numbers are what a call costs, so there are as few of
-- them as possible.
--
-- PROTOCOL 5: to be raised when coordinators of two releases must not share a namespace any more.

-- A deadline of 0: the session was ended. This one: its coordinator was closed, so no other session follows it.
local CLOSED = -1
-- Events beyond it are dropped: a resync repairs that, an endless stream repairs nothing.
local MAILBOX_LENGTH = '16384'
-- Streams are trimmed by whole nodes, so trimming after each event would only cost.
local TRIM_EVERY = 64
local REAP_SESSIONS, REAP_ENTRIES = 16, 128
-- So many claims are served in one call at most.
local SERVED = 256
-- A script passes so many arguments to a command: Lua unpacks some 8,000 values at most.
local MOST_ARGUMENTS = 4000
-- How long the keys of a session outlive its deadline, in ms. Whatever it owns is touched four times as often.
local ABANDONED, A_DAY = 86400000, '86400000'
-- Alarms later than a year are set again when a session comes.
local LONGEST_ALARM = 365 * ABANDONED
-- What a session owns stands in its record while that is as short as this: each call reads and writes it.
local FEW, SHORT = 4, 256
-- What this release cannot reap, or ring, another one may: it is looked at again after a minute.
local ASIDE = 60000

local handlers, reapers, alarms = {}, {}, {}
-- Calls of one request, by its verb, that need no context: they answer, or have written nothing, see lua/LockStraight.lua.
local straight = {}
-- Registered behind all files, hence declared here: lua/calls.lua, lua/Fence.lua.
local run, inspect, renew, fence

-- What a library cannot reach while it is loaded, bound when it is first called.
local call, format, match, find, sub, byte, concat, floor, pack, unpackStruct, WHOLE

local function bind()
  call, format, match, find, sub, byte = redis.call, string.format, string.match, string.find, string.sub, string.byte
  concat, floor = table.concat, math.floor
  pack, unpackStruct = struct.pack, struct.unpack
  -- Integers print several times faster than doubles, where they are wide enough for a token.
  WHOLE = format('%d', 2 ^ 52 + 1) == '4503599627370497' and '%d' or '%.0f'
end

-- `owned` has entries of what the session owns, each between two bytes that no text has.
-- record Session 3: number, deadline, read, posted, stamp, lease, text owned

local function text(number)
  return format(WHOLE, number)
end

-- -----------------------------------------------------------------------------
-- Replies and events
-- -----------------------------------------------------------------------------

-- Text that is JSON already.
local function json(value)
  return { value }
end

local function encoded(value)
  local kind = type(value)
  if kind == 'string' then
    return find(value, '[%c"\\]') and cjson.encode(value) or '"' .. value .. '"'
  elseif kind == 'number' then
    return text(value)
  elseif kind == 'table' then
    return value[1]
  end
  return value and 'true' or 'false'
end

-- A list of texts, numbers and booleans as JSON.
local function list(values)
  local parts = {}
  for index, value in ipairs(values) do parts[index] = encoded(value) end
  return json('[' .. concat(parts, ',') .. ']')
end

-- A reply or an event: a tag, and what belongs to it.
local function reply(tag, ...)
  local parts = { tag, ... }
  for index = 1, #parts do parts[index] = encoded(parts[index]) end
  return '[' .. concat(parts, ',') .. ']'
end

-- So many ms ago. Ids of streams have no times of before 1970.
local function ago(ctx, millis)
  return math.max(0, ctx.now - millis)
end

-- The part of an answer that several claims share, as JSON without brackets.
local function continued(...)
  local parts = { ... }
  for index = 1, #parts do parts[index] = encoded(parts[index]) end
  return concat(parts, ',')
end

-- An answer that an expired session stands in the way of: it has to be reaped first.
local STALE, RELEASED, ABSENT, MISSING = '["stale"]', '["released"]', '["absent"]', '["missing"]'

-- -----------------------------------------------------------------------------
-- Tokens, sessions, claims
-- -----------------------------------------------------------------------------

-- The newest token of the partition, which most calls do not need, as text.
local function lastToken(ctx)
  if not ctx.last then
    ctx.before = ctx.before or call('HGET', ctx.sessions, 'token')
    ctx.last = ctx.before or call('GET', ctx.prefix .. 'floor') or '0'
  end
  return ctx.last
end

-- The last token as a negative number, for a member that has asked again. The number -1 stands for no token.
local function asked(ctx)
  local token = lastToken(ctx)
  return json(token == '0' and '-1' or '-' .. token)
end

-- Strictly increasing in the partition, hence per resource, even after the resource was deleted. It starts from the
-- clock, hence also after the partition lost its data.
local function nextToken(ctx)
  local token = (ctx.token or lastToken(ctx)) + 1
  if ctx.micros > token then token = ctx.micros end
  ctx.token, ctx.last = token, text(token)
  return ctx.last
end

-- So many consecutive ones: the first of them.
local function nextTokens(ctx, count)
  if count == 0 then return '0' end
  local first = nextToken(ctx)
  if count > 1 then
    ctx.token = ctx.token + count - 1
    ctx.last = text(ctx.token)
  end
  return first
end

-- So many tokens go with what its process may keep: one for each time that it is taken again without asking. Only while the last token
-- is not ahead of the clock: it would stay behind for good, and tokens would be smaller after a loss of data.
local KEPT_TOKENS = 1000

local function hasTokens(ctx)
  return (ctx.token or lastToken(ctx) + 0) <= ctx.micros
end

local function grantedToKeep(token)
  return '["kept","' .. token .. '",' .. KEPT_TOKENS .. ']'
end

-- The record of a session, read once in a call; false for one that is forgotten.
local function sessionOf(ctx, session)
  if session == ctx.session then return ctx.own end
  local sessions = ctx.known
  if not sessions then
    sessions = {}
    ctx.known = sessions
  end
  local known = sessions[session]
  if known == nil then
    local packed = call('HGET', ctx.sessions, 's' .. session)
    known = packed and unpackSession(packed) or false
    sessions[session] = known
  end
  return known
end

local function isAlive(ctx, session)
  if session == ctx.session then return true end
  local known = sessionOf(ctx, session)
  return known and known.deadline > ctx.now
end

-- Whether no later session will come back for what this one has owned: it gives that up itself, or its coordinator was
-- closed.
local function hasLeft(ctx, session)
  local known = sessionOf(ctx, session)
  return session == ctx.session or known and known.deadline == CLOSED
end

-- What is left, in ms, of the time that a resource outlives its last member. If the session of that member has died, the time counts from
-- the end of that session.
local function leftOf(ctx, session, life)
  local known = session ~= ctx.session and sessionOf(ctx, session)
  local ended = known and known.deadline > 0 and known.deadline or ctx.now
  return text(math.max(0, life - math.max(0, ctx.now - ended)))
end

-- Of a claim, which is named "<session>/<id>".
local function holderOf(claim)
  return match(claim, '^[^/]*')
end

local function idOf(claim)
  return match(claim, '/(.*)$')
end

local function claimOf(ctx, id)
  return ctx.session .. '/' .. id
end

local function aboutOf(ctx, claim)
  return json(call('HGET', ctx.sessions, 'about' .. holderOf(claim)) or 'null')
end

-- The set of what a session owns.
local function ownedBy(ctx, session)
  return ctx.prefix .. 'own:' .. session
end

local function mailboxIn(prefix, session)
  return prefix .. 'mail:' .. session
end

local function mailboxOf(ctx, session)
  return mailboxIn(ctx.prefix, session)
end

-- What stands in the set of a session for something that it owns.
local function entryOf(ctx, key, id)
  return id .. ':' .. sub(key, #ctx.prefix + 1)
end

-- A key stays for a day after it was touched last; sessions touch what they own more often than that.
local function keep(key, millis)
  call('PEXPIRE', key, millis and millis > ABANDONED and text(millis) or A_DAY)
end

-- Instead of a time to live: what users store has its own, or none.
local PERMANENT = -1

-- What a session owns, in its record. No name has these bytes, because names are well-formed Unicode.
local function marked(entry)
  return '\254' .. entry .. '\255'
end

-- Takes an entry out of a session's record. Answers whether it was there.
local function unmark(state, entry)
  local first, last = find(state.owned, marked(entry), 1, true)
  if first then state.owned = sub(state.owned, 1, first - 1) .. sub(state.owned, last + 1) end
  return first
end

-- Whether this call gave it up before, which does not count any more then.
local function isTakenBack(ctx, entry)
  local removed = ctx.removed
  for index = 1, removed and #removed or 0 do
    if removed[index] == entry then return table.remove(removed, index) end
  end
end

-- The session owns a hold or a wait of a resource that has been written already. What it owns is written once a call.
local function own(ctx, key, id, millis)
  local added, entry = ctx.added, entryOf(ctx, key, id)
  if not isTakenBack(ctx, entry) then
    if added then added[#added + 1] = entry else ctx.added = { entry } end
  end
  if millis == PERMANENT then return end
  keep(key, millis)
  if ctx.items then keep(ctx.items, millis) end
end

-- The session has given it up, and never asks for it again.
local function disown(ctx, key, id)
  local removed = ctx.removed
  if removed then removed[#removed + 1] = entryOf(ctx, key, id) else ctx.removed = { entryOf(ctx, key, id) } end
end

-- It has ended by itself. The same call may ask what has become of it, and own it anew.
local function disownNow(ctx, key, id)
  local entry = entryOf(ctx, key, id)
  if not unmark(ctx.own, entry) then call('SREM', ownedBy(ctx, ctx.session), entry) end
end

-- A command about a consumer group; false if there is none, or if it has expired with its stream.
local function tryGroup(...)
  local answered = redis.pcall(...)
  if type(answered) ~= 'table' or not answered.err then return answered or {} end
  if find(answered.err, 'NOGROUP', 1, true) or find(answered.err, 'requires the key to exist', 1, true) then return false end
  error(answered)
end

-- The words of a field of a hash.
local function wordsIn(key, field)
  local words = {}
  for word in string.gmatch(call('HGET', key, field) or '', '%S+') do words[#words + 1] = word end
  return words
end

-- -----------------------------------------------------------------------------
-- Mailboxes
-- -----------------------------------------------------------------------------

-- All that is posted to a session in one call is one event of its mailbox.
local function post(ctx, session, event)
  local mail = ctx.mail
  if not mail then
    mail = {}
    ctx.mail, ctx.addressees = mail, {}
  end
  local events = mail[session]
  if events then
    events[#events + 1] = event
  else
    mail[session] = { event }
    ctx.addressees[#ctx.addressees + 1] = session
  end
end

-- Entries are numbered, so that a coordinator notices what it has missed. The other half of their ids is the time: a number
-- that is given again after Redis has forgotten the first event looks different.
local function postedId(ctx, state)
  state.posted, state.stamp = state.posted + 1, ctx.micros
  return text(state.posted) .. '-' .. text(state.stamp)
end

-- pcall: an event that does not come into another session's mailbox is a delay and not a failure.
local function putMail(prefix, session, id, events)
  redis.pcall('XADD', mailboxIn(prefix, session), 'NOMKSTREAM', 'MAXLEN', '~', MAILBOX_LENGTH, id, 'e', events)
end

-- The records of the sessions are to be written.
local function writeMail(ctx, writes)
  for _, session in ipairs(ctx.addressees) do
    local state = sessionOf(ctx, session)
    if state then
      local id = postedId(ctx, state)
      if session ~= ctx.session then writes[#writes + 1], writes[#writes + 2] = 's' .. session, packSession(state) end
      putMail(ctx.prefix, session, id, '[' .. concat(ctx.mail[session], ',') .. ']')
    end
  end
end

-- To claims of other sessions through their mailboxes, to one of the session that asks with the reply.
local function deliver(ctx, session, event)
  if session == ctx.session then
    ctx.events = ctx.events or {}
    ctx.events[#ctx.events + 1] = event
  else
    post(ctx, session, event)
  end
end

-- A resource is gone, though its partition is not: each session asks about all that it has.
local function doubtAll(ctx)
  for _, member in ipairs(call('ZRANGEBYSCORE', ctx.dues, '(' .. text(ctx.now), '+inf')) do
    if byte(member) ~= 64 and isAlive(ctx, member) then deliver(ctx, member, '["doubt"]') end
  end
end

-- Grants a claim that waits.
local function inform(ctx, claim, token, ...)
  local session, id = match(claim, '^([^/]*)/(.*)$')
  deliver(ctx, session, ... ~= nil and reply('granted', id, token, ...) or '["granted","' .. id .. '","' .. token .. '"]')
end

-- A hold is ended by another session's request.
local function revoke(ctx, claim)
  deliver(ctx, holderOf(claim), reply('revoked', idOf(claim)))
end

-- A member of a resource hears of its changes: a field "o<session>/<id>" of its hash. Answers whether it is new.
local function enrol(ctx, key, id, millis)
  if call('HSET', key, 'o' .. claimOf(ctx, id), '') == 0 then return false end
  own(ctx, key, id, millis)
  return true
end

-- A resource may outlive its sessions: after a day without any, Redis has forgotten them all, and no session will be reaped for what it
-- had there. Removes such members, and answers how many there were; nothing if no session was forgotten since it was asked last. The hash
-- notes in a field `identity` which sessions these are.
local function dropForgottenMembers(ctx, key)
  local identity, known = call('HGET', ctx.sessions, 'identity'), call('HGET', key, 'identity')
  if known == identity then return end
  call('HSET', key, 'identity', identity)
  if not known then return end
  local dropped = 0
  for _, field in ipairs(call('HKEYS', key)) do
    local session = match(field, '^o([^/]*)/')
    if session and not sessionOf(ctx, session) then dropped = dropped + call('HDEL', key, field) end
  end
  return dropped
end

-- Tells every member of a resource how it is now: with `post` in the order of the changes, with `deliver` sooner, where members can tell
-- that order themselves. Answers whether there is one.
local function announceBy(send, ctx, key, ...)
  local state
  for _, field in ipairs(call('HKEYS', key)) do
    local session, id = match(field, '^o([^/]*)/(.*)$')
    if session then
      state = state or continued(...)
      send(ctx, session, '["changed","' .. id .. '",' .. state .. ']')
    end
  end
  return state ~= nil
end

local function announce(ctx, key, ...)
  return announceBy(post, ctx, key, ...)
end

-- Notes a claim for `tellAll`, by its session.
local function gather(told, session, id, single)
  local one = told[session]
  if not one then
    one = { ids = {}, single = {} }
    told[session], told[#told + 1] = one, session
  end
  local count = #one.ids + 1
  one.ids[count], one.single[count] = id, single
end

-- Answers claims that were gathered, by one event for each session however many of its claims are answered. `answer` is what
-- `continued` makes.
local function tellAll(ctx, told, answer)
  for _, session in ipairs(told) do
    -- The ids are one text: cold, to parse each as one of its own is most of what a coordinator does before it wakes the first claim.
    local ids, singles = concat(told[session].ids, ' '), concat(told[session].single, ',')
    deliver(ctx, session, '["each","' .. ids .. '",[' .. singles .. '],' .. answer .. ']')
  end
end

-- Answers claims that wait. `single` has the last part of each answer, if they differ.
local function tell(ctx, claims, answer, single)
  local told = {}
  for index, claim in ipairs(claims) do
    local session, id = match(claim, '^([^/]*)/(.*)$')
    gather(told, session, id, single and single[index])
  end
  tellAll(ctx, told, answer)
end

-- -----------------------------------------------------------------------------
-- Deadlines and alarms
-- -----------------------------------------------------------------------------

-- Whether a session is due that has not been reaped yet. Alarms may have piled up, and a look at all of them would stop
-- Redis. Beyond a bound, a session may be among them: then the answer is yes, which costs the coordinator a tick.
local function isAnyDue(ctx)
  if ctx.due == nil then
    local due = call('ZRANGEBYSCORE', ctx.dues, 0, text(ctx.now), 'LIMIT', 0, 4 * REAP_ENTRIES)
    ctx.due = #due == 4 * REAP_ENTRIES
    for _, member in ipairs(due) do
      ctx.due = ctx.due or sub(member, 1, 1) ~= '@' and not isAlive(ctx, member)
    end
  end
  return ctx.due
end

-- Whether an answer may be wrong because of a session that ended long ago. The coordinator reaps it and asks again.
local function isStale(ctx)
  return not ctx.anyway and isAnyDue(ctx)
end

-- The reply says when the partition has something to do: a waiter depends on it.
local function expect(ctx, after)
  ctx.expects = after or '-inf'
end

local function queued(ctx, ahead)
  expect(ctx)
  return '["queued",' .. text(ahead) .. ']'
end

-- Has `alarms[kind]` called for a resource, in so many ms, or sooner if that was asked for.
local function alarm(ctx, key, millis)
  call('ZADD', ctx.dues, 'LT', text(ctx.now + millis), '@' .. sub(key, #ctx.prefix + 1))
  call('PEXPIRE', ctx.dues, A_DAY, 'NX')
  -- No session may be alive by then.
  if millis > ABANDONED / 2 then call('PEXPIRE', ctx.dues, text(math.min(millis, LONGEST_ALARM) + ABANDONED), 'GT') end
  expect(ctx)
end

-- Has f called when all requests of the call are done: for what is read and written once for all requests about a resource.
local function later(ctx, key, f)
  ctx.later = ctx.later or {}
  ctx.later[#ctx.later + 1] = { key = key, act = f }
end

-- What requests of one call share, by its name: empty at first.
local function sharedIn(ctx, name)
  local shared = ctx[name]
  if not shared then
    shared = {}
    ctx[name] = shared
  end
  return shared
end

-- Milliseconds until the partition has something to do, from a time on, and the session that may end then, as JSON: 0 for at once, -1 for
-- never. Exact to a tenth of one: others wait for that moment.
local function nearest(due, from, session, micros)
  local found = call('ZRANGEBYSCORE', due, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
  for index = 1, #found, 2 do
    local member = found[index]
    if member ~= session then
      local millis = format('%.1f', math.max(0, tonumber(found[index + 1]) - floor(micros / 100) / 10))
      return byte(member) == 64 and millis or millis .. ',' .. encoded(member)
    end
  end
  return '-1'
end

-- -----------------------------------------------------------------------------
-- What is known for a while
-- -----------------------------------------------------------------------------

-- Of a resource that notes something in turns of `window` ms, in `even` and `odd`. Before its first member has said how long
-- these are, as after a loss of data, they are the default.
local function windowOf(state)
  return state.window > 0 and state.window or 600000
end

-- The hash of this turn, and that of the turn before.
local function turnsOf(ctx, state)
  if state.current then return state.current, state.former end
  local turn = floor(ctx.now / windowOf(state))
  -- The clock may be behind what it was, as after a fail-over, and a new `window` begins in the turn that comes: what is known must not
  -- be forgotten for that.
  if turn < state.turn and turn >= state.turn - 2 then turn = state.turn end
  if turn ~= state.turn then
    call('UNLINK', turn % 2 == 0 and state.even or state.odd)
    if turn ~= state.turn + 1 then call('UNLINK', turn % 2 == 0 and state.odd or state.even) end
    state.turn = turn
  end
  state.current, state.former = state.even, state.odd
  if turn % 2 ~= 0 then state.current, state.former = state.odd, state.even end
  return state.current, state.former
end
