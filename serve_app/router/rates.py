"""The rates of API keys: exact in one Router; over all Routers where Redis keeps the counts."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import redis.asyncio

from serve_app.admission.rates import WINDOW_S, Room, Sliding
from serve_app.errors import ApiError
from serve_app.router.auth import Caller
from serve_app.router.reply import retry_after
from serve_app.router.tally import Tally
from serve_app.service_schema import Anonymous, ApiKey

logger = logging.getLogger(__name__)

_REDIS_TIMEOUT_S = 0.25
# A Redis that hangs must not cost every request its time-out.
_REDIS_PAUSE_S = 2.0
# One sorted set for each key and kind: members `id:amount`, scored by when they came. Redis runs it as one step, for
# both kinds at once: what one of them refuses must not use up the other. ARGV: window, id, then limit and amount each.
_TAKE = """
local t = redis.call('TIME')
local now = tonumber(t[1]) + tonumber(t[2]) / 1e6
local window, fits, found = tonumber(ARGV[1]), true, {}
for k = 1, #KEYS do
  local limit, amount = tonumber(ARGV[1 + 2 * k]), tonumber(ARGV[2 + 2 * k])
  redis.call('ZREMRANGEBYSCORE', KEYS[k], '-inf', now - window)
  local used, wait, entries = 0, 0, redis.call('ZRANGE', KEYS[k], 0, -1, 'WITHSCORES')
  for i = 1, #entries, 2 do used = used + tonumber(string.match(entries[i], ':(%d+)$')) end
  if used + amount > limit and used > 0 then
    local over = used + math.min(amount, limit) - limit
    for i = 1, #entries, 2 do
      over = over - tonumber(string.match(entries[i], ':(%d+)$'))
      wait = tonumber(entries[i + 1]) + window - now
      if over <= 0 then break end
    end
    fits = false
  end
  local reset = 0
  if #entries > 0 then reset = tonumber(entries[#entries]) + window - now end
  found[k] = {used, tostring(wait), tostring(reset)}
end
if fits then
  for k = 1, #KEYS do
    local amount = tonumber(ARGV[2 + 2 * k])
    redis.call('ZADD', KEYS[k], now, ARGV[2] .. ':' .. amount)
    redis.call('EXPIRE', KEYS[k], math.ceil(window))
    found[k] = {found[k][1] + amount, '0', tostring(window)}
  end
end
return found
"""
_SETTLE = """
local score = redis.call('ZSCORE', KEYS[1], ARGV[1] .. ':' .. ARGV[2])
if score then
  redis.call('ZREM', KEYS[1], ARGV[1] .. ':' .. ARGV[2])
  redis.call('ZADD', KEYS[1], score, ARGV[1] .. ':' .. ARGV[3])
end
"""


@dataclasses.dataclass(slots=True)
class _Key:
    """What one key used in this Router."""

    requests: Sliding | None
    tokens: Sliding | None


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What a request has used up; its tokens are settled when they are known."""

    caller: str
    guessed: int
    at: float
    member: str | None


