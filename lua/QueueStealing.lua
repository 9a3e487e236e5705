-- Deques: each worker that wants one has jobs of its own, which it runs the newest first. Workers without jobs steal the oldest.
--
-- after Queue.lua
-- after QueueNotes.lua
-- after QueueHandOut.lua
-- after QueueOffers.lua
--
-- A job in a deque is an entry of `held` with the letter N that is not pending. From the time that it is handed out it is as any
-- other job: what is given back, or belonged to a worker that died, goes to any worker. `stored` counts these entries.
--
-- A deque is a sequence of places, in blocks of 64. A place is a job, and whether the job was stolen: <B mark> <d ms> <d number>, the
-- latter two of its id. A job that was cancelled leaves its place behind, which is passed over later: `gaps` counts such places.
--
-- The hash:
--   D                the deques: "<weight>:<name>", and "-:<name>" of one that no worker has any more
--   D<name>          record QueueDeque, and behind it the claims of the workers that have the deque
--   E<block>:<name>  the places of a block
-- The deque has the blocks from `head` to `tail`. `keep` places are not stolen, and at most `most` at a time. `own`, `stolen` and
-- `shared` count the jobs that its workers have begun, by where these were from, and `lost` the jobs that others stole. `idle` has the
-- ms without a job in hand until `since`, if that is not 0, and `busy` the jobs in hand.
-- record QueueDeque 1: weight, head, tail, size, keep, most, own, stolen, shared, lost, idle, since, busy, served

local RECORD, PLACE, IN_BLOCK = 1 + 8 * 14, 17, 64
-- Of the letter N. Places that one call steals, and hashes of keys and workers are below this prime.
local LETTER_OF_DEQUES, MOST_STOLEN, PRIME = 'N', 256, 2147483647
-- Fewer jobs are found one by one.
local LEAST_RUN = 3

-- -----------------------------------------------------------------------------
-- State: read once in a call, and written at its end
-- -----------------------------------------------------------------------------

local function fieldOfBlock(deque, at)
  return 'E' .. text(at) .. ':' .. deque.name
end

