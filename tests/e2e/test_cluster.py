"""On a cluster of three fake GPU nodes: autoscaling from zero, for distinct models, by load, and back to nothing;
and a node that is drained before it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.fake_cluster import FakeCluster, FakeNodes, Snapshot, fake_cluster
from tests.e2e.service import REPOSITORY, Service, meanwhile, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

POOL = "LazyPool"
HOT = "Resident-hot"
LAZY = ["lazy-a", "lazy-b", "lazy-c"]
LOAD_S = 1.0
TPOT_S = 0.02
IDLE_UNLOAD_S = 2.0
DOWNSCALE_S = 1.5
# What comes on top of a load: Serve hears of the request, starts a replica, and that starts the engine.
OVERHEAD_S = 4.0
# Until Serve wants the first replica. Its defaults would make it 10 s.
SIGNAL_S = 2.0
MODELS = [
    {
        "id": "hot",
        "tier": "resident",
        "context": 4096,
        "fake": {"tpot_s": TPOT_S},
        "autoscaling": {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 3,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 2,
        },
    },
    *(
        {
            "id": name,
            "tier": "lazy",
            "context": 4096,
            "memory_gb": 1,
            "idle_unload_s": IDLE_UNLOAD_S,
            "fake": {"load_s": LOAD_S, "tpot_s": TPOT_S},
        }
        for name in LAZY
    ),
]


@dataclasses.dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer. Times since the request was sent."""

    status: int
    first_token_s: float
    tokens: int
    whole: bool


class Watched:
    """What the cluster looked like, all the time."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.seen: list[tuple[float, Snapshot]] = []

    def look(self) -> None:
        self.seen.append((time.monotonic(), self.cluster.look()))

    def most_running(self, deployment: str) -> int:
        return max(snapshot.running.get(deployment, 0) for _, snapshot in self.seen)

    def first_at(self, condition: Callable[[Snapshot], object]) -> float:
        return next(at for at, snapshot in self.seen if condition(snapshot))


@contextlib.contextmanager
def watch(cluster: FakeCluster) -> Iterator[Watched]:
    watched = Watched(cluster)
    with meanwhile(watched.look, every_s=0.05):
        yield watched


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster(FakeNodes(count=3, idle_s=4)) as running:
        yield running


@pytest.fixture(scope="module")
def service(cluster: FakeCluster) -> Iterator[Service]:
    """The pool may be empty; a replica has a GPU, and room for one model."""
    running = Service(
        MODELS,
        address=cluster.address,
        environment=cluster.environment,
        pool={
            "resources": {"num_cpus": 0.1, "num_gpus": 1},
            "memory_gb": 1,
            "min_residency_s": 60,
            "autoscaling": {"min_replicas": 0, "max_replicas": 3, "downscale_delay_s": DOWNSCALE_S},
        },
        router={"drain_s": 30},
    )
    running.start()
    yield running
    assert not running.stop()


def stream(service: Service, model: str, tokens: int) -> Streamed:
    """Ask for so many tokens and read them as they come."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"fake[tokens={tokens}]"}],
        "stream": True,
    }
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    first, count, done = 0.0, 0, False
    for raw in response:
        line = raw.strip()
        if line == b"data: [DONE]":
            done = True
        elif line.startswith(b"data: ") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            first = first or time.monotonic() - began
            count += 1
    connection.close()
    return Streamed(response.status, first, count, done and count == tokens)


def gone(cluster: FakeCluster) -> bool:
    now = cluster.look()
    return not now.gpu_nodes and not now.running.get(POOL)


@pytest.mark.case(34)
def test_a_service_whose_pool_is_empty_is_ready_and_has_no_gpu_node(service: Service, cluster: FakeCluster) -> None:
    status, _, details = service.request("/ready")
    assert (status, details["load_path"]) == (200, "moving")
    assert {service.model(name)["state"] for name in LAZY} == {"stopped"}
    assert gone(cluster)


@pytest.mark.case(34)
@pytest.mark.usefixtures("alone")
def test_the_first_request_brings_a_node_a_replica_and_its_model(service: Service, cluster: FakeCluster) -> None:
    wait_until(lambda: gone(cluster), 30, "no GPU node")
    began = time.monotonic()
    with watch(cluster) as watched:
        answer = stream(service, "lazy-a", 5)
    signal_s = watched.first_at(lambda seen: seen.starting.get(POOL)) - began
    node_s = watched.first_at(lambda seen: seen.gpu_nodes) - began
    load_s = service.in_state("lazy-a", "awake")["load_s"]
    print(
        f"from nothing: signal after {signal_s:.1f} s, node after {node_s:.1f} s,"
        f" first token {answer.first_token_s:.1f} s, load {load_s:.1f} s"
    )
    assert answer.whole
    assert signal_s < SIGNAL_S
    assert answer.first_token_s < node_s + load_s + OVERHEAD_S
    assert watched.most_running(POOL) == 1


