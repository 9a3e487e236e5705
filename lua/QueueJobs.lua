-- What a worker keeps of a job that it has in hand, and what other processes read and change of jobs that are not done.
--
-- after Queue.lua
-- after QueueNotes.lua
-- after QueueHandOut.lua
-- after QueueNamed.lua
-- after QueueOffers.lua
-- after QueueWorkers.lua

local function unlessDone(queue, job, letter, at)
  if not letter then return nil end
  local fields, holder, count = jobAt(queue, letter, at)
  if not fields then return nil end
  return job, letter, at, holder, count or 0
end

-- A job that is not done, by its own id: that, its letter and place, its holder and its count.
local function jobHere(queue, job)
  return unlessDone(queue, job, split(job))
end

-- As `jobHere`, also by a former id, or that of its producer.
local function jobFound(ctx, queue, name)
  return unlessDone(queue, jobNamed(ctx, queue, name))
end

-- Ends the delay of a job, or its time until a retry. Answers whether it had one.
local function promoteJob(queue, job, letter, at, holder)
  if not holder then return unsetNote(queue, 'd' .. job) end
  if holder ~= DELAYED then return false end
  endDelays(queue, letter, { at })
  call('ZREM', queue.delays, job)
  return true
end

-- queue.promote: has a job begin now that is delayed, or waits for its retry
-- keys: all
-- args: name string
-- reply: ["promoted"] | ["begun"] | ["missing"]
-- flags: allow-oom
handlers['queue.promote'] = function(ctx, key, name)
  local queue = loadQueue(ctx, key)
  local job, letter, at, holder = jobFound(ctx, queue, name)
  if not job then return MISSING end
  return promoteJob(queue, job, letter, at, holder) and '["promoted"]' or '["begun"]'
end

-- Has a job begin at that time. Answers false for a job that is in work.
local function postponeJob(ctx, queue, job, letter, at, holder, due)
  if not holder then
    setNote(queue, 'd' .. job, text(due))
  elseif holder == RETURNED then
    if groups.levels[letter] then
      groups.rescheduled(queue, letter, at)
    else
      unstack(queue, job)
      queue[READY[letter]] = math.max(0, queue[READY[letter]] - 1)
    end
    delayJob(ctx, queue, letter, at, due)
  elseif holder == DELAYED then
    call('ZADD', queue.delays, text(due), job)
    soonerDue(ctx, queue, due)
  else
    return false
  end
  return true
end

-- queue.reschedule: has a job that is not in work begin in so many ms, or at that time, and not before
-- keys: all
-- args: name string, relative boolean, millis number
-- reply: ["rescheduled"] | ["begun"] | ["missing"]
handlers['queue.reschedule'] = function(ctx, key, name, relative, millis)
  local queue = loadQueue(ctx, key)
  local job, letter, at, holder = jobFound(ctx, queue, name)
  if not job then return MISSING end
  local due = math.max(0, tonumber(millis) + (relative == '1' and ctx.now or 0))
  return postponeJob(ctx, queue, job, letter, at, holder, due) and '["rescheduled"]' or '["begun"]'
end

-- queue.update: replaces the payload of a job that has not begun. A job that was begun and given back has not.
-- keys: all
-- args: name string, body string
-- reply: ["updated"] | ["begun"] | ["missing"]
handlers['queue.update'] = function(ctx, key, name, body)
  local queue = loadQueue(ctx, key)
  local job, _, _, _, count = jobFound(ctx, queue, name)
  if not job then return MISSING end
  if count > 0 then return '["begun"]' end
  replacePayload(queue, job, body)
  return '["updated"]'
end

-- How many dead letters one request looks at.
local SOUGHT = 512

-- queue.seek: the newest dead letter of a job, by its own id, a former one, or that of its producer; among the letters before
-- `before`, all if that is empty. When there may be more, it answers the letter to go on from.
-- keys: all
-- args: name string, before string
-- reply: ["found", letter string] | ["more", before string] | ["missing"]
-- flags: allow-oom
handlers['queue.seek'] = function(ctx, key, name, before)
  local job = jobNamed(ctx, readQueue(ctx, key), name)
  local found = call('XREVRANGE', ctx.dead, before == '' and '+' or '(' .. before, '-', 'COUNT', SOUGHT)
  for _, entry in ipairs(found) do
    local last = fieldOf(entry[2], 'j')
    if last == job or last == name or fieldOf(entry[2], 'i') == name or fieldOf(entry[2], 'f') == name then return reply('found', entry[1]) end
  end
  if #found < SOUGHT then return MISSING end
  return reply('more', found[SOUGHT][1])
