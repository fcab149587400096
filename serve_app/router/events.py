"""`GET /v1/router/events`: what happens in this Router, as server-sent events for those who watch (docs/ui.md).

One task makes what all viewers are sent, twice a second, while there is one; nothing runs without. Viewers with the
same rights are a group, for which everything is made and serialised once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app import log
from serve_app.errors import ApiError, bad_request, unavailable
from serve_app.router.auth import CALLER, Caller, Keys
from serve_app.router.disconnect import ClientGone, while_connected
from serve_app.router.overview import Overview
from serve_app.router.reply import Reply
from serve_app.router.wire import WIRE, Wire
from serve_app.telemetry.traffic import STEP_S, Traffic

logger = logging.getLogger(__name__)

PATH = "/v1/router/events"
SSE = "text/event-stream"
# Requests at every beat, the rest at every second one: four events a second at most.
BEAT_S = 0.5
_FIRST_REQUESTS = 50
# A Router can end thousands of requests a second, and nobody reads them; their number is in the traffic.
_MORE_REQUESTS = 20
# A viewer that takes nothing for so many events is let go, and begins anew when it can.
_MOST_WAITING = 64
_RETRY_AFTER_S = 5.0
_BYE = b"event: bye\ndata: {}\n\n"

Pause = Callable[[float], Awaitable[None]]
# Whose requests are seen (None: everybody's), and which models (None: all).
_Rights = tuple[str | None, frozenset[str] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class About:
    """What a viewer is told first. `router`: which replica this is; `policy`: of the configuration."""

    version: str
    policy: str
    router: str


class _Viewer:
    """One connection: who it is, and what it is still to be sent."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.waiting: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.over = False

    def say(self, event: bytes) -> None:
        if self.over:
            return
        if len(self.waiting) >= _MOST_WAITING:
            self.waiting.clear()
            self.bye()
            return
        self.waiting.append(event)
        self.news.set()

    def bye(self) -> None:
        if not self.over:
            self.over = True
            self.waiting.append(_BYE)
            self.news.set()


class _Group:
    """Viewers with the same rights, and how far they were told."""

    def __init__(self, caller: Caller, about: About, overview: Overview, traffic: Traffic, now: float) -> None:
        self.caller = caller
        self.viewers: set[_Viewer] = set()
        self._about = about
        self._overview = overview
        self._traffic = traffic
        # Whose requests are seen; None: everybody's.
        self._key = None if caller.admin else caller.id
        self._told = traffic.taken
        self._seen = self._look()
        (self._newest,) = traffic.points(now, self._key)[-1:]
        self._welcome: bytes | None = None

    def welcome(self, now: float) -> bytes:
        """The first events of a viewer that comes now; made once for all that come between two beats."""
        if self._welcome is None:
            points = self._traffic.points(now, self._key)
            requests = self._traffic.latest(_FIRST_REQUESTS, self._key, until=self._told)
            self._welcome = b"".join(
                (self._hello(), self._models(now), _traffic_event(points), _event("requests", {"requests": requests}))
            )
        return self._welcome

    def beat(self, now: float, *, slow: bool) -> None:
        """Tell the viewers what is new. `slow`: it is time for models and traffic, too."""
        events = [*self._new_requests()]
        if slow:
            events += [*self._new_models(now), *self._new_points(now)]
        if events:
            self._welcome = None
        for event in events:
            for viewer in self.viewers:
                viewer.say(event)

    def _hello(self) -> bytes:
        caller, about = self.caller, self._about
        said = {
            "version": about.version,
            "policy": about.policy,
            "router": about.router,
            "admin": caller.admin,
            "default": self._overview.default_of(caller),
            "models": [model["id"] for model in self._seen["models"]],
        }
        return _event("hello", said)

    def _look(self) -> dict[str, Any]:
        return self._overview(self.caller, self._traffic.last_used)

    def _models(self, now: float) -> bytes:
        models = []
        for model in self._seen["models"]:
            said = dict(model)
            used_at = said.pop("used_at")
            ago = None if used_at is None else round(max(0.0, now - used_at), 1)
            models.append(said | {"last_used_s": 0 if said["running"] else ago})
        return _event("models", {**self._seen, "at": round(now, 3), "models": models})

    def _new_models(self, now: float) -> list[bytes]:
        seen = self._look()
        if seen == self._seen:
            return []
        self._seen = seen
        return [self._models(now)]

    def _new_points(self, now: float) -> list[bytes]:
        """The running step, and the last one that was told if that has got more since."""
        points = self._traffic.points(now, self._key, self._newest["t"])
        if points[0] == self._newest:
            points = points[1:]
        if not points:
            return []
        self._newest = points[-1]
        return [_traffic_event(points)]

    def _new_requests(self) -> list[bytes]:
        after, self._told = self._told, self._traffic.taken
        requests = self._traffic.latest(_MORE_REQUESTS, self._key, after)
        return [_event("requests", {"requests": requests})] if requests else []


