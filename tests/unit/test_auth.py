"""serve_app.router.auth: who is let in, by which key, and what a key with a list of models sees of the others."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from asgi_call import Call
from scripted_pool import SECRET, Pool
from scripted_upstream import Upstream, answer
from starlette.datastructures import Headers
from typer.testing import CliRunner

from serve_app import cli
from serve_app.config import Config
from serve_app.errors import ApiError
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.auth import ANONYMOUS, Caller, Keys, digest_of, keys_in, new_key

HOT, COLD, HIDDEN = "org/hot", "cold", "hidden-model"
OWN, OTHER, NEW = "sk-own-4711", "sk-other-4711", "sk-new-4711"


def entry(key: str, key_id: str = "", **fields: Any) -> dict[str, Any]:
    return {"id": key_id or key.split("-")[1], "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


def config(*keys: dict[str, Any], **fields: Any) -> Config:
    security = {name: fields.pop(name) for name in ("keys_file", "cors_origins") if name in fields}
    models = [
        {"id": HOT, "aliases": ["nick"], "tier": "resident", "source": "org/hot", "context": 4096},
        {"id": COLD, "tier": "lazy", "source": "org/cold", "context": 2048},
        {"id": HIDDEN, "aliases": ["mask"], "tier": "lazy", "source": "org/hidden", "context": 8192},
        {"id": "embedder", "tier": "lazy", "source": "org/e", "context": 512, "abilities": ["embeddings"]},
    ]
    return Config.model_validate({"models": models, "security": {"keys": list(keys), **security}, **fields})


def headers(**given: str) -> Headers:
    return Headers({name.replace("_", "-"): value for name, value in given.items()})


def bearer(key: str) -> Headers:
    return headers(authorization=f"Bearer {key}")


def code(keys: Keys, given: Headers) -> str | None:
    """The code of the refusal, or the caller's id."""
    try:
        return keys.caller(given).id
    except ApiError as error:
        return error.code if error.status in (401, 403) else f"{error.status}"


# From the configuration


def test_without_keys_everybody_is_anonymous_whatever_they_send() -> None:
    keys = Keys(config())
    assert {keys.caller(given).id for given in (headers(), bearer(OWN), headers(authorization="?"))} == {ANONYMOUS}


def test_key_says_who_calls_and_what_they_may() -> None:
    keys = Keys(config(entry(OWN, models=[HOT], requests_per_minute=5), entry(OTHER, admin=True)))
    own, other = keys.caller(bearer(OWN)), keys.caller(bearer(OTHER))
    assert (own.id, own.models, own.admin, own.limits.requests_per_minute) == ("own", frozenset({HOT}), False, 5)
    assert (other.id, other.models, other.admin) == ("other", None, True)


@pytest.mark.parametrize(
    "given",
    [
        headers(authorization=f"Bearer {OWN}"),
        headers(authorization=f"bearer {OWN}"),
        headers(authorization=f"Bearer   {OWN} "),
        headers(x_api_key=OWN),
        headers(authorization="Basic dXNlcjpwYXNz", x_api_key=OWN),
        headers(authorization="", x_api_key=OWN),
        headers(authorization=f"Bearer {OWN}", x_api_key="something else"),
    ],
)
def test_key_comes_in_openais_header_or_in_anthropics(given: Headers) -> None:
    assert code(Keys(config(entry(OWN))), given) == "own"


@pytest.mark.parametrize(
    "given",
    [
        headers(),
        headers(authorization=""),
        headers(authorization="Bearer"),
        headers(authorization="Bearer "),
        headers(authorization=OWN),
        headers(authorization=f"Bearer{OWN}"),
        headers(authorization=f"Bearer\t{OWN}"),
        headers(authorization=f"Basic {OWN}"),
        headers(authorization=f"Token {OWN}"),
        headers(x_api_key=" "),
        headers(cookie=f"key={OWN}"),
        headers(proxy_authorization=f"Bearer {OWN}"),
        headers(api_key=OWN),
    ],
)
def test_other_headers_hold_no_key(given: Headers) -> None:
    assert code(Keys(config(entry(OWN))), given) == "missing_api_key"