end

-- -----------------------------------------------------------------------------
-- What a worker keeps of its job
-- -----------------------------------------------------------------------------

-- queue.note: a worker keeps the progress and the checkpoint of a job that it has in hand, as JSON, and lines of its log, each as
-- JSON; an empty argument changes nothing
-- keys: all
-- args: id string, job string, progress string, checkpoint string, lines string
-- reply: ["noted"] | ["missing"]
handlers['queue.note'] = function(ctx, key, id, job, progress, checkpoint, lines)
  local claim = claimOf(ctx, id)
  local queue = loadQueue(ctx, key, claim)
  local letter, at = split(job)
  if holdingOf(queue, letter, at) ~= claim then return MISSING end
  if queue.cancelled > 0 and extend.isCancelled(queue, job) then return MISSING end
  if checkpoint ~= '' then setNote(queue, 'k' .. job, checkpoint) end
  if lines ~= '' then addLines(queue, job, lines) end
  if progress ~= '' then
    local token, followers = nextToken(ctx), noteOf(queue, 'v' .. job)
    setNote(queue, 'p' .. job, token .. ' ' .. progress)
    if followers then tellMembers(ctx, followers, 'progress', job, json(token), json(progress)) end
  end
  return '["noted"]'
end

-- The other members that follow a job. Members whose sessions have ended do not follow it any more.
local function otherFollowers(ctx, queue, job, claim)
  local claims = {}
  for known in string.gmatch(noteOf(queue, 'v' .. job) or '', '%S+') do
    if known ~= claim and isAlive(ctx, holderOf(known)) then claims[#claims + 1] = known end
  end
  return claims
end

-- queue.follow: tells a member the progress of a job from now on, and when the job is not there any more. It answers the
-- progress so far, if there is any, as a list.
-- keys: all
-- args: id string, name string
-- reply: ["following", job string, token number, progress json] | ["missing"]
handlers['queue.follow'] = function(ctx, key, id, name)
  local queue = loadQueue(ctx, key)
  local job = jobFound(ctx, queue, name)
  if not job then return MISSING end
  local claim = claimOf(ctx, id)
  local claims = otherFollowers(ctx, queue, job, claim)
  claims[#claims + 1] = claim
  setNote(queue, 'v' .. job, concat(claims, ' '))
  expectExpiry(ctx, queue)
  local token, progress = match(noteOf(queue, 'p' .. job) or '', '^(%d+) (.*)$')
  return reply('following', job, json(token or '0'), json('[' .. (progress or '') .. ']'))
end

-- queue.unfollow: a member is not told of a job any more
-- keys: all
-- args: id string, job string
-- reply: ["unfollowed"]
-- flags: allow-oom
handlers['queue.unfollow'] = function(ctx, key, id, job)
  local queue = loadQueue(ctx, key)
  if not noteOf(queue, 'v' .. job) then return '["unfollowed"]' end
  local claims = otherFollowers(ctx, queue, job, claimOf(ctx, id))
  if #claims == 0 then unsetNote(queue, 'v' .. job) else setNote(queue, 'v' .. job, concat(claims, ' ')) end
  return '["unfollowed"]'
end

-- queue.logs: the newest lines of the log of a job that is not done
-- keys: all
-- args: name string
-- reply: ["logs", lines json] | ["missing"]
-- flags: allow-oom
handlers['queue.logs'] = function(ctx, key, name)
  local queue = readQueue(ctx, key)
  local job = jobFound(ctx, queue, name)
  if not job then return MISSING end
  return reply('logs', linesOf(noteOf(queue, 'l' .. job)))
end

-- queue.complete: as `queue.finish`, adds the jobs that follow it, as `queue.offer` does, and sends errands, which are JSON texts, one a
-- line: none, if the job is not there any more
-- keys: all
-- args: id string, job string, given string, deduped string, outcome string, life number, take number, values string, shapes string, errands string
-- reply: ["done"] | ["missing"]
-- flags: heard
handlers['queue.complete'] = function(ctx, key, id, job, given, deduped, outcome, life, take, values, shapes, errands)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  if finishJob(ctx, queue, job, given, deduped, outcome, life) then
    storeJobs(ctx, queue, values, shapes, false)
    if errands ~= '' then extend.entrust(ctx, queue, errands) end
  end
  giveCredit(ctx, queue, worker, take)
  return '["done"]'
end
