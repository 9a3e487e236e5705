-- A countdown latch, and a latch that is opened and closed, which has a count of 1: it is open while nothing remains.
--
-- kinds: countDownLatch: hash, items
-- kinds: latch: hash
--
-- The hash outlives its last member by `timeToLive`, if there is anything to remember:
--   s                 record Latch
--   run               the run that it belongs to, or ""
--   o<session>/<id>   a member; it hears of every change but counts
--   identity          see `dropForgottenMembers`
-- `passes` says how often the waiters passed. `changes` orders what members are told. Another epoch means that Redis has
-- forgotten the latch meanwhile: members then count again what they had counted.
--
-- Counts are kept apart, because opening must not read them; an open latch counts nothing, so it drops them:
--   i<id>             this id was counted
--   n<member>         the last number of a member's counts without an id, and before it the ranges that have not arrived
-- record Latch 2: total, remaining, passes, resets, changes, epoch, timeToLive, members, decided

-- Numbers of one member arrive almost in order, so only a few ranges are missing at a time. Redis may have forgotten many
-- numbers when a newer one arrives: those are one range.
local MISSING_LENGTH = 1024

-- UNLINK frees the memory in the background: DEL of 100,000 ids would block Redis for tens of milliseconds.
local function forgetCounts(ctx)
  if ctx.items then call('UNLINK', ctx.items) end
end

local function loadLatch(ctx, key, total, remaining, life, run)
  local found = call('HMGET', key, 's', 'run')
  local latch = found[1] and unpackLatch(found[1])
  if latch then
    latch.run = found[2] or ''
    return latch, true
  end
  -- They may expire after the hash.
  forgetCounts(ctx)
  return {
    total = total, remaining = remaining, passes = 0, resets = 0, changes = 0, epoch = tonumber(nextToken(ctx)),
    timeToLive = tonumber(life), members = 0, decided = 0, run = run
  }, false
end

local function saveLatch(ctx, key, latch, left)
  if latch.members == 0 and latch.remaining == latch.total and latch.changes == 0 then
    call('DEL', key)
    return
  end
  call('HSET', key, 's', packLatch(latch), 'run', latch.run)
  if latch.members > 0 then return end
  left = left or text(latch.timeToLive)
  call('PEXPIRE', key, left)
  if ctx.items then call('PEXPIRE', ctx.items, left) end
end

local function stateOfLatch(latch, ...)
  return latch.total, latch.remaining, latch.passes, latch.resets, latch.changes, latch.epoch, latch.run, ...
end

local function changeLatch(ctx, key, latch)
  latch.changes = latch.changes + 1
  if latch.members > 0 then announceBy(deliver, ctx, key, stateOfLatch(latch)) end
end

local function openLatch(ctx, key, latch)
  latch.remaining, latch.passes = 0, latch.passes + 1
  forgetCounts(ctx)
  changeLatch(ctx, key, latch)
end

local function resetLatch(ctx, key, latch, total, remaining, run)
  latch.total, latch.remaining, latch.resets, latch.run = total, remaining, latch.resets + 1, run
  forgetCounts(ctx)
  changeLatch(ctx, key, latch)
end

-- The remaining count moves with the total; an open latch stays open.
local function resizeLatch(ctx, key, latch, total)
  local more = total - latch.total
  latch.total = total
  if latch.remaining > 0 and latch.remaining + more <= 0 then return openLatch(ctx, key, latch) end
  if latch.remaining > 0 then latch.remaining = latch.remaining + more end
  changeLatch(ctx, key, latch)
end

-- Whether the latch belongs to a later run than that of the member. A latch of no run adopts one: after a loss of data, it
-- was created by a member that has none.
local function isSuperseded(latch, run)
  if run == '' or latch.run == run then return false end
  if latch.run ~= '' then return true end
  latch.run = run
  return false
end

-- A request that another session may have executed already tells the number of resets that its member knew when it was first sent.
-- After another reset it is not executed again: it would count in two rounds.
local function isFormer(latch, since)
  return since ~= '' and latch.resets > tonumber(since)
end

