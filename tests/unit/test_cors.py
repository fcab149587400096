"""serve_app.router.cors: which web pages may call the API from a browser."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from asgi_call import Call
from scripted_pool import Pool

from serve_app.config import Config, ConfigError, parse_config
from serve_app.router.app import RouterApp

KEY, PAGE, OTHER = "sk-1", "https://chat.example", "https://evil.example"


def config(origins: list[str], *, keyed: bool = True) -> dict[str, Any]:
    key = {"id": "one", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    models = [{"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096}]
    return {"models": models, "security": {"keys": [key] if keyed else [], "cors_origins": origins}}


async def asked(
    origins: list[str], origin: str, *, method: str = "GET", path: str = "/v1/models", keyed: bool = True, **sent: str
) -> Call:
    app = RouterApp(Config.model_validate(config(origins, keyed=keyed)), {"hot": "Hot"}, Pool(), "test")
    headers = {"origin": origin} | {name.replace("_", "-"): value for name, value in sent.items()}
    call = await Call(app, path=path, method=method, headers=headers).done()
    await app._relay.close()
    return call


def shared(call: Call) -> dict[str, str]:
    return {name: value for name, value in call.headers.items() if name.startswith("access-control-")}


PREFLIGHT = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,x-stainless-os"}


async def preflight(origins: list[str], origin: str, **sent: str) -> Call:
    return await asked(origins, origin, method="OPTIONS", path="/v1/chat/completions", **PREFLIGHT | sent)


@pytest.mark.parametrize("origin", [PAGE, "null", ""])
async def test_no_page_may_call_by_default(origin: str) -> None:
    refused = await preflight([], origin)
    assert (refused.status, shared(refused)) == (401, {})
    answered = await asked([], origin, authorization=f"Bearer {KEY}")
    assert (answered.status, shared(answered)) == (200, {})


async def test_preflight_of_a_listed_page_is_answered_without_a_key() -> None:
    call = await preflight([PAGE], PAGE)
    assert (call.status, call.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in call.headers["access-control-allow-methods"]
    assert call.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "access-control-allow-credentials" not in call.headers
    assert "Origin" in call.headers["vary"]


@pytest.mark.parametrize("origin", [OTHER, "null", PAGE + ".evil.example", "http://chat.example", PAGE + ":8443"])
async def test_preflight_of_another_page_is_refused_in_openais_shape(origin: str) -> None:
    call = await preflight([PAGE], origin)
    assert (call.status, call.error["code"]) == (403, "wrong_origin")
    assert "access-control-allow-origin" not in call.headers


async def test_preflight_for_another_method_is_refused() -> None:
    call = await preflight([PAGE], PAGE, access_control_request_method="PUT")
    assert (call.status, call.error["code"]) == (403, "wrong_origin")


async def test_answers_and_refusals_can_be_read_by_a_listed_page_with_their_headers() -> None:
    for call in (await asked([PAGE], PAGE, authorization=f"Bearer {KEY}"), await asked([PAGE], PAGE)):
        assert shared(call) == {"access-control-allow-origin": PAGE, "access-control-expose-headers": "*"}
        assert call.headers["x-request-id"]
    assert call.status == 401


async def test_answers_cannot_be_read_by_another_page() -> None:
    call = await asked([PAGE], OTHER, authorization=f"Bearer {KEY}")
    assert "access-control-allow-origin" not in call.headers


async def test_options_that_is_no_preflight_needs_a_key_as_everything_does() -> None:
    assert (await asked([PAGE], PAGE, method="OPTIONS")).status == 401


async def test_every_page_may_call_where_the_configuration_says_so() -> None:
    assert (await preflight(["*"], OTHER)).headers["access-control-allow-origin"] == "*"


async def test_without_keys_another_page_is_refused_before_it_does_anything() -> None:
    for origins in ([], [PAGE]):
        call = await asked(origins, OTHER, method="POST", path="/v1/router/models/hot/load", keyed=False)
        assert (call.status, call.error["code"]) == (403, "wrong_origin")
    assert (await asked([PAGE], PAGE, keyed=False)).status == 200
    assert (await asked([], OTHER, path="/health", keyed=False)).status == 200


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://*", "null", "", "https://a b", "HTTPS://CHAT.EXAMPLE"]
)
def test_what_is_no_origin_is_refused_by_its_path(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.cors_origins\[0\]: "):
        parse_config(config([origin]))


@pytest.mark.parametrize("origin", ["*", PAGE, "http://localhost:3000", "http://[::1]:3000", "tauri://localhost"])
def test_every_form_of_an_origin_is_taken(origin: str) -> None:
    parse_config(config([origin]))


LOCAL_NAMES = [
    "127.0.0.1:8000",
    "127.0.0.1",
    "[::1]:8000",
    "localhost:8000",
    "LOCALHOST",
    "box",
    "box:8000",
    "10.0.0.7:1",
]
RESERVED_NAMES = ["host.docker.internal:8000", "box.local", "a.localhost:1", "localhost."]
PUBLIC_NAMES = [
    "evil.example.com:8000",
    "evil.example.com",
    "127.0.0.1.evil.com",
    "localhost.evil.com.",
    "EVIL.COM:8000",
]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files", "/openapi.json", "/v1/router/conversations/x"])
@pytest.mark.parametrize("host", PUBLIC_NAMES)
async def test_page_whose_name_was_bound_to_this_machine_reads_nothing(host: str, path: str) -> None:
    call = await greeted(host, path=path)
    assert (call.status, call.error["code"]) == (403, "wrong_host")
    assert "evil" not in call.error["message"].lower()


@pytest.mark.parametrize("host", [*LOCAL_NAMES, *RESERVED_NAMES])
async def test_this_machine_answers_to_every_name_that_nobody_can_own(host: str) -> None:
    assert (await greeted(host)).status == 200


async def test_name_of_a_proxy_in_front_may_be_listed() -> None:
    assert (await greeted("llm.example.org", hosts=["llm.example.org"])).status == 200
    assert (await greeted("llm.example.org.evil.com", hosts=["llm.example.org"])).status == 403
    with pytest.raises(ConfigError, match=r"security\.hosts\[0\]: "):
        parse_config(config([]) | {"security": {"hosts": ["https://llm.example.org"]}})


async def test_probes_a_key_and_a_service_for_others_are_asked_for_no_name() -> None:
    assert (await greeted("evil.com", path="/health")).status == 200
    assert (await greeted("evil.com", router={"host": "0.0.0.0"})).status == 200
    with_key = RouterApp(Config.model_validate(config([])), {"hot": "Hot"}, Pool(), "test")
    sent = {"host": "llm.example.org", "authorization": f"Bearer {KEY}"}
    assert (await Call(with_key, path="/v1/models", method="GET", headers=sent).done()).status == 200


async def greeted(host: str, *, path: str = "/v1/models", router: Any = None, hosts: Any = ()) -> Call:
    """A page's reading request, as a browser sends it to the origin that it takes the page's to be: without one."""
    settings = config([], keyed=False) | {"router": router or {}}
    settings["security"]["hosts"] = list(hosts)
    app = RouterApp(Config.model_validate(settings), {"hot": "Hot"}, Pool(), "test")
    return await Call(app, path=path, method="GET", headers={"host": host}).done()
