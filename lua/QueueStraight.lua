-- One job is offered without options, in a call of its own: what `run` does, without its context and the table of the queue, for half of
-- its cost, and less where Redis has rested before. A worker that waits gets the job. Whatever is not frequent is left to `run`: then
-- nothing has been written.
--
-- after LockStraight.lua
-- after QueueLists.lua
-- after QueueHandOut.lua

-- What a plain queue does not have: the fields from `c1` on.
local NONE

-- The next worker, if it takes the job without ado: its claim, what is known of it, its session, and that of the list behind it.
local function readyWorker(keys, session, list, now)
  local claim, behind = match(list or '', '^(%S+) ?(.*)$')
  local holder = claim and holderOf(claim)
  -- Its events would go with the reply.
  if not claim or holder == session then return end
  local credit, sent = match(call('HGET', keys[2], 'w' .. claim) or '', '^([1-9]%d*) (%d+) 1$')
  local state = credit and call('HGET', keys[1], 's' .. holder)
  state = state and unpackSession(state)
  if state and state.deadline > now then return claim, credit - 1, sent + 1, state, behind end
end

straight['queue.offer'] = function(keys, argv, field, _, found, micros)
  local now = floor(micros / 1000)
  local session, values, node, offer = argv[1], argv[4], argv[6], argv[7]
  if #argv ~= 7 or argv[5] ~= text(#values) .. ' ' then return end
  local number, read, posted, stamp, lease, owned = callerOf(argv, found, now)
  if not number then return end

  local sessions, key, normal = keys[1], keys[2], keys[5]
  NONE = NONE or string.rep('\0', PLACE.Queue.delayed - PLACE.Queue.c1)
  -- What does not fit is for `run` to refuse: one request, and not the whole call.
  local known = redis.pcall('HMGET', key, 's', 'q')
  local record = known[1]
  if not record or #record ~= LENGTH.Queue or byte(record) ~= VERSION.Queue
    or sub(record, PLACE.Queue.c1, PLACE.Queue.delayed - 1) ~= NONE then return end
  local _, count, latest, waiting, active, idle, since, begun, waited, ran, last, at, turn, window, shards =
    unpackStruct(SHAPE.Queue.c1, record)
  local ahead = turn - floor(now / window)
  -- As in `turnsOf`, the clock may be behind.
  if shards ~= 1 or window == 0 or ahead < 0 or ahead > 2 or floor(now / MINUTE) > floor(since / MINUTE) then return end
  local noted = keys[turn % 2 == 0 and 11 or 12]
  local former = redis.pcall('HGET', noted, 'p' .. node)
  former = type(former) == 'string' and match(former, '^%d+')
  if not former or former + 0 >= offer + 0 then return end

  local claim, credit, sent, state, behind, token, newest
  if idle > 0 then
    if waiting > 0 then return end
    claim, credit, sent, state, behind = readyWorker(keys, session, known[2], now)
    if not claim then return end
    token, newest = tokensBehind(found[2], micros, 1)
    if not token then return end
  end

  count, latest = count + 1, math.max(latest, now)
  local added = redis.pcall('XADD', normal, text(latest) .. '-' .. text(count), 'b', values)
  if type(added) == 'table' and added.err then return end
  if now > since then
    waited, ran, since = waited + (now - since) * waiting, ran + (now - since) * active, now
  end
  -- Where the job cannot be handed out, it waits.
  local fine, jobs = false, nil
  if claim then fine, jobs = pcall(readWaiting, normal, claim, 1) end
  local job = fine and jobs[1]
  local stays = job and credit > 0
  if job then
    at, last = match(job[1], '^(%d+)%-(%d+)$')
    at, last, active, begun = at + 0, last + 0, active + 1, begun + 1
  else
    waiting = waiting + 1
  end
  if stays then
    behind = behind == '' and claim or behind .. ' ' .. claim
  elseif job then
    idle = idle - 1
  end
  record = pack(SHAPE.Queue.c1, VERSION.Queue, count, latest, waiting, active, idle, since, begun, waited, ran, last, at, turn, window,
    shards) .. sub(record, PLACE.Queue.c1)
  local answered = '["offered",' .. text(latest) .. ',' .. text(count) .. ',[]]'
  local reply = '["ok",[' .. answered .. ']]'
  call('HSET', noted, 'p' .. node, offer .. ' ' .. answered)
  call('PEXPIRE', noted, text(2 * window))
  local caller = packed(number, now + lease, read, posted, stamp, lease, owned)
  if not job then
    call('HSET', key, 's', record)
    call('HSET', sessions, field, caller, 'r' .. session, reply)
    return reply
  end
  call('HSET', key, 's', record, 'q', behind, 'w' .. claim, text(credit) .. ' ' .. text(sent) .. (stays and ' 1' or ' 0'))
  local holder, id = match(claim, '^([^/]*)/(.*)$')
  putMail(sub(sessions, 1, -9), holder, postedId({ micros = micros }, state), '[["changed","' .. id .. '","deliver",' .. text(sent) .. ',' .. token
    .. ',[' .. describedJob('n', job[1], '1', job[2]) .. ']]]')
  call('HSET', sessions, field, caller, 'r' .. session, reply, 'token', newest, 's' .. holder, packSession(state))
  return reply
end