class Feed:
    """The endpoint, and who watches: so many `viewers`.

    `most`: of them; 0: there is no feed here. `clock`: as in the audit's records.
    """

    def __init__(
        self,
        most: int,
        about: About,
        overview: Overview,
        traffic: Traffic,
        keys: Keys,
        *,
        clock: Callable[[], float] = time.time,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._most = most
        self._about = about
        self._overview = overview
        self._traffic = traffic
        self._keys = keys
        self._clock = clock
        self._pause = pause
        self._groups: dict[_Rights, _Group] = {}
        self.viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._beats = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire: Wire | None = scope.get(WIRE)
        reply = Reply(send, stream=True, wire=wire)
        try:
            once = self._asked_once(scope)
            if not once:
                self._check_places(scope[CALLER])
        except ApiError as error:
            reply.stream = False
            await reply.error(error)
            return
        if scope["method"] == "HEAD":
            await reply.start(200, SSE.encode())
            await reply.end()
        elif once:
            await reply.start(200, SSE.encode())
            await reply.chunk(self._group_of(scope[CALLER]).welcome(self._clock()))
            self._tidy()
            await reply.end()
        else:
            await self._watched(_Viewer(scope[CALLER]), receive, reply)

    def _asked_once(self, scope: Scope) -> bool:
        """Whether the state of now is wanted, and no more. Raises `ApiError`."""
        if not self._most:
            raise ApiError(404, "There is no feed here; see router.viewers.", code="events_off")
        once = Request(scope).query_params.get("once", "false")
        if once not in ("true", "false"):
            raise bad_request("`once` is true or false.", "once")
        return once == "true"

    def _check_places(self, caller: Caller) -> None:
        """Raise `ApiError` (503) where there are viewers enough. The last quarter of the places is for operators."""
        if self.viewers >= (self._most if caller.admin else self._most - self._most // 4):
            raise unavailable(
                f"{self.viewers} viewers watch already; see router.viewers.",
                code="too_many_viewers",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def _watched(self, viewer: _Viewer, receive: Receive, reply: Reply) -> None:
        """Have a viewer watch until it leaves or is sent away."""
        self.viewers += 1
        try:
            await reply.start(200, SSE.encode())
            if reply.wire:
                reply.wire.closing = viewer.bye
            await while_connected(reply.wire, receive, self._watch(viewer, reply))
        except ClientGone:
            pass
        finally:
            self.viewers -= 1
            if reply.wire:
                reply.wire.closing = None

    async def _watch(self, viewer: _Viewer, reply: Reply) -> None:
        group = self._group_of(viewer.caller)
        group.viewers.add(viewer)
        try:
            if self._closed or (reply.wire and reply.wire.closes):
                viewer.bye()
            else:
                viewer.say(group.welcome(self._clock()))
                self._task = self._task or asyncio.create_task(self._run())
            while not (viewer.over and not viewer.waiting):
                await viewer.news.wait()
                viewer.news.clear()
                events = b"".join(viewer.waiting)
                viewer.waiting.clear()
                await reply.chunk(events)
            await reply.end()
        finally:
            group.viewers.discard(viewer)
            self._tidy()

    def _group_of(self, caller: Caller) -> _Group:
        rights = _rights(caller)
        if rights not in self._groups:
            self._groups[rights] = _Group(caller, self._about, self._overview, self._traffic, self._clock())
        return self._groups[rights]

    def _tidy(self) -> None:
        """Forget groups without viewers; the beat ends with the last of them."""
        self._groups = {rights: group for rights, group in self._groups.items() if group.viewers}
        if not self._groups and self._task:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._pause(BEAT_S)
            try:
                self._beat()
            except Exception as error:
                log.fault(logger, error)
                self._bye(lambda viewer: True)

    def _beat(self) -> None:
        self._beats += 1
        slow = self._beats % 2 == 0
        if slow:
            callers = {viewer.caller.id: viewer.caller for viewer in self._everybody()}
            changed = {key for key, caller in callers.items() if not self._still_may(caller)}
            self._bye(lambda viewer: viewer.caller.id in changed)
        now = self._clock()
        for group in self._groups.values():
            group.beat(now, slow=slow)

    def _still_may(self, caller: Caller) -> bool:
        """Whether the key is still there, and may what it might when its viewers came."""
        now = self._keys.named(caller.id)
        return now is not None and _rights(now) == _rights(caller)

    def _everybody(self) -> list[_Viewer]:
        return [viewer for group in self._groups.values() for viewer in group.viewers]

    def _bye(self, whom: Callable[[_Viewer], bool]) -> None:
        for viewer in self._everybody():
            if whom(viewer):
                viewer.bye()

    def close(self) -> None:
        """Tell the viewers to come again: another app takes over, or the Router ends."""
        self._closed = True
        self._bye(lambda viewer: True)


def _rights(caller: Caller) -> _Rights:
    """Callers of whom these are equal see the same."""
    return None if caller.admin else caller.id, caller.models


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def _traffic_event(points: list[dict[str, Any]]) -> bytes:
    return _event("traffic", {"step_s": STEP_S, "points": points})
