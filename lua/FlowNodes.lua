-- A run is loaded, and its nodes begin, end and add others.
--
-- after Flow.lua
-- after FlowProgress.lua
-- after Queue.lua
-- after QueueErrands.lua

-- -----------------------------------------------------------------------------
-- Begin
-- -----------------------------------------------------------------------------

local function armDeadline(ctx, flow)
  if flow.deadline > 0 then
    flow.due = ctx.now + flow.deadline
    alarm(ctx, flow.key, flow.deadline)
  end
end

-- flow.begin: makes a run, whose nodes are to be loaded before it starts. A run that was begun with the same input is the same run.
-- One that was not started is begun again with another graph. `policy` is as above. The deadline is in ms from the start, 0 for none. `expected` is how many nodes there have to be before the run can end, or -1.
-- keys: hash, nodes
-- args: flow string, input string, digest string, nodes number, expected number, policy number, deadline number, retention number
-- reply: ["loading"] | ["begun", state number] | ["mismatch"]
handlers['flow.begin'] = function(ctx, key, flow, input, digest, nodes, expected, policy, deadline, retention)
  local run = loadFlow(ctx, key)
  if run then
    local found = call('HMGET', key, 'i', 'g')
    if found[1] ~= input then return '["mismatch"]' end
    if run.state ~= FLOW.loading then return reply('begun', run.state) end
    if found[2] == digest then return '["loading"]' end
    -- The process that has begun it has run another version of the program, and has died before it could start the run.
    call('DEL', ctx.nodes)
  else
    run = { key = key, items = ctx.nodes, name = flow, changes = {}, work = {}, version = 0, watchers = 0, waiters = 0 }
    run.run, run.stamp = sub(key, #ctx.prefix + 7 + #flow), tonumber(nextToken(ctx))
    keepFlow(ctx, run)
  end
  for _, field in pairs(NODE_COUNTS) do run[field] = 0 end
  run.nodes, run.expected, run.policy = tonumber(nodes), tonumber(expected), tonumber(policy)
  run.deadline, run.retention = tonumber(deadline), tonumber(retention)
  run.state, run.stop, run.scan, run.phase, run.step, run.head, run.tail = FLOW.loading, 0, 0, 0, 0, 1, 0
  run.undos, run.undone, run.faults, run.fault, run.due, run.started, run.ended = 0, 0, 0, 0, 0, 0, 0
  run.blocked = run.nodes
  call('HSET', key, 's', packFlow(run), 'f', flow, 'i', input, 'g', digest)
  keep(key)
  return '["loading"]'
end

-- flow.load: stores a part of the graph: fields of the nodes and their values, a list of texts as JSON. The same again changes nothing.
-- keys: hash, nodes
-- args: digest string, fields string
-- reply: ["loaded"] | ["begun", state number] | ["missing"]
handlers['flow.load'] = function(ctx, key, digest, fields)
  local flow = loadFlow(ctx, key)
  if not flow or call('HGET', key, 'g') ~= digest then return MISSING end
  if flow.state ~= FLOW.loading then return reply('begun', flow.state) end
  call('HSET', ctx.nodes, unpack(cjson.decode(fields)))
  keep(ctx.nodes)
  return '["loaded"]'
end

-- flow.start: starts a run, all of whose fields were loaded
-- keys: all
-- args: digest string, fields number
-- reply: ["begun", state number, stamp number] | ["missing"]
handlers['flow.start'] = function(ctx, key, digest, fields)
  local flow = loadFlow(ctx, key)
  if not flow then return MISSING end
  if flow.state ~= FLOW.loading then return reply('begun', flow.state, flow.stamp) end
  if call('HGET', key, 'g') ~= digest or call('HLEN', ctx.nodes) ~= tonumber(fields) then return MISSING end
  flow.state, flow.started = FLOW.running, ctx.now
  call('PERSIST', key)
  call('PERSIST', ctx.nodes)
  flow.work[1] = '0 0'
  armDeadline(ctx, flow)
  stepFlow(ctx, flow)
  return reply('begun', flow.state, flow.stamp)
end

-- -----------------------------------------------------------------------------
-- Nodes
-- -----------------------------------------------------------------------------

-- flow.begun: the job of a node was offered, or is going to be. If it was, and the run stops, or has given the node up, conductors remove
-- it. If it is not yet, and the run stops, it is not to be offered. Nor are other nodes of the run, once this one hears that it stops.
-- keys: all
-- args: stamp number, node string, generation number, offered boolean
-- reply: ["active"] | ["stopping"] | ["over"] | ["missing"]
-- flags: allow-oom
handlers['flow.begun'] = function(ctx, key, stamp, node, generation, offered)
  local flow = loadFlow(ctx, key)
  local found = flow and flow.stamp == tonumber(stamp) and nodeAt(flow, node)
  if not found then return MISSING end
  if found.generation ~= tonumber(generation) or found.state == 'c' then
    found.generation = tonumber(generation)
    if offered == '1' then stopNode(ctx, flow, node, found) end
    return '["over"]'
  end
  if found.state ~= 'r' and found.state ~= 'a' then return '["over"]' end
  if offered ~= '1' then return found.state == 'r' and flow.stop ~= 0 and '["stopping"]' or '["active"]' end
  if found.state == 'r' then
    moveNode(flow, node, found, 'a')
    writeNode(flow, node, found)
  end
  if flow.stop == 0 then return '["active"]' end
  stopNode(ctx, flow, node, found)
  return '["stopping"]'
end

-- Whether there is a way from a node to one of the others; of a way that is too long to look for it, it is said that there is.
local function leads(flow, from, others)
  local list, seen, edges = { from }, {}, 0
  for at in function() return table.remove(list) end do
    if others[at] or edges > 16 * FLOW_STEPS then return true end
    local node = nodeAt(flow, at)
    for chunk = 0, node.successors - 1 do
      for successor in string.gmatch(call('HGET', flow.items, 'e' .. at .. '.' .. text(chunk)), '(%d+)%a') do
        edges = edges + 1
        if not seen[successor] then seen[successor], list[#list + 1] = true, successor end
      end
    end
  end
  return false
end

-- A node that is done again may add new ones behind one that it has added before, which waits: those cannot be before a node that this one
-- is behind. Answers the name of such a node, if there is one.
local function cycleOf(flow, added, numbers, known)
  local others = {}
  for place, one in ipairs(added) do
    for _, before in ipairs(known[place] and {} or one[4]) do
      if known[before] == 'b' then others[numbers[before]] = true end
    end
  end
  if not next(others) then return nil end
  for place, one in ipairs(added) do
    for _, name in ipairs(known[place] and {} or one[6]) do
      if leads(flow, call('HGET', flow.items, 'N' .. name), others) then return name end
    end
  end
end

-- A number for each new node, and the state of those that the node behind them has added before. Answers the name that
-- stands in the way, if any.
local function numberNodes(flow, behind, added)
  local taken, numbers, known, last = {}, {}, {}, flow.nodes
  for place, one in ipairs(added) do
    local at = call('HGET', flow.items, 'N' .. one[1])
    if at and behind and call('HGET', flow.items, 'm' .. at) == behind then known[place] = nodeAt(flow, at).state end
    if taken[one[1]] or at and not known[place] then return one[1] end
    taken[one[1]] = true
    if not at then last = last + 1 end
    numbers[place] = at or text(last)
    for _, name in ipairs(known[place] and {} or one[6]) do
      local to = call('HGET', flow.items, 'N' .. name)
      local state = to and nodeAt(flow, to).state
      if state ~= 'b' and not (flow.stop ~= 0 and state == 'c') then return name end
    end
  end
  return cycleOf(flow, added, numbers, known), numbers, known, last
end

-- The edges from each of the new nodes, and those from the node behind them.
local function edgesOf(added, numbers, known)
  local successors, fresh = {}, {}
  for place in ipairs(added) do successors[place] = {} end
  for place, one in ipairs(added) do
    if not known[place] then
      fresh[#fresh + 1] = numbers[place] .. 'f'
      for index, before in ipairs(one[4]) do
        local edges = successors[before]
        edges[#edges + 1] = numbers[place] .. sub(one[5], index, index)
      end
    end
  end
  return successors, fresh
end

-- The nodes that wait for the new one of number `at` are added to its edges.
local function delayNodes(flow, at, one, edges)
  for index, name in ipairs(one[6]) do
    local to = call('HGET', flow.items, 'N' .. name)
    local waiting = nodeAt(flow, to)
    call('HSET', flow.items, 'b' .. to .. '.' .. text(waiting.predecessors), at .. ' ')
    waiting.open, waiting.predecessors = waiting.open + 1, waiting.predecessors + 1
    writeNode(flow, to, waiting)
    edges[#edges + 1] = to .. sub(one[7], index, index)
  end
end

local function newNode(ctx, flow, behind, at, one, numbers, known, edges)
  local predecessors = behind and { behind } or {}
  local open = #predecessors
  for _, before in ipairs(one[4]) do
    predecessors[#predecessors + 1] = numbers[before]
    if known[before] ~= 'd' then open = open + 1 end
  end
  delayNodes(flow, at, one, edges)
  local node = {
    state = 'b', open = open, verdict = 0, generation = 0, successors = 0,
    predecessors = #predecessors > 0 and 1 or 0, fatal = '1', undo = 0
  }
  call('HSET', flow.items, 'N' .. one[1], at, 'b' .. at .. '.0', concat(predecessors, ' '))
  if behind then call('HSET', flow.items, 'm' .. at, behind) end
  flow.blocked = flow.blocked + 1
  if flow.stop ~= 0 or open == 0 then settleSuccessor(ctx, flow, at, node) end
  return node
end

-- Adds nodes behind a node that is just ending, or behind none: `added` has of each its name, its queue, its payload as JSON text, its
-- predecessors among the added nodes (their places, from 1 on), the policies of the edges to those, its successors among the nodes
-- that were there (their names), the policies, and the options of its job as JSON text. A node that is done again adds its nodes again:
-- those keep their edges, and what they have done. While the run stops, they are cancelled, for a retry. Answers the name that is in the
-- way, if one is, and then adds nothing.
local function addNodes(ctx, flow, behind, from, added)
  local unfit, numbers, known, last = numberNodes(flow, behind, added)
  if unfit then return unfit end
  local successors, fresh = edgesOf(added, numbers, known)
  for place, one in ipairs(added) do
    local at, edges = numbers[place], successors[place]
    if known[place] ~= 'd' then
      call('HSET', flow.items, 'd' .. at, '[' .. encoded(one[1]) .. ',' .. encoded(one[2]) .. ',' .. one[8] .. ']', 'p' .. at, one[3])
    end
    local node = known[place] and nodeAt(flow, at) or newNode(ctx, flow, behind, at, one, numbers, known, edges)
    if #edges > 0 then
      -- All its edges say whether they handle its failure.
      local line = concat(edges, ' ')
      if find(line, 'f', 1, true) then node.fatal = '1' elseif node.successors == 0 then node.fatal = '0' end
      call('HSET', flow.items, 'e' .. at .. '.' .. text(node.successors), line)
      node.successors = node.successors + 1
    end
    writeNode(flow, at, node)
  end
  flow.nodes = last
  -- The end of the node tells those that it has added, and a replay of it goes on with them.
  if behind and #fresh > 0 then
    from.fatal = '1'
    call('HSET', flow.items, 'e' .. behind .. '.' .. text(from.successors), concat(fresh, ' '))
    from.successors = from.successors + 1
  end
end

-- Whether the run is beginning again, and has still to come to a node, which is done again then.
local function isCleared(flow, node)
  return flow.scan > 0 and (flow.phase >= PHASE.mark or flow.phase == PHASE.clear and tonumber(node) >= flow.scan)
end

-- The job of a node has ended; or `undo` is the number of its compensation, and not 0. A node that has succeeded adds nodes behind itself;
-- if one of these does not fit, nothing happens, and this answers its name.
local function endNode(ctx, flow, node, found, undo, tag, outcome, added)
  if undo > 0 then
    local isNext = flow.state == FLOW.undoing and call('HGET', flow.items, 'k' .. text(flow.undos)) == node
    if not isNext or found.undo ~= 2 * undo - 1 then return end
    if tag == 'success' then moveNode(flow, node, found, 'x') else found.undo = 2 * undo end
    writeNode(flow, node, found)
    call('HDEL', flow.items, 'k' .. text(flow.undos))
    flow.undos = flow.undos - 1
    return nextUndo(ctx, flow)
  end
  if found.state ~= 'r' and found.state ~= 'a' then return end
  if added then
    local taken = addNodes(ctx, flow, node, found, added)
    if taken then return taken end
  end
  settleNode(flow, node, found, tag == 'success' and 'd' or tag == 'cancelled' and 'c' or 'f')
  call('HSET', flow.items, 'r' .. node, outcome, 'n' .. node, lineOf(found))
  if found.state ~= 'd' and found.fatal == '1' and flow.stop == 0 and not isCleared(flow, node) then
    if flow.faults == 0 then flow.fault = tonumber(node) end
    flow.faults = flow.faults + 1
    if flow.policy % 2 == 1 then stopFlow(flow, STOP.failed) end
  end
  stepFlow(ctx, flow)
  armAgain(ctx, flow)
end

-- The nodes that a handler has added: a list behind the result of its job. A result can be a list too. Answers whether it is known, and
-- the nodes.
local function addedIn(outcome)
  if sub(outcome, -2) ~= ']]' then return true end
  if #outcome > FLOW_DECODED then return false end
  local fine, parts = pcall(cjson.decode, outcome)
  return fine, fine and parts[3]
end

-- A job has ended whose subscriber may be a run in this partition. Answers false if a conductor is to tell the run.
extend.tellRun = function(ctx, name, reference, outcome)
  local node, generation, undo, stamp, run = match(reference, '^(%d+) (%d+) (%d+) (%d+) (.*)$')
  if not node then return false end
  local known, added = addedIn(outcome)
  local flow = known and loadOther(ctx, 'flow', name .. '/' .. run, loadFlow)
  if not flow then return false end
  local found = flow.stamp == tonumber(stamp) and nodeAt(flow, node)
  if not found or found.generation ~= tonumber(generation) then return true end
  return not endNode(ctx, flow, node, found, tonumber(undo), match(outcome, '^%["(%a+)"'), outcome, added)
end

-- flow.ended: the job of a node has ended: with the tag of its outcome, and the outcome as JSON. Repeated, it changes nothing. `undo` is
-- the number of its compensation, if the job has done that, and otherwise 0.
-- keys: all
-- args: stamp number, node string, generation number, undo number, tag string, outcome string, added string
-- reply: ["ended"] | ["refused", name string] | ["missing"]
handlers['flow.ended'] = function(ctx, key, stamp, node, generation, undo, tag, outcome, added)
  local flow = loadFlow(ctx, key)
  local found = flow and flow.stamp == tonumber(stamp) and nodeAt(flow, node)
  if not found or found.generation ~= tonumber(generation) then return MISSING end
  local taken = endNode(ctx, flow, node, found, tonumber(undo), tag, outcome, added ~= '' and cjson.decode(added))
  if taken then return reply('refused', taken) end
  return '["ended"]'
end

-- flow.add: adds nodes without edges to a run that goes on, as `addNodes`, and answers how many; those whose names are there already
-- are left out, unless they are of the same `addition`: that request is repeated when its session was lost before the answer. With `seal`
-- no more are added, and neither when there are as many as expected.
-- keys: all
-- args: added string, addition string, seal boolean
-- reply: ["added", count number] | ["sealed", state number] | ["missing"]
handlers['flow.add'] = function(ctx, key, added, addition, seal)
  local flow = loadFlow(ctx, key)
  if not flow then return MISSING end
  local fresh, names, own, nodes = {}, {}, 0, flow.nodes
  for _, one in ipairs(added == '' and {} or cjson.decode(added)) do
    local at = names[one[1]] or call('HGET', flow.items, 'N' .. one[1])
    if not at then
      fresh[#fresh + 1], names[one[1]] = one, ''
    elseif addition ~= '' and call('HGET', flow.items, 'c' .. at) == addition then
      own = own + 1
    end
  end
  if #fresh > 0 then
    local closed = flow.state ~= FLOW.running or flow.stop ~= 0
    if closed or flow.expected >= 0 and flow.nodes + #fresh > flow.expected then return reply('sealed', flow.state) end
    addNodes(ctx, flow, nil, nil, fresh)
    if addition ~= '' then
      for place in ipairs(fresh) do call('HSET', flow.items, 'c' .. text(nodes + place), addition) end
    end
  end
  if seal == '1' and flow.state == FLOW.running and flow.expected ~= 0 then flow.expected, flow.sealed = 0, true end
  stepFlow(ctx, flow)
  return reply('added', own + #fresh)
end
