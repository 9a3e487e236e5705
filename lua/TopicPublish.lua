-- Events are published.
--
-- after Topic.lua
-- after TopicGroups.lua
-- after TopicRetention.lua

-- The last number that a coordinator has published under.
local function lastOf(topic, node, now, before)
  local last = topic.last[node]
  if not last then
    local field = 'p' .. node
    last = tonumber(call('HGET', now, field) or call('HGET', before, field) or '0')
    topic.last[node] = last
  end
  return last
end

local function note(topic, field, value)
  local published, at = topic.published, topic.places[field]
  if not at then
    at = #published + 1
    topic.places[field], published[at] = at, field
  end
  published[at + 1] = value
end

-- What is about an event besides its number, in one argument, which mostly is the same for all of a call: "<epoch> <node>
-- <after> <bytes of key> <of id> <of trace> " and then key, id, trace and publisher.
local function originOf(ctx, about)
  local origins = sharedIn(ctx, 'origins')
  local origin = origins[about]
  if not origin then
    local epoch, node, after, key, id, trace, at = match(about, '^(%d+) (%S+) (%S*) (%d+) (%d+) (%d+) ()')
    local ofId, ofTrace = at + key, at + key + id
    local ofPublisher = ofTrace + trace
    origin = {
      epoch = tonumber(epoch), node = node, after = after, key = sub(about, at, ofId - 1), id = sub(about, ofId, ofTrace - 1),
      trace = sub(about, ofTrace, ofPublisher - 1), publisher = sub(about, ofPublisher), size = key + id + trace
    }
    origins[about] = origin
  end
  return origin
end

-- The event that was published under an id.
local function eventOf(topic, id, now, before)
  local field = 'i' .. id
  local at = topic.places[field]
  return at and topic.published[at + 1] or call('HGET', now, field) or call('HGET', before, field)
end

-- What stands in front of the number and behind the bytes of each event of this call.
local function stampTopic(ctx, topic)
  if topic.time then return end
  topic.stamp = math.max(topic.stamp, ctx.now)
  topic.time = text(topic.stamp) .. '-'
  topic.mark = topic.epoch > 0 and '.' .. text(topic.epoch) .. ' ' or ' '
end

-- Whether what an event follows was answered with a tag. Several events can follow one request.
local function follows(ctx, after)
  local count = #ctx.replies
  if ctx.followed ~= count then ctx.leader = ctx.replies[count] or '' end
  ctx.followed = count + 1
  return match(ctx.leader, '^%["(%w+)"') == after
end

-- topic.publish: appends an event, once for the number of a coordinator's publication, and once for an id. It may be given
-- the tag that the request which it follows in the batch must have been answered with: then it is stored whatever the epoch,
-- since it cannot be stored anywhere else in the same step. With "-" as the tag, that request is not made again: the answer says
-- whether the event was stored with it.
-- keys: all
-- args: value string, about string, number number
-- reply: ["published", event string] | ["duplicate", event string] | ["skipped"] | ["moved"]
handlers['topic.publish'] = function(ctx, hash, value, about, number)
  local origin = originOf(ctx, about)
  local after, topic, node, id = origin.after, loadTopic(ctx, hash), origin.node, origin.id
  local fits = after == '' or after ~= '-' and follows(ctx, after)
  local now, before = turnsOf(ctx, topic)
  local last = lastOf(topic, node, now, before)
  if tonumber(number) <= last then
    -- What follows a request has a node of its own: a later number says that its id was known.
    return reply('duplicate', after ~= '' and last > tonumber(number) and eventOf(topic, id, now, before) or '')
  end
  -- One that has failed may be made again, with what follows it.
  if not fits then return after ~= '-' and find(ctx.leader, '["failed"', 1, true) == 1 and ctx.leader or '["skipped"]' end
  local known = id ~= '' and eventOf(topic, id, now, before)
  if known then
    -- If the answer is lost with its session, the next one asks.
    if after ~= '' then
      topic.last[node] = number + 1
      topic.nodes[node] = text(number + 1)
    end
    return reply('duplicate', known)
  end
  if (origin.epoch ~= topic.epoch or topic.open == 0) and after == '' then return '["moved"]' end
  stampTopic(ctx, topic)
  local size = #value + origin.size
  local total = topic.total + size
  local event = topic.time .. text(topic.number + 1)
  if origin.size == 0 then
    call('XADD', topic.entries, event, text(total) .. topic.mark .. origin.publisher, value)
  else
    call('XADD', topic.entries, event, text(total) .. topic.mark .. origin.publisher, value, 'k', origin.key, 'i', id,
      't', origin.trace)
  end
  topic.number, topic.total, topic.largest = topic.number + 1, total, math.max(topic.largest, size)
  topic.last[node] = tonumber(number)
  topic.nodes[node] = number
  if id ~= '' then
    topic.noted = ctx.now
    note(topic, 'i' .. id, event)
  end
  return '["published","' .. event .. '"]'