local function dequeFrom(name, packed)
  local deque = packed and unpackQueueDeque(sub(packed, 1, RECORD))
  if not deque then return false end
  deque.name, deque.blocks, deque.changed, deque.fresh, deque.claims = name, {}, {}, {}, {}
  for claim in string.gmatch(sub(packed, RECORD + 1), '%S+') do deque.claims[#deque.claims + 1] = claim end
  return deque
end

local function dequesOf(queue)
  queue.deques = queue.deques or {}
  return queue.deques
end

-- A deque by its name; false if there is none.
local function dequeOf(queue, name)
  local deques = dequesOf(queue)
  if deques[name] == nil then deques[name] = dequeFrom(name, call('HGET', queue.key, 'D' .. name)) end
  return deques[name]
end

-- The names of all deques, and the weights of deques that workers have.
local function indexOf(queue)
  local index = queue.index
  if not index then
    index = {}
    for weight, name in string.gmatch(call('HGET', queue.key, 'D') or '', '([^:%s]+):(%S+)') do
      index[#index + 1] = { name = name, weight = tonumber(weight) or false }
    end
    queue.index = index
  end
  return index
end

-- Sets the weight of a deque: false if no worker has it any more, nil if it is gone.
local function enter(queue, name, weight)
  local index = indexOf(queue)
  queue.reindexed = true
  for at, one in ipairs(index) do
    if one.name == name then
      if weight == nil then table.remove(index, at) else one.weight = weight end
      return
    end
  end
  if weight ~= nil then index[#index + 1] = { name = name, weight = weight } end
end

-- All deques that workers have.
local function everyDeque(queue)
  local deques, fields, names = dequesOf(queue), {}, {}
  for _, one in ipairs(indexOf(queue)) do
    if deques[one.name] == nil then fields[#fields + 1], names[#names + 1] = 'D' .. one.name, one.name end
  end
  for from = 1, #fields, 1000 do
    local to = math.min(from + 999, #fields)
    for at, packed in ipairs(call('HMGET', queue.key, unpack(fields, from, to))) do
      deques[names[from + at - 1]] = dequeFrom(names[from + at - 1], packed)
    end
  end
  local every = {}
  for _, one in ipairs(indexOf(queue)) do
    if one.weight and deques[one.name] then every[#every + 1] = deques[one.name] end
  end
  return every
end

-- Adds what has changed to the fields that the call writes.
extend.writeDeques = function(queue, args)
  local gone = {}
  local function write(field, value)
    if value and value ~= '' then args[#args + 1], args[#args + 2] = field, value else gone[#gone + 1] = field end
  end
  for _, deque in pairs(queue.deques) do
    if deque and deque.touched then
      extend.settle(queue, deque)
      for at in pairs(deque.changed) do write(fieldOfBlock(deque, at), deque.blocks[at]) end
      write('D' .. deque.name, not deque.over and packQueueDeque(deque) .. concat(deque.claims, ' '))
    end
  end
  if queue.reindexed then
    local parts = {}
    for at, one in ipairs(queue.index) do parts[at] = (one.weight and text(one.weight) or '-') .. ':' .. one.name end
    write('D', concat(parts, ' '))
  end
  if #gone > 0 then call('HDEL', queue.key, unpack(gone)) end
end

-- -----------------------------------------------------------------------------
-- Places
-- -----------------------------------------------------------------------------

local function blockAt(queue, deque, at)
  local block = deque.blocks[at]
  if not block then
    block = call('HGET', queue.key, fieldOfBlock(deque, at)) or ''
    deque.blocks[at] = block
  end
  return block
end

local function setBlock(deque, at, block)
  deque.blocks[at], deque.changed[at] = block, true
end

local function add(deque, place)
  deque.fresh[#deque.fresh + 1] = place
  deque.size, deque.touched = deque.size + 1, true
end

-- Puts places that were added in this call behind the others.
extend.settle = function(queue, deque)
  local fresh, from = deque.fresh, 1
  if #fresh == 0 then return end
  deque.fresh = {}
  while from <= #fresh do
    local block = blockAt(queue, deque, deque.tail)
    local room = IN_BLOCK - #block / PLACE
    if room == 0 then
      deque.tail = deque.tail + 1
      deque.blocks[deque.tail] = ''
    else
      local to = math.min(from + room - 1, #fresh)
      setBlock(deque, deque.tail, block .. concat(fresh, '', from, to))
      from = to + 1
    end
  end
end

-- A block at one of the ends is empty. The next one is at that end now, if there is one.
local function dropBlock(deque, at)
  setBlock(deque, at, '')
  if deque.head == deque.tail then return end
  if at == deque.head then deque.head = at + 1 else deque.tail = at - 1 end
end

-- Takes up to so many places from an end: the newest first, or the oldest first.
local function takePlaces(queue, deque, newest, count, places)
  extend.settle(queue, deque)
  count = math.min(count, deque.size)
  if count > 0 then deque.size, deque.touched = deque.size - count, true end
  while count > 0 do
    local at = newest and deque.tail or deque.head
    local block = blockAt(queue, deque, at)
    local some = math.min(count, #block / PLACE)
    for number = 1, some do
      local behind = newest and #block - number * PLACE or (number - 1) * PLACE
      places[#places + 1] = sub(block, behind + 1, behind + PLACE)
    end
    if some * PLACE == #block then
      dropBlock(deque, at)
      -- Nothing is there, as the counts are wrong.
      if at == (newest and deque.tail or deque.head) then break end
    else
      setBlock(deque, at, newest and sub(block, 1, #block - some * PLACE) or sub(block, some * PLACE + 1))
    end
    count = count - some
  end
  return places
end

local function idOfPlace(place)
  local _, ms, number = unpackStruct('<Bdd', place)
  return text(ms) .. '-' .. text(number)
end

local function addEntries(entries, found, from, to, step)
  for at = from, to, step do entries[#entries + 1] = found[at] end
end

-- Jobs that were offered one after the other are read one after the other, from behind that place on. To find each by itself would be
-- most of the cost of a job. Nothing else reads `held`, and no entry of these is missing.
local function readRun(queue, consumer, behind, count)
  local setting = { 'XGROUP', 'SETID', queue.U, JOBS, behind }
  if not tryGroup(unpack(setting)) then
    startJobs(queue.U)
    tryGroup(unpack(setting))
  end
  local found = tryGroup('XREADGROUP', 'GROUP', JOBS, consumer, 'COUNT', count, 'STREAMS', queue.U, '>')
  return found and found[1] and found[1][2] or {}
end

local function claimEach(queue, consumer, ids)
  local args = { 'XCLAIM', queue.U, JOBS, consumer, 0 }
  for at, id in ipairs(ids) do args[5 + at] = id end
  for _, last in ipairs({ 'RETRYCOUNT', 1, 'FORCE' }) do args[#args + 1] = last end
  local found = tryGroup(unpack(args))
  if found then return found end
  startJobs(queue.U)
  return tryGroup(unpack(args)) or {}
end

-- The jobs of places become those of a consumer: the entries of those that are there still, and of each whether it was stolen.
local function claimPlaces(queue, consumer, places)
  local entries, stolen, ms, numbers, single, at = {}, {}, {}, {}, {}, 1
  for place = 1, #places do
    local mark, time, number = unpackStruct('<Bdd', places[place])
    ms[place], numbers[place] = time, number
    if mark == 1 then stolen[text(time) .. '-' .. text(number)] = true end
  end
  local function flush()
    if #single == 0 then return end
    local found = claimEach(queue, consumer, single)
    addEntries(entries, found, 1, #found, 1)
    single = {}
  end
  while at <= #places do
    local last, step = at, at < #places and numbers[at + 1] - numbers[at] or 0
    if queue.gaps == 0 and (step == 1 or step == -1) then
      while last < #places and numbers[last + 1] - numbers[last] == step do last = last + 1 end
    end
    if last - at >= LEAST_RUN - 1 then
      flush()
      local first = step == 1 and at or last
      local found = readRun(queue, consumer, text(ms[first]) .. '-' .. text(numbers[first] - 1), last - at + 1)
      if step == 1 then addEntries(entries, found, 1, #found, 1) else addEntries(entries, found, #found, 1, -1) end
    else
      last = at
      single[#single + 1] = text(ms[at]) .. '-' .. text(numbers[at])
    end
    at = last + 1
  end
  flush()
  queue.stored = math.max(0, queue.stored - #entries)
  queue.gaps = math.max(0, queue.gaps - (#places - #entries))
  return entries, stolen
end

-- -----------------------------------------------------------------------------
-- Offers
-- -----------------------------------------------------------------------------

-- Owners of deques may take jobs now, before the worker whose turn it is. Where all workers share so many slots, the turns decide: or else
-- the worker that has ended a job would have its slot again, for as long as its deque has jobs.
local function rouse(queue, deque, anyway)
  if queue.limit > 0 and not anyway then return end
  queue.eager = queue.eager or {}
  queue.eager[#queue.eager + 1] = deque.name
end

-- Puts a job of `held` into the deque of that name. Answers false if no worker has it.
extend.push = function(queue, name, ms, number)
  local deque = name and dequeOf(queue, name)
  if not deque or #deque.claims == 0 then return false end
  if #deque.fresh == 0 then rouse(queue, deque) end
  add(deque, pack('<Bdd', 0, ms, number))
  queue.stored = queue.stored + 1
  return true
end

-- Stores a job that has nothing but a body, in a deque, or with those that go to any worker.
extend.place = function(queue, name, id, number, body, holding)
  call('XADD', queue.U, id, 'b', body)
  if extend.push(queue, name, queue.stamp, number) then return end
  local consumer = consumerOf(LETTER_OF_DEQUES, RETURNED)
  local ids = holding[consumer] or {}
  holding[consumer], ids[#ids + 1] = ids, id
  queue[READY[LETTER_OF_DEQUES]] = queue[READY[LETTER_OF_DEQUES]] + 1
end

-- The name of the deque that a key belongs to: each worker weighs it, and the highest weight decides. So a worker that comes takes an
-- even share of the keys, and those of a worker that leaves go to all others.
extend.home = function(queue, key)
  local best, highest = nil, -1
  for _, one in ipairs(indexOf(queue)) do
    if one.weight then
      local mixed = bit.bxor(key, one.weight) * 48271 % PRIME
      mixed = bit.bxor(mixed, bit.rshift(mixed, 15)) * 69621 % PRIME
      if mixed > highest then best, highest = one.name, mixed end
    end
  end
  return best
end

-- -----------------------------------------------------------------------------
-- Hand out
-- -----------------------------------------------------------------------------

-- A worker that takes jobs of a deque now, if there is one.
local function ownerOf(ctx, queue, deque)
  for _, claim in ipairs(deque.claims) do
    local worker = workerOf(queue, claim)
    if worker and worker.credit > 0 and isAlive(ctx, holderOf(claim)) then return worker end
  end
end

-- The next worker that has jobs in its deque and room for them: only such that this call has changed.
extend.owner = function(ctx, queue)
  local eager = queue.eager
  while eager and #eager > 0 do
    local deque = dequeOf(queue, eager[#eager])
    local worker = deque and deque.size > 0 and ownerOf(ctx, queue, deque)
    if worker then return worker end
    eager[#eager] = nil
  end
end

local function retire(queue, deque)
  deque.over, deque.touched = true, true
  enter(queue, deque.name, nil)
end

-- Jobs that were rescheduled while they stood in a deque are delayed from now on. Answers how many.
local function delayNoted(ctx, queue, ids)
  local count = 0
  for _, id in ipairs(queue.notes > 0 and ids or {}) do
    local note = 'd' .. LETTER_OF_DEQUES .. id
    local due = tonumber(noteOf(queue, note) or 0)
    unsetNote(queue, note)
    if due > ctx.now then
      delayJob(ctx, queue, LETTER_OF_DEQUES, id, due, 0)
      count = count + 1
    end
  end
  return count
end

-- Moves some jobs of a deque that no worker has to the jobs that were given back, which go first.
local function adopt(ctx, queue)
  for _, one in ipairs(indexOf(queue)) do
    local deque = not one.weight and dequeOf(queue, one.name)
    if deque then
      local places, ids = takePlaces(queue, deque, false, MOVED, {}), {}
      for at, place in ipairs(places) do ids[at] = idOfPlace(place) end
      local held = holdJobs(queue, consumerOf(LETTER_OF_DEQUES, RETURNED), ids) or {}
      local found = #held
      queue.stored, queue.orphaned = math.max(0, queue.stored - found), math.max(0, queue.orphaned - #ids)
      queue.gaps = math.max(0, queue.gaps - (#ids - found))
      queue[READY[LETTER_OF_DEQUES]] = queue[READY[LETTER_OF_DEQUES]] + found - delayNoted(ctx, queue, held)
      if deque.size == 0 then retire(queue, deque) end
      return
    end
  end
  queue.orphaned = 0
end

-- The deque to steal from, and how many jobs: that of a dead worker, or the longest one. One whose worker takes jobs now is not stolen
-- from: the worker goes ahead.
local function victimOf(ctx, queue)
  local best, most, all = nil, 0, everyDeque(queue)
  for place = 1, #all do
    -- Each of them is the first one now and then.
    local deque = all[(queue.begun + place) % #all + 1]
    if deque.size > 0 then
      if ownerOf(ctx, queue, deque) then
        rouse(queue, deque, true)
        return nil
      end
      local alive = false
      for _, claim in ipairs(deque.claims) do alive = alive or isAlive(ctx, holderOf(claim)) end
      local spare = alive and deque.size - deque.keep or math.huge
      if spare > most then best, most = deque, spare end
    end
  end
  if not best then return nil end
  local limit = most == math.huge and MOST_STOLEN or math.min(best.most, MOST_STOLEN)
  return best, math.min(math.ceil(best.size / 2), most, limit)
end

local function addClaimed(ctx, queue, worker, places, items)
  local entries, stolen = claimPlaces(queue, consumerOf(LETTER_OF_DEQUES, worker.claim), places)
  local deque = worker.deque and dequeOf(queue, worker.deque)
  for _, entry in ipairs(deque and entries or {}) do
    if stolen[entry[1]] then deque.stolen = deque.stolen + 1 else deque.own = deque.own + 1 end
  end
  local before = #items
  addTaken(ctx, queue, LETTER_OF_DEQUES, entries, nil, items)
  worker.dealt = (worker.dealt or 0) + #items - before
end

-- Half of the oldest jobs of another deque become those of a worker. Answers nothing if there are none that it may have.
local function steal(ctx, queue, worker, deque, most, items)
  local victim, count = victimOf(ctx, queue)
  if not victim then return #(queue.eager or {}) > 0 and items or nil end
  local places = takePlaces(queue, victim, false, deque and count or math.min(count, most), {})
  victim.lost = victim.lost + #places
  if deque then
    for _, place in ipairs(places) do add(deque, '\1' .. sub(place, 2)) end
  else
    addClaimed(ctx, queue, worker, places, items)
  end
  return items
end

-- Up to so many jobs for a worker: of its own deque, or else those that go to any worker, or else of another deque. One of TURNS is
-- from the oldest end of its deque, and one is not of its deque. Answers nothing if no worker of the list may have the other jobs.
extend.deal = function(ctx, queue, worker, most, ready, inGroups)
  local deque, items, shared = worker.deque and dequeOf(queue, worker.deque), {}, nil
  if queue.orphaned > 0 and queue[READY[LETTER_OF_DEQUES]] == 0 then
    adopt(ctx, queue)
    ready = ready + queue[READY[LETTER_OF_DEQUES]]
    -- Jobs that were cancelled have left places behind.
    if queue.orphaned > 0 and ready == 0 then return items end
  end
  if ready == 0 and not (deque and deque.size > 0) then
    if not steal(ctx, queue, worker, deque, most, items) then return nil end
    if not deque or deque.size == 0 then return items end
  end
  if deque and deque.size > 0 then
    local turn = deque.served % TURNS
    shared = ready > 0 and floor((turn + most) / TURNS) or 0
    local own = math.min(most - shared, deque.size)
    local oldest = floor(((turn + TURNS / 2) % TURNS + own) / TURNS)
    deque.served = deque.served + own + shared
    addClaimed(ctx, queue, worker, takePlaces(queue, deque, false, oldest, takePlaces(queue, deque, true, own - oldest, {})), items)
  else
    shared = math.min(most, math.ceil(ready / (#queue.list - queue.head + 2)))
  end
  if shared > 0 then
    local take = inGroups > 0 and groups.take or takeJobs
    for _, item in ipairs(take(ctx, queue, worker.claim, shared)) do items[#items + 1] = item end
  end
  return items
end

-- Takes up to so many jobs out of all deques, the oldest of each, for no worker. Answers their entries.
extend.takeStored = function(queue, count)
  local found = {}
  for at = #indexOf(queue), 1, -1 do
    local one = indexOf(queue)[at]
    local deque = dequeOf(queue, one.name)
    while deque and deque.size > 0 and #found < count do
      local places = takePlaces(queue, deque, false, count - #found, {})
      if not one.weight then queue.orphaned = math.max(0, queue.orphaned - #places) end
      for _, entry in ipairs((claimPlaces(queue, consumerOf(LETTER_OF_DEQUES, '/'), places))) do found[#found + 1] = entry end
    end
    if deque and deque.size == 0 and not one.weight then retire(queue, deque) end
  end
  if #found < count then queue.stored = 0 end
  return found
end

-- -----------------------------------------------------------------------------
-- Workers
-- -----------------------------------------------------------------------------

extend.handed = function(ctx, queue, worker, count)
  local deque, shared = dequeOf(queue, worker.deque), count - (worker.dealt or 0)
  worker.busy, worker.dealt = worker.busy + count, 0
  if not deque then return end
  deque.shared = deque.shared + shared
  if deque.since > 0 then deque.idle, deque.since = deque.idle + math.max(0, ctx.now - deque.since), 0 end
  deque.busy, deque.touched = deque.busy + count, true
end

local function unburden(ctx, queue, worker, count)
  local deque, less = dequeOf(queue, worker.deque), math.min(count, worker.busy)
  worker.busy = worker.busy - less
  if not deque then return end
  deque.busy, deque.touched = math.max(0, deque.busy - less), true
  if deque.busy == 0 and deque.since == 0 then deque.since = ctx.now end
  return deque
end

-- So many jobs that a worker had in hand have ended or went back, and it may take others.
extend.relieved = function(ctx, queue, worker, count)
  local deque = unburden(ctx, queue, worker, count)
  if deque and deque.size > 0 then rouse(queue, deque) end
end

-- A worker is gone, and its jobs go to others: those of its deque too, if no other worker has it.
extend.bereave = function(ctx, queue, worker)
  local deque = unburden(ctx, queue, worker, worker.busy)
  if not deque then return end
  for at = #deque.claims, 1, -1 do
    if deque.claims[at] == worker.claim then table.remove(deque.claims, at) end
  end
  if #deque.claims > 0 then return end
  if deque.size == 0 then return retire(queue, deque) end
  queue.orphaned = queue.orphaned + deque.size
  enter(queue, deque.name, false)
end

-- queue.employ: as `queue.work`, of a worker with a deque. `weight` is a hash of its name, from 0 to 2147483646. So many jobs
-- of the deque are not stolen while a worker has it, and so many at most at a time.
-- keys: all
-- args: id string, credit number, name string, weight number, keep number, most number
-- reply: ["joined", sent number, token number, jobs json, cancelled strings]
handlers['queue.employ'] = function(ctx, key, id, credit, name, weight, keep, most)
  local claim = claimOf(ctx, id)
  local queue = loadQueue(ctx, key, claim)
  local answered = handlers['queue.work'](ctx, key, id, credit)
  local worker, deque = workerOf(queue, claim), dequeOf(queue, name)
  if not deque or deque.over then
    deque = dequeFrom(name, packQueueDeque({
      weight = tonumber(weight), head = 0, tail = 0, size = 0, keep = 0, most = 0, own = 0, stolen = 0, shared = 0, lost = 0,
      idle = 0, since = 0, busy = 0, served = 0
    }))
    queue.deques[name] = deque
  end
  deque.keep, deque.most, deque.touched = tonumber(keep), tonumber(most), true
  if not worker.deque then
    worker.deque, worker.busy, worker.changed = name, 0, true
    if #deque.claims == 0 then
      queue.orphaned = math.max(0, queue.orphaned - deque.size)
      enter(queue, name, tonumber(weight))
      -- It may have been the deque of a worker of this name that died.
      deque.own, deque.stolen, deque.shared, deque.lost, deque.idle, deque.since = 0, 0, 0, 0, 0, ctx.now
    end
    deque.claims[#deque.claims + 1] = claim
  end
  if deque.size > 0 then rouse(queue, deque) end
  return answered
end

-- queue.deques: the deques that workers have: the name of each, how many jobs it has, how many its workers have in hand, how many they
-- have begun of their own, of others and of those that go to any worker, how many others stole, and for how many ms they had none
-- keys: all
-- args:
-- reply: ["deques", deques json] | ["stale"]
-- flags: allow-oom
handlers['queue.deques'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local queue, parts = readQueue(ctx, key), {}
  for at, deque in ipairs(everyDeque(queue)) do
    local idle = deque.idle + (deque.since > 0 and math.max(0, ctx.now - deque.since) or 0)
    parts[at] = list({
      deque.name, deque.size, deque.busy, deque.own, deque.stolen, deque.shared, deque.lost, idle
    })[1]
  end
  return reply('deques', json('[' .. concat(parts, ',') .. ']'))
end
