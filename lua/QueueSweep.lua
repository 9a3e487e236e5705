-- Looks at all members, workers and groups of a queue, some with each alarm.
--
-- after Queue.lua
-- after QueueGroups.lua
-- after QueueSchedules.lua
-- after QueueWorkers.lua
--
-- A sweep begins when no session was alive for a day, when the limits of groups or the window have changed, and when a schedule needs a
-- member that is alive. Members and workers whose sessions were forgotten leave the queue, groups that can begin a job get a turn,
-- schedules that wait are told of a member, and members of the window. `sweep` is the cursor of the next part, and 1; it is 0 when no
-- sweep goes on.

-- Of the hash, in fields.
local SWEPT = 512

extend.beginSweep = function(ctx, queue)
  queue.sweep = 1
  soonerDue(ctx, queue, ctx.now)
end

local function sweepClaim(ctx, queue, claim)
  if not sessionOf(ctx, holderOf(claim)) then return dropClaim(ctx, queue, claim, true) end
  if queue.plans == 0 or queue.swept then return false end
  local known = call('HGET', queue.key, 'n')
  if not livingMember(ctx, queue, known) then
    if not livingMember(ctx, queue, claim) then return false end
    call('HSET', queue.key, 'n', claim)
    extend.wakePlans(ctx, queue)
  end
  queue.swept = true
  return false
end

extend.sweep = function(ctx, queue)
  local found = call('HSCAN', queue.key, text(queue.sweep - 1), 'MATCH', '[gow]*', 'COUNT', SWEPT)
  local fields = found[2]
  for at = 1, #fields, 2 do
    local kind, name = sub(fields[at], 1, 1), sub(fields[at], 2)
    if kind == 'g' then
      groups.sweep(queue, name, fields[at + 1])
    elseif sweepClaim(ctx, queue, name) then
      -- A worker can have had many jobs. The next call looks at this part again.
      return soonerDue(ctx, queue, ctx.now)
    elseif kind == 'o' and isAlive(ctx, holderOf(name)) then
      deliver(ctx, holderOf(name), reply('changed', idOf(name), 'window', queue.window))
    end
  end
  queue.sweep = tonumber(found[1])
  if queue.sweep == 0 then return end
  queue.sweep = queue.sweep + 1
  soonerDue(ctx, queue, ctx.now)
end
