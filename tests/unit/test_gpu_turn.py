"""Engines on one GPU start one after the other; on different ones they do not wait for each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from serve_app.engines.gpu_turn import turn

_CONTEXT = multiprocessing.get_context("spawn")
_PATIENCE_S = 30.0
# A process that may start does so well within this.
_WHILE_S = 0.3


def hold(devices: str | None, directory: Path, parent: Connection) -> None:
    parent.send("asks")
    with turn(devices, directory):
        parent.send("has it")
        with contextlib.suppress(EOFError):
            parent.recv()


class Starter:
    """Another process that wants the turn."""

    def __init__(self, devices: str | None, directory: Path) -> None:
        self._said, child = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=hold, args=(devices, directory, child))
        self.process.start()
        child.close()

    def asks(self) -> bool:
        return self._said.poll(_PATIENCE_S) and self._said.recv() == "asks"

    def starts_within(self, seconds: float) -> bool:
        return self._said.poll(seconds) and self._said.recv() == "has it"

    def end(self) -> None:
        self._said.close()
        self.process.join(_PATIENCE_S)


@contextmanager
def starting(devices: str | None, directory: Path) -> Iterator[Starter]:
    starter = Starter(devices, directory)
    try:
        assert starter.asks()
        yield starter
    finally:
        starter.end()


@pytest.mark.parametrize("mine", ["0", "1,0", "0,0"])
def test_who_shares_a_gpu_waits_until_the_other_has_started(tmp_path: Path, mine: str) -> None:
    with ExitStack() as other:
        with turn(mine, tmp_path):
            begins = other.enter_context(starting("0", tmp_path))
            assert not begins.starts_within(_WHILE_S)
        assert begins.starts_within(_PATIENCE_S)


def test_other_gpus_and_processes_without_one_do_not_wait(tmp_path: Path) -> None:
    with (
        turn("0", tmp_path),
        starting("1", tmp_path) as on_another,
        starting("", tmp_path) as on_a_cpu,
        starting("GPU-8f2c/../x", tmp_path) as by_its_uuid,
    ):
        assert on_another.starts_within(_PATIENCE_S)
        assert on_a_cpu.starts_within(_PATIENCE_S)
        assert by_its_uuid.starts_within(_PATIENCE_S)


def test_one_that_is_killed_gives_up_its_turn(tmp_path: Path) -> None:
    with starting("0", tmp_path) as first:
        assert first.starts_within(_PATIENCE_S)
        with starting("0", tmp_path) as other:
            assert not other.starts_within(_WHILE_S)
            first.process.kill()
            assert other.starts_within(_PATIENCE_S)


def test_a_child_that_outlives_the_start_keeps_nobody_waiting(tmp_path: Path) -> None:
    """An engine core is forked while its host has the turn, and has the file open as long as it lives."""
    reading, writing = os.pipe()
    with turn("0", tmp_path):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with starting("0", tmp_path) as other:
            assert other.starts_within(_PATIENCE_S)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_a_file_that_is_somebody_elses_stops_no_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"switchyard-{os.getuid()}-gpu-0.lock").symlink_to(tmp_path / "elsewhere")
    with turn("0", tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()
    assert "may start beside another one" in caplog.text
