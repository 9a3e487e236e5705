-- What is known of jobs of a queue beside their entries, which cannot be changed: in the hash `notes`, until they are done.
--
--   b<job>  the payload that has replaced that of the entry
--   d<job>  of a job that waits: when it can begin
-- `notes` of the queue's record counts these fields: while there are none, no request looks for any.

local NOTES = { 'b', 'd' }
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

-- Of jobs that are done, or gone.
local function dropNotes(queue, jobs)
  if queue.notes == 0 then return end
  for from = 1, #jobs, MOST_NOTED do
    local fields = {}
    for at = from, math.min(#jobs, from + MOST_NOTED - 1) do
      for _, kind in ipairs(NOTES) do fields[#fields + 1] = kind .. jobs[at] end
    end
    queue.notes = queue.notes - call('HDEL', queue.notebook, unpack(fields))
  end
end

-- What is noted of entries that are handed out: payload and time of each, in turn.
local function notesOf(queue, letter, entries)
  if queue.notes == 0 or #entries == 0 then return nil end
  local fields = {}
  for at = 1, #entries do
    local job = letter .. entries[at][1]
    fields[2 * at - 1], fields[2 * at] = 'b' .. job, 'd' .. job
  end
  return call('HMGET', queue.notebook, unpack(fields))
end
