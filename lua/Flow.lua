-- Flows: a run of a graph of jobs. It decides which node may start, and its conductors offer the jobs.
--
-- kinds: flow: hash, nodes
-- after Queue.lua
-- after QueueErrands.lua
--
-- A run is named "<flow>/<run>", where the flow has no "/", and is two hashes. While it is not over they stay; afterwards for `retention` ms:
--   s                  record Flow
--   f                  the flow, whose errands in this partition go to the conductors
--   i                  the input, as JSON
--   g                  the digest of the graph
--   retry              the last request that has begun it again
--   asked              the last requests to begin it again, the newest first: each is executed once
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
-- predecessors are counts of chunks. `fatal` is 1 if no edge handles its failure. `undo` is 0 if it cannot be compensated, and otherwise 1;
-- 2 more for each time that a compensation has failed and the run has begun again since, 1 more if it has failed and the run has not.
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
    match(line, '^(%a) (%d+) (%d) (%d+) (%d+) (%d+) (%d) (%d+)$')
  return {
    state = state, open = tonumber(open), verdict = tonumber(verdict), generation = tonumber(generation),
    successors = tonumber(successors), predecessors = tonumber(predecessors), fatal = fatal, undo = tonumber(undo)
  }
end

local function lineOf(node)
  return node.state .. ' ' .. text(node.open) .. ' ' .. text(node.verdict) .. ' ' .. text(node.generation) .. ' '
    .. text(node.successors) .. ' ' .. text(node.predecessors) .. ' ' .. node.fatal .. ' ' .. text(node.undo)
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

local function keepFlow(ctx, flow)
  ctx.flows = ctx.flows or {}
  ctx.flows[flow.key], flow.finished = flow, false
  later(ctx, flow.key, function() extend.finishFlow(ctx, flow) end)
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
  more = more .. 'rmi' .. #id
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

-- The number of the compensation that is under way, or the next one.
local function undoOf(node)
  return floor((node.undo + 1) / 2)
end

local function undoNode(ctx, flow, at, node)
  local found = call('HMGET', flow.items, 'd' .. at, 'r' .. at)
  errandFor(ctx, flow, 'undo', at, node, found[1], found[2], text(undoOf(node)))
end
