"""The service that is hurt: two Routers, two replicas of the hot model, a lazy one, Redis, batches, a small disk."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from serve_app.telemetry.audit import read_records
from tests.chaos.clients import WHOLE, Load, load
from tests.chaos.disk import SmallDisk, small_disk
from tests.chaos.report import Act
from tests.e2e.service import Service, running, wait_until
from tests.unit.redis_server import RedisServer, redis_server

ROUTERS, REPLICAS, PLACES = 2, 2, 24
KEYS = ("a-key", "b-key")
_CALM = 40
_CALM_DEADLINE_S = 60.0
_MORE_SOCKETS = 48


class Stage:
    """What is running, and how to get at its parts."""

    def __init__(self, service: Service, redis: RedisServer, disk: SmallDisk, batches: Path) -> None:
        self.service, self.redis, self.disk, self.batches = service, redis, disk, batches
        self.acts: list[Act] = []

    def warm_up(self) -> None:
        """Have every connection opened that the service keeps, so that it does not look like one that leaks."""
        with load(self.service.base_url, list(KEYS)) as clients:
            self._calm(clients, time.monotonic())
        self._nothing_left({})

    @contextlib.contextmanager
    def act(self, name: str) -> Iterator[tuple[Act, Load]]:
        """Do something while clients ask; before and after it they are answered, and afterwards nothing is left."""
        act = Act(name)
        before = {router.pid: router.num_fds() for router in self.routers()}
        with load(self.service.base_url, list(KEYS)) as clients:
            self._calm(clients, time.monotonic())
            yield act, clients
            self._calm(clients, time.monotonic())
        act.seen = clients.seen
        self.acts.append(act)
        print(f"\n{act.row()}")
        assert not [one for one in act.seen if not one.allowed], Counter(one.outcome for one in act.hurt)
        self._nothing_left(before)

    def _calm(self, clients: Load, since: float) -> None:
        wait_until(lambda: clients.answered_since(since) >= _CALM, _CALM_DEADLINE_S, "clients are answered")

    def _nothing_left(self, before: dict[int, int]) -> None:
        """No place, no key's slot and no socket is still taken, and every place of every replica can be had."""
        wait_until(lambda: self.in_flight() == 0, 10, "nothing is in flight")
        routers = self.routers()
        assert len(routers) == ROUTERS
        connections = self._connections(PLACES)
        body = {"model": "hot", "messages": [{"role": "user", "content": "fake[ttft_s=1.5,tokens=1]"}]}
        # Each Router gets as many at once as a key may have there, and together they take each place of the model.
        with ThreadPoolExecutor(len(connections)) as pool:
            answers = Counter(pool.map(lambda connection: _post(connection, body), connections))
        assert answers == {WHOLE: ROUTERS * PLACES}
        wait_until(lambda: self.in_flight() == 0, 10, "nothing is in flight")
        for router in routers:
            if router.pid in before:
                most = before[router.pid] + _MORE_SOCKETS
                wait_until(lambda router=router, most=most: router.num_fds() <= most, 10, "sockets are closed")

    def _connections(self, each: int) -> list[http.client.HTTPConnection]:
        """So many connections to each Router. The kernel says who gets one."""
        found: dict[int, list[http.client.HTTPConnection]] = {router.pid: [] for router in self.routers()}
        deadline = time.monotonic() + 20
        while any(len(some) < each for some in found.values()):
            assert time.monotonic() < deadline, "connections reach all Routers"
            fresh = {}
            for _ in range(each):
                connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=30)
                connection.connect()
                fresh[connection.sock.getsockname()[1]] = connection
            # Accepted when answered.
            for connection in fresh.values():
                connection.request("GET", "/health")
                connection.getresponse().read()
            for router in self.routers():
                for port in self.held_by(router) & fresh.keys():
                    if len(found[router.pid]) < each:
                        found[router.pid].append(fresh.pop(port))
            for connection in fresh.values():
                connection.close()
        return [connection for some in found.values() for connection in some]

    def in_flight(self) -> int:
        """Of all models."""
        return sum(int(self.ask(f"/v1/models/{model}")[1]["in_flight"]) for model in ("hot", "lazy"))

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        """Status and body."""
        status, _, answer = self.service.request(path, body, headers={"authorization": f"Bearer {KEYS[0]}"})
        return status, answer

    def _actors(self, deployment: str) -> list[psutil.Process]:
        assert self.service._process
        found = []
        for process in psutil.Process(self.service._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if "ServeReplica" in line and f":{deployment}" in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def routers(self) -> list[psutil.Process]:
        """Those that listen."""
        return [router for router in self._actors("Router") if self.service.port in _listens_on(router)]

    def engines(self, deployment: str = "Resident-hot") -> list[psutil.Process]:
        """Those that listen, which an engine does when it can answer."""
        return [engine for engine in self.service.engine_processes(deployment) if _listens_on(engine)]

    def replicas(self) -> list[psutil.Process]:
        """The processes of the hot model's replicas; their engines are their children."""
        return self._actors("Resident-hot")

    def held_by(self, router: psutil.Process) -> set[int]:
        """The clients' ports of the connections that a Router has."""
        connections = router.net_connections()
        return {one.raddr.port for one in connections if one.raddr and one.laddr.port == self.service.port}

    def all_there(self) -> bool:
        """Every Router listens, and every replica has an engine that answers."""
        return len(self.routers()) == ROUTERS and len(self.engines()) == REPLICAS

    def records(self) -> dict[str, dict[str, Any]]:
        """The audit by request."""
        return {record["request"]: record for record in read_records(self.disk.directory)}


def _listens_on(process: psutil.Process) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
    return set()


def _post(connection: http.client.HTTPConnection, body: dict[str, Any]) -> str:
    headers = {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    return WHOLE if answer.status == 200 else f"{answer.status} {json.loads(raw)['error']['code']}"


@contextlib.contextmanager
def stage(scratch: Path) -> Iterator[Stage]:
    """All of it, running."""
    models = [
        {
            "id": "hot",
            "tier": "resident",
            "context": 4096,
            "replicas": REPLICAS,
            "max_ongoing_requests": PLACES,
            # Nobody waits: a place that was lost is a refusal.
            "queue": {"size": 0},
            "fake": {"ttft_s": 0.02, "tpot_s": 0.01},
        },
        {"id": "lazy", "tier": "lazy", "context": 4096, "idle_unload_s": 600, "fake": {"load_s": 0.3, "tpot_s": 0.01}},
    ]
    keys = [
        {
            "id": key,
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "requests_per_minute": 1_000_000,
            "tokens_per_minute": 1_000_000_000,
            "max_concurrent": PLACES,
        }
        for key in KEYS
    ]
    with (
        small_disk(scratch / "audit") as disk,
        redis_server(scratch / "redis") as redis,
        running(
            models,
            router={"replicas": ROUTERS},
            security={"keys": keys, "redis_url": redis.url},
            conversations={"enabled": True, "redis_url": redis.url},
            batches={"directory": str(scratch / "batches"), "run_below_load": 0.9, "concurrency": 4},
            audit={"directory": str(disk.directory), "max_bytes": 2**20, "keep": 8},
        ) as service,
    ):
        yield Stage(service, redis, disk, scratch / "batches")
