-- Lone holds: most locks have a holder and nothing else. Such a hold has no key of its own: it is a field of `sessions`, which is
-- read and written with the session. The field is empty while there is more, which the hash of the resource has.

local function isLone(ctx, key)
  return sub(key, #ctx.prefix + 1, #ctx.prefix + 5) == 'lock:'
end

local function loneField(sessions, key)
  -- Behind the prefix that it has in common with "sessions".
  return '@' .. sub(key, #sessions - 7)
end

-- The hold; false if there is nothing of the resource.
local function loneOf(ctx, key)
  local lone = ctx.lone
  if not lone then
    lone = {}
    ctx.lone = lone
  end
  local hold = lone[key]
  if hold == nil then
    hold = call('HGET', ctx.sessions, loneField(ctx.sessions, key))
    lone[key] = hold
  end
  return hold
end

-- The hold, if it is all that there is of the resource.
local function loneHold(ctx, key)
  local hold = isLone(ctx, key) and loneOf(ctx, key)
  return hold and hold ~= '' and hold
end

-- Written at the end of the call. It must have been read.
local function setLone(ctx, key, hold)
  ctx.lone[key] = hold
  local changed = ctx.changed
  if changed then changed[#changed + 1] = key else ctx.changed = { key } end
end

-- Nothing of the resource is left.
local function dissolve(ctx, key)
  call('DEL', key)
  if isLone(ctx, key) and loneOf(ctx, key) then setLone(ctx, key, false) end
end
