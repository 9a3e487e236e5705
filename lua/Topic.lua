-- A topic: a stream of events, read by subscribers as it is, and by groups whose events this actor hands out.
--
-- kinds: topic: hash, entries, even, odd, retries
--
-- The id of an event is "<ms>-<number>". Numbers are contiguous, so a reader notices what was trimmed or lost; times never
-- decrease, so the ids do neither. An entry of the stream has a first field that is named "<bytes of all events so far>
-- <publisher>", with the JSON, and where it has them: k <key> i <id of the publisher's> t <trace>. Two more fields would cost
-- a reader more than all the rest of the entry. After a change of the shards, the bytes are followed by ".<epoch>". Small events
-- that were published together may have the bytes up to the first of them.
--
-- A topic has a shard in each of several partitions, and a key belongs to one of them. A change of their number begins an
-- epoch: all shards are *sealed*, the first one, which decides, before the others. A sealed shard refuses what is published,
-- until all are sealed and it is *opened*. So every event of an epoch was stored before every event of the next one, and a
-- reader that keeps order finishes an epoch in all shards before the next one. `shards` counts those that keys belong to now: 0 is one
-- that no process has named. `width` counts all that ever had events.
--
-- The hash:
--   s                  record Topic
--   o<session>/<id>    a member: it publishes or subscribes, and hears of changes
--   identity           see `dropForgottenMembers`
--   N<index>           the name of a group; G<name> its index
--   g<index>           record TopicGroup
--   m<index>           the members of a group: "<session>/<id> <credit> <deliveries so far> <gaps so far> <missed> ...", where
--                      `missed` counts the events of the gaps that the member has not acknowledged; -1 for a number that is
--                      not known
--   x<session>/<id>    the index of a member's group
--   k<index>:<key>     the events of a key, if the group is ordered: "<in work> <parked> ...", as ids
--   E<epoch>           the last event before an epoch
--   L<epoch>           "<shards before it> <time>"
-- `even` and `odd` have what was published in turns of `window` ms: i<id> of a publisher's, and p<node> the last number of a
-- coordinator's publications. `retries` is a zset of "<index>:<event>" by the time of the next delivery.
--
-- A group is a consumer group of the stream. Its consumers are its members by their claims, and these:
local RETURNED, PARKED, DELAYED = '-', '*', '~'
-- The count of deliveries of a pending event is its attempts, and CRASH for each attempt that ended with its member's session. One
-- that ended because its member left is no attempt.
-- A schedule without an end makes millions of attempts.
local CRASH = 2 ^ 32
-- An ordered group hands out one event of a key at a time. Later ones are parked, so order needs no assignment of keys to
-- members, and outlives every member.
-- It begins an epoch when all shards have nothing of the former one left: its members tell each shard.
-- `held` of a topic says that a group keeps events beyond the limits: 0 or 1; `noted` when an id was published last; `largest`
-- how many bytes an event has had at most.
-- record Topic 5: number, stamp, length, bytes, age, abandon, window, turn, total, members, groups, trimmed, protect, shards,
--   ring, epoch, width, open, decided, held, noted, largest
-- `missed` of a group is of gaps that no member has.
-- record TopicGroup 4: ordered, members, returned, parked, cursor, stamp, left, epoch, drained, made, first, missed

-- Lua unpacks some thousand values at most; the fields are even.
local MOST_PARKED, PAGE, MOST_GROUPS, MOST_PAGES, MOST_FIELDS = 1024, 64, 64, 512, 2000
-- Of the events that one call reads for groups: what it sends has to arrive in time.
local MOST_BYTES = 1048576

-- -----------------------------------------------------------------------------
-- State: read once in a call, and written at its end
-- -----------------------------------------------------------------------------

local function eventId(topic)
  return text(topic.stamp) .. '-' .. text(topic.number)
end

local function numberOf(id)
  return tonumber(match(id, '%-(%d+)$'))
end

local function timeOf(id)
  return tonumber(match(id, '^%d+'))
end

local function bytesOf(entry)
  return tonumber(match(entry[2][1], '^%d+')) or 0
end

-- Of an event without those before it.
local function sizeOf(entry)
  local size = 0
  for at = 2, #entry[2], 2 do size = size + #entry[2][at] end
  return size
end

local function readTopic(ctx, key)
  local packed = call('HGET', key, 's')
  local topic = packed and unpackTopic(packed) or {
    number = 0, stamp = 0, length = 0, bytes = 0, age = 0, abandon = ABANDONED, window = 0, turn = 0, total = 0,
    members = 0, groups = 0, trimmed = 0, protect = 1, shards = 0, ring = 0, epoch = 0, width = 1, open = 1,
    decided = 0, held = 0, noted = 0, largest = 0
  }
  topic.known, topic.rung = packed and true, topic.ring
  -- What is written at the end of the call: for `even` or `odd`, and where each field of it stands.
  topic.published, topic.places, topic.last, topic.nodes = {}, {}, {}, {}
  topic.key, topic.entries, topic.even, topic.odd, topic.retries = key, ctx.entries, ctx.even, ctx.odd, ctx.retries
  topic.loaded = {}
  return topic
end

local function groupAt(topic, index)
  local group = topic.loaded[index]
  if group == nil then
    local found = call('HMGET', topic.key, 'g' .. index, 'm' .. index, 'N' .. index)
    group = found[1] and unpackTopicGroup(found[1]) or false
    if group then
      group.name, group.index, group.list = found[3], index, {}
      group.before, group.beforeList, group.credit = found[1], found[2], 0
      for claim, credit, sent, gaps, missed in string.gmatch(found[2] or '', '(%S+) (%d+) (%d+) (%d+) (-?%d+)') do
        group.list[#group.list + 1] = {
          claim = claim, credit = tonumber(credit), sent = tonumber(sent), gaps = tonumber(gaps), missed = tonumber(missed)
        }
        group.credit = group.credit + tonumber(credit)
      end
    end
    topic.loaded[index] = group
  end
  return group
end

local function sooner(ctx, topic, at)
  if not topic.next or at < topic.next then topic.next = at end
end
