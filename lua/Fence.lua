-- The enforcing side of fencing tokens: a Redis command that runs only when no newer token has been seen for its key.

-- KEYS  1 the key of the command  2 the newest token seen, in the same slot
-- ARGV  1 token  2 how long to remember it, in ms  3 command  4.. its arguments after the key
-- reply {"stale", seen} | {"denied", command} | {"failed", code} | {"done", reply of the command}
--
-- after calls.lua
fence = function(keys, argv)
  if not call then bind() end
  local token = tonumber(argv[1])
  local seen = call('GET', keys[2])
  if seen and tonumber(seen) > token then
    return { 'stale', seen }
  end
  -- It must not run if its token cannot be kept.
  if not redis.acl_check_cmd('SET', keys[2], '0', 'PX', argv[2]) then return { 'denied', 'SET' } end
  local reply = redis.pcall(argv[3], keys[1], unpack(argv, 4))
  if type(reply) == 'table' and reply.err then
    if isDenial(reply.err) then return { 'denied', argv[3] } end
    return { 'failed', match(reply.err, '^[%u]+') or 'ERR' }
  end
  call('SET', keys[2], text(token), 'PX', argv[2])
  return { 'done', reply }
end
