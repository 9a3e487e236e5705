-- The ticks of a schedule that runs on one process of many. A resource is one hash, forgotten some time after the last:
--   t   when the last tick was due that somebody has claimed, in ms

-- singleton.claim: claims a tick, if nobody has claimed one since `last` that is still known
-- keys: resource
-- args: last string, tick string, keep number
-- reply: ["claimed"] | ["taken", last string]
handlers['singleton.claim'] = function(_, key, last, tick, keep)
  local found = call('HGET', key, 't')
  if found and found ~= last then return '["taken","' .. found .. '"]' end
  call('HSET', key, 't', tick)
  call('PEXPIRE', key, keep)
  return '["claimed"]'
end

-- singleton.last: when the last tick was due that was claimed; "" if none is known
-- keys: resource
-- args:
-- reply: ["last", tick string]
-- flags: no-writes
handlers['singleton.last'] = function(_, key)
  return '["last","' .. (call('HGET', key, 't') or '') .. '"]'
end