@pytest.mark.parametrize(
    "key",
    [
        OWN + "x",
        OWN[:-1],
        OWN.upper(),
        f"Bearer {OWN}",
        f"{OWN},{OWN}",
        f'"{OWN}"',
        hashlib.sha256(OWN.encode()).hexdigest(),
        "\x00",
        "*",
        "null",
        "x" * 60_000,
    ],
)
@pytest.mark.parametrize("header", ["authorization", "x_api_key"])
def test_wrong_key_is_refused_and_not_repeated(key: str, header: str) -> None:
    given = headers(**{header: f"Bearer {key}" if header == "authorization" else key})
    with pytest.raises(ApiError) as refused:
        Keys(config(entry(OWN))).caller(given)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert len(key) < 5 or key not in refused.value.message


def test_wrong_authorization_is_not_made_good_by_a_right_key_beside_it() -> None:
    """Else two callers could be meant; OpenAI's header is the one that counts."""
    assert code(Keys(config(entry(OWN))), headers(authorization="Bearer wrong", x_api_key=OWN)) == "invalid_api_key"


def test_first_of_two_authorization_headers_counts() -> None:
    raw = [(b"authorization", f"Bearer {OWN}".encode()), (b"authorization", b"Bearer wrong")]
    keys = Keys(config(entry(OWN)))
    assert code(keys, Headers(raw=raw)) == "own"
    assert code(keys, Headers(raw=raw[::-1])) == "invalid_api_key"


def test_key_with_letters_beyond_ascii_is_hashed_as_it_was_sent() -> None:
    key = "schlüssel-4711"
    raw = Headers(raw=[(b"authorization", b"Bearer " + key.encode())])
    assert code(Keys(config(entry(key, "umlaut"))), raw) == "umlaut"


def test_new_key_opens_the_door_with_its_entry_and_only_its_hash_is_in_it() -> None:
    key, made = new_key("mine", models=[HOT], admin=True)
    assert key not in made.model_dump_json()
    caller = Keys(config(made.model_dump())).caller(bearer(key))
    assert caller == Caller("mine", made, frozenset({HOT}), admin=True)
    assert new_key("mine")[0] != key


def test_command_prints_an_entry_for_the_file_and_the_key_beside_it() -> None:
    run = CliRunner().invoke(cli.app, ["key", "new", "team-a", "--model", HOT, "--model", COLD, "--admin"])
    key = run.stderr.strip()
    assert (run.exit_code, key.startswith("sk-"), len(key)) == (0, True, 46)
    (made,) = keys_in(run.stdout.encode())
    assert (made.id, made.sha256, made.models, made.admin) == ("team-a", digest_of(key), [HOT, COLD], True)
    assert key not in run.stdout


def test_command_says_what_is_wrong_with_a_name_and_makes_no_key() -> None:
    run = CliRunner().invoke(cli.app, ["key", "new", "team a"])
    assert (run.exit_code, run.stdout) == (1, "")
    assert run.stderr.startswith("id: ")
    assert "sk-" not in run.stderr


# Where no keys are, from web pages


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:8000", "http://localhost", ""])
def test_without_keys_web_pages_are_refused_unless_they_are_listed(origin: str) -> None:
    assert code(Keys(config()), headers(origin=origin)) == "wrong_origin"
    listed = Keys(config(cors_origins=["https://chat.example"]))
    assert code(listed, headers(origin=origin)) == "wrong_origin"
    assert code(listed, headers(origin="https://chat.example")) == ANONYMOUS
    assert code(Keys(config(cors_origins=["*"])), headers(origin=origin)) == ANONYMOUS


