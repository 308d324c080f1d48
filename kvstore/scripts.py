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

SCRIPTS = (RECORD, FORGET, SAMPLE, PAGE, TOTAL, GET, CLAIM, SWAP, FREE, DROP, ALL_FIELDS, ENROL, NAME, ADD)
