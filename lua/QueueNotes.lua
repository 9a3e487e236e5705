-- What changes of a job: its entry cannot be changed. The hash `notes` has it until the job is done.
--
--   b<job>  the payload that has replaced that of the entry
--   d<job>  of a job that waits: when it can begin
--   k<job>  its checkpoint, as JSON
--   p<job>  "<token> <its progress as JSON>": a later one has a larger token
--   l<job>  the newest lines of its log, each as JSON
--   v<job>  the members that follow its progress: their claims
-- `notes` of the queue's record counts these fields: while there are none, no request looks for any.

local NOTES = { 'b', 'd', 'k', 'p', 'l', 'v' }
-- Of a log, in lines and in bytes.
local MOST_LINES, MOST_LOG = 100, 16384
-- Lua unpacks some thousand values at most.
local MOST_NOTED = 256

local function setNote(queue, field, value)
  queue.notes = queue.notes + call('HSET', queue.notebook, field, value)
end

local function noteOf(queue, field)
  return queue.notes > 0 and call('HGET', queue.notebook, field)
end

local function unsetNote(queue, field)
  if queue.notes == 0 then return false end
  local removed = call('HDEL', queue.notebook, field)
  queue.notes = queue.notes - removed
  return removed == 1
end

-- A job has another payload from now on. A checkpoint says how far the work on the former one was.
local function replacePayload(queue, job, body)
  setNote(queue, 'b' .. job, body)
  unsetNote(queue, 'k' .. job)
end

-- Tells the members of a list of claims.
local function tellMembers(ctx, claims, ...)
  for session, id in string.gmatch(claims, '([^/%s]+)/(%S+)') do deliver(ctx, session, reply('changed', id, ...)) end
end

-- Of jobs that are done, or gone: their followers are told, and nothing is to end them any more.
local function dropNotes(ctx, queue, jobs)
  for from = 1, queue.expiring > 0 and #jobs or 0, MOST_NOTED do
    local members = {}
    for at = from, math.min(#jobs, from + MOST_NOTED - 1) do members[#members + 1] = 'e' .. jobs[at] end
    queue.expiring = queue.expiring - call('ZREM', queue.delays, unpack(members))
  end
  if queue.notes == 0 then return end
  for from = 1, #jobs, MOST_NOTED do
    local fields, followers = {}, {}
    for at = from, math.min(#jobs, from + MOST_NOTED - 1) do
      followers[#followers + 1] = 'v' .. jobs[at]
      for _, kind in ipairs(NOTES) do fields[#fields + 1] = kind .. jobs[at] end
    end
    for at, claims in ipairs(call('HMGET', queue.notebook, unpack(followers))) do
      if claims then tellMembers(ctx, claims, 'over', jobs[from + at - 1]) end
    end
    queue.notes = queue.notes - call('HDEL', queue.notebook, unpack(fields))
  end
end

-- The notes of entries that are handed out: payload, time and checkpoint of each, in turn.
local function notesOf(queue, letter, entries)
  if queue.notes == 0 or #entries == 0 then return nil end
  local fields = {}
  for at = 1, #entries do
    local job = letter .. entries[at][1]
    fields[3 * at - 2], fields[3 * at - 1], fields[3 * at] = 'b' .. job, 'd' .. job, 'k' .. job
  end
  return call('HMGET', queue.notebook, unpack(fields))
end

-- The fields of an entry, as they are now. The first one is the payload. A checkpoint of the entry is about its own payload.
local function reviseFields(fields, body, checkpoint)
  if not body and not checkpoint then return end
  if body then fields[2] = body end
  for at = #fields - 1, 3, -2 do
    if fields[at] == 'k' then
      table.remove(fields, at)
      table.remove(fields, at)
    end
  end
  if checkpoint then fields[#fields + 1], fields[#fields + 2] = 'k', checkpoint end
end

-- Adds lines to a log, and removes its oldest lines beyond the bounds.
local function addLines(queue, job, lines)
  local log = noteOf(queue, 'l' .. job)
  log = log and log .. '\n' .. lines or lines
  local from = #log > MOST_LOG and find(log, '\n', #log - MOST_LOG, true) or 0
  local ends = { from }
  for at in string.gmatch(sub(log, from + 1), '()\n') do ends[#ends + 1] = from + at end
  setNote(queue, 'l' .. job, sub(log, ends[math.max(1, #ends - MOST_LINES + 1)] + 1))
end

local function linesOf(log)
  return json('[' .. string.gsub(log or '', '\n', ',') .. ']')
end