@pytest.mark.usefixtures("alone")
def test_with_a_node_at_hand_the_first_token_comes_within_the_load_time_and_four_seconds(
    service: Service, cluster: FakeCluster
) -> None:
    stream(service, "lazy-a", 1)
    wait_until(lambda: not cluster.look().running.get(POOL), 30, "the pool is empty")
    assert cluster.look().gpu_nodes == 1
    answer = stream(service, "lazy-b", 5)
    load_s = service.in_state("lazy-b", "awake")["load_s"]
    print(f"from zero replicas: first token {answer.first_token_s:.1f} s, load {load_s:.1f} s")
    assert answer.whole
    assert answer.first_token_s < load_s + OVERHEAD_S


def test_models_that_do_not_fit_together_get_a_replica_each_and_lose_nothing(
    service: Service, cluster: FakeCluster
) -> None:
    """Each is asked for again and again until all three run: how long a new node takes is the machine's affair."""
    served = threading.Event()

    def ask(model: str) -> list[Streamed]:
        answers = [stream(service, model, 100)]
        while not served.is_set():
            answers.append(stream(service, model, 100))
        return answers

    with ThreadPoolExecutor() as threads:
        asking = {name: threads.submit(ask, name) for name in LAZY}
        try:
            wait_until(lambda: cluster.look().running.get(POOL) == 3, 60, "three replicas of the pool")
        finally:
            served.set()
        answers = {name: asked.result() for name, asked in asking.items()}
    print("distinct models: first tokens", {name: round(asked[0].first_token_s, 1) for name, asked in answers.items()})
    assert all(answer.whole for asked in answers.values() for answer in asked)


@pytest.mark.case(71)
def test_requests_that_come_while_the_pool_shrinks_are_all_answered(service: Service, cluster: FakeCluster) -> None:
    """One falls before, one into and one after the moment at which Serve stops the replica."""
    assert stream(service, "lazy-a", 5).whole
    for model, late_s in zip(itertools.cycle(LAZY), (0.1, 0.5, 0.9), strict=False):
        # Not a wait for a state: the moment is what is tried.
        time.sleep(IDLE_UNLOAD_S + DOWNSCALE_S + late_s)
        assert stream(service, model, 20).whole


@pytest.mark.case(34)
def test_an_idle_pool_returns_to_zero_and_its_nodes_go(service: Service, cluster: FakeCluster) -> None:
    began = time.monotonic()
    wait_until(lambda: gone(cluster), 30, "no replica of the pool and no GPU node")
    print(f"back to nothing after {time.monotonic() - began:.1f} s")
    assert service.ready()


@pytest.mark.case(22, 71)
@pytest.mark.usefixtures("alone")
def test_the_resident_model_gets_a_second_replica_under_load_and_gives_it_back_with_its_streams_finished(
    service: Service, cluster: FakeCluster
) -> None:
    with ThreadPoolExecutor() as threads:
        burst = [threads.submit(stream, service, "hot", 400) for _ in range(5)]
        wait_until(lambda: cluster.look().running[HOT] == 2, 20, "a second replica")
        assert all(answer.result().whole for answer in burst)
        # One on each replica: whichever Serve stops, one is running there.
        long = [threads.submit(stream, service, "hot", 700) for _ in range(2)]
        wait_until(lambda: cluster.look().running[HOT] == 1, 20, "one replica")
        assert not any(answer.done() for answer in long)
        assert all(answer.result().whole for answer in long)


def node_of_pool(cluster: FakeCluster) -> str:
    """Ray's id of the node on which the only replica of the pool runs."""
    (replica,) = (
        process
        for process in cluster.family()
        if " ".join(process.cmdline()).startswith(f"ray::ServeReplica:switchyard:{POOL}")
    )
    raylet = replica.parent()
    assert isinstance(raylet, psutil.Process)
    found = re.search(r"--node_id=(\w+)", " ".join(raylet.cmdline()))
    assert found
    return found[1]


def test_a_drained_node_finishes_its_streams_and_no_new_request_fails(service: Service, cluster: FakeCluster) -> None:
    """As the preStop hook of a pod does it (ray-project/ray#41726)."""
    stream(service, "lazy-a", 1)
    wait_until(lambda: cluster.look().running.get(POOL) == 1, 30, "one replica of the pool")
    node = node_of_pool(cluster)
    with ThreadPoolExecutor() as threads:
        long = threads.submit(stream, service, "lazy-a", 500)
        wait_until(lambda: service.model("lazy-a")["in_flight"] == 1, 10, "the stream runs")
        drain = subprocess.Popen(
            [sys.executable, "-m", "serve_app", "drain", "--deadline-s", "60", "--node-id", node],
            env={**os.environ, **cluster.environment},
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
        )
        answered = []
        while drain.poll() is None:
            answered.append(stream(service, "lazy-a", 10))
        _, said = drain.communicate()
        assert long.result().whole
    assert (drain.returncode, said) == (0, "")
    assert answered
    assert all(answer.whole for answer in answered)
    assert stream(service, "lazy-a", 10).whole
    assert node_of_pool(cluster) != node
