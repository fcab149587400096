"""`/v1/files` and `/v1/batches` of the whole Router, with OpenAI's client, on scripted engines."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from asgi_call import Call
from openai import AsyncOpenAI
from scripted_pool import SECRET, Pool
from scripted_upstream import Script, Upstream, answer, error, silent

from serve_app.batches import runner
from serve_app.batches.plan import OFFLINE_PRIORITY, Load
from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.auth import CALLER
from serve_app.router.generate import PRIORITY

PATIENCE_S = 10.0
MAX_FILE_BYTES = 4096
CHAT = "/v1/chat/completions"
SAID = {"choices": [{"message": {"content": "hello"}}]}
KEYS = {"alice": "secret-a", "bob": "secret-b", "narrow": "secret-n"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_LOOK_S", "_STOP_LOOK_S", "_SAVE_EVERY_S"):
        monkeypatch.setattr(runner, name, 0.01)
    yield
    for deployment in ("Hot", "Pool"):
        set_replicas(deployment, [])


def config(directory: Path | None, *, keys: Collection[str] = ()) -> Config:
    models = [
        {"id": "hot", "aliases": ["nick"], "tier": "resident", "source": "o/h", "context": 4096},
        {"id": "cold", "tier": "lazy", "source": "o/c", "context": 2048},
    ]
    models[0]["max_ongoing_requests"] = 8
    batches = {"directory": str(directory), "max_file_bytes": MAX_FILE_BYTES, "max_lines": 50} if directory else {}
    known = [
        {
            "id": name,
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "models": ["cold"] if name == "narrow" else None,
        }
        for name, key in KEYS.items()
        if name in keys
    ]
    return Config.model_validate(
        {
            "models": models,
            "audit": {"sink": "none"},
            "batches": batches,
            "security": {"keys": known},
            "router": {"hold_s": 0.2},
        }
    )


class Front:
    """The Router with its background work, and clients of it."""

    def __init__(self, app: RouterApp, upstream: Upstream) -> None:
        self.app = app
        self.upstream = upstream

    def client(self, key: str = "none") -> AsyncOpenAI:
        return AsyncOpenAI(base_url="http://router/v1", api_key=key, max_retries=0, http_client=self.http())

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://router")


@contextlib.asynccontextmanager
async def front(
    directory: Path | None, script: Script | None = None, *, keys: Collection[str] = ()
) -> AsyncIterator[Front]:
    async with Upstream(script or answer(200, SAID)) as upstream:
        set_replicas("Hot", [Replica("hot-0", {"hot": upstream.url}, SECRET, {"hot": PublishedModel("awake")}, True)])
        set_replicas("Pool", [Replica("pool-0", {}, SECRET, {}, True)])
        pool = Pool()
        pool.woken.set()
        pool.will_be_at(upstream.url)
        app = RouterApp(config(directory, keys=keys), {"hot": "Hot", "cold": "Pool"}, pool, "test")
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        started = asyncio.Event()

        async def send(message: Any) -> None:
            started.set()

        incoming.put_nowait({"type": "lifespan.startup"})
        life = asyncio.create_task(app({"type": "lifespan"}, incoming.get, send))
        await started.wait()
        try:
            yield Front(app, upstream)
        finally:
            incoming.put_nowait({"type": "lifespan.shutdown"})
            await life


def lines(*models: str, **fields: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return b"".join(
        json.dumps({"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": {"model": model, **body}}).encode()
        + b"\n"
        for n, model in enumerate(models)
    )


async def started(client: AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    wish = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file.id, **fields}
    return await client.batches.create(**wish)


async def reached(client: AsyncOpenAI, batch: Any, *states: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            now = await client.batches.retrieve(batch.id)
            if now.status in states:
                return now
            await asyncio.sleep(0.01)


async def results(client: AsyncOpenAI, file_id: str) -> dict[str, Any]:
    content = await client.files.content(file_id)
    found = [json.loads(line) for line in content.text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


async def test_openais_client_runs_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    async with front(tmp_path) as it, it.client() as client:
        batch = await started(client, lines("hot", "nick", "auto"), metadata={"team": "x"})
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"team": "x"})
        batch = await reached(client, batch, "completed")
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 3, "failed": 0}
        found = await results(client, batch.output_file_id)
        assert set(found) == {"id-0", "id-1", "id-2"}
        assert all(one["response"]["body"] == SAID for one in found.values())
        assert [one.id async for one in client.batches.list()] == [batch.id]
        output = await client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.bytes) == ("batch_output", len((await client.files.content(output.id)).content))
        assert {body["model"] for body in (seen.body for seen in it.upstream.seen)} == {"hot"}


async def test_a_refusal_is_the_result_of_its_line(tmp_path: Path) -> None:
    async with front(tmp_path, answer(400, error(400, "too long for max_model_len"))) as it, it.client() as client:
        batch = await reached(client, await started(client, lines("hot", "nobody")), "completed")
        assert batch.request_counts.failed == 2
        found = await results(client, batch.error_file_id)
        assert found["id-0"]["response"]["status_code"] == 400
        assert found["id-0"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
        assert found["id-1"]["response"]["body"]["error"]["code"] == "model_not_found"


async def test_a_file_that_is_none_fails_with_each_lines_error(tmp_path: Path) -> None:
    async with front(tmp_path) as it, it.client() as client:
        batch = await reached(client, await started(client, lines("hot") + b"nonsense\n"), "failed")
        assert [(one.code, one.line) for one in batch.errors.data] == [("invalid_json_line", 2)]
        assert not it.upstream.seen


async def test_cancelled_lines_stop_in_the_engine(tmp_path: Path) -> None:
    async with front(tmp_path, silent) as it, it.client() as client:
        batch = await started(client, lines("hot", "hot"))
        async with asyncio.timeout(PATIENCE_S):
            await it.upstream.arrived.wait()
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await reached(client, batch, "cancelled")
        assert (batch.output_file_id, batch.request_counts.completed) == (None, 0)
        async with asyncio.timeout(PATIENCE_S):
            await it.upstream.seen[0].closed.wait()
        assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_lines_give_way_to_requests_that_wait_for_an_answer(tmp_path: Path) -> None:
    async with front(tmp_path, silent) as it, it.client() as client:
        batch = await started(client, lines(*["hot"] * 10))
        async with asyncio.timeout(PATIENCE_S):
            while len(it.upstream.seen) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert len(it.upstream.seen) == 4, "half of the model's eight places"
        calls = [Call(it.app, {"model": "hot", "messages": [{"role": "user", "content": "hi"}]}) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(seen.closed.wait() for seen in it.upstream.seen[:4]))
        assert len(it.upstream.seen) == 8
        it.upstream.script = answer(200, SAID)
        await asyncio.sleep(0.1)
        assert len(it.upstream.seen) == 8, "nothing begins anew while they run"
        for call in calls:
            call.disconnect()
            await call.done()
        batch = await reached(client, batch, "completed")
        assert batch.request_counts.completed == 10


async def test_lines_come_as_their_owner_with_the_lowest_priority(tmp_path: Path) -> None:
    async with front(tmp_path, keys=KEYS) as it, it.client("secret-n") as client:
        seen: list[dict[str, Any]] = []
        chat = it.app._engine_apps[CHAT]

        async def looking(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope)
            await chat(scope, receive, send)

        it.app._engine_apps[CHAT] = looking
        batch = await reached(client, await started(client, lines("hot", "cold")), "completed")
        assert [(scope[CALLER].id, scope[PRIORITY]) for scope in seen] == [("narrow", OFFLINE_PRIORITY)] * 2
        found = await results(client, batch.error_file_id)
        assert found["id-0"]["response"]["status_code"] in (403, 404), "what the key may not is refused to its batch"
        assert set(await results(client, batch.output_file_id)) == {"id-1"}


async def test_keys_see_their_own_only(tmp_path: Path) -> None:
    async with front(tmp_path, keys=KEYS) as it, it.client("secret-a") as alice, it.client("secret-b") as bob:
        batch = await reached(alice, await started(alice, lines("hot")), "completed")
        assert not (await bob.files.list()).data
        assert not (await bob.batches.list()).data
        for look in (
            bob.files.retrieve(batch.input_file_id),
            bob.files.content(batch.output_file_id),
            bob.files.delete(batch.output_file_id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await look
        with pytest.raises(openai.AuthenticationError):
            await it.client("stranger").files.list()


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with front(tmp_path) as it, it.client() as client:
        files = [await client.files.create(file=("f", b"x"), purpose="batch") for _ in range(5)]
        ids = [file.id for file in files]
        assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
        batches = [
            (await client.batches.create(input_file_id=ids[0], endpoint=CHAT, completion_window="24h")).id
            for _ in range(3)
        ]
        assert [batch.id async for batch in client.batches.list(limit=1)] == batches[::-1]
        page = await client.batches.list(limit=2)
        assert (page.has_more, [batch.id for batch in page.data]) == (True, batches[:0:-1])


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "\u00b2", "\u0663", "9" * 5000, ""])
@pytest.mark.parametrize("path", ["/files", "/batches"])
async def test_an_odd_length_of_a_page_is_a_400(tmp_path: Path, path: str, limit: str) -> None:
    async with front(tmp_path) as it, it.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.get(path, cast_to=object, options={"params": {"limit": limit}})
        assert refused.value.param == "limit"


@pytest.mark.parametrize("wanted", ["bytes=0-0", "bytes=5-1", "bytes=x", "lines=1", "bytes=" + "0-," * 5000 + "0-"])
async def test_a_file_is_given_whole_whatever_range_is_asked_for(tmp_path: Path, wanted: str) -> None:
    async with front(tmp_path) as it, it.client() as client:
        file = await client.files.create(file=("f", b"abc"), purpose="batch")
        got = await client.files.with_raw_response.content(file.id, extra_headers={"range": wanted})
        assert (got.status_code, got.content) == (200, b"abc")


async def test_a_deleted_file_is_gone(tmp_path: Path) -> None:
    async with front(tmp_path) as it, it.client() as client:
        file = await client.files.create(file=("päth/../x.jsonl", b"x"), purpose="batch")
        assert (file.filename, file.bytes, file.status) == ("x.jsonl", 1, "processed")
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)


async def test_a_file_may_be_exactly_as_large_as_it_may_be(tmp_path: Path) -> None:
    async with front(tmp_path) as it, it.client() as client:
        assert (await client.files.create(file=("f", b"x" * MAX_FILE_BYTES), purpose="batch")).bytes == MAX_FILE_BYTES
        for size in (MAX_FILE_BYTES + 1, 100_000, 1_000_000):
            with pytest.raises(openai.APIStatusError) as refused:
                async with asyncio.timeout(PATIENCE_S):
                    await client.files.create(file=("f", b"x" * size), purpose="batch")
            assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
        assert len((await client.files.list()).data) == 1


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "batch"}}, "file"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": ("f", b"x")}}, "purpose"),
        ({"files": {"file": ("f", b"x")}}, "purpose"),
        ({"data": {"purpose": "batch", "file": "text"}}, "file"),
        (
            {"data": {"purpose": "batch", "expires_after[seconds]": "5"}, "files": {"file": ("f", b"x")}},
            "expires_after.seconds",
        ),
        ({"json": {"purpose": "batch"}}, "file"),
        ({"content": b"--x\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "file"),
        ({"content": b"zz", "headers": {"content-type": "multipart/form-data"}}, None),
        ({"data": {"purpose": "batch"}, "files": [("file", ("f", b"x")), ("file", ("g", b"y"))]}, None),
    ],
)
async def test_a_wrong_upload_is_refused_in_openais_shape(
    tmp_path: Path, form: dict[str, Any], param: str | None
) -> None:
    async with front(tmp_path) as it, it.http() as http:
        refused = await http.post("/v1/files", **form)
        assert refused.status_code == 400
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        assert refused.json()["error"]["param"] == param


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with front(tmp_path) as it, it.client() as client:
        head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nhalf'
        headers = {"content-type": "multipart/form-data; boundary=b"}
        call = Call(it.app, path="/v1/files", headers=headers, chunks=[head], unfinished=True)
        call.disconnect()
        await call.done()
        assert not (await client.files.list()).data


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "forever"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input_file_id": 5}, "input_file_id"),
    ],
)
async def test_a_wrong_batch_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with front(tmp_path) as it, it.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await started(client, lines("hot"), **fields)
        assert refused.value.param == param


async def test_without_a_directory_each_says_that_it_is_off() -> None:
    async with front(None) as it, it.client() as client:
        for look in (
            client.files.list(),
            client.files.create(file=("f", b"x"), purpose="batch"),
            client.files.content("file-1"),
            client.batches.list(),
            client.batches.create(input_file_id="file-1", endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError) as refused:
                await look
            assert refused.value.code == "batches_off"


async def test_what_was_running_when_the_router_ended_runs_in_the_next_one(tmp_path: Path) -> None:
    async with front(tmp_path, silent) as it, it.client() as client:
        batch = await started(client, lines("hot", "hot", "cold"))
        async with asyncio.timeout(PATIENCE_S):
            await it.upstream.arrived.wait()
    async with front(tmp_path) as it, it.client() as client:
        batch = await reached(client, batch, "completed")
        assert set(await results(client, batch.output_file_id)) == {"id-0", "id-1", "id-2"}
        assert len(it.upstream.seen) == 3


async def test_a_key_that_was_taken_away_runs_nothing_more(tmp_path: Path) -> None:
    async with front(tmp_path, silent, keys=KEYS) as it, it.client("secret-a") as client:
        batch = await started(client, lines("hot"))
        async with asyncio.timeout(PATIENCE_S):
            await it.upstream.arrived.wait()
    async with front(tmp_path, keys=("bob",)) as it:
        async with asyncio.timeout(PATIENCE_S):
            while (tmp_path / "active" / batch.id).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not it.upstream.seen
    async with front(tmp_path, keys=KEYS) as it, it.client("secret-a") as client:
        batch = await client.batches.retrieve(batch.id)
        found = await results(client, batch.error_file_id)
        assert found["id-0"]["response"]["body"]["error"]["code"] == "invalid_api_key"


async def test_load_counts_what_other_routers_run_but_not_our_own_lines(tmp_path: Path) -> None:
    async with front(tmp_path, silent) as it, it.client() as client:
        await started(client, lines(*["hot"] * 3))
        async with asyncio.timeout(PATIENCE_S):
            while len(it.upstream.seen) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for published, interactive in ((0, 0), (3, 0), (5, 2), (8, 5)):
            state = PublishedModel("awake", in_flight=published)
            set_replicas("Hot", [Replica("hot-0", {"hot": it.upstream.url}, SECRET, {"hot": state}, True)])
            assert it.app._offline.load("hot") == Load(interactive, 8)
            assert it.app._offline.load(None) == Load(interactive, 8)


async def test_model_whose_requests_wait_for_kv_cache_has_no_room_for_lines(tmp_path: Path) -> None:
    async with front(tmp_path) as it:
        for kv_cache, waiting, interactive in ((0.99, 0, 2), (0.5, 2, 2), (0.99, 1, 8)):
            state = PublishedModel("awake", in_flight=2, kv_cache=kv_cache, waiting=waiting)
            set_replicas("Hot", [Replica("hot-0", {"hot": it.upstream.url}, SECRET, {"hot": state}, True)])
            assert it.app._offline.load("hot") == Load(interactive, 8)
