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
--
-- The keys of errands are not declared in the calls that send some, which do not know their names. They are in the slot of the call.

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

-- -----------------------------------------------------------------------------
-- Follow-ups in other queues
-- -----------------------------------------------------------------------------

-- The errands of a queue's own jobs, "queue:<its name>", are delivered by its members. They begin to do so when they are told that
-- there are errands and no worker; a member that joins hears it with the answer.

local OWN = 'queue:'

local function callMembers(ctx, errands)
  local queue = match(sub(errands.key, #ctx.prefix + 1), '^errands:(queue:.*)$')
  if queue and errands.workers == 0 and jobsOf(errands) > 0 then announce(ctx, ctx.prefix .. queue, 'errands') end
end

-- Sends errands of a job that is done: JSON texts, one a line.
extend.entrust = function(ctx, queue, bodies)
  local name = OWN .. sub(queue.key, #ctx.prefix + #OWN + 1)
  for body in string.gmatch(bodies, '[^\n]+') do extend.errand(ctx, name, body) end
  callMembers(ctx, loadErrands(ctx, name))
end

-- Whether a queue has errands of its own. While its slot migrates, Redis may refuse to say: then it may.
extend.hasErrands = function(ctx, key)
  local found = redis.pcall('HLEN', ctx.prefix .. 'errands:' .. OWN .. sub(key, #ctx.prefix + #OWN + 1))
  return type(found) ~= 'number' or found > 0
end

reapers.errands = function(ctx, key, session, id)
  reapers.queue(ctx, key, session, id)
  callMembers(ctx, loadQueue(ctx, key))
end

alarms.errands = alarms.queue

-- queue.entrust: as `queue.offer`, of an errand that may be delivered again: once for its id
-- keys: all
-- args: values string, shapes string, errand string
-- reply: ["offered", stamp number, first number, known json] | ["late"]
handlers['queue.entrust'] = function(ctx, key, values, shapes, errand)
  local queue = loadQueue(ctx, key)
  -- The errand stays known for the window also if the queue is forgotten before it.
  queue.named = ctx.now
  return offerOnce(ctx, queue, values, shapes, errand, '1', false)
end