local function leaveLatch(ctx, key, session, id)
  if call('HDEL', key, 'o' .. session .. '/' .. id) == 0 then return end
  local latch, known = loadLatch(ctx, key, 0, 0, 0, '')
  if not known then return end
  latch.members = latch.members - 1
  saveLatch(ctx, key, latch, leftOf(ctx, session, latch.timeToLive))
end

local function rangeOf(from, to)
  return from > to and '' or text(from) .. '-' .. text(to) .. ','
end

-- Whether a count was not counted before: an id, or a number of the member's. It is noted, unless the latch
-- opens with it, which drops all counts.
local function isFirstCount(ctx, count, number, opens)
  if number == 0 and opens then return not call('HGET', ctx.items, count) end
  if number == 0 then return call('HSET', ctx.items, count, '') == 1 end
  local last, missing = match(call('HGET', ctx.items, count) or '0 ', '^(%d+) (.*)$')
  last = tonumber(last)
  local first = number > last
  if first then
    missing = missing .. rangeOf(last + 1, number - 1)
    last = number
  else
    missing = string.gsub(missing, '(%d+)-(%d+),', function(from, to)
      from, to = tonumber(from), tonumber(to)
      if number < from or number > to then return end
      first = true
      return rangeOf(from, number - 1) .. rangeOf(number + 1, to)
    end)
  end
  if opens or not first then return first end
  if #missing > MISSING_LENGTH then missing = match(string.sub(missing, -MISSING_LENGTH), ',(.*)$') end
  call('HSET', ctx.items, count, text(last) .. ' ' .. missing)
  return true
end

-- latch.join: creates the latch, or joins it. A member of another run creates it anew, and so does a `fresh` one when no
-- other has it open. When it has another count, `mismatch` decides: "fail", unless no other member has it open; "keep" that
-- count; or "resize". A member that joins again, after a loss of its session, tells the epoch and the number of resets that
-- it knew. It joins the latch as it is, unless Redis has gone back to before the last reset, or the member's run: that begins
-- again. The last member decides about `timeToLive`: `decided` is 0 for one that does so now, and the number that it was
-- answered for one that did so before.
-- keys: all
-- args: id string, total number, remaining number, life number, decided number, run string, mismatch string, fresh boolean, epoch number, resets number, anyway boolean
-- reply: ["joined", total number, remaining number, passes number, resets number, changes number, epoch number, run string, decided number] | ["mismatch", total number] | ["stale"]
handlers['latch.join'] = function(ctx, key, id, total, remaining, life, decided, run, mismatch, fresh, epoch, resets, anyway)
  total, remaining, epoch, resets = tonumber(total), tonumber(remaining), tonumber(epoch), tonumber(resets)
  decided = tonumber(decided)
  local latch, known = loadLatch(ctx, key, total, remaining, life, run)
  local member = known and call('HGET', key, 'o' .. claimOf(ctx, id))
  -- One that Redis has forgotten goes on from there: members that join later know whether it was reset since.
  if not known then latch.resets = resets end
  local forgotten = dropForgottenMembers(ctx, key) or 0
  if forgotten > 0 then
    latch.members = latch.members - forgotten
    call('HSET', key, 's', packLatch(latch))
  end
  if known and not member then
    local used = latch.members > 0
    -- Had the members that died been reaped in time, the latch might be gone, or free.
    if epoch == 0 and used and anyway == '' and isStale(ctx) then return STALE end
    if epoch == latch.epoch and resets > latch.resets and (run ~= '' or latch.run == '') then
      latch.resets = resets - 1
      resetLatch(ctx, key, latch, total, remaining, run)
    elseif epoch > 0 then
      isSuperseded(latch, run)
    elseif run ~= '' and latch.run ~= run then
      resetLatch(ctx, key, latch, total, remaining, run)
    elseif fresh == '1' or latch.total ~= total then
      if fresh == '1' and not used then
        resetLatch(ctx, key, latch, total, remaining, run)
      elseif latch.total ~= total and mismatch ~= 'keep' then
        if used and mismatch == 'fail' then return reply('mismatch', latch.total) end
        resizeLatch(ctx, key, latch, total)
      end
    end
  end
  if decided == 0 and not member then decided = math.max(latch.decided + 1, ctx.now) end
  if decided > latch.decided then latch.timeToLive, latch.decided = tonumber(life), decided end
  if enrol(ctx, key, id, latch.timeToLive) then latch.members = latch.members + 1 end
  saveLatch(ctx, key, latch)
  return reply('joined', stateOfLatch(latch, latch.decided))
