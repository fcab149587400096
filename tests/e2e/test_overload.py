"""Ten times more than the engines can do, through `serve run`: who is served, who is refused, and what is left after.

`pytest tests/e2e/test_overload.py -s --overload-seconds 180` is the long run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from serve_app.telemetry.audit import read_records
from tests.e2e.service import Service, running, wait_until

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"

OVERLOAD_S = 15.0
WARM_UP_S = 3.0
# Two replicas of four places, a second for each answer.
PLACES, SERVICE_S = 8, 1.0
CAPACITY = PLACES / SERVICE_S
FACTOR = 10
# Of all requests: the important ones alone are less than the capacity.
GOLD_SHARE, STREAM_SHARE, LEAVER_SHARE = 1 / 16, 0.5, 0.3
QUICKLY_S = 0.05
MORE_SOCKETS, MORE_RSS_BYTES = 24, 64e6


@dataclasses.dataclass(slots=True)
class Seen:
    """One request as its client saw it; status 0: it left. `whole`: it got its answer to the end."""

    key: str
    stream: bool
    status: int = 0
    seconds: float = 0.0
    whole: bool = False
    retry_after: str = ""


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}-key"}


async def _ask(session: aiohttp.ClientSession, seen: Seen) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": seen.stream}
    if seen.key == "gold":
        body["priority"] = 10
    began = time.monotonic()
    async with session.post(CHAT, json=body, headers=_bearer(seen.key)) as answer:
        raw = await answer.read()
        seen.status, seen.retry_after = answer.status, answer.headers.get("retry-after", "")
    seen.seconds = time.monotonic() - began
    ending = b"data: [DONE]\n\n" if seen.stream else b"}"
    seen.whole = seen.status == 200 and raw.endswith(ending) and b'"error"' not in raw


async def _client(session: aiohttp.ClientSession, seen: Seen, leaves_after_s: float) -> None:
    try:
        async with asyncio.timeout(leaves_after_s):
            await _ask(session, seen)
    except TimeoutError:
        seen.status = 0


async def _flood(url: str, seconds: float) -> list[Seen]:
    """Ten times the capacity, evenly spread, whatever is answered."""
    chance = random.Random(7)
    found, running_ = [], []
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.monotonic()
        for number in range(int(CAPACITY * FACTOR * seconds)):
            await asyncio.sleep(max(0.0, began + number / (CAPACITY * FACTOR) - time.monotonic()))
            seen = Seen("gold" if chance.random() < GOLD_SHARE else "plain", chance.random() < STREAM_SHARE)
            leaves = chance.uniform(0.02, 0.9) if chance.random() < LEAVER_SHARE else 60.0
            found.append(seen)
            running_.append(asyncio.create_task(_client(session, seen, leaves)))
        await asyncio.gather(*running_)
    return found


async def _unloaded(url: str) -> list[float]:
    """Latencies of answers that nothing is in the way of: half of the places are taken."""
    found = [Seen("plain", number % 2 == 0) for number in range(24)]
    async with aiohttp.ClientSession(url) as session:
        for start in range(0, len(found), PLACES // 2):
            await asyncio.gather(*(_ask(session, seen) for seen in found[start : start + PLACES // 2]))
    assert all(seen.whole for seen in found)
    return [seen.seconds for seen in found]


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _router(service: Service) -> psutil.Process:
    assert service._process
    (found,) = [
        process
        for process in psutil.Process(service._process.pid).children(recursive=True)
        if "ServeReplica" in (line := " ".join(process.cmdline())) and line.rstrip().endswith(":Router")
    ]
    return found


def _models(replicas: int = 2) -> list[dict[str, Any]]:
    return [
        {
            "id": "hot",
            "tier": "resident",
            "context": 4096,
            "replicas": replicas,
            "max_ongoing_requests": PLACES // replicas,
            "queue": {"size": 6, "wait_s": 0.7},
            "fake": {"tokens": 10, "ttft_s": SERVICE_S / 10, "tpot_s": SERVICE_S / 10},
        }
    ]


def _keys() -> list[dict[str, Any]]:
    return [
        {"id": name, "sha256": hashlib.sha256(f"{name}-key".encode()).hexdigest(), "max_priority": most}
        for name, most in (("gold", 10), ("plain", 0))
    ]


def _in_flight(service: Service) -> int:
    status, _, card = service.request("/v1/models/hot", headers=_bearer("plain"))
    assert status == 200
    return int(card["in_flight"])


@pytest.fixture(scope="module")
def trail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the audit records go."""
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def service(trail: Path) -> Iterator[Service]:
    with running(_models(), security={"keys": _keys()}, audit={"sink": "file", "directory": str(trail)}) as service:
        yield service


