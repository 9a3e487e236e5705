-- Flows: a run of a graph of jobs. It decides which node may start, and its conductors offer the jobs.
--
-- kinds: flow: hash, nodes, absent
-- after Queue.lua
-- after QueueErrands.lua
--
-- A run is named "<flow>/<run>", where the flow has no "/", and is two hashes. While it is not over they stay; afterwards for `retention` ms:
--   s                  record Flow
--   f                  the flow, whose errands in this partition go to the conductors
--   i                  the input, as JSON
--   g                  the digest of the graph
--   o<session>/<id>    a member that hears of every change
--   a<session>/<id>    a member that hears of the end only
-- and its nodes, which are numbered from 1 on; 0 is done from the start, and in front of all nodes without predecessors:
--   N<name>            the number of a node
--   d<node>            [name, queue, options of its job], as JSON
--   p<node>            the payload, as JSON, unless a function of results makes it
--   n<node>            "<state> <open> <verdict> <generation> <successors> <predecessors> <fatal> <undo>", see below
--   e<node>.<chunk>    successors: "<node><policy> " each; the policy is f (fail), s (skip) or c (continue)
--   b<node>.<chunk>    predecessors: "<node> " each
--   m<node>            the node whose handler has added it
--   c<node>            the request that has added it to a batch under a name of the user's
--   r<node>            its outcome, as JSON
--   w<place>           a node whose end its successors do not know yet: "<node> <chunk>"
--   k<place>           nodes that can be compensated, in the order of their ends
-- The state of a node is the first letter of one of `NODE_COUNTS`. `open` counts the predecessors that have not ended; the verdict is
-- what edges say so far: 0 it starts, 1 it is skipped, 2 it fails. The generation grows with each retry. Successors and
-- predecessors are counts of chunks. `fatal` is 1 if no edge handles its failure. `undo` is 1 if it can be compensated.
--
-- All work of a call is bounded: the ends of nodes whose successors are not told yet wait in w, and the alarm goes on with them.
-- `scan` is the next node of a walk over all nodes, 0 for none: of nodes that are to be stopped, or that are to start again. Before a run
-- is replayed, the nodes behind those that were named wait in w too, and then `scan` is the next place of a walk over k.
-- `expected` is how many nodes there have to be before the run can end; -1 while it is not known. The policy is the sum of 1 if a
-- failure stops what has not begun, 2 if the conductors hear of the end of a run that is done, and 4 if they hear of any other end.
-- The stamp is a token: it tells the run from those of the same name before it, whose jobs and errands may be known for longer.
-- record Flow 1: state, nodes, expected, blocked, ready, active, done, failed, skipped, cancelled, compensated, version, policy, stop,
--   scan, phase, step, head, tail, undos, undone, faults, fault, deadline, due, retention, watchers, waiters, started, ended, stamp

local NODE_COUNTS = {
  b = 'blocked', r = 'ready', a = 'active', d = 'done', f = 'failed', s = 'skipped', c = 'cancelled', x = 'compensated'
}
local FLOW = { loading = 0, running = 1, undoing = 2, done = 3, failed = 4, cancelled = 5, expired = 6 }
-- Why a run stops: its conductors withdraw jobs that have not begun, or cancel all.
local STOP = { failed = 1, cancelled = 2, expired = 3 }
-- What a walk over all nodes is for.
local PHASE = { stop = 1, clear = 2, count = 3, start = 4, again = 5, mark = 6, pack = 7 }
-- Of one call: edges that are walked. Of one answer. Bytes of an outcome that is parsed.
local FLOW_STEPS, FLOW_CHUNK, FLOW_PAGE, FLOW_BYTES, FLOW_DECODED = 512, 256, 256, 131072, 16384

local function nodeFrom(line)
  local state, open, verdict, generation, successors, predecessors, fatal, undo =
    match(line, '^(%a) (%d+) (%d) (%d+) (%d+) (%d+) (%d) (%d)$')
  return {
    state = state, open = tonumber(open), verdict = tonumber(verdict), generation = tonumber(generation),
    successors = tonumber(successors), predecessors = tonumber(predecessors), fatal = fatal, undo = undo
  }
end

local function lineOf(node)
  return node.state .. ' ' .. text(node.open) .. ' ' .. text(node.verdict) .. ' ' .. text(node.generation) .. ' '
    .. text(node.successors) .. ' ' .. text(node.predecessors) .. ' ' .. node.fatal .. ' ' .. node.undo
end

