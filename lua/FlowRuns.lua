-- Requests about a run as a whole.
--
-- after Flow.lua
-- after FlowNodes.lua
-- after FlowProgress.lua

-- -----------------------------------------------------------------------------
-- The whole run
-- -----------------------------------------------------------------------------

-- Of these requests to begin again, a run remembers that it has executed them.
local MOST_ASKED = 32

-- flow.cancel: stops a run: nodes that have not begun are cancelled, and the jobs of the others. With an input, only a run that has it;
-- with a stamp, only that run.
-- keys: all
-- args: input string, stamp number
-- reply: ["cancelled", state number] | ["missing"]
-- flags: allow-oom
handlers['flow.cancel'] = function(ctx, key, input, stamp)
  local flow = loadFlow(ctx, key)
  if not flow or stamp ~= '0' and tonumber(stamp) ~= flow.stamp then return MISSING end
  if input ~= '' and call('HGET', key, 'i') ~= input then return MISSING end
  if flow.state == FLOW.loading then
    -- Some of its nodes may be missing.
    call('DEL', ctx.nodes)
    flow.nodes, flow.blocked = 0, 0
    endFlow(ctx, flow, FLOW.cancelled)
  end
  stopFlow(flow, STOP.cancelled)
  stepFlow(ctx, flow)
  -- How it ends may be decided already.
  if flow.state == FLOW.undoing then return reply('cancelled', flow.undone) end
  local expires = flow.state == FLOW.running and flow.stop == STOP.expired
  return reply('cancelled', expires and FLOW.expired or flow.state)
end