def test_with_keys_the_key_decides_and_not_the_page() -> None:
    assert code(Keys(config(entry(OWN))), headers(origin="https://x.example", x_api_key=OWN)) == "own"


# From a file


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Rotating:
    """Keys with a file that the test rewrites; a look is due at every question."""

    def __init__(self, tmp_path: Path, *configured: dict[str, Any]) -> None:
        self.file = tmp_path / "keys.yaml"
        self._clock = Clock()
        self._configured = configured
        self._keys: Keys | None = None

    def write(self, content: object) -> None:
        """As Kubernetes and careful people do: a new file in the old one's place."""
        fresh = self.file.with_suffix(".new")
        raw = content if isinstance(content, bytes) else yaml.safe_dump(content).encode()
        fresh.write_bytes(raw)
        fresh.replace(self.file)

    def known(self, *, wait_s: float = 2.0) -> set[str]:
        """Which of the three keys are let in."""
        if self._keys is None:
            self._keys = Keys(config(*self._configured, keys_file=str(self.file)), clock=self._clock)
        self._clock.now += wait_s
        return {key for key in (OWN, OTHER, NEW) if code(self._keys, bearer(key)) not in ("invalid_api_key", None)}


@pytest.fixture
def rotating(tmp_path: Path) -> Rotating:
    return Rotating(tmp_path, entry(OWN))


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("serve_app"), "propagate", True)
    return caplog


def test_keys_of_the_file_are_added_to_those_of_the_configuration(rotating: Rotating) -> None:
    rotating.write([entry(OTHER)])
    assert rotating.known() == {OWN, OTHER}


def test_replaced_file_lets_the_new_key_in_and_the_old_one_no_more(rotating: Rotating) -> None:
    rotating.write([entry(OTHER)])
    rotating.known()
    rotating.write([entry(NEW)])
    assert rotating.known() == {OWN, NEW}
    rotating.write([])
    assert rotating.known() == {OWN}


def test_file_of_the_same_size_and_time_is_read_again(rotating: Rotating) -> None:
    """A rotated key changes no length, and a copy may keep the time."""
    rotating.write([entry(OTHER, "same")])
    os.utime(rotating.file, ns=(1, 1))
    assert rotating.known() == {OWN, OTHER}
    rotating.write([entry(NEW, "same")])
    os.utime(rotating.file, ns=(1, 1))
    assert rotating.known() == {OWN, NEW}


