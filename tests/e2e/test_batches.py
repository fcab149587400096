"""Batches through `serve run` and OpenAI's client, on scripted engines: restarts, ends, loads, and who comes first."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.service import REPOSITORY, Service, running, wait_until

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"
SLOW = "fake[ttft_s=0.4,tokens=1]"


def models() -> list[dict[str, Any]]:
    return [
        {"id": "hot", "tier": "resident", "context": 4096, "max_ongoing_requests": 8, "fake": {"tokens": 2}},
        *(
            {"id": name, "tier": "lazy", "context": 4096, "idle_unload_s": 60, "fake": {"load_s": 0.5}}
            for name in ("lazy-a", "lazy-b")
        ),
    ]


def settings(directory: Path) -> dict[str, Any]:
    # Room for one of the two lazy models.
    return {"batches": {"directory": str(directory)}, "pool": {"memory_gb": 1.5, "min_residency_s": 0.5, "ageing_s": 1}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(models(), **settings(tmp_path_factory.mktemp("batches"))) as service:
        yield service


def client_of(service: Service) -> OpenAI:
    return OpenAI(base_url=service.base_url + "/v1", api_key="none", max_retries=2, timeout=60)


def lines(*models: str, text: str = "hi") -> bytes:
    body = {"messages": [{"role": "user", "content": text}]}
    requests = [
        {"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": {"model": model, **body}}
        for n, model in enumerate(models)
    ]
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def started(client: OpenAI, content: bytes) -> str:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id


def when(client: OpenAI, batch_id: str, look: Callable[[Any], bool], deadline_s: float = 60) -> Any:
    """The batch as soon as it is as wished."""
    return wait_until(
        lambda: (batch := client.batches.retrieve(batch_id)) and look(batch) and batch,
        deadline_s,
        "the batch got there",
    )


def done(client: OpenAI, batch_id: str, status: str = "completed") -> Any:
    return when(client, batch_id, lambda batch: batch.status == status)


def recorded(client: OpenAI, file_id: str | None) -> Counter[str]:
    assert file_id
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert all(one["response"]["status_code"] == 200 for one in found)
    return Counter(one["custom_id"] for one in found)


def once(count: int) -> Counter[str]:
    return Counter({f"id-{n}": 1 for n in range(count)})


def test_a_batch_that_mixes_models_loads_each_lazy_one_once(service: Service) -> None:
    client = client_of(service)
    before = {name: service.model(name)["loads"] for name in ("lazy-a", "lazy-b")}
    batch = done(client, started(client, lines(*["lazy-a", "hot", "lazy-b", "auto"] * 6)))
    assert recorded(client, batch.output_file_id) == once(24)
    assert batch.request_counts.completed == 24
    assert {name: service.model(name)["loads"] for name in before} == {name: n + 1 for name, n in before.items()}


def test_cancel_gives_what_was_answered_until_then(service: Service) -> None:
    client = client_of(service)
    batch_id = started(client, lines(*["hot"] * 60, text=SLOW))
    when(client, batch_id, lambda batch: batch.request_counts.completed >= 4)
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = done(client, batch_id, "cancelled")
    assert 4 <= batch.request_counts.completed < 60
    found = recorded(client, batch.output_file_id)
    assert sum(found.values()) == len(found) == batch.request_counts.completed
    wait_until(lambda: service.model("hot")["in_flight"] == 0, 5, "its lines have left the engine")


@pytest.mark.usefixtures("alone")
async def test_interactive_requests_come_first_while_a_batch_runs(service: Service) -> None:
    client = client_of(service)

    async def asked(one: AsyncOpenAI, text: str) -> float:
        began = time.monotonic()
        await one.chat.completions.create(model="hot", messages=[{"role": "user", "content": text}])
        return time.monotonic() - began

    async with AsyncOpenAI(base_url=service.base_url + "/v1", api_key="none", max_retries=0) as one:
        await asked(one, "hi")
        alone = [await asked(one, "hi") for _ in range(20)]
        batch_id = started(client, lines(*["hot"] * 8, text="fake[ttft_s=3,tokens=1]"))
        await asyncio.to_thread(
            wait_until, lambda: service.model("hot")["in_flight"] == 4, 10, "lines take half of the places"
        )
        beside = [await asked(one, "hi") for _ in range(20)]
        assert sorted(beside)[10] < sorted(alone)[10] + 0.05
        assert max(beside) < 1
        # Four take the other half; then the lines give way, and four more find places at once.
        first = [asyncio.create_task(asked(one, "fake[ttft_s=2,tokens=1]")) for _ in range(4)]
        await asyncio.sleep(0.5)
        second = await asyncio.gather(*(asked(one, "fake[ttft_s=0.5,tokens=1]") for _ in range(4)))
        assert max(second) < 1.5
        assert max(await asyncio.gather(*first)) < 3
    batch = await asyncio.to_thread(done, client, batch_id)
    assert recorded(client, batch.output_file_id) == once(8)


def test_a_router_that_is_killed_loses_and_doubles_nothing(service: Service) -> None:
    client = client_of(service)
    batch_id = started(client, lines(*["hot"] * 40, text=SLOW))
    when(client, batch_id, lambda batch: batch.request_counts.completed >= 4)
    assert service._process
    routers = [
        process
        for process in psutil.Process(service._process.pid).children(recursive=True)
        if ":Router" in " ".join(process.cmdline())
    ]
    assert len(routers) == 1
    routers[0].kill()
    wait_until(lambda: routers[0].pid not in psutil.pids() and service.ready(), 60, "another Router is there")
    batch = done(client, batch_id)
    assert recorded(client, batch.output_file_id) == once(40)
    assert batch.request_counts.completed == 40


def test_a_file_is_run_from_the_command_line_and_goes_on_where_it_was_stopped(service: Service, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(*["hot", "lazy-a"] * 10, text=SLOW))
    command = [sys.executable, "-m", "serve_app", "batch", "run", str(source), str(target)]
    command += ["--url", service.base_url, "--concurrency", "2"]
    stopped = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 3, 30, "some lines are answered")
    stopped.send_signal(2)
    _, says = stopped.communicate(timeout=20)
    assert (stopped.returncode, "goes on from here" in says) == (130, True)
    assert target.read_bytes().count(b"\n") < 20
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "20 answered, 0 failed" in again.stdout
    assert Counter(json.loads(line)["custom_id"] for line in target.read_text().splitlines()) == once(20)


def test_a_batch_goes_on_when_the_service_is_started_again(service: Service) -> None:
    client = client_of(service)
    batch_id = started(client, lines(*["hot"] * 40, text=SLOW))
    when(client, batch_id, lambda batch: batch.request_counts.completed >= 4)
    before = [one.id for one in client.batches.list()]
    service.restart()
    batch = done(client, batch_id)
    assert recorded(client, batch.output_file_id) == once(40)
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert [one.id for one in client.batches.list()] == before