-- flow.retry: starts all nodes again that are not done, in the order of the graph. While a run goes on, the jobs that Redis may have
-- lost are offered again; while it stops, nothing else starts. `retry` names the request, which is executed once. `names` is a list of
-- nodes as JSON, or empty: with them the run is replayed, unless it goes on, and these nodes start again and all behind them, although
-- they are done.
-- keys: all
-- args: retry string, names string
-- reply: ["retried", state number] | ["done"] | ["active"] | ["stopping"] | ["unknown", name string] | ["missing"]
handlers['flow.retry'] = function(ctx, key, retry, names)
  local flow = loadFlow(ctx, key)
  -- A run that was cancelled before its start has no nodes.
  if not flow or flow.started == 0 then return MISSING end
  local asked = call('HGET', key, 'asked') or ''
  if find(asked, retry .. ' ', 1, true) then return reply('retried', flow.state) end
  local found = {}
  if names ~= '' then
    if not isFlowOver(flow) then return '["active"]' end
    for place, name in ipairs(cjson.decode(names)) do
      found[place] = call('HGET', flow.items, 'N' .. name)
      if not found[place] then return reply('unknown', name) end
    end
  elseif flow.state == FLOW.done then
    return '["done"]'
  end
  local stops = flow.state == FLOW.undoing or flow.state == FLOW.running and flow.stop ~= 0
  -- One that has begun nothing may find that the run is over when it is repeated, and begin it.
  if not stops then call('HSET', key, 'asked', sub(retry .. ' ' .. asked, 1, MOST_ASKED * (#retry + 1))) end
  if flow.state == FLOW.running then
    if flow.scan == 0 then flow.scan, flow.phase = 1, PHASE.again end
  elseif flow.state == FLOW.undoing then
    nextUndo(ctx, flow)
  elseif isFlowOver(flow) then
    call('HSET', key, 'retry', retry)
    flow.state, flow.stop, flow.faults, flow.fault, flow.ended = FLOW.running, 0, 0, 0, 0
    flow.scan, flow.phase, flow.step, flow.over = 1, names == '' and PHASE.clear or PHASE.mark, 0, false
    -- Of a run that has stopped, what the last nodes would have told their successors.
    while nextWork(flow) do end
    for _, at in ipairs(found) do
      local node = nodeAt(flow, at)
      clearNode(flow, at, node)
      writeNode(flow, at, node)
      if node.successors > 0 then flow.work[#flow.work + 1] = at .. ' 0' end
    end
    if flow.nodes == 0 then flow.scan = 0 end
    call('PERSIST', key)
    call('PERSIST', ctx.nodes)
    armDeadline(ctx, flow)
  end
  stepFlow(ctx, flow)
  return stops and '["stopping"]' or reply('retried', flow.state)
end

-- flow.observe: becomes a member, which hears of every change, or of the end only. The state is -1 if there is no such run.
-- keys: hash, nodes
-- args: id string, all boolean
-- reply: ["joined", state number, version number, nodes number, blocked number, ready number, active number, done number, failed number, skipped number, cancelled number, compensated number, expected number, changes json]
handlers['flow.observe'] = function(ctx, key, id, all)
  local flow = loadFlow(ctx, key)
  if not flow then return reply('joined', -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, json('[]')) end
  local letter, count = all == '1' and 'o' or 'a', all == '1' and 'watchers' or 'waiters'
  if call('HSET', key, letter .. claimOf(ctx, id), '') == 1 then
    flow[count] = flow[count] + 1
    own(ctx, key, id, PERMANENT)
    armAgain(ctx, flow)
  end
  return reply('joined', flowCounts(flow, json('[]')))
end

-- -----------------------------------------------------------------------------
-- Look
-- -----------------------------------------------------------------------------

-- The fields of some nodes, from a place on, as JSON: what `describe` makes of each. Answers them, and the place behind them.
local function pageOfNodes(nodes, from, describe)
  local parts, bytes, at = {}, 0, from
  while at <= #nodes and #parts < FLOW_PAGE and bytes < FLOW_BYTES do
    local part = describe(nodes[at])
    parts[#parts + 1], bytes, at = part, bytes + #part, at + 1
  end
  return json('[' .. concat(parts, ',') .. ']'), at
end

local function outcomeOfNode(flow, at)
  local found = call('HMGET', flow.items, 'd' .. at, 'n' .. at, 'r' .. at)
  return '[' .. found[1] .. ',"' .. sub(found[2], 1, 1) .. '",' .. (found[3] or 'null') .. ']'
end

-- flow.status: the counts, the input, the first node that has failed the run, as `flow.inputs` has it, and nodes from a number on, each with its state, its generation and the number of its compensation; next is 0 at the end
-- keys: hash, nodes
-- args: from number
-- reply: ["status", state number, version number, nodes number, blocked number, ready number, active number, done number, failed number, skipped number, cancelled number, compensated number, expected number, input json, started number, ended number, fault json, next number, page json, stamp number] | ["missing"]
-- flags: no-writes
handlers['flow.status'] = function(ctx, key, from)
  local flow = readFlow(ctx, key)
  if not flow then return MISSING end
  local first, nodes = tonumber(from), {}
  -- The nodes of a run that is loaded may be missing yet.
  local last = flow.state == FLOW.loading and 0 or math.min(flow.nodes, first + FLOW_PAGE - 1)
  for at = first, last do nodes[#nodes + 1] = text(at) end
  local page, count = pageOfNodes(nodes, 1, function(at)
    local found = call('HMGET', flow.items, 'd' .. at, 'n' .. at)
    local node = nodeFrom(found[2])
    return '[' .. found[1] .. ',"' .. node.state .. '",' .. text(node.generation) .. ',' .. text(undoOf(node)) .. ']'
  end)
  local next = first + count - 1
  if next > flow.nodes or #nodes == 0 then next = 0 end
  return reply('status', flowCounts(flow, json(call('HGET', key, 'i')), flow.started, flow.ended,
    json(flow.fault > 0 and outcomeOfNode(flow, text(flow.fault)) or 'null'), next, page, flow.stamp))
end

-- flow.inputs: the outcomes of the predecessors of a node, from a place on: name and queue, state, outcome; next is 0 at the end
-- keys: hash, nodes
-- args: node string, from number
-- reply: ["inputs", next number, page json] | ["missing"]
-- flags: no-writes
handlers['flow.inputs'] = function(ctx, key, node, from)
  local flow = readFlow(ctx, key)
  local found = flow and nodeAt(flow, node)
  if not found then return MISSING end
  -- The place is the chunk, and the place in it.
  local chunk, place = floor(tonumber(from) / 1024), tonumber(from) % 1024
  local nodes = {}
  for at in string.gmatch(call('HGET', flow.items, 'b' .. node .. '.' .. text(chunk)) or '', '%d+') do nodes[#nodes + 1] = at end
  local page, behind = pageOfNodes(nodes, place + 1, function(at) return outcomeOfNode(flow, at) end)
  local next = 0
  if behind <= #nodes then
    next = chunk * 1024 + behind - 1
  elseif chunk + 1 < found.predecessors then
    next = (chunk + 1) * 1024
  end
  return reply('inputs', next, page)
end

-- flow.outcomes: the outcomes of nodes by their names, a list as JSON, as `flow.inputs`; a name that is not known has null
-- keys: hash, nodes
-- args: names string, from number
-- reply: ["outcomes", next number, page json] | ["missing"]
-- flags: no-writes
handlers['flow.outcomes'] = function(ctx, key, names, from)
  local flow = readFlow(ctx, key)
  if not flow then return MISSING end
  local list = cjson.decode(names)
  local page, behind = pageOfNodes(list, tonumber(from), function(name)
    local at = call('HGET', flow.items, 'N' .. name)
    return at and outcomeOfNode(flow, at) or 'null'
  end)
  return reply('outcomes', behind <= #list and behind or 0, page)
end

-- -----------------------------------------------------------------------------
-- The end of a session, and alarms
-- -----------------------------------------------------------------------------

reapers.flow = function(ctx, key, session, id)
  local flow = loadFlow(ctx, key)
  if not flow then return end
  local claim = session .. '/' .. id
  if call('HDEL', key, 'o' .. claim) == 1 then flow.watchers = flow.watchers - 1 end
  if call('HDEL', key, 'a' .. claim) == 1 then flow.waiters = flow.waiters - 1 end
end

alarms.flow = function(ctx, key)
  local flow = loadFlow(ctx, key)
  if not flow then return end
  local due = flow.due
  if due > 0 and flow.state == FLOW.running then
    if due <= ctx.now then stopFlow(flow, STOP.expired) else alarm(ctx, key, due - ctx.now) end
  end
  stepFlow(ctx, flow)
end
