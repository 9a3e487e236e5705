-- Errands: messages from an actor of this partition to actors of other partitions. An errand is a plain job of an internal queue
-- beside the actor that sends it, so the queue hands it to live processes, and again if its process dies.
--
-- after Queue.lua
-- after QueueOffers.lua
--
-- The queue `errands:<name>` has the errands of that name. Any handler, alarm or reaper can send some. They are stored in the
-- step that sends them.
--
-- A job can have a subscriber: the name of errands, and a reference for their receiver. When the job is done, or gone for any other
-- reason, the actor sends the errand ["ended", reference, job, outcome]. Such jobs keep their outcome, so `conclude` hears of each.
-- `y<job>` of the hash has the subscriber until then: "<bytes of the name> <name><reference>".
--
-- A run that is in the partition of a queue hears of the end of a job in the same step, without an errand, and offers the next job in
-- that step if it can.
--
-- The keys of errands, and of resources beside, are not declared in the calls that reach them, which do not know their names. They are in
-- the slot of the call, which Redis refuses as a whole while that migrates.

-- -----------------------------------------------------------------------------
-- Other resources of the partition
-- -----------------------------------------------------------------------------

local function isLoaded(ctx, key)
  return ctx.queues and ctx.queues[key] or ctx.flows and ctx.flows[key]
end

-- Loads a resource, whatever resource the request is about: its keys are bound as the kernel does.
local function loadOther(ctx, kind, name, load)
  if isLoaded(ctx, ctx.prefix .. kind .. ':' .. name) then return load(ctx, ctx.prefix .. kind .. ':' .. name) end
  local bound = {}
  for _, role in ipairs(ROLES[kind]) do
    if role ~= 'hash' then bound[role], ctx[role] = ctx[role] or false, ctx.prefix .. kind .. '-' .. role .. ':' .. name end
  end
  local loaded = load(ctx, ctx.prefix .. kind .. ':' .. name)
  for role, key in pairs(bound) do ctx[role] = key end
  return loaded
end

-- Sends an errand. Its body is JSON.
extend.errand = function(ctx, name, body)
  local queue = loadOther(ctx, 'errands', name, loadQueue)
  storeJobs(ctx, queue, body, #body .. ' ', false)
end

-- -----------------------------------------------------------------------------
-- Subscribers
-- -----------------------------------------------------------------------------

-- Of one call: ends of jobs that are told to runs at once. The others are sent as errands.
local MOST_TOLD = 64

extend.ended = function(ctx, queue, subscriber, job, outcome)
  local bytes, rest = match(subscriber, '^(%d+) (.*)$')
  local name, reference = sub(rest, 1, tonumber(bytes)), sub(rest, tonumber(bytes) + 1)
  queue.ended = queue.ended or {}
  queue.ended[#queue.ended + 1] = { name = name, reference = reference, job = job, outcome = outcome }
end

-- Tells the subscribers of jobs that have ended. A run in this partition hears of it in this step, and perhaps offers the next job.
extend.tellSubscribers = function(ctx, queue, here)
  local ended = queue.ended
  queue.ended = nil
  for _, one in ipairs(ended) do
    ctx.told = (ctx.told or 0) + 1
    -- A defect of a run is not one of the queue.
    local fine, told = here and ctx.told <= MOST_TOLD, false
    if fine then fine, told = pcall(extend.tellRun, ctx, one.name, one.reference, one.outcome) end
    if told and not fine then redis.log(redis.LOG_WARNING, 'lockstep: a run could not be told of a job') end
    if not fine or not told then
      extend.errand(ctx, one.name, '["ended",' .. encoded(one.reference) .. ',"' .. one.job .. '",' .. one.outcome .. ']')
    end
  end
end

-- Offers a job, as `queue.offer`, to a queue in this partition that takes all jobs. Answers whether it was stored.
extend.offerBeside = function(ctx, name, values, shapes)
  local key = ctx.prefix .. 'queue:' .. name
  if not isLoaded(ctx, key) and call('HLEN', key) == 0 then return false end
  local queue = loadOther(ctx, 'queue', name, loadQueue)
  if queue.window == 0 or queue.shards > 1 or queue.length > 0 then return false end
  local _, known = storeJobs(ctx, queue, values, shapes, false)
  return #known == 0
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
  callMembers(ctx, loadOther(ctx, 'errands', name, loadQueue))
end

-- Whether a queue has errands of its own.
extend.hasErrands = function(ctx, key)
  return call('HLEN', ctx.prefix .. 'errands:' .. OWN .. sub(key, #ctx.prefix + #OWN + 1)) > 0
end

reapers.errands = function(ctx, key, session, id)
  reapers.queue(ctx, key, session, id)
  callMembers(ctx, loadQueue(ctx, key))
end

alarms.errands = function(ctx, key) alarms.queue(ctx, key) end

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
