-- A countdown latch, and a gate, which is one of count 1: it is open while nothing is left to count.
--
-- A resource is one hash. While a session has it open it stays; afterwards for as long as it says, if there is anything to
-- remember:
--   s                 state, packed: total, left, how often it was opened, how often it was reset, epoch, ms to keep, members
--   c<id>             has been counted
--   o<session>/<id>   a member; it hears of every opening and every reset
-- Another epoch means that Redis has forgotten the latch meanwhile: members then count again what they had counted.

local LATCH = '<ddddddd'

local function loadLatch(ctx, key, total, keep)
  local packed = call('HGET', key, 's')
  if not packed then
    total = tonumber(total)
    local epoch = tonumber(nextToken(ctx))
    return { total = total, left = total, opened = 0, resets = 0, epoch = epoch, keep = tonumber(keep), members = 0 }
  end
  local t, l, o, r, e, k, m = unpackStruct(LATCH, packed)
  return { total = t, left = l, opened = o, resets = r, epoch = e, keep = k, members = m }
end

local function saveLatch(key, latch)
  if latch.members == 0 and latch.left == latch.total and latch.opened == 0 then
    call('DEL', key)
    return
  end
  call('HSET', key, 's', pack(LATCH, latch.total, latch.left, latch.opened, latch.resets, latch.epoch, latch.keep, latch.members))
  if latch.members == 0 then call('PEXPIRE', key, text(latch.keep)) else call('PERSIST', key) end
end

local function describeLatch(latch)
  return format('%d,%d,%d,%d,', latch.total, latch.left, latch.opened, latch.resets) .. text(latch.epoch)
end

local function leaveLatch(ctx, key, session, id)
  if call('HDEL', key, 'o' .. session .. '/' .. id) == 1 then
    local latch = loadLatch(ctx, key, 0, 0)
    latch.members = latch.members - 1
    saveLatch(key, latch)
  end
end

-- latch.join: creates the latch, or joins it when it has the same count; a member of it just hears how it is
-- keys: resource
-- args: id string, total number, keep number
-- reply: ["observing", total number, left number, opened number, resets number, epoch number] | ["mismatch", total number]
handlers['latch.join'] = function(ctx, key, id, total, keep)
  local latch = loadLatch(ctx, key, total, keep)
  if latch.total ~= tonumber(total) then return format('["mismatch",%d]', latch.total) end
  if enrol(ctx, key, id, '') then latch.members = latch.members + 1 end
  latch.keep = tonumber(keep)
  saveLatch(key, latch)
  return '["observing",' .. describeLatch(latch) .. ']'
end

-- latch.count: counts down, once for each count id, and opens the latch when nothing is left
-- keys: resource
-- args: count string, by number, total number, keep number
-- reply: ["counted", total number, left number, opened number, resets number, epoch number] | ["mismatch", total number]
handlers['latch.count'] = function(ctx, key, count, by, total, keep)
  local latch = loadLatch(ctx, key, total, keep)
  if latch.total ~= tonumber(total) then return format('["mismatch",%d]', latch.total) end
  if latch.left > 0 and not call('HGET', key, 'c' .. count) then
    latch.left = math.max(0, latch.left - tonumber(by))
    call('HSET', key, 'c' .. count, '')
    if latch.left == 0 then
      latch.opened = latch.opened + 1
      announce(ctx, key, describeLatch(latch))
    end
    saveLatch(key, latch)
  end
  return '["counted",' .. describeLatch(latch) .. ']'
end

-- latch.reset: closes the latch, with everything left to count
-- keys: resource
-- args: total number, keep number
-- reply: ["reset", total number, left number, opened number, resets number, epoch number] | ["mismatch", total number]
handlers['latch.reset'] = function(ctx, key, total, keep)
  local latch = loadLatch(ctx, key, total, keep)
  if latch.total ~= tonumber(total) then return format('["mismatch",%d]', latch.total) end
  for _, field in ipairs(call('HKEYS', key)) do
    if string.byte(field) == 99 then call('HDEL', key, field) end
  end
  latch.left, latch.resets = latch.total, latch.resets + 1
  if latch.members > 0 then announce(ctx, key, describeLatch(latch)) end
  saveLatch(key, latch)
  return '["reset",' .. describeLatch(latch) .. ']'
end

-- latch.state: how it is
-- keys: resource
-- args:
-- reply: ["state", left number] | ["missing"]
-- flags: no-writes
handlers['latch.state'] = function(_, key)
  local packed = call('HGET', key, 's')
  if not packed then return '["missing"]' end
  local _, left = unpackStruct(LATCH, packed)
  return format('["state",%d]', left)
end

reapers.latch = leaveLatch
reapers.gate = leaveLatch
