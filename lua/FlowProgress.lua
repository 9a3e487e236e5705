-- A run goes on: nodes end, and their successors hear of it.
--
-- after Flow.lua
-- after Queue.lua

-- -----------------------------------------------------------------------------
-- Progress
-- -----------------------------------------------------------------------------

local function listUndo(flow, at)
  flow.undos = flow.undos + 1
  call('HSET', flow.items, 'k' .. text(flow.undos), at)
end

-- A node has ended, so its successors have to know.
local function settleNode(flow, at, node, state)
  moveNode(flow, at, node, state)
  if state == 'd' and node.undo > 0 then listUndo(flow, at) end
  if node.successors > 0 then flow.work[#flow.work + 1] = at .. ' 0' end
end

local function stopFlow(flow, why)
  -- A run that has failed waits for the jobs that had begun; these are cancelled too when it is cancelled, or expires.
  if flow.stop > STOP.failed or flow.stop >= why or flow.state ~= FLOW.running then return end
  flow.stop = why
  -- A replay forgets all results behind the nodes that were named first, or else the next retry would leave old ones.
  if flow.scan > 0 and flow.phase >= PHASE.mark then return end
  flow.scan, flow.phase, flow.step = 1, PHASE.stop, 0
end

-- A node that is to be done again waits without knowing for what, and its result is gone. The caller writes the node.
local function clearNode(flow, at, node)
  node.generation, node.open, node.verdict, node.undo = node.generation + 1, 0, 0, math.min(node.undo, 1)
  moveNode(flow, at, node, 'b')
  call('HDEL', flow.items, 'r' .. at)
end

-- What an edge makes of the end of its predecessor.
local function verdictOf(state, policy)
  if state == 'd' or policy == 'c' then return 0 end
  return policy == 'f' and state ~= 's' and 2 or 1
end

local function settleSuccessor(ctx, flow, at, node)
  if flow.stop ~= 0 then
    moveNode(flow, at, node, 'c')
  elseif node.verdict == 0 then
    moveNode(flow, at, node, 'r')
    offerNode(ctx, flow, at, node)
  else
    settleNode(flow, at, node, node.verdict == 1 and 's' or 'f')
  end
end

-- Visits one chunk of the successors of a node, and leaves the next chunk as work. `visit` answers whether a successor is to be written.
-- Answers how many they are.
local function visitSuccessors(flow, at, chunk, visit)
  local found = call('HMGET', flow.items, 'n' .. at, 'e' .. at .. '.' .. chunk)
  local from, fields, policies = nodeFrom(found[1]), {}, {}
  for successor, policy in string.gmatch(found[2] or '', '(%d+)(%a)') do
    fields[#fields + 1], policies[#policies + 1] = 'n' .. successor, policy
  end
  if #fields == 0 then return 1 end
  local written = {}
  for index, line in ipairs(call('HMGET', flow.items, unpack(fields))) do
    local node = nodeFrom(line)
    if visit(sub(fields[index], 2), node, from, policies[index]) then
      written[#written + 1], written[#written + 2] = fields[index], lineOf(node)
    end
  end
  if #written > 0 then call('HSET', flow.items, unpack(written)) end
  local behind = tonumber(chunk) + 1
  if behind < from.successors then flow.work[#flow.work + 1] = at .. ' ' .. text(behind) end
  return #fields
end

-- Tells one chunk of the successors of a node that it has ended. Answers how many they are.
local function tellSuccessors(ctx, flow, at, chunk)
  return visitSuccessors(flow, at, chunk, function(successor, node, from, policy)
    if node.state ~= 'b' then return false end
    node.open = node.open - 1
    node.verdict = math.max(node.verdict, verdictOf(from.state, policy))
    if node.open == 0 then settleSuccessor(ctx, flow, successor, node) end
    return true
  end)
end

-- A node whose end its successors do not know yet; those that wait from earlier calls come first.
local function nextWork(flow)
  if flow.head <= flow.tail then
    local field = 'w' .. text(flow.head)
    local item = call('HGET', flow.items, field)
    call('HDEL', flow.items, field)
    flow.head = flow.head + 1
    return match(item, '^(%d+) (%d+)$')
  end
  local item = table.remove(flow.work, 1)
  if item then return match(item, '^(%d+) (%d+)$') end
end

-- What a walk over all nodes does with one node. Answers whether the node is to be written.
local function visitNode(ctx, flow, at, node)
  local state = node.state
  if flow.phase == PHASE.stop then
    if state == 'b' then
      moveNode(flow, at, node, 'c')
      return true
    end
    if state == 'r' or state == 'a' then stopNode(ctx, flow, at, node) end
  elseif flow.phase == PHASE.clear then
    -- A compensation that has failed is attempted again if the run does not succeed.
    if state == 'd' and node.undo > 0 and node.undo % 2 == 0 then
      listUndo(flow, at)
      node.undo = node.undo + 1
      return true
    end
    -- A replay has cleared the nodes that wait; a batch has added those that are ready.
    if state == 'd' or state == 'b' or state == 'r' or state == 'a' then return false end
    clearNode(flow, at, node)
    return true
  elseif flow.phase == PHASE.again then
    if state == 'r' or state == 'a' then offerNode(ctx, flow, at, node, 'again') end
  elseif flow.phase == PHASE.start and state == 'b' and node.open == 0 then
    moveNode(flow, at, node, 'r')
    offerNode(ctx, flow, at, node)
    return true
  end
  return false
end

-- A chunk of a walk over all nodes. Answers how many they are.
local function walkNodes(ctx, flow)
  local fields, last = {}, math.min(flow.nodes, flow.scan + FLOW_CHUNK - 1)
  for at = flow.scan, last do fields[#fields + 1] = 'n' .. text(at) end
  local lines, written = #fields > 0 and call('HMGET', flow.items, unpack(fields)) or {}, {}
  for index, field in ipairs(fields) do
    local node = nodeFrom(lines[index])
    if visitNode(ctx, flow, sub(field, 2), node) then
      written[#written + 1], written[#written + 2] = field, lineOf(node)
    end
  end
  if #written > 0 then call('HSET', flow.items, unpack(written)) end
  flow.scan = last + 1
  if flow.scan > flow.nodes then
    flow.scan, flow.phase = flow.phase == PHASE.clear and 1 or 0, flow.phase == PHASE.clear and PHASE.count or 0
  end
  return math.max(1, #fields)
end

-- Before a run is replayed, what is behind the nodes that were named is cleared as they are. One chunk of the successors of one node.
local function markSuccessors(_, flow)
  local at, chunk = nextWork(flow)
  if not at then
    flow.scan, flow.phase, flow.step = 1, PHASE.pack, 0
    return 1
  end
  return visitSuccessors(flow, at, chunk, function(successor, node)
    if node.state == 'b' then return false end
    clearNode(flow, successor, node)
    if node.successors > 0 then flow.work[#flow.work + 1] = successor .. ' 0' end
    return true
  end)
end

-- A node that was cleared has its place among those that can be compensated when it is done again, and not twice. A chunk of the places.
local function packUndos(_, flow)
  local last = math.min(flow.undos, flow.scan + FLOW_CHUNK - 1)
  local places, nodes = {}, {}
  for place = flow.scan, last do places[#places + 1] = 'k' .. text(place) end
  if #places > 0 then
    local found = call('HMGET', flow.items, unpack(places))
    for index, at in ipairs(found) do nodes[index] = 'n' .. at end
    call('HDEL', flow.items, unpack(places))
    for index, line in ipairs(call('HMGET', flow.items, unpack(nodes))) do
      if nodeFrom(line).state == 'd' then
        flow.step = flow.step + 1
        call('HSET', flow.items, 'k' .. text(flow.step), found[index])
      end
    end
  end
  flow.scan = last + 1
  if flow.scan > flow.undos then
    flow.undos, flow.scan, flow.step, flow.phase = flow.step, 1, 0, flow.stop == 0 and PHASE.clear or PHASE.stop
  end
  return math.max(1, #places)
end

-- Before a run begins again, each node that is not done counts the others that it is blocked by. One chunk of the successors of one
-- node.
local function countSuccessors(_, flow)
  local at = text(flow.scan)
  local node = nodeAt(flow, at)
  local written = {}
  if node.state == 'b' and flow.step < node.successors then
    local fields = {}
    for successor in string.gmatch(call('HGET', flow.items, 'e' .. at .. '.' .. text(flow.step)), '(%d+)%a') do
      fields[#fields + 1] = 'n' .. successor
    end
    for index, line in ipairs(#fields > 0 and call('HMGET', flow.items, unpack(fields)) or {}) do
      local behind = nodeFrom(line)
      if behind.state == 'b' then
        behind.open = behind.open + 1
        written[#written + 1], written[#written + 2] = fields[index], lineOf(behind)
      end
    end
    if #written > 0 then call('HSET', flow.items, unpack(written)) end
    flow.step = flow.step + 1
  end
  if node.state ~= 'b' or flow.step >= node.successors then flow.scan, flow.step = flow.scan + 1, 0 end
  if flow.scan > flow.nodes then flow.scan, flow.phase = 1, PHASE.start end
  return 1 + #written
end

local WALKS = { [PHASE.count] = countSuccessors, [PHASE.mark] = markSuccessors, [PHASE.pack] = packUndos }

local function endFlow(ctx, flow, state)
  flow.state, flow.ended, flow.due, flow.over = state, ctx.now, 0, true
  local told = flow.policy >= 4
  if state == FLOW.done then told = flow.policy % 4 >= 2 end
  if told then
    local counts = { state, text(flow.nodes), text(flow.done), text(flow.failed), text(flow.cancelled) }
    -- The last retry tells this end from the ends before it.
    local retry = encoded(call('HGET', flow.key, 'retry') or '')
    extend.errand(ctx, flow.name, '["over",' .. whichOf(flow) .. ',' .. concat(counts, ',') .. ',' .. retry .. ']')
  end
end

-- Of the nodes that can be compensated, the last one that was done comes first, and one at a time.
local function nextUndo(ctx, flow)
  while flow.undos > 0 do
    local field = 'k' .. text(flow.undos)
    local at = call('HGET', flow.items, field)
    local node = at and nodeAt(flow, at)
    if node and node.state == 'd' then return undoNode(ctx, flow, at, node) end
    call('HDEL', flow.items, field)
    flow.undos = flow.undos - 1
  end
  endFlow(ctx, flow, flow.undone)
end

-- Whether nothing is left to do.
local function closeFlow(ctx, flow)
  if unsettledIn(flow) > 0 or flow.expected < 0 and flow.stop == 0 or flow.nodes < flow.expected and flow.stop == 0 then return end
  local state = flow.stop == STOP.cancelled and FLOW.cancelled or flow.stop == STOP.expired and FLOW.expired
    or flow.faults > 0 and FLOW.failed or FLOW.done
  if state == FLOW.done or flow.undos == 0 then return endFlow(ctx, flow, state) end
  flow.state, flow.undone = FLOW.undoing, state
  nextUndo(ctx, flow)
end

-- Alarms are forgotten when no session was alive for a day.
local function armAgain(ctx, flow)
  if flow.state ~= FLOW.running then return end
  if flow.due > 0 and flow.stop <= STOP.failed then alarm(ctx, flow.key, math.max(0, flow.due - ctx.now)) end
  if flow.scan > 0 or flow.head <= flow.tail then alarm(ctx, flow.key, 0) end
end

-- Goes on with what the run has to do, up to a bound that all requests of the call share.
local function stepFlow(ctx, flow)
  if flow.state ~= FLOW.running then return end
  local steps = ctx.flowSteps or 0
  while steps < FLOW_STEPS do
    if flow.scan > 0 then
      steps = steps + (WALKS[flow.phase] or walkNodes)(ctx, flow)
    else
      local at, chunk = nextWork(flow)
      if not at then break end
      steps = steps + tellSuccessors(ctx, flow, at, chunk)
    end
  end
  ctx.flowSteps = steps
  if flow.scan == 0 and flow.head > flow.tail and #flow.work == 0 then return closeFlow(ctx, flow) end
  alarm(ctx, flow.key, 0)
end

-- -----------------------------------------------------------------------------
-- The end of a call
-- -----------------------------------------------------------------------------

local function flowCounts(flow, ...)
  return flow.state, flow.version, flow.nodes, flow.blocked, flow.ready, flow.active, flow.done, flow.failed, flow.skipped,
    flow.cancelled, flow.compensated, flow.expected, ...
end

-- The nodes that have changed: name and state of each, in order.
local function changesOf(flow)
  local parts = {}
  for index = 1, #flow.changes, 2 do
    parts[#parts + 1] = '[' .. call('HGET', flow.items, 'd' .. flow.changes[index]) .. ',"' .. flow.changes[index + 1] .. '"]'
  end
  return json('[' .. concat(parts, ',') .. ']')
end

-- Tells members whose fields begin with that letter.
local function tellFlowMembers(ctx, flow, letter, event)
  for _, field in ipairs(call('HKEYS', flow.key)) do
    local session, id = match(field, '^' .. letter .. '([^/]*)/(.*)$')
    if session then post(ctx, session, '["changed","' .. id .. '",' .. event .. ']') end
  end
end

extend.finishFlow = function(ctx, flow)
  flow.finished = true
  for _, item in ipairs(flow.work) do
    flow.tail = flow.tail + 1
    call('HSET', flow.items, 'w' .. text(flow.tail), item)
  end
  flow.work = {}
  if #flow.changes > 0 or flow.over or flow.sealed then
    flow.version = flow.version + 1
    if flow.watchers > 0 then
      tellFlowMembers(ctx, flow, 'o', continued(flowCounts(flow, changesOf(flow))))
    end
    if flow.over and flow.waiters > 0 then tellFlowMembers(ctx, flow, 'a', continued(flowCounts(flow, json('[]')))) end
  end
  flow.changes = {}
  call('HSET', flow.key, 's', packFlow(flow))
  if flow.over then
    call('PEXPIRE', flow.key, text(flow.retention))
    call('PEXPIRE', flow.items, text(flow.retention))
  end
end