end

local GRAIN = 512

-- So many bytes of the events of one publication may have the field of the first of them: Redis stores and sends a field like
-- the one before it for much less.
local function grainOf(topic)
  return topic.bytes > 0 and math.min(GRAIN, floor(topic.bytes / 64)) or GRAIN
end

-- topic.publishAll: appends events without key, id and trace: their values behind one another, and the bytes of each, as a JSON
-- array. They are stored once, and have the numbers behind that of the first one.
-- keys: all
-- args: values string, sizes string, about string, number number
-- reply: ["published", event string] | ["duplicate"] | ["moved"]
handlers['topic.publishAll'] = function(ctx, hash, values, sizes, about, number)
  local origin, topic = originOf(ctx, about), loadTopic(ctx, hash)
  local node = origin.node
  local now, before = turnsOf(ctx, topic)
  if tonumber(number) <= lastOf(topic, node, now, before) then return '["duplicate"]' end
  if origin.epoch ~= topic.epoch or topic.open == 0 then return '["moved"]' end
  stampTopic(ctx, topic)
  local entries, total, at, field, due = topic.entries, topic.total, 1, nil, 0
  local first, rest, grain = topic.time .. text(topic.number + 1), topic.mark .. origin.publisher, grainOf(topic)
  -- Behind the first one, Redis counts on.
  local id, onward, all = first, topic.time .. '*', cjson.decode(sizes)
  for _, size in ipairs(all) do
    total = total + size
    if size > topic.largest then topic.largest = size end
    if total >= due then field, due = text(total) .. rest, total + grain end
    call('XADD', entries, id, field, sub(values, at, at + size - 1))
    id, at = onward, at + size
  end
  topic.number, topic.total = topic.number + #all, total
  topic.last[node] = tonumber(number)
  topic.nodes[node] = number
  return reply('published', first)
end

-- The lowest free index is the new group's.
local function makeGroup(ctx, topic, name, from, ordered, epoch)
  local index
  for at = 1, MOST_GROUPS do
    if not groupAt(topic, text(at)) then
      index = text(at)
      break
    end
  end
  if not index then return nil end
  if from == '' then from = eventId(topic) end
  -- It misses what was removed behind an event that it is to begin after. One that is not there, though earlier ones are, is lost.
  local last = numberOf(from)
  if last and (timeOf(from) > topic.stamp or timeOf(from) == topic.stamp and last > topic.number) then
    from, last = eventId(topic), topic.number + 1
  end
  if not startGroup(topic, name, from) then from, epoch, last = resumeGroup(topic, name), 0, nil end
  local before = call('XREVRANGE', topic.entries, from, '-', 'COUNT', 1)[1]
  local oldest = not before and oldestEvent(topic)
  local group = {
    ordered = ordered, credit = 0, members = 0, returned = 0, parked = 0, left = 0, name = name, index = index, list = {},
    cursor = before and numberOf(before[1]) or oldest and numberOf(oldest[1]) - 1 or topic.number,
    stamp = before and timeOf(before[1]) or 0, epoch = epoch, drained = epoch, made = ctx.now
  }
  group.first, group.missed = group.cursor + 1, last and (last > group.cursor and -1 or group.cursor - last) or 0
  topic.loaded[index], topic.groups = group, math.max(topic.groups, tonumber(index))
  call('HSET', topic.key, 'G' .. name, index, 'N' .. index, name)
  return group
end
