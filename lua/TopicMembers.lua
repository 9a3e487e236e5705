-- Members of a topic and of its groups: from the first request to the end of their sessions.
--
-- after Topic.lua
-- after TopicGroups.lua
-- after TopicPublish.lua
-- after TopicRetention.lua

-- The numbers of shards that there were while ids are known that were published then, and for how long they still are.
local function formerOf(ctx, topic)
  local former = {}
  for epoch = topic.epoch, 1, -1 do
    local shards, at = match(call('HGET', topic.key, 'L' .. text(epoch)) or '', '^(%d+) (%d+)$')
    local left = at and tonumber(at) + 2 * windowOf(topic) - ctx.now or 0
    if left <= 0 then break end
    former[#former + 1] = '[' .. shards .. ',' .. text(left) .. ']'
  end
  return json('[' .. concat(former, ',') .. ']')
end

-- How it is kept, and when that was decided: as members say when they join.
local function keptOf(topic)
  return json('[' .. concat({ text(topic.decided), text(topic.length), text(topic.bytes), text(topic.age), text(topic.abandon),
    text(topic.window), tostring(topic.protect == 1) }, ',') .. ']')
end

-- topic.join: becomes a member, and says how the topic is kept: in events, bytes and ms (0 for no limit), how long a group
-- without members is kept, how long ids are known, and whether what a group still needs is kept. The last member decides that:
-- `decided` is -1 for one that does so now, the number that was answered for one that did so before, or knows it from another shard,
-- and 0 for one that leaves that as it is. `shards` counts for a topic that is new, and is 0 for a process that names no number.
-- keys: all
-- args: id string, decided number, length number, bytes number, age number, abandon number, window number, protect boolean, shards number
-- reply: ["joined", number number, last string, epoch number, shards number, width number, open number, former json, kept json]
handlers['topic.join'] = function(ctx, key, id, decided, length, bytes, age, abandon, window, protect, shards)
  local topic = loadTopic(ctx, key)
  if topic.window == 0 and topic.epoch == 0 then
    topic.shards, topic.width = tonumber(shards), math.max(1, tonumber(shards))
  end
  decided = decided == '-1' and math.max(topic.decided + 1, ctx.now) or tonumber(decided)
  if decided > topic.decided or topic.window == 0 then
    topic.length, topic.bytes, topic.age = tonumber(length), tonumber(bytes), tonumber(age)
    topic.abandon = tonumber(abandon)
    if topic.window ~= tonumber(window) then
      if topic.window > 0 then announce(ctx, key, 'window', tonumber(window)) end
      topic.window, topic.current = tonumber(window), nil
      -- What is known stays so for one of the new turns at least: they do not follow the former ones.
      topic.turn = floor(ctx.now / topic.window) + 1
    end
    topic.protect, topic.trim, topic.decided = protect == '1' and 1 or 0, true, decided
    -- How long groups are kept may have been for ever.
    eachGroup(topic, function(group) expectEnd(ctx, topic, group) end)
  end
  local forgotten = dropForgottenMembers(ctx, key)
  if forgotten then
    topic.members = topic.members - forgotten
    -- Alarms may be forgotten too, and members of groups.
    sooner(ctx, topic, ctx.now)
  end
  if enrol(ctx, key, id, PERMANENT) then topic.members = topic.members + 1 end
  if topic.number > 0 and call('XLEN', topic.entries) == 0 then
    -- It may not have heard of that. Its mailbox tells it behind what was read of the stream before.
    post(ctx, ctx.session, '["changed","' .. id .. '","emptied","' .. eventId(topic) .. '"]')
  end
  return reply('joined', topic.number, eventId(topic), topic.epoch, topic.shards, topic.width, topic.open, formerOf(ctx, topic),
    keptOf(topic))
end

-- topic.seal: ends the epoch of a shard, unless it is in this one or in a later one already, which is answered. `width` is how many
-- shards are known to have had events.
-- keys: all
-- args: epoch number, shards number, width number
-- reply: ["sealed", epoch number, shards number, width number, open number, former json, groups json, kept json]
-- flags: allow-oom
handlers['topic.seal'] = function(ctx, key, epoch, shards, width)
  local topic = loadTopic(ctx, key)
  if tonumber(epoch) > topic.epoch then
    call('HSET', key, 'E' .. epoch, eventId(topic), 'L' .. epoch, text(math.max(1, topic.shards)) .. ' ' .. text(ctx.now))
    topic.epoch, topic.shards, topic.open, topic.time = tonumber(epoch), tonumber(shards), 0, nil
    topic.width = math.max(topic.width, topic.shards)
    announce(ctx, key, 'epoch', topic.epoch)
  end
  -- One that has lost its data hears of all shards again.
  topic.width = math.max(topic.width, tonumber(width))
  local groups = {}
  eachGroup(topic, function(group) groups[#groups + 1] = '[' .. encoded(group.name) .. ',' .. text(group.ordered) .. ']' end)
  return reply('sealed', topic.epoch, topic.shards, topic.width, topic.open, formerOf(ctx, topic),
    json('[' .. concat(groups, ',') .. ']'), keptOf(topic))
end

-- topic.open: all shards are sealed, so this one takes in events of the epoch. It gets the groups of the others, given as
-- JSON, at its first event of the epoch.
-- keys: all
-- args: epoch number, groups string
-- reply: ["opened", epoch number]
-- flags: allow-oom
handlers['topic.open'] = function(ctx, key, epoch, groups)
  local topic = loadTopic(ctx, key)
  if tonumber(epoch) == topic.epoch and topic.open == 0 then
    for _, group in ipairs(cjson.decode(groups)) do
      if not call('HGET', key, 'G' .. group[1]) then
        local made = makeGroup(ctx, topic, group[1], call('HGET', key, 'E' .. epoch), group[2], topic.epoch - 1)
        if made then
          made.left = ctx.now
          expectEnd(ctx, topic, made)
        end
      end
    end
    topic.open = 1
  end
  return reply('opened', topic.epoch)
end

-- topic.mark: the last event before an epoch, if the shard is in that one already
-- keys: all
-- args: epoch number
-- reply: ["mark", event string] | ["early"]
-- flags: no-writes
handlers['topic.mark'] = function(ctx, key, epoch)
  local topic = readTopic(ctx, key)
  if topic.epoch < tonumber(epoch) then return '["early"]' end
  return reply('mark', call('HGET', key, 'E' .. epoch) or '0-0')
end

-- topic.find: the event that was published under an id
-- keys: all
-- args: id string
-- reply: ["found", event string]
-- flags: no-writes
handlers['topic.find'] = function(ctx, key, id)
  return reply('found', eventOf(readTopic(ctx, key), id, ctx.even, ctx.odd) or '')
end

-- When no session was alive for a day, sessions are forgotten that were not reaped by then, and so are alarms. Their members leave a
-- group, some in each call.
local FORGOTTEN = 16

local function dropForgotten(ctx, topic, group)
  local gone = {}
  for _, member in ipairs(group.list) do
    if not sessionOf(ctx, holderOf(member.claim)) then gone[#gone + 1] = member.claim end
  end
  for at = 1, math.min(#gone, FORGOTTEN) do dismissMember(ctx, topic, gone[at], group.index, true) end
  if #gone > FORGOTTEN then sooner(ctx, topic, ctx.now) end
end

-- The alarm rings for the next event whose delay is over.
local function expectRetry(ctx, topic)
  local nextRetry = call('ZRANGEBYSCORE', topic.retries, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if nextRetry then sooner(ctx, topic, tonumber(nextRetry)) end
end

local function orderOf(ordered)
  return ordered == '1' and 1 or 0
end

-- topic.consume: becomes a member of a group, with credit for so many events. A group that is new begins after `from`, or
-- with the next event. A member that asks again hears all events that it has not acknowledged, how many it misses in all gaps up to
-- a number that it has not acknowledged, and the number of deliveries to it so far: a delivery among these that comes later is old.
-- Of events that were purged, or do not fit into one answer, it hears the ids.
-- `made` tells a group from one of that name that Redis has lost: 0 for a member that knows none, otherwise what it was answered, with
-- the events that it had in hand.
-- keys: all
-- args: id string, name string, from string, credit number, ordered boolean, made number, events string
-- reply: ["joined", index string, sent number, drained number, epoch number, made number, unacknowledged json] | ["full"] | ["ordering"]
handlers['topic.consume'] = function(ctx, key, id, name, from, credit, ordered, made, events)
  local topic = loadTopic(ctx, key)
  local claim, index = claimOf(ctx, id), call('HGET', key, 'G' .. name)
  local group = index and groupAt(topic, index)
    -- While this shard is sealed, others may still take in events of the former epoch.
    or makeGroup(ctx, topic, name, from, orderOf(ordered), from == '' and topic.epoch + topic.open - 1 or 0)
  if not group then return '["full"]' end
  if group.ordered ~= orderOf(ordered) then return '["ordering"]' end
  index = group.index
  if call('HSET', key, 'x' .. claim, index) == 1 then
    local member = { claim = claim, credit = tonumber(credit), sent = 0, gaps = 0, missed = 0 }
    group.list[#group.list + 1] = member
    group.members, group.credit = group.members + 1, group.credit + tonumber(credit)
    own(ctx, key, id, PERMANENT)
    dropForgotten(ctx, topic, group)
    expectRetry(ctx, topic)
    if made ~= '0' and tonumber(made) ~= group.made then takeBack(topic, group, member, events) end
  end
  local items, member = {}, memberOf(group, claim)
  if member and member.missed ~= 0 then
    items[1] = '["missed",' .. text(member.missed) .. ',' .. text(member.gaps) .. ']'
  end
  for _, pending in ipairs(tryGroup('XPENDING', topic.entries, name, '-', '+', 1024, claim) or {}) do
    local entry = roomOf(ctx) > 0 and call('XRANGE', topic.entries, pending[1], pending[1])[1]
    if entry then spendRoom(ctx, entry) end
    -- If its delivery was lost too, the member gives it back.
    items[#items + 1] = entry and described(pending[1], pending[4], entry[2]) or '["unsent","' .. pending[1] .. '"]'
  end
  return reply('joined', index, member and member.sent or 0, group.drained, group.epoch, group.made,
    json('[' .. concat(items, ',') .. ']'))
end

-- topic.begin: no shard has anything left for a group of what there was before an epoch, so the group begins that epoch
-- keys: all
-- args: name string, epoch number
-- reply: ["begun"]
-- flags: allow-oom
handlers['topic.begin'] = function(ctx, key, name, epoch)
  local topic = loadTopic(ctx, key)
  local index = call('HGET', key, 'G' .. name)
  local group = index and groupAt(topic, index)
  if group then group.epoch = math.max(group.epoch, math.min(tonumber(epoch), topic.epoch)) end
  return '["begun"]'
end

-- topic.ack: a member has handled an event, and takes another one; or a gap, of as many events as stand in place of the event.
-- keys: all
-- args: id string, index string, event string, key string
-- reply: ["acknowledged"]
-- flags: allow-oom
handlers['topic.ack'] = function(ctx, hash, id, index, event, key)
  local topic = loadTopic(ctx, hash)
  local group = groupAt(topic, index)
  if not group then return '["acknowledged"]' end
  local missed = tonumber(event)
  if missed then
    local member = memberOf(group, claimOf(ctx, id))
    if member and missed < 0 then member.missed = 0 end
    if member and member.missed > 0 then member.missed = math.max(0, member.missed - missed) end
    return '["acknowledged"]'
  end
  if call('XACK', topic.entries, group.name, event) == 1 or hadRemoved(topic, group, event) then
    unlockKey(topic, group, key, event)
    credited(ctx, group, id, 1)
    -- Perhaps the group has held it back, or the last ones do.
    if topic.held == 1 and (group.cursor == topic.number or numberOf(event) % stepOf(topic) == 0) then topic.trim = true end
  end
  return '["acknowledged"]'
end

-- topic.retry: a member could not handle an event; it is delivered again in so many ms. With -1 it has not received it, and that delivery
-- does not count.
-- keys: all
-- args: id string, index string, event string, delay number
-- reply: ["returned"]
-- flags: allow-oom
handlers['topic.retry'] = function(ctx, hash, id, index, event, delay)
  local topic = loadTopic(ctx, hash)
  local group = groupAt(topic, index)
  if not group then return '["returned"]' end
  local pending = (tryGroup('XPENDING', topic.entries, group.name, event, event, 1, claimOf(ctx, id)) or {})[1]
  if not pending then
    if hadRemoved(topic, group, event) then
      unlockRemoved(topic, group, { event })
      credited(ctx, group, id, 1)
    end
    return '["returned"]'
  end
  if tonumber(delay) > 0 then
    local at = ctx.now + tonumber(delay)
    shift(topic, group, DELAYED, { event })
    call('ZADD', topic.retries, text(at), index .. ':' .. event)
    sooner(ctx, topic, at)
  else
    giveBack(topic, group, { event }, tonumber(delay) < 0 and pending[4] - 1 or nil)
  end
  credited(ctx, group, id, 1)
  return '["returned"]'
end

-- topic.forget: removes a group without members, and all that it has not acknowledged; with `anyway` it says that the group has
-- some, though an expired session may stand in the way
-- keys: all
-- args: name string, anyway boolean
-- reply: ["forgotten"] | ["missing"] | ["busy"] | ["stale"]
-- flags: allow-oom
handlers['topic.forget'] = function(ctx, key, name, anyway)
  local topic = loadTopic(ctx, key)
  local index = call('HGET', key, 'G' .. name)
  local group = index and groupAt(topic, index)
  if not group then return MISSING end
  if group.members > 0 then return anyway ~= '1' and isStale(ctx) and STALE or '["busy"]' end
  destroyGroup(topic, group)
  return '["forgotten"]'
end

-- topic.purge: removes all events, and groups without members; what members are working on, they finish. The shards are purged one
-- after the other: it is given, as JSON, the groups that stay in those before, and answers all that stay. Their members may not have
-- joined this shard yet, and would not hear what they miss in it.
-- keys: all
-- args: groups string
-- reply: ["purged", length number, groups json]
-- flags: allow-oom
handlers['topic.purge'] = function(ctx, key, groups)
  local topic = loadTopic(ctx, key)
  local length, stays, names = call('XLEN', topic.entries), {}, {}
  for at, name in ipairs(cjson.decode(groups)) do stays[name], names[at] = true, encoded(name) end
  if length > 0 then
    call('XTRIM', topic.entries, 'MAXLEN', 0)
    tellEmptied(ctx, topic)
  end
  call('UNLINK', topic.retries)
  eachGroup(topic, function(group)
    if not stays[group.name] then
      if group.members == 0 then return destroyGroup(topic, group) end
      names[#names + 1] = encoded(group.name)
    end
    purgeGroup(topic, group)
    tryGroup('XGROUP', 'SETID', topic.entries, group.name, eventId(topic))
  end)
  return reply('purged', length, json('[' .. concat(names, ',') .. ']'))
end

-- The oldest event that a group has not acknowledged; '' if there is none. What no member was given is newer than all that one was.
local function oldestFor(topic, group, pending)
  if pending and pending[1] > 0 then return pending[2] end
  if group.cursor >= topic.number then return '' end
  local after = text(group.stamp) .. '-' .. text(group.cursor + 1)
  local entry = call('XRANGE', topic.entries, after, '+', 'COUNT', 1)[1]
  return entry and entry[1] or ''
end

-- topic.state: how the topic is
-- keys: all
-- args:
-- reply: ["state", number number, length number, bytes number, first string, last string, members number, groups json] | ["stale"] | ["missing"]
-- flags: allow-oom
handlers['topic.state'] = function(ctx, key)
  local topic = readTopic(ctx, key)
  if not topic.known then return MISSING end
  if isStale(ctx) then return STALE end
  local first, groups = oldestEvent(topic), {}
  eachGroup(topic, function(group)
    local pending = tryGroup('XPENDING', topic.entries, group.name)
    local count = pending and pending[1] or 0
    groups[#groups + 1] = '[' .. concat({ encoded(group.name), encoded(group.members),
      encoded(math.max(0, topic.number - group.cursor) + group.parked), encoded(count - group.parked),
      encoded(oldestFor(topic, group, pending)) }, ',') .. ']'
  end)
  local last = topic.number > 0 and eventId(topic) or ''
  -- The first one is counted with those before it.
  local bytes = first and topic.total - bytesOf(first) + sizeOf(first) or 0
  return reply('state', topic.number, call('XLEN', topic.entries), bytes, first and first[1] or '', last, topic.members,
    json('[' .. concat(groups, ',') .. ']'))
end

reapers.topic = function(ctx, key, session, id)
  local claim = session .. '/' .. id
  local index = call('HGET', key, 'x' .. claim)
  local member = call('HDEL', key, 'o' .. claim) == 1
  if not index and not member then return end
  local topic = loadTopic(ctx, key)
  if member then topic.members = math.max(0, topic.members - 1) end
  if index then dismissMember(ctx, topic, claim, index, not hasLeft(ctx, session)) end
end

alarms.topic = function(ctx, key)
  local topic = loadTopic(ctx, key)
  topic.trim, topic.rung = true, nil
  for _, member in ipairs(call('ZRANGEBYSCORE', topic.retries, '-inf', text(ctx.now), 'LIMIT', 0, SERVED)) do
    local index, event = match(member, '^(%d+):(.*)$')
    local group = groupAt(topic, index)
    call('ZREM', topic.retries, member)
    -- The group may be another one by now, and the event be in hand.
    local delayed = group and tryGroup('XPENDING', topic.entries, group.name, event, event, 1, DELAYED)
    if delayed and #delayed > 0 then
      giveBack(topic, group, { event })
    end
  end
  expectRetry(ctx, topic)
  eachGroup(topic, function(group)
    dropForgotten(ctx, topic, group)
    if group.members > 0 or topic.abandon == 0 then return end
    if group.left + topic.abandon > ctx.now then return expectEnd(ctx, topic, group) end
    destroyGroup(topic, group)
  end)
end
