-- Errands: messages from an actor of this partition to actors of other partitions. An errand is a plain job of an internal queue
-- beside the actor that sends it, so the queue hands it to live processes, and again if its process dies.
--
-- after Queue.lua
--
-- The queue `errands:<name>` has the errands of that name. Any handler, alarm or reaper can send some. They are stored in the
-- step that sends them.
--
-- A job can have a subscriber: the name of errands, and a reference for their receiver. When the job is done, or gone for any other
-- reason, the actor sends the errand ["ended", reference, job, outcome]. Such jobs keep their outcome, so `conclude` hears of each.
-- `y<job>` of the hash has the subscriber until then: "<bytes of the name> <name><reference>".

-- As the kernel binds them for the resource of a request.
local function bindErrands(ctx, name)
  for _, role in ipairs(ROLES.errands) do
    if role ~= 'hash' then ctx[role] = ctx.prefix .. 'errands-' .. role .. ':' .. name end
  end
end

local function rolesOf(ctx)
  local bound = {}
  for _, role in ipairs(ROLES.errands) do bound[role] = ctx[role] or false end
  return bound
end

-- The queue of errands of a name, whatever resource the request is about.
local function loadErrands(ctx, name)
  local bound = rolesOf(ctx)
  bindErrands(ctx, name)
  local queue = loadQueue(ctx, ctx.prefix .. 'errands:' .. name)
  for role, key in pairs(bound) do ctx[role] = key end
  return queue
end

-- Sends an errand. Its body is JSON.
extend.errand = function(ctx, name, body)
  local queue = loadErrands(ctx, name)
  -- The end of a call may send errands too: another queue may be finished after this one.
  if queue.finished then
    queue.finished = false
    later(ctx, function() finishQueue(ctx, queue) end)
  end
  storeJobs(ctx, queue, body, #body .. ' ', false)
end

extend.ended = function(ctx, subscriber, job, outcome)
  local bytes, rest = match(subscriber, '^(%d+) (.*)$')
  local name, reference = sub(rest, 1, tonumber(bytes)), sub(rest, tonumber(bytes) + 1)
  extend.errand(ctx, name, '["ended",' .. encoded(reference) .. ',"' .. job .. '",' .. outcome .. ']')
end

reapers.errands = reapers.queue
alarms.errands = alarms.queue
