"""The Lua scripts of the store, all of them: a server that we start ourselves is given these and runs no others.

Rights to the commands that they call stand in `kvstore.redis.rights`.
"""

from __future__ import annotations

# Quotas. KEYS: index, sizes. The total lies in the sizes under "". ARGV: now, life of the index in ms, quota or -1,
# number of keys that were written, then (score, size, key) of each and of those that were used: one of these that the
# index does not know is entered if it has a size. Returns the total, the number of keys, and those that the namespace
# must lose. Redis may evict one of index and sizes: the other alone says nothing.
RECORD = """
local index, sizes = KEYS[1], KEYS[2]
if redis.call('exists', index) ~= redis.call('exists', sizes) then redis.call('unlink', index, sizes) end
local function size_of(key) return tonumber(redis.call('hget', sizes, key) or 0) end
local function enter(score, size, key)
  redis.call('zadd', index, score, key)
  redis.call('hincrby', sizes, '', size - size_of(key))
  redis.call('hset', sizes, key, size)
end
local last = 4 + 3 * tonumber(ARGV[4])
for i = 5, #ARGV, 3 do
  local score, size, key = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  if i > last and redis.call('hget', sizes, key) then
    redis.call('zadd', index, score, key)
  elseif i <= last or size > 0 then
    enter(score, size, key)
  end
end
for _, key in ipairs(redis.call('zrangebyscore', index, '-inf', ARGV[1], 'limit', 0, 200)) do
  redis.call('zrem', index, key)
  redis.call('hincrby', sizes, '', -size_of(key))
  redis.call('hdel', sizes, key)
end
local lost, quota = {}, tonumber(ARGV[3])
local over = size_of('') - quota
while quota >= 0 and over > 0 and #lost < 1000 do
  local oldest = redis.call('zrange', index, #lost, #lost)[1]
  if not oldest then break end
  lost[#lost + 1] = oldest
  over = over - size_of(oldest)
end
redis.call('pexpire', index, ARGV[2])
redis.call('pexpire', sizes, ARGV[2])
return {size_of(''), redis.call('zcard', index), lost}
"""

# KEYS: index, sizes. ARGV: keys that are gone. Returns the total and the number of keys.
FORGET = """
for _, key in ipairs(ARGV) do
  if redis.call('zrem', KEYS[1], key) == 1 then
    redis.call('hincrby', KEYS[2], '', -(tonumber(redis.call('hget', KEYS[2], key)) or 0))
    redis.call('hdel', KEYS[2], key)
  end
end
return {tonumber(redis.call('hget', KEYS[2], '') or 0), redis.call('zcard', KEYS[1])}
"""

# KEYS: index (and sizes).
SAMPLE = "return redis.call('zrandmember', KEYS[1], ARGV[1])"
PAGE = "return redis.call('zrange', KEYS[1], 0, ARGV[1])"
TOTAL = "return {tonumber(redis.call('hget', KEYS[2], '') or 0), redis.call('zcard', KEYS[1])}"

# Single values, documents that change by their number, and locks. KEYS: value (and document). ARGV: what is compared,
# what is written.
GET = "return redis.call('get', KEYS[1])"
CLAIM = "redis.call('set', KEYS[1], ARGV[1], 'NX') return redis.call('get', KEYS[1])"
SWAP = """
if (redis.call('get', KEYS[1]) or '0') ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2])
redis.call('set', KEYS[2], ARGV[3])
return 1
"""
FREE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('unlink', KEYS[1]) end return 0"
DROP = "return redis.call('unlink', KEYS[1])"

# Hashes: models, names, accounts. ARGV: fields and values.
ALL_FIELDS = "return redis.call('hgetall', KEYS[1])"
ENROL = "return redis.call('hset', KEYS[1], ARGV[1], ARGV[2])"
NAME = """
for i = 1, #ARGV, 2 do redis.call('hsetnx', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""
ADD = """
for i = 1, #ARGV, 2 do redis.call('hincrby', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""

# Limits of a tenant that several processes keep together. KEYS: account, a hash: of each rate, what has not drained and
# when that was so; of each process, how many requests of a class run, and when it last said so. A process that has said
# nothing for a while has ended: what ran in it does not count. Of clocks that differ, a rate drains by the one
# that is ahead; one that is by more than a minute, in which every rate drains, was wrong.
_limits = """
local account, now, process = KEYS[1], tonumber(ARGV[1]), ARGV[2]
local function number(name) return tonumber(redis.call('hget', account, name) or 0) end
local function level(name, limit)
  local at = number(name .. ':at')
  if at > now + 60000 then return 0 end
  return math.max(number(name) - math.max(now - at, 0) * limit / 60000, 0)
end
local function use(name, limit, amount)
  if limit <= 0 then return end
  local used, at = math.max(level(name, limit) + amount, 0), number(name .. ':at')
  if at < now or at > now + 60000 then at = now end
  redis.call('hset', account, name, string.format('%.6f', used))
  redis.call('hset', account, name .. ':at', at)
end
local function keep()
  redis.call('hset', account, 'seen:' .. process, now)
  redis.call('pexpire', account, 3600000)
end
"""
# ARGV: now in ms, process, class of requests, ms of silence; requests and tokens of a minute and requests at once that
# are allowed (-1: all); tokens needed, share of rates that is left alone. Returns nothing where the request is let in,
# else the limit that has no room, what is left of it, and ms until there is room.
TAKE = (
    _limits
    + """
local class, silence = ARGV[3], tonumber(ARGV[4])
local limits = {requests = tonumber(ARGV[5]), tokens = tonumber(ARGV[6])}
local most, needed, kept = tonumber(ARGV[7]), {requests = 1, tokens = tonumber(ARGV[8])}, tonumber(ARGV[9])
local busy, fields = 0, redis.call('hgetall', account)
for i = 1, #fields, 2 do
  local whose = string.match(fields[i], '^seen:(.*)$')
  if whose and now - tonumber(fields[i + 1]) > silence then
    redis.call('hdel', account, fields[i], 'running:interactive:' .. whose, 'running:batch:' .. whose)
  elseif whose then
    busy = busy + number('running:' .. class .. ':' .. whose)
  end
end
if most >= 0 and busy >= most then return {'concurrency', 0, 0} end
for _, name in ipairs({'requests', 'tokens'}) do
  local limit = limits[name]
  if limit > 0 then
    local used = level(name, limit)
    local excess = used + math.min(needed[name] + kept * limit, limit) - limit
    if excess > 1e-9 * limit then
      return {name .. '_per_minute', math.max(math.floor(limit - used), 0), math.ceil(excess * 60000 / limit)}
    end
  end
end
use('requests', limits.requests, 1)
use('tokens', limits.tokens, needed.tokens)
redis.call('hincrby', account, 'running:' .. class .. ':' .. process, 1)
keep()
return {}
"""
)
# ARGV: now in ms, process, running requests of it: interactive, of batches; requests and tokens to add to what is used,
# and both limits of a minute (-1: none).
REPORT = (
    _limits
    + """
redis.call('hset', account, 'running:interactive:' .. process, ARGV[3])
redis.call('hset', account, 'running:batch:' .. process, ARGV[4])
use('requests', tonumber(ARGV[7]), tonumber(ARGV[5]))
use('tokens', tonumber(ARGV[8]), tonumber(ARGV[6]))
keep()
return 1
"""
)

SCRIPTS = (
    RECORD, FORGET, SAMPLE, PAGE, TOTAL, GET, CLAIM, SWAP, FREE, DROP, ALL_FIELDS, ENROL, NAME, ADD, TAKE, REPORT,
)  # fmt: skip