class Rates:
    """Takes from the rates of callers, and says so in headers as OpenAI does."""

    def __init__(self, redis_url: str = "") -> None:
        self._keys: dict[tuple[str, int | None, int | None], _Key] = {}
        self._concurrent: Counter[str] = Counter()
        self._redis: Any = None
        self._redis_again_at = 0.0
        if redis_url:
            self._redis = redis.asyncio.Redis.from_url(
                redis_url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
            )

    async def close(self) -> None:
        """Close the connection to Redis."""
        if self._redis is not None:
            await self._redis.aclose()

    @contextlib.contextmanager
    def at_once(self, caller: Caller) -> Iterator[None]:
        """Count one request of the caller. Raises `ApiError` (429) where it has too many under way."""
        limit = caller.limits.max_concurrent
        if limit is not None and self._concurrent[caller.id] >= limit:
            raise ApiError(
                429,
                f"This key has {limit} requests under way, which is its limit.",
                code="concurrency_limit_exceeded",
                retry_after_s=1,
            )
        self._concurrent[caller.id] += 1
        try:
            yield
        finally:
            self._concurrent[caller.id] -= 1
            if not self._concurrent[caller.id]:
                del self._concurrent[caller.id]

    async def take(self, caller: Caller, tokens: int, out: MutableMapping[str, str]) -> Taken | None:
        """Use up one request and about so many tokens. Raises `ApiError` (429); None where there are no limits."""
        limits = caller.limits
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return None
        if self._redis is not None and time.monotonic() >= self._redis_again_at:
            try:
                return await self._take_shared(caller, tokens, out)
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                self._redis_again_at = time.monotonic() + _REDIS_PAUSE_S
                # Rather this Router's own count than no service, or no limit.
                logger.warning("Redis did not answer for rates: %s", type(error).__name__)
        if self._redis is not None:
            out["x-router-rates"] = "this router's own; Redis is away"
        now = time.monotonic()
        key = self._key(caller.id, limits)
        wanted = [(key.requests, "requests", 1), (key.tokens, "tokens", tokens)]
        rooms = {kind: sliding.look(amount, now) for sliding, kind, amount in wanted if sliding}
        if all(room.fits for room in rooms.values()):
            # All or none: what one of them refuses must not use up the other.
            rooms = {kind: sliding.take(amount, now) for sliding, kind, amount in wanted if sliding}
        _check(rooms, out)
        return Taken(caller.id, tokens, now, None)

    async def settle(self, caller: Caller, taken: Taken | None, tally: Tally) -> None:
        """Replace the guess by what it was: nothing, where no engine answered."""
        tokens = tally.total
        if taken is None or caller.limits.tokens_per_minute is None or tokens == taken.guessed:
            return
        if tally.first_at is not None and not tokens:
            return  # cut off before the engine had counted
        if taken.member is not None:
            await self._settle_shared(caller, taken, tokens)
        elif (key := self._key(caller.id, caller.limits)).tokens:
            key.tokens.settle(taken.at, taken.guessed, tokens)

    def _key(self, caller: str, limits: ApiKey | Anonymous) -> _Key:
        name = (caller, limits.requests_per_minute, limits.tokens_per_minute)
        if name not in self._keys:
            requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
            self._keys[name] = _Key(Sliding(requests) if requests else None, Sliding(tokens) if tokens else None)
        return self._keys[name]

    async def _take_shared(self, caller: Caller, tokens: int, out: MutableMapping[str, str]) -> Taken:
        member = uuid.uuid4().hex
        limits = caller.limits
        asked = [("requests", limits.requests_per_minute, 1), ("tokens", limits.tokens_per_minute, tokens)]
        wanted = [(kind, limit, amount) for kind, limit, amount in asked if limit is not None]
        numbers = [number for _, limit, amount in wanted for number in (limit, amount)]
        names = [_name(caller, kind) for kind, _, _ in wanted]
        found = await self._redis.eval(_TAKE, len(names), *names, WINDOW_S, member, *numbers)
        rooms = {
            kind: Room(limit, max(0, limit - int(used)), float(reset), float(wait))
            for (kind, limit, _), (used, wait, reset) in zip(wanted, found, strict=True)
        }
        _check(rooms, out)
        return Taken(caller.id, tokens, 0.0, member)

    async def _settle_shared(self, caller: Caller, taken: Taken, tokens: int) -> None:
        if time.monotonic() < self._redis_again_at:
            return
        with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
            await self._redis.eval(_SETTLE, 1, _name(caller, "tokens"), taken.member, taken.guessed, tokens)


def _name(caller: Caller, kind: str) -> str:
    # In braces: a Redis cluster keeps both kinds in one place.
    return f"switchyard:rate:{{{caller.id}}}:{kind}"


def _check(rooms: Mapping[str, Room], out: MutableMapping[str, str]) -> None:
    """Say what is left, and refuse where something does not fit, for as long as the one that takes longest."""
    for kind, room in rooms.items():
        out[f"x-ratelimit-limit-{kind}"] = str(room.limit)
        out[f"x-ratelimit-remaining-{kind}"] = str(room.remaining)
        out[f"x-ratelimit-reset-{kind}"] = f"{room.reset_s:.3f}s"
    kind, room = max(rooms.items(), key=lambda item: item[1].retry_after_s)
    if not room.fits:
        raise ApiError(
            429,
            f"This key's limit of {room.limit} {kind} a minute is used up; in {retry_after(room.retry_after_s)} s"
            " this request would fit.",
            code="rate_limit_exceeded",
            retry_after_s=room.retry_after_s,
        )
