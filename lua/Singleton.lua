-- The ticks of a schedule that runs on one process of many.
--
-- kinds: tick: hash
--
-- A resource is one hash, which is forgotten some time after the last tick:
--   t   when the last tick was due that was claimed, in ms
--   c   the claim of the term that has claimed it

-- singleton.claim: claims a tick, if no tick was claimed since `last` that is still known
-- keys: hash
-- args: id string, last string, tick string, timeToLive number
-- reply: ["claimed"] | ["taken", last string]
handlers['singleton.claim'] = function(ctx, key, id, last, tick, timeToLive)
  local found, claim = call('HMGET', key, 't', 'c'), claimOf(ctx, id)
  if found[1] == tick and found[2] == claim then return '["claimed"]' end
  if found[1] and found[1] ~= last then return reply('taken', found[1]) end
  call('HSET', key, 't', tick, 'c', claim)
  call('PEXPIRE', key, timeToLive)
  return '["claimed"]'
end

-- singleton.last: when the last tick was due that was claimed; "" if none is known
-- keys: hash
-- args:
-- reply: ["last", tick string]
-- flags: no-writes
handlers['singleton.last'] = function(_, key)
  return reply('last', call('HGET', key, 't') or '')
end