@pytest.mark.case(22)
@pytest.mark.usefixtures("alone")
def test_ten_times_the_capacity_harms_nobody_who_is_let_in(
    request: pytest.FixtureRequest, service: Service, trail: Path
) -> None:
    seconds = request.config.getoption("--overload-seconds", default=None) or OVERLOAD_S
    unloaded_p99 = _percentile(asyncio.run(_unloaded(service.base_url)), 0.99)
    asyncio.run(_flood(service.base_url, WARM_UP_S))
    wait_until(lambda: _in_flight(service) == 0, 10, "nothing is in flight")
    router = _router(service)
    before_sockets, before_rss = router.num_fds(), router.memory_info().rss
    before_threads = router.num_threads()
    records = len(list(read_records(trail)))

    found = asyncio.run(_flood(service.base_url, seconds))

    wait_until(lambda: _in_flight(service) == 0, 10, "nothing is in flight after the flood")
    wait_until(lambda: router.num_fds() <= before_sockets + MORE_SOCKETS, 20, "the sockets are closed")
    after_sockets, after_rss = router.num_fds(), router.memory_info().rss
    assert len(asyncio.run(_unloaded(service.base_url))) == 24  # all is as it was
    wait_until(lambda: len(list(read_records(trail))) >= records + 24, 10, "the records are written")
    recorded = len(list(read_records(trail))) - records - 24

    accepted = [seen for seen in found if seen.status == 200]
    refused = [seen for seen in found if seen.status not in (0, 200)]
    share = {
        key: len([seen for seen in accepted if seen.key == key])
        / len([seen for seen in found if seen.key == key and seen.status])
        for key in ("gold", "plain")
    }
    latencies = [seen.seconds for seen in accepted]
    refusals = [seen.seconds for seen in refused]
    print(
        f"\n{len(found)} requests in {seconds:g} s, {Counter(seen.status for seen in found)}"
        f"\nunloaded p99 {unloaded_p99:.2f} s; accepted p50 {_percentile(latencies, 0.5):.2f} s,"
        f" p99 {_percentile(latencies, 0.99):.2f} s; gold p99"
        f" {_percentile([seen.seconds for seen in accepted if seen.key == 'gold'], 0.99):.2f} s"
        f"\nrefusals p50 {_percentile(refusals, 0.5) * 1000:.1f} ms, p90 {_percentile(refusals, 0.9) * 1000:.1f} ms,"
        f" p99 {_percentile(refusals, 0.99) * 1000:.1f} ms"
        f"\naccepted: gold {share['gold']:.1%}, plain {share['plain']:.1%};"
        f" {len(accepted) / seconds:.1f} answers/s of {CAPACITY:g}"
        f"\nrouter: fds {before_sockets} -> {after_sockets}, threads {before_threads},"
        f" RSS {before_rss / 1e6:.0f} -> {after_rss / 1e6:.0f} MB; {recorded} audit records"
    )
    assert all(seen.whole for seen in accepted)
    assert {seen.status for seen in refused} == {503}
    assert all(int(seen.retry_after) >= 1 for seen in refused)
    assert _percentile(latencies, 0.99) <= 2 * unloaded_p99
    assert _percentile(refusals, 0.5) < QUICKLY_S
    assert share["gold"] > 0.95
    assert share["plain"] < 0.3
    # Leavers take places, too; the others must not stay empty.
    assert len(accepted) / seconds > 0.5 * CAPACITY
    assert after_rss - before_rss < MORE_RSS_BYTES
    assert recorded >= 0.98 * len(found)