local function readFlow(ctx, key)
  local found = call('HMGET', key, 's', 'f')
  local flow = found[1] and unpackFlow(found[1])
  if not flow then return nil end
  flow.key, flow.items, flow.name = key, ctx.nodes, found[2]
  flow.run = sub(key, #ctx.prefix + 7 + #flow.name)
  flow.changes, flow.work = {}, {}
  return flow
end

local finishFlow

local function keepFlow(ctx, flow)
  ctx.flows = ctx.flows or {}
  ctx.flows[flow.key], flow.finished = flow, false
  later(ctx, flow.key, function() finishFlow(ctx, flow) end)
end

-- The state is read once in a call, and written at its end.
local function loadFlow(ctx, key)
  local flow = ctx.flows and ctx.flows[key]
  if not flow then flow = readFlow(ctx, key) end
  -- The end of a call may load a run that was finished already.
  if flow and flow.finished ~= false then keepFlow(ctx, flow) end
  return flow
end

local function nodeAt(flow, at)
  local line = call('HGET', flow.items, 'n' .. at)
  return line and nodeFrom(line)
end

local function isFlowOver(flow)
  return flow.state >= FLOW.done
end

local function unsettledIn(flow)
  return flow.blocked + flow.ready + flow.active
end

-- Gives a node another state. The caller writes the node.
local function moveNode(flow, at, node, state)
  local from, to = NODE_COUNTS[node.state], NODE_COUNTS[state]
  flow[from], flow[to] = flow[from] - 1, flow[to] + 1
  node.state = state
  flow.changes[#flow.changes + 1] = at
  flow.changes[#flow.changes + 1] = state
end

local function writeNode(flow, at, node)
  call('HSET', flow.items, 'n' .. at, lineOf(node))
end

-- -----------------------------------------------------------------------------
-- Errands
-- -----------------------------------------------------------------------------

local function whichOf(flow)
  return '[' .. encoded(flow.run) .. ',' .. text(flow.stamp) .. ']'
end

local function errandFor(ctx, flow, tag, at, node, ...)
  local parts = { encoded(tag), whichOf(flow), at, text(node.generation), ... }
  extend.errand(ctx, flow.name, '[' .. concat(parts, ',') .. ']')
end

-- The options of a job as `queue.offer` reads them, and the texts among them.
local LETTERS = { urgent = 'u', high = 'h', low = 'l' }

local function shapeOf(options, id, subscriber)
  local more = LETTERS[options.priority] or ''
  if options.delay then more = more .. 'd' .. text(options.delay) end
  if options.attempts then more = more .. 'a' .. text(options.attempts) end
  if options.timeout then more = more .. 't' .. text(options.timeout) end
  more = more .. 'ri' .. #id
  if options.group then more = more .. 'g' .. #options.group end
  return more .. 'y' .. #subscriber, id .. (options.group or '') .. subscriber
end

-- Offers the job of a node to a queue in the partition of the run. Answers whether it was stored.
local function offerBeside(ctx, flow, at, node, about, payload)
  local _, queue, options = unpack(cjson.decode(about))
  local generation = text(node.generation)
  local stamp = text(flow.stamp)
  local id = flow.name .. '/' .. flow.run .. '/' .. stamp .. '/' .. at .. '/' .. generation
  local reference = at .. ' ' .. generation .. ' 0 ' .. stamp .. ' ' .. flow.run
  local more, texts = shapeOf(options, id, #flow.name .. ' ' .. flow.name .. reference)
  return extend.offerBeside(ctx, queue, payload .. texts, #payload .. more .. ' ')
end

-- The node is ready. If its payload is known, and its queue in this partition, its job is offered in this step, and the node is active. If
-- not, a conductor offers it, or looks whether that has happened. Repeated, it is the same job: its id has the node and the generation.
-- The caller writes the node.
local function offerNode(ctx, flow, at, node, tag)
  local found = call('HMGET', flow.items, 'd' .. at, 'p' .. at)
  if not tag and found[2] and offerBeside(ctx, flow, at, node, found[1], found[2]) then return moveNode(flow, at, node, 'a') end
  errandFor(ctx, flow, tag or 'offer', at, node, found[1], found[2] and '[' .. found[2] .. ']' or '[]')
end

-- A conductor removes the job of a node, unless it has begun and the run only has failed. An active node whose job is lost ends.
local function stopNode(ctx, flow, at, node)
  errandFor(ctx, flow, 'stop', at, node, call('HGET', flow.items, 'd' .. at), flow.stop == STOP.failed and 'true' or 'false',
    node.state == 'a' and 'true' or 'false')
end

local function undoNode(ctx, flow, at, node)
  local found = call('HMGET', flow.items, 'd' .. at, 'r' .. at)
  errandFor(ctx, flow, 'undo', at, node, found[1], found[2])
end

-- -----------------------------------------------------------------------------
-- Progress
-- -----------------------------------------------------------------------------

-- A node has ended, so its successors have to know.
local function settleNode(flow, at, node, state)
  moveNode(flow, at, node, state)
  if state == 'd' and node.undo == '1' then
    flow.undos = flow.undos + 1
    call('HSET', flow.items, 'k' .. text(flow.undos), at)
  end
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
  node.generation, node.open, node.verdict = node.generation + 1, 0, 0
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

finishFlow = function(ctx, flow)
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
-- it.
-- keys: all
-- args: stamp number, node string, generation number, offered boolean
-- reply: ["active"] | ["over"] | ["missing"]
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
  if offered ~= '1' then return '["active"]' end
  if found.state == 'r' then
    moveNode(flow, node, found, 'a')
    writeNode(flow, node, found)
  end
  if flow.stop ~= 0 then stopNode(ctx, flow, node, found) end
  return '["active"]'
end

-- Adds nodes behind a node that is just ending, or behind none: `added` has of each its name, its queue, its payload as JSON text, its
-- predecessors among the added nodes (their places, from 1 on), the policies of the edges to those, its successors among the nodes
-- that were there (their names), the policies, and the options of its job as JSON text. A node that is done again adds its nodes again:
-- those keep their edges, and what they have done. While the run stops, they are cancelled, for a retry. Answers the name that is in the
-- way, if one is, and then adds nothing.
local function addNodes(ctx, flow, behind, from, added)
  local taken, numbers, known, last, stopped = {}, {}, {}, flow.nodes, flow.stop ~= 0
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
      if state ~= 'b' and not (stopped and state == 'c') then return name end
    end
  end
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
  for place, one in ipairs(added) do
    local at, edges = numbers[place], successors[place]
    local node
    if known[place] ~= 'd' then
      call('HSET', flow.items, 'd' .. at, '[' .. encoded(one[1]) .. ',' .. encoded(one[2]) .. ',' .. one[8] .. ']', 'p' .. at, one[3])
    end
    if known[place] then
      node = nodeAt(flow, at)
    else
      local predecessors = behind and { behind } or {}
      local open = #predecessors
      for _, before in ipairs(one[4]) do
        predecessors[#predecessors + 1] = numbers[before]
        if known[before] ~= 'd' then open = open + 1 end
      end
      for index, name in ipairs(one[6]) do
        local to = call('HGET', flow.items, 'N' .. name)
        local waiting = nodeAt(flow, to)
        call('HSET', flow.items, 'b' .. to .. '.' .. text(waiting.predecessors), at .. ' ')
        waiting.open, waiting.predecessors = waiting.open + 1, waiting.predecessors + 1
        writeNode(flow, to, waiting)
        edges[#edges + 1] = to .. sub(one[7], index, index)
      end
      local line = concat(edges, ' ')
      node = {
        state = 'b', open = open, verdict = 0, generation = 0, successors = 0,
        predecessors = #predecessors > 0 and 1 or 0, fatal = (line == '' or find(line, 'f', 1, true)) and '1' or '0', undo = '0'
      }
      call('HSET', flow.items, 'N' .. one[1], at, 'b' .. at .. '.0', concat(predecessors, ' '))
      if behind then call('HSET', flow.items, 'm' .. at, behind) end
      flow.blocked = flow.blocked + 1
      if stopped then
        moveNode(flow, at, node, 'c')
      elseif node.open == 0 then
        moveNode(flow, at, node, 'r')
        offerNode(ctx, flow, at, node)
      end
    end
    if #edges > 0 then
      call('HSET', flow.items, 'e' .. at .. '.' .. text(node.successors), concat(edges, ' '))
      node.successors = node.successors + 1
    end
    writeNode(flow, at, node)
  end
  flow.nodes = last
  -- The end of the node tells those that it has added, and a replay of it goes on with them.
  if behind and #fresh > 0 then
    call('HSET', flow.items, 'e' .. behind .. '.' .. text(from.successors), concat(fresh, ' '))
    from.successors = from.successors + 1
  end
end

-- The job of a node has ended, or that which compensates it. A node that has succeeded adds nodes behind itself; if one of these does not
-- fit, nothing happens, and this answers its name.
local function endNode(ctx, flow, node, found, undo, tag, outcome, added)
  if undo then
    if flow.state ~= FLOW.undoing or call('HGET', flow.items, 'k' .. text(flow.undos)) ~= node then return end
    if tag == 'success' then
      moveNode(flow, node, found, 'x')
      writeNode(flow, node, found)
    end
    call('HDEL', flow.items, 'k' .. text(flow.undos))
    flow.undos = flow.undos - 1
    return nextUndo(ctx, flow)
  end
  if found.state ~= 'r' and found.state ~= 'a' then return end
  if added then
    local taken = addNodes(ctx, flow, node, found, added)
    if taken then return taken end
  end
  call('HSET', flow.items, 'r' .. node, outcome)
  settleNode(flow, node, found, tag == 'success' and 'd' or tag == 'cancelled' and 'c' or 'f')
  writeNode(flow, node, found)
  if found.state ~= 'd' and found.fatal == '1' and flow.stop == 0 then
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
  local node, generation, undo, stamp, run = match(reference, '^(%d+) (%d+) ([01]) (%d+) (.*)$')
  if not node then return false end
  local known, added = addedIn(outcome)
  local flow = known and loadBeside(ctx, 'flow', name .. '/' .. run, loadFlow)
  if not flow then return false end
  local found = flow.stamp == tonumber(stamp) and nodeAt(flow, node)
  if not found or found.generation ~= tonumber(generation) then return true end
  return not endNode(ctx, flow, node, found, undo == '1', match(outcome, '^%["(%a+)"'), outcome, added)
end

-- flow.ended: the job of a node has ended: with the tag of its outcome, and the outcome as JSON. Repeated, it changes nothing. `undo` says
-- that the job has compensated the node.
-- keys: all
-- args: stamp number, node string, generation number, undo boolean, tag string, outcome string, added string
-- reply: ["ended"] | ["refused", name string] | ["missing"]
handlers['flow.ended'] = function(ctx, key, stamp, node, generation, undo, tag, outcome, added)
  local flow = loadFlow(ctx, key)
  local found = flow and flow.stamp == tonumber(stamp) and nodeAt(flow, node)
  if not found or found.generation ~= tonumber(generation) then return MISSING end
  local taken = endNode(ctx, flow, node, found, undo == '1', tag, outcome, added ~= '' and cjson.decode(added))
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

-- -----------------------------------------------------------------------------
-- The whole run
-- -----------------------------------------------------------------------------

-- flow.cancel: stops a run: nodes that have not begun are cancelled, and the jobs of the others
-- keys: all
-- args:
-- reply: ["cancelled", state number] | ["missing"]
-- flags: allow-oom
handlers['flow.cancel'] = function(ctx, key)
  local flow = loadFlow(ctx, key)
  if not flow then return MISSING end
  if flow.state == FLOW.loading then endFlow(ctx, flow, FLOW.cancelled) end
  stopFlow(flow, STOP.cancelled)
  stepFlow(ctx, flow)
  return reply('cancelled', flow.state)
end

-- flow.retry: starts all nodes again that are not done, in the order of the graph. While a run goes on, the jobs that Redis may have
-- lost are offered again. `retry` names the request, which is executed once. `names` is a list of nodes as JSON, or empty: with them the
-- run is replayed, unless it goes on, and these nodes start again and all behind them, although they are done.
-- keys: all
-- args: retry string, names string
-- reply: ["retried", state number] | ["done"] | ["active"] | ["unknown", name string] | ["missing"]
handlers['flow.retry'] = function(ctx, key, retry, names)
  local flow = loadFlow(ctx, key)
  -- The nodes of a run that was cancelled before its start may be missing.
  if not flow or flow.started == 0 then return MISSING end
  if call('HGET', key, 'retry') == retry then return reply('retried', flow.state) end
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
  call('HSET', key, 'retry', retry)
  if flow.state == FLOW.running then
    if flow.scan == 0 then flow.scan, flow.phase = 1, PHASE.again end
  elseif flow.state == FLOW.undoing then
    nextUndo(ctx, flow)
  elseif isFlowOver(flow) then
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
  return reply('retried', flow.state)
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

-- flow.status: the counts, the input, the first node that has failed the run, as `flow.inputs` has it, and nodes from a number on, each with its state and generation; next is 0 at the end
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
    return '[' .. found[1] .. ',"' .. node.state .. '",' .. text(node.generation) .. ']'
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
