"""What is done to the cluster while clients stream. Each drill says when it was done and when all was there again."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from tests.chaos.clients import Load
from tests.chaos.report import Act
from tests.cluster_sim.deployment import HOT, HOT_MAX, HOT_MIN, NODES, ROUTER, Deployed, Placed
from tests.cluster_sim.streams import streams
from tests.cluster_sim.verdict import Killed, as_json, broken_promises
from tests.e2e.fake_cluster import FakeCluster, kill
from tests.e2e.service import meanwhile, wait_until

HEAL_DEADLINE_S = 180.0
# What is answered before something is done, and after all is there again.
_CALM = 40
_WATCH_S = 0.5


class Nodes:
    """How many GPU nodes there were, one after the other, as Ray says."""

    def __init__(self, service: Deployed) -> None:
        self._service = service
        self._seen: list[int] = []

    def look(self) -> None:
        """Look now."""
        # Without a head nobody knows.
        with contextlib.suppress(OSError):
            count = len(self._service.nodes())
            if self._seen[-1:] != [count]:
                self._seen.append(count)

    def __str__(self) -> str:
        return " → ".join(map(str, self._seen))


class Simulation:
    """A cluster with the service on it, and the report of what was done."""

    def __init__(self, cluster: FakeCluster, service: Deployed, seconds: float) -> None:
        self.cluster, self.service, self._seconds = cluster, service, seconds
        self.results: list[dict[str, Any]] = []
        self.broken: list[str] = []

    @contextlib.contextmanager
    def act(self, name: str) -> Iterator[tuple[Act, Load, list[Killed]]]:
        """Clients stream for so long, and are answered before and after what is done. It may put down what it kills.

        Until something is done, times count from the begin of the load.
        """
        act, killed, late = Act(name), [], []
        nodes = Nodes(self.service)
        with meanwhile(nodes.look, _WATCH_S), streams(self.service.base_url) as clients:
            act.strikes()
            began = act.struck_at
            try:
                self._calm(clients, began)
                yield act, clients, killed
                self._calm(clients, time.monotonic())
                wait_until(lambda: time.monotonic() - began > self._seconds, self._seconds, "the time is over")
            except AssertionError as error:
                late.append(str(error))
        act.seen = clients.seen
        act.notes.append(f"GPU nodes {nodes}")
        self._report(act, killed[0] if killed else None, late)

    def _calm(self, clients: Load, since: float) -> None:
        wait_until(lambda: clients.answered_since(since) >= _CALM, HEAL_DEADLINE_S, "clients are answered")

    def _report(self, act: Act, killed: Killed | None, late: list[str]) -> None:
        records = self.service.records()
        replicas = {one.id: records.get(one.id, {}).get("replica") for one in act.seen}
        broken = [*late, *broken_promises(act, killed, replicas)]
        act.notes.append(f"{sum(map(act.after, act.hurt))} failed after that")
        self.results.append(as_json(act, broken, replicas))
        print(act.row(), flush=True)
        for promise in broken:
            self.not_met(f"{act.name}: {promise}")

    def not_met(self, promise: str) -> None:
        """Put down what did not hold."""
        self.broken.append(promise)
        print(f"NOT MET: {promise}", flush=True)

    def placed(self, deployment: str, state: str = "RUNNING") -> list[Placed]:
        """The replicas of a deployment in this state."""
        return [one for one in self.service.placed() if (one.deployment, one.state) == (deployment, state)]

    def healed(self, act: Act, whole: Callable[[], object]) -> None:
        """Wait until all is there again."""
        wait_until(whole, HEAL_DEADLINE_S, "all is there again")
        act.healed()


def scale(simulation: Simulation) -> None:
    """Nodes come for the service, another one for its load, and that goes when the load ends."""
    service = simulation.service
    with simulation.act("load comes and ends") as (act, _, __):
        simulation.healed(act, lambda: service.complete(HOT_MAX) and len(service.nodes()) == NODES.count)
    ended = time.monotonic()
    wait_until(
        lambda: len(simulation.placed(HOT)) == HOT_MIN and len(service.nodes()) < NODES.count,
        HEAL_DEADLINE_S,
        "the third node goes",
    )
    simulation.results[-1]["shrunk_s"] = round(time.monotonic() - ended, 1)
    print(f"{len(service.nodes())} GPU nodes are left {time.monotonic() - ended:.0f} s after the load", flush=True)


def node(simulation: Simulation) -> None:
    """A GPU node dies with its Router, its replicas and their engines."""
    service = simulation.service
    with simulation.act("kill -9 a GPU node") as (act, _, killed):
        wait_until(lambda: service.complete(HOT_MAX), HEAL_DEADLINE_S, "the load has its replicas")
        replicas = [one for one in service.placed() if one.state == "RUNNING"]
        routers = {one.node: psutil.Process(one.pid) for one in replicas if one.deployment == ROUTER}
        victim, _ = Counter(one.node for one in replicas if one.node in routers).most_common(1)[0]
        lost = [one for one in replicas if one.node == victim]
        processes = simulation.cluster.of_node(victim)
        act.strikes()
        # What the victim no longer accepts, the kernel gives to others only when it is dead.
        spared = {
            connection.raddr.port
            for place, router in routers.items()
            if place != victim
            for connection in router.net_connections()
            if connection.raddr and connection.laddr.port == service.port
        }
        kill(processes)
        killed.append(Killed(time.monotonic(), {one.name for one in lost}, spared))
        simulation.healed(act, lambda: service.complete(HOT_MAX, killed[0].replicas))
        act.notes.append(f"it had {', '.join(sorted(one.deployment for one in lost))}")


def head(simulation: Simulation, away_s: float = 15.0) -> None:
    """The head dies with GCS, Serve's controller, the dashboard and the autoscaler, and another takes its state up."""
    service = simulation.service
    with simulation.act(f"kill -9 the head, for {away_s:.0f} s") as (act, clients, _):
        wait_until(lambda: service.complete(HOT_MAX), HEAL_DEADLINE_S, "the load has its replicas")
        before = {(one.name, one.pid) for one in service.placed()}
        act.strikes()
        simulation.cluster.kill_head()
        wait_until(lambda: time.monotonic() - act.struck_at > away_s, away_s + 5, "the head was away")
        meanwhile = clients.answered_since(act.struck_at)
        simulation.cluster.start()
        simulation.healed(act, lambda: service.complete(HOT_MAX))
        kept = before & {(one.name, one.pid) for one in service.placed() if one.state == "RUNNING"}
        act.notes.append(f"{meanwhile} streams answered without a head")
        act.notes.append(f"{len(kept)} of {len(before)} replicas are the same")


def deploy(simulation: Simulation) -> None:
    """`serve deploy` of other arguments: Serve replaces every replica, one after the other."""
    service = simulation.service
    with simulation.act("serve deploy of a changed configuration") as (act, _, __):
        wait_until(lambda: service.complete(HOT_MAX), HEAL_DEADLINE_S, "the load has its replicas")
        before = {one.name for one in service.placed()}
        act.strikes()
        service.change(aliases=["hotter"])
        simulation.healed(act, lambda: service.complete(HOT_MAX, before))
        assert service.request("/v1/models/hotter")[0] == 200
        act.notes.append(f"{len(before)} replicas replaced")


def end(simulation: Simulation) -> None:
    """Take the service away, and see every GPU node go."""
    began = time.monotonic()
    simulation.service.shutdown()
    wait_until(lambda: not simulation.service.nodes(), HEAL_DEADLINE_S, "all GPU nodes have gone")
    print(f"`serve shutdown`: the last GPU node is gone after {time.monotonic() - began:.0f} s", flush=True)


# The head before the deployment: what a new head can still do is seen by that.
DRILLS = {"scale": scale, "node": node, "head": head, "deploy": deploy}
