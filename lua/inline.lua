-- Inline state: of a resource that has little, it is a text in a field of `sessions`, which is read and written with the session. So it
-- costs no command, and no key.

local function inlineField(sessions, key)
  -- Behind the prefix that it has in common with "sessions".
  return '@' .. sub(key, #sessions - 7)
end

-- The text; false if there is none.
local function readInline(ctx, key)
  local inline = ctx.inline
  if not inline then
    inline = {}
    ctx.inline = inline
  end
  local found = inline[key]
  if found == nil then
    found = call('HGET', ctx.sessions, inlineField(ctx.sessions, key))
    inline[key] = found
  end
  return found
end

-- Written at the end of the call; false for nothing. It must have been read.
local function writeInline(ctx, key, state)
  ctx.inline[key] = state
  local changed = ctx.changed
  if changed then changed[#changed + 1] = key else ctx.changed = { key } end
end
