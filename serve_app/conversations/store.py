"""Where conversations are kept: in this process, or in Redis for several Routers. Both behave the same.

Entries are only ever added, each in one step: requests of one conversation that run at once lose nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from serve_app.conversations.history import Entry, first_kept
from serve_app.service_schema import Conversations

logger = logging.getLogger(__name__)

_MOST_BYTES = 512 * 2**20
_CONNECT_S = 0.3
_ANSWER_S = 0.5
_ALTOGETHER_S = 1.0
_CONNECTIONS = 64
# A Redis that is gone costs a request now and then, not each one, the time it is waited for.
_REST_S = 1.0
_PREFIX = "switchyard:conversation:1"


class Unavailable(Exception):
    """The store cannot be reached. Chats go on without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A conversation. `head`: what is replaced, not added to: system messages, or a response."""

    head: bytes
    entries: tuple[Entry, ...]


class Store(Protocol):
    """Conversations by key. Everything raises `Unavailable`."""

    async def read(self, key: str) -> Kept | None:
        """What is kept, None if nothing is."""
        ...

    async def append(self, key: str, entries: Sequence[Entry], head: bytes | None = None) -> None:
        """Add entries, and replace the head if one is given; then drop what is beyond the limit."""
        ...

    async def delete(self, key: str) -> bool:
        """Forget it. False: there was nothing."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


def key_of(owner: str, kind: str, name: str) -> str:
    """The key of somebody's conversation: another owner's name never leads to it, and it says nothing of either."""
    digest = hashlib.blake2b(digest_size=20)
    for part in (owner, kind, name):
        raw = part.encode("utf-8", "replace")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


def store_of(settings: Conversations) -> Store:
    """The store that the configuration says."""
    return RedisStore(settings) if settings.redis_url else MemoryStore(settings)


@dataclasses.dataclass(slots=True)
class _Held:
    head: bytes = b""
    entries: list[bytes] = dataclasses.field(default_factory=list)
    ends_at: float = 0.0

    @property
    def size(self) -> int:
        return len(self.head) + sum(map(len, self.entries))


class MemoryStore:
    """The conversations of one process, for one event loop. Those unused for the longest go first."""

    def __init__(
        self,
        settings: Conversations,
        *,
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._most_bytes = most_bytes
        self._bytes = 0
        self._held: OrderedDict[str, _Held] = OrderedDict()

    async def read(self, key: str) -> Kept | None:
        """See `Store`."""
        held = self._alive(key)
        return Kept(held.head, tuple(map(Entry.decode, held.entries))) if held else None

    async def append(self, key: str, entries: Sequence[Entry], head: bytes | None = None) -> None:
        """See `Store`."""
        held = self._alive(key) or _Held()
        self._forget(key)
        known = {entry_id for _, _, entry_id in map(Entry.label, held.entries)}
        held.entries += [entry.encode() for entry in entries if entry.id not in known]
        sizes = [(tokens, continues) for tokens, continues, _ in map(Entry.label, held.entries)]
        del held.entries[: first_kept(sizes, self._settings.max_tokens)]
        held.head = held.head if head is None else head
        held.ends_at = self._clock() + self._settings.ttl_s
        self._held[key] = held
        self._bytes += held.size
        while len(self._held) > self._settings.max_conversations or self._bytes > self._most_bytes:
            self._forget(next(iter(self._held)))

    async def delete(self, key: str) -> bool:
        """See `Store`."""
        return bool(self._alive(key)) and self._forget(key)

    async def close(self) -> None:
        """See `Store`."""

    def _alive(self, key: str) -> _Held | None:
        held = self._held.get(key)
        if held is None:
            return None
        if held.ends_at <= self._clock():
            self._forget(key)
            return None
        self._held.move_to_end(key)
        return held

    def _forget(self, key: str) -> bool:
        held = self._held.pop(key, None)
        self._bytes -= held.size if held else 0
        return held is not None


# What `MemoryStore.append` does, in one step. An entry that is there already was added by a try before this one.
_APPEND = """
local function parts(entry)
  local tokens, continues, id = string.match(entry, '^(%d+):([01]):(%w+):')
  return tonumber(tokens), continues == '1', id
end
local entries, known = redis.call('LRANGE', KEYS[1], 0, -1), {}
for _, entry in ipairs(entries) do
  local _, _, id = parts(entry)
  known[id] = true
end
for i = 5, #ARGV do
  local _, _, id = parts(ARGV[i])
  if not known[id] then
    redis.call('RPUSH', KEYS[1], ARGV[i])
    entries[#entries + 1] = ARGV[i]
  end
end
local total, first = 0, nil
for i = #entries, 1, -1 do
  local tokens, continues = parts(entries[i])
  total = total + tokens
  if first and total > tonumber(ARGV[2]) then break end
  if not continues then first = i end
end
if first and first > 1 then redis.call('LTRIM', KEYS[1], first - 1, -1) end
if ARGV[3] == '1' then redis.call('SET', KEYS[2], ARGV[4]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
"""


class RedisStore:
    """Conversations in Redis, shared by all Routers. After a failure Redis is left alone for a moment."""

    def __init__(
        self, settings: Conversations, *, clock: Callable[[], float] = time.monotonic, rest_s: float = _REST_S
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._rest_s = rest_s
        self._rests_until = 0.0
        # The one more try is for a connection that broke while it was idle.
        pool = BlockingConnectionPool.from_url(
            settings.redis_url,
            max_connections=_CONNECTIONS,
            timeout=_ANSWER_S,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 1),
        )
        self._redis = Redis(connection_pool=pool)

    async def read(self, key: str) -> Kept | None:
        """See `Store`."""
        names = _names(key)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.lrange(names[0], 0, -1)
        pipeline.get(names[1])
        entries, head = await self._bounded(pipeline.execute)
        if not entries and head is None:
            return None
        try:
            return Kept(head or b"", tuple(map(Entry.decode, entries)))
        except ValueError:
            logger.error("conversations: somebody else wrote below %s in Redis", _PREFIX)
            raise Unavailable from None

    async def append(self, key: str, entries: Sequence[Entry], head: bytes | None = None) -> None:
        """See `Store`."""
        limits = [round(self._settings.ttl_s * 1000), self._settings.max_tokens]
        given: list[int | bytes] = [int(head is not None), head or b"", *(entry.encode() for entry in entries)]
        await self._bounded(lambda: self._redis.eval(_APPEND, 2, *_names(key), *limits, *given))

    async def delete(self, key: str) -> bool:
        """See `Store`."""
        return bool(await self._bounded(lambda: self._redis.delete(*_names(key))))

    async def close(self) -> None:
        """See `Store`."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _bounded(self, call: Callable[[], Any]) -> Any:
        if self._clock() < self._rests_until:
            raise Unavailable
        try:
            async with asyncio.timeout(_ALTOGETHER_S):
                return await call()
        except (RedisError, OSError, TimeoutError) as error:
            self._rests_until = self._clock() + self._rest_s
            logger.warning("conversations: Redis does not answer: %s", type(error).__name__)
            raise Unavailable from None


def _names(key: str) -> tuple[str, str]:
    """The list of entries and the head; the braces keep both on one node of a Redis cluster."""
    return f"{_PREFIX}:{{{key}}}:entries", f"{_PREFIX}:{{{key}}}:head"
