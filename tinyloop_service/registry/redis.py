"""The registry that replicas share: Redis 6 or newer.

Keys of a realm R, all in one slot of a cluster; a member is TENANT NUL NAME:

    tinyloop:{R}:records    hash   member → record
    tinyloop:{R}:etags      hash   member → etag
    tinyloop:{R}:index      zset   members in the order of their bytes
    tinyloop:{R}:expiries   zset   member → expire time in ms, for `purge`
    tinyloop:{R}:changes    zset   NUMBER NUL member → number, of the last MAX_LOG changes and the one before
    tinyloop:{R}:news       channel, told of each change

Each change is one script, so it is whole or not at all.  How much "durable" means is Redis's own setting: with
`appendonly yes` and `appendfsync always` an answered change has reached the disk.  A write is sent once: after a lost
connection nobody knows what became of it, and the caller is told so.  A read is tried again on a new connection.

A change's number is the time in µs, or one more than the last: so a Redis that was emptied, started with older data, or
replaced by one that had not heard of the last changes never gives the number of a lost change to another.  A replica
asks for what came after the last number that it saw.  Where that number is not among the changes, too old or lost, it
is told to look at all names, so nothing that it knows of a lost change stays, however many were lost and made since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import structlog

from tinyloop_service.errors import InvalidArgument, RegistryUnavailable, install
from tinyloop_service.registry.api import Changes, Key, Realm
from tinyloop_service.registry.record import decode, decode_all, encode
from tinyloop_service.types import PrefixRecord

try:
    from redis import asyncio as client
    from redis import exceptions
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ModuleNotFoundError:
    raise InvalidArgument("registry", f"redis:// needs the package redis: {install('redis')}") from None

T = TypeVar("T")
MAX_LOG = 10_000  # changes that are told one by one; who is further behind looks at all names
_TIMEOUT_S = 1.0  # for a connection, and for an answer
_CONNECTIONS = 16
_PURGED_AT_ONCE = 1000
_UNREACHABLE = "the server's registry of names does not answer; try again in a moment"
_PARTS = ("records", "etags", "index", "expiries", "changes")
_log = structlog.get_logger("tinyloop.registry")

# KEYS: _PARTS.  Common to both changes: compare, count, tell.
_COMPARE = """
if (redis.call('HGET', KEYS[2], ARGV[1]) or '') ~= ARGV[2] then return 0 end
"""
_LAST = """
local last = tonumber(redis.call('ZREVRANGE', KEYS[5], 0, 0, 'WITHSCORES')[2] or 0)
"""
_TELL = f"""{_LAST}
local time = redis.call('TIME')
local number = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
redis.call('ZADD', KEYS[5], number, number .. '\\0' .. ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -2 - ARGV[4])
redis.call('PUBLISH', ARGV[3], number)
return 1
"""
# ARGV: member, expected etag ('' for none), channel, MAX_LOG, and for a write: etag, record, expiry in ms or ''
_WRITE = f"""{_COMPARE}
redis.call('HSET', KEYS[1], ARGV[1], ARGV[6])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[5])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
if ARGV[7] == '' then redis.call('ZREM', KEYS[4], ARGV[1]) else redis.call('ZADD', KEYS[4], ARGV[7], ARGV[1]) end
{_TELL}"""
_DROP = """
redis.call('HDEL', KEYS[1], {0}) redis.call('HDEL', KEYS[2], {0})
redis.call('ZREM', KEYS[3], {0}) redis.call('ZREM', KEYS[4], {0})
"""
_REMOVE = f"""{_COMPARE}{_DROP.format("ARGV[1]")}{_TELL}"""
# ARGV: time in ms, most at a time.  No news: everybody knows by the record that its time is over.
_PURGE = f"""
local members = redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(members) do {_DROP.format("member")} end
return #members
"""
# ARGV: position, -1 for "now".  Answers: last, whether all may have changed, then member and etag of each that did.
_CHANGES = f"""{_LAST}
local since = tonumber(ARGV[1])
if since < 0 or since == last then return {{last, 0}} end
local found = redis.call('ZRANGEBYSCORE', KEYS[5], ARGV[1], '+inf')
local seen = ARGV[1] .. '\\0'
if string.sub(found[1] or '', 1, #seen) ~= seen then return {{last, 1}} end
local answer = {{last, 0}}
for i = 2, #found do
  local member = string.match(found[i], '%z(.*)')
  answer[#answer + 1] = member
  answer[#answer + 1] = redis.call('HGET', KEYS[2], member) or ''
end
return answer
"""


class RedisRegistry:
    """One realm in one Redis.  Make it with `open`."""

    is_shared = True

    def __init__(self, url: str, realm: Realm) -> None:
        pool = client.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = client.Redis.from_pool(pool)
        self._news: Any = None  # the subscription, while there is one
        base = f"tinyloop:{{{realm}}}:"
        self._keys = [base + part for part in _PARTS]
        self._channel = base + "news"
        self._write, self._remove, self._purge, self._changes = map(
            self._redis.register_script, (_WRITE, _REMOVE, _PURGE, _CHANGES)
        )

    @classmethod
    async def open(cls, url: str, realm: Realm) -> Self:
        """Raises InvalidArgument when Redis refuses us, RegistryUnavailable when it does not answer (yet)."""
        try:
            registry = cls(url, realm)
        except ValueError as error:  # says nothing of passwords
            raise InvalidArgument("registry", f"no address of a Redis: {error}") from None
        try:
            await registry._check()
        except BaseException:
            await registry.close()
            raise
        return registry

    async def read(self, tenant: str, name: str) -> PrefixRecord | None:
        text = await self._reading(lambda: self._redis.hget(self._keys[0], _member(tenant, name)))
        return decode(text) if text is not None else None

    async def write(self, record: PrefixRecord, *, replaces: str | None) -> bool:
        expiry = "" if record.expire_time_ns is None else record.expire_time_ns // 10**6
        member = _member(record.tenant, record.name)
        with _mapped():
            given: list[Any] = [member, replaces or "", self._channel, MAX_LOG, record.etag, encode(record), expiry]
            return bool(await self._write(keys=self._keys, args=given))

    async def remove(self, tenant: str, name: str, *, etag: str) -> bool:
        with _mapped():
            given: list[Any] = [_member(tenant, name), etag, self._channel, MAX_LOG]
            return bool(await self._remove(keys=self._keys, args=given))

    async def page(self, tenant: str, *, after: str, limit: int) -> list[PrefixRecord]:
        first, last = b"(" + _member(tenant, after), b"(" + tenant.encode() + b"\1"
        found: list[PrefixRecord] = []
        while len(found) < limit:
            wanted = (first, last, limit - len(found))
            members = await self._reading(lambda w=wanted: self._redis.zrangebylex(self._keys[2], w[0], w[1], 0, w[2]))  # type: ignore[misc]
            if not members:
                break
            texts = await self._reading(lambda m=members: self._redis.hmget(self._keys[0], m))  # type: ignore[misc]
            found += decode_all(text for text in texts if text is not None)  # None: removed between the two calls
            first = b"(" + members[-1]
        return found

    async def changes(self, since: int | None) -> Changes:
        position = -1 if since is None else since
        last, all_changed, *rest = await self._reading(lambda: self._changes(keys=self._keys, args=[position]))
        etags = {_key(member): etag.decode() or None for member, etag in zip(rest[::2], rest[1::2], strict=True)}
        return Changes(last, None if all_changed else etags)

    async def wait(self, limit_s: float) -> None:
        try:
            if self._news is None:
                self._news = self._redis.pubsub()
                await self._news.subscribe(self._channel)
            if await self._news.get_message(ignore_subscribe_messages=True, timeout=limit_s) is None:
                return
            while await self._news.get_message(ignore_subscribe_messages=True, timeout=0.0) is not None:
                pass  # one look is enough for all that was told so far
        except (exceptions.RedisError, OSError):
            await self._unsubscribe()
            await asyncio.sleep(limit_s)

    async def purge(self, before_ns: int) -> None:
        with _mapped():
            while await self._purge(keys=self._keys, args=[before_ns // 10**6, _PURGED_AT_ONCE]) == _PURGED_AT_ONCE:
                pass

    async def close(self) -> None:
        await self._unsubscribe()
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    # ---- helpers

    async def _check(self) -> None:
        """That it lets us in; what may lose names is worth a warning."""
        facts: dict[str, Any] = {}
        try:
            await self._redis.ping()
            with suppress(exceptions.NoPermissionError):
                facts = await self._redis.info()
        except (exceptions.AuthenticationError, exceptions.ResponseError) as error:
            raise InvalidArgument("registry", f"Redis refuses: {error}") from None
        except (exceptions.RedisError, OSError) as error:
            raise RegistryUnavailable(_UNREACHABLE) from error
        if facts and not facts.get("aof_enabled"):
            _log.warning("names may be lost when Redis ends", way_out="set appendonly yes, appendfsync always")
        if str(facts.get("maxmemory_policy", "")).startswith("allkeys"):
            _log.warning("Redis may evict names", way_out="set maxmemory-policy noeviction or volatile-lru")

    async def _reading(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """A connection that broke while it was idle is no reason to give up."""
        try:
            return await work()
        except (exceptions.ConnectionError, OSError):
            with _mapped():
                return await work()
        except exceptions.RedisError as error:
            raise RegistryUnavailable(_UNREACHABLE) from error

    async def _unsubscribe(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            await news.aclose()


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except (exceptions.RedisError, OSError) as error:
        if isinstance(error, exceptions.ResponseError):  # it is there, but full, or a replica that takes no writes
            _log.error("Redis refuses", error=str(error))
        raise RegistryUnavailable(_UNREACHABLE) from error


def _member(tenant: str, name: str) -> bytes:
    return f"{tenant}\0{name}".encode()


def _key(member: bytes) -> Key:
    tenant, _, name = member.decode().partition("\0")
    return tenant, name
