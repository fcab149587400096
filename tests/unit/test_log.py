"""serve_app.log: lines about a request carry its ids, for people or for what collects logs."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from serve_app import log


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Ours, put back as it was."""
    top = logging.getLogger("serve_app")
    before = top.level, top.propagate, top.handlers[:]
    top.handlers = []
    yield logging.getLogger("serve_app.somewhere")
    top.handlers = before[2]
    top.setLevel(before[0])
    top.propagate = before[1]


async def working(logger: logging.Logger, request_id: str, trace_id: str | None = None) -> None:
    log.about(request_id, trace_id)
    await asyncio.sleep(0)
    logger.warning("it broke for %s", request_id)


async def test_line_ends_with_the_ids_of_its_own_request(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("warning")
    await asyncio.gather(
        asyncio.create_task(working(logger, "one", "a" * 32)), asyncio.create_task(working(logger, "two"))
    )
    logger.warning("about nobody")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith(f"serve_app.somewhere: it broke for one request=one trace={'a' * 32}")
    assert second.endswith("it broke for two request=two")
    assert third.endswith("about nobody")


async def test_json_is_one_object_a_line_with_the_ids_as_fields(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("warning", "json")
    await asyncio.create_task(working(logger, 'a"b', "a" * 32))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("a fault")
    about, fault = map(json.loads, capsys.readouterr().err.splitlines())
    assert about == about | {
        "level": "warning",
        "logger": "serve_app.somewhere",
        "message": 'it broke for a"b',
        "request": 'a"b',
        "trace": "a" * 32,
    }
    assert "request" not in fault
    assert "ValueError: two" in fault["traceback"]


def test_format_can_be_changed(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning")
    log.configure("error", "json")
    logger.warning("not this")
    logger.error("this")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "this"