end

-- latch.count: counts down, once for each id, or for each number of a member, and opens the latch when nothing remains
-- keys: hash, items
-- args: count string, number number, by number, total number, life number, run string, since string
-- reply: ["counted", total number, remaining number, passes number, resets number, changes number, epoch number, run string] | ["superseded", run string]
handlers['latch.count'] = function(ctx, key, count, number, by, total, life, run, since)
  total = tonumber(total)
  local latch = loadLatch(ctx, key, total, total, life, run)
  if isSuperseded(latch, run) then return reply('superseded', latch.run) end
  local left = math.max(0, latch.remaining - tonumber(by))
  if latch.remaining > 0 and not isFormer(latch, since) and isFirstCount(ctx, count, tonumber(number), left == 0) then
    latch.remaining = left
    if left == 0 then openLatch(ctx, key, latch) else keep(ctx.items, latch.timeToLive) end
    saveLatch(ctx, key, latch)
  end
  return reply('counted', stateOfLatch(latch))
end

-- latch.open: opens the latch; answers whether it was closed
-- keys: all
-- args: total number, life number, run string, since string
-- reply: ["opened", changed boolean, total number, remaining number, passes number, resets number, changes number, epoch number, run string] | ["superseded", run string]
handlers['latch.open'] = function(ctx, key, total, life, run, since)
  total = tonumber(total)
  local latch = loadLatch(ctx, key, total, total, life, run)
  if isSuperseded(latch, run) then return reply('superseded', latch.run) end
  local changed = latch.remaining > 0 and not isFormer(latch, since)
  if changed then
    openLatch(ctx, key, latch)
    saveLatch(ctx, key, latch)
  end
  return reply('opened', changed, stateOfLatch(latch))
end

-- latch.reset: closes the latch, with everything to count; one that is closed already only if `always`. Answers whether it
-- was open.
-- keys: all
-- args: total number, life number, run string, since string, always boolean
-- reply: ["reset", changed boolean, total number, remaining number, passes number, resets number, changes number, epoch number, run string] | ["superseded", run string]
handlers['latch.reset'] = function(ctx, key, total, life, run, since, always)
  total = tonumber(total)
  local latch = loadLatch(ctx, key, total, total, life, run)
  if isSuperseded(latch, run) then return reply('superseded', latch.run) end
  local changed = latch.remaining == 0
  if (changed or always == '1') and not isFormer(latch, since) then
    resetLatch(ctx, key, latch, latch.total, latch.total, latch.run)
    saveLatch(ctx, key, latch)
  end
  return reply('reset', changed, stateOfLatch(latch))
end

-- latch.release: lets the present waiters pass, and leaves the latch closed; answers whether it was closed
-- keys: hash
-- args: total number, life number, run string
-- reply: ["released", changed boolean, total number, remaining number, passes number, resets number, changes number, epoch number, run string] | ["superseded", run string]
handlers['latch.release'] = function(ctx, key, total, life, run)
  total = tonumber(total)
  local latch = loadLatch(ctx, key, total, total, life, run)
  if isSuperseded(latch, run) then return reply('superseded', latch.run) end
  local changed = latch.remaining > 0
  if changed then
    latch.passes = latch.passes + 1
    changeLatch(ctx, key, latch)
    saveLatch(ctx, key, latch)
  end
  return reply('released', changed, stateOfLatch(latch))
end

-- latch.state: what remains to be counted, and the run
-- keys: hash
-- args:
-- reply: ["state", remaining number, run string] | ["missing"]
-- flags: no-writes
handlers['latch.state'] = function(_, key)
  local found = call('HMGET', key, 's', 'run')
  local latch = found[1] and unpackLatch(found[1])
  if not latch then return MISSING end
  return reply('state', latch.remaining, found[2] or '')
end

reapers.countDownLatch, reapers.latch = leaveLatch, leaveLatch