def test_file_that_a_link_leads_to_is_followed(rotating: Rotating, tmp_path: Path) -> None:
    """Kubernetes mounts secrets like this, and swaps the link."""
    for name, key in (("one", OTHER), ("two", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.yaml").write_text(yaml.safe_dump([entry(key)]))
    data = tmp_path / "data"
    data.symlink_to(tmp_path / "one")
    rotating.file.symlink_to(data / "keys.yaml")
    assert rotating.known() == {OWN, OTHER}
    fresh = tmp_path / "fresh"
    fresh.symlink_to(tmp_path / "two")
    fresh.replace(data)
    assert rotating.known() == {OWN, NEW}


def test_file_is_looked_at_once_a_second_at_most(rotating: Rotating) -> None:
    rotating.write([entry(OTHER)])
    rotating.known()
    rotating.write([entry(NEW)])
    assert rotating.known(wait_s=0.5) == {OWN, OTHER}
    assert rotating.known(wait_s=0.6) == {OWN, NEW}


FAULTY = [
    b"",
    b"# all of them went\n",
    b"[{id: other",
    b"\xff\xfe\x00",
    f"{OTHER}\n".encode(),
    f"{OTHER}: admin\n".encode(),
    f"!!timestamp {OTHER}\n".encode(),
    f"!!python/object/apply:os.system ['echo {OTHER}']\n".encode(),
    f"- {OTHER}\n".encode(),
    f"- {{id: other, {OTHER}: x}}\n".encode(),
    f"- {{id: other, sha256: {OTHER}}}\n".encode(),
    f"- {{id: '{OTHER} of mine', sha256: {'0' * 64}}}\n".encode(),
    f"- {{id: other, sha256: {'0' * 64}, {OTHER}: true}}\n".encode(),
    yaml.safe_dump([entry(OTHER), entry(NEW, "other")]).encode(),
    yaml.safe_dump([entry(OTHER), entry(OTHER, "twice")]).encode(),
    yaml.safe_dump([entry(NEW, "own")]).encode(),
    yaml.safe_dump([entry(OWN, "again")]).encode(),
]


@pytest.mark.parametrize("raw", FAULTY)
def test_faulty_file_leaves_the_keys_as_they_were_and_no_key_in_the_log(
    rotating: Rotating, raw: bytes, heard: pytest.LogCaptureFixture
) -> None:
    rotating.write([entry(OTHER)])
    rotating.known()
    rotating.write(raw)
    assert [rotating.known() for _ in range(3)] == [{OWN, OTHER}] * 3
    (line,) = heard.messages  # said once, not at every request
    assert line.startswith(f"{rotating.file}: the keys stay as they were: ")
    assert "4711" not in heard.text
    rotating.write([entry(NEW)])
    assert rotating.known() == {OWN, NEW}


def test_file_that_is_gone_leaves_the_keys_as_they_were(rotating: Rotating, heard: pytest.LogCaptureFixture) -> None:
    rotating.write([entry(OTHER)])
    rotating.known()
    rotating.file.unlink()
    assert [rotating.known() for _ in range(3)] == [{OWN, OTHER}] * 3
    assert heard.messages == [f"{rotating.file}: the keys stay as they were: No such file or directory"]
    rotating.write([entry(NEW)])
    assert rotating.known() == {OWN, NEW}
    rotating.file.unlink()
    rotating.known()
    assert len(heard.messages) == 2


def test_file_that_appears_later_is_read_then(rotating: Rotating) -> None:
    assert rotating.known() == {OWN}
    rotating.write([entry(OTHER)])
    assert rotating.known() == {OWN, OTHER}


def test_door_is_closed_while_the_only_keys_are_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    rotating = Rotating(tmp_path)
    assert rotating.known() == set()
    rotating.write([entry(OTHER)])
    assert rotating.known() == {OTHER}
    rotating.write([])
    assert rotating.known() == set()


def test_file_that_can_be_read_again_is_read_though_it_has_not_changed(
    rotating: Rotating, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotating.write([entry(OTHER)])

    def unreadable(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", unreadable)
        assert rotating.known() == {OWN}
    assert rotating.known() == {OWN, OTHER}


def test_key_for_a_model_that_is_not_here_is_told_to_the_operator_and_the_others_work(
    rotating: Rotating, heard: pytest.LogCaptureFixture
) -> None:
    """A model may leave the configuration before the keys hear of it."""
    rotating.write([entry(OTHER, models=["gone"]), entry(NEW)])
    assert rotating.known() == {OWN, OTHER, NEW}
    assert heard.messages == [f"{rotating.file}: the key other names a model that is not the id of one here"]


def test_caller_may_only_what_is_here(tmp_path: Path) -> None:
    """Others look its models up in the configuration."""
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([entry(OWN, models=["gone", COLD]), entry(OTHER, models=["gone"])]))
    keys = Keys(config(keys_file=str(file)))
    assert keys.caller(bearer(OWN)).models == frozenset({COLD})
    assert keys.caller(bearer(OTHER)).models == frozenset()


# What a key with a list of models sees


@pytest.fixture(autouse=True)
def empty_tables() -> Iterator[None]:
    yield
    for deployment in ("Hot", "Pool"):
        set_replicas(deployment, [])


@contextlib.asynccontextmanager
async def service(settings: Config) -> AsyncIterator[RouterApp]:
    """All models awake on one upstream."""
    async with Upstream(answer(200, {"id": "ok"})) as upstream:
        awake = {name: PublishedModel("awake") for name in (COLD, HIDDEN, "embedder")}
        set_replicas("Hot", [Replica("hot-0", {HOT: upstream.url}, SECRET, {HOT: PublishedModel("awake")}, True)])
        set_replicas("Pool", [Replica("pool-0", dict.fromkeys(awake, upstream.url), SECRET, awake, True)])
        deployments = {HOT: "Hot", **dict.fromkeys(awake, "Pool")}
        app = RouterApp(settings, deployments, Pool(), "test")
        yield app
        await app._relay.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def asked(app: RouterApp, path: str, body: object = None, *, key: str = OWN) -> Call:
    method = "GET" if body is None else "POST"
    sent = {"authorization": f"Bearer {key}"} if key else {}
    return await Call(app, body or b"", path=path, method=method, headers=sent).done()


CHAT, PREVIEW = "/v1/chat/completions", "/v1/router/preview"


@pytest.mark.parametrize("path", [CHAT, PREVIEW])
@pytest.mark.parametrize(
    "name",
    [
        HIDDEN,
        "mask",
        f"{HIDDEN}:think",
        "mask:fast",
        HIDDEN.upper(),
        f" {HIDDEN}",
        f"{HIDDEN} ",
        f"{HIDDEN}\x00",
        "MASK",
        f"./{HIDDEN}",
        f"{HIDDEN}/",
        f"openai/{HIDDEN}",
        f"{HIDDEN}\u200b",
        f"{HIDDEN}:think:think",
        f"auto:{HIDDEN}",
    ],
)
async def test_model_that_the_key_may_not_use_is_as_one_that_is_not_there(path: str, name: str) -> None:
    async with service(config(entry(OWN, models=[HOT, COLD]))) as app:
        hidden = await asked(app, path, chat(model=name))
        missing = await asked(app, path, chat(model="nowhere"))
        allowed = [await asked(app, path, chat(model=model)) for model in (HOT, "nick", COLD)]
    assert (hidden.status, hidden.error["code"], hidden.body) == (404, "model_not_found", missing.body)
    assert [call.status for call in allowed] == [200] * 3


async def test_the_last_of_two_models_in_a_body_is_the_one_that_is_checked_and_asked_for() -> None:
    async with service(config(entry(OWN, models=[HOT, COLD]))) as app:
        twice = b'{"messages":[{"role":"user","content":"hi"}],"model":"%s","model":"%s"}'
        for first, last, status in ((HOT, HIDDEN, 404), (HIDDEN, HOT, 200)):
            raw = twice % (first.encode(), last.encode())
            call = await Call(app, raw, path=CHAT, headers={"authorization": f"Bearer {OWN}"}).done()
            assert call.status == status


async def test_a_key_in_the_address_opens_nothing_and_is_written_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with service(config(entry(OWN))) as app:
        for name in ("key", "api_key", "access_token", "authorization"):
            call = await Call(app, path="/v1/models", method="GET", query=f"{name}={OWN}").done()
            assert call.status == 401
            assert OWN not in call.body.decode()
    assert OWN not in caplog.text


@pytest.mark.parametrize("endpoint", ["completions", "embeddings"])
async def test_the_other_endpoints_refuse_it_too(endpoint: str) -> None:
    async with service(config(entry(OWN, models=[HOT]))) as app:
        body = {"prompt": "x", "input": "x"}
        named = await asked(app, f"/v1/{endpoint}", body | {"model": HIDDEN})
        auto = await asked(app, f"/v1/{endpoint}", body)
    assert (named.status, named.error["code"]) == (404, "model_not_found")
    assert auto.status == (200 if endpoint == "completions" else 400)


@pytest.mark.parametrize("path", [CHAT, PREVIEW])
@pytest.mark.parametrize(
    "body",
    [
        chat(),
        chat(model="auto"),
        chat(model="auto:think"),
        chat(messages=[{"role": "user", "content": "word " * 4000}]),  # only the hidden one has the context
        chat(messages=[{"role": "user", "content": "please use the rule"}]),
        chat(conversation="one that another key began"),
    ],
)
async def test_auto_never_chooses_nor_names_a_model_that_the_key_may_not_use(path: str, body: dict[str, Any]) -> None:
    rules = [{"name": "named", "when": {"text": "use the rule"}, "then": {"model": HIDDEN}}]
    settings = config(
        entry(OWN, models=[COLD]), entry(OTHER), routing={"rules": rules, "small_model": HIDDEN, "thinking": "default"}
    )
    async with service(settings) as app:
        await asked(app, CHAT, chat(model=HIDDEN, conversation="one that another key began"), key=OTHER)
        call = await asked(app, path, body)
        free = await asked(app, PREVIEW, chat(messages=[{"role": "user", "content": "use the rule"}]), key=OTHER)
    assert free.json["model"] == HIDDEN  # or the rest would prove nothing
    assert HIDDEN not in call.body.decode() + str(call.headers)
    if call.status == 200:
        assert (call.json["model"] if path == PREVIEW else call.headers["x-router-model"]) == COLD
    else:
        assert call.error["code"] == "context_length_exceeded"


async def test_list_and_readiness_name_only_the_models_of_the_key() -> None:
    async with service(config(entry(OWN, models=[COLD]), entry(OTHER))) as app:
        listed = await asked(app, "/v1/models")
        assert {card["id"] for card in listed.json["data"]} == {COLD, "auto"}
        assert listed.json["data"][-1]["root"] == COLD
        for name in (HOT, "nick", HIDDEN, "mask"):
            assert (await asked(app, f"/v1/models/{name}")).status == 404
        assert (await asked(app, f"/v1/models/{COLD}")).status == 200
        assert (await asked(app, "/v1/models/auto")).json["root"] == COLD
        assert set((await asked(app, "/ready")).json["models"]) == {COLD}
        assert len((await asked(app, "/v1/models", key=OTHER)).json["data"]) == 5
        assert "models" not in (await asked(app, "/ready", key="")).json


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", PREVIEW])
@pytest.mark.parametrize("model", [None, "auto", HOT])
async def test_key_whose_models_are_all_gone_is_told_so(tmp_path: Path, path: str, model: str | None) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([entry(OWN, models=["gone"]), entry(OTHER, models=[])]))
    async with service(config(keys_file=str(file))) as app:
        for key in (OWN, OTHER):
            call = await asked(app, path, chat(model=model, prompt="x", input="x"), key=key)
            assert (call.status, call.error["code"]) == (403, "model_not_allowed")
            assert (await asked(app, "/v1/models", key=key)).json["data"] == []
            assert (await asked(app, "/v1/models/auto", key=key)).status == 404


async def test_refusal_says_how_to_come_in() -> None:
    async with service(config(entry(OWN))) as app:
        for key in ("", "wrong"):
            assert (await asked(app, "/v1/models", key=key)).headers["www-authenticate"] == "Bearer"


async def test_only_an_operators_key_gives_orders() -> None:
    async with service(config(entry(OWN, models=[COLD]), entry(OTHER, admin=True))) as app:
        path = f"/v1/router/models/{COLD}/load"
        refused = await asked(app, path, {})
        assert (refused.status, refused.error["code"]) == (403, "not_an_admin")
        assert (await asked(app, path, {}, key=OTHER)).status == 202


def test_digest_is_what_sha256sum_says() -> None:
    assert digest_of(OWN) == hashlib.sha256(OWN.encode()).hexdigest()


def test_relative_path_of_the_file_is_below_the_repository_wherever_ray_runs_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.model_schema.REPOSITORY", tmp_path)
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump([entry(OWN)]))
    monkeypatch.chdir("/")
    keys = Keys(config(keys_file="keys.yaml"))
    assert code(keys, bearer(OWN)) not in ("invalid_api_key", None)
