"""The front door with keys set, over raw sockets: no way to write a request gets an answer from behind it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
import time
from collections.abc import Iterator

import pytest
from scripted_pool import Pool

from serve_app.config import Config
from serve_app.router.app import RouterApp
from serve_app.router.listener import Listener
from tests.ports import free_port

KEY = "sk-4711"
_IDLE_S = 0.5
PROBES = ("/health", "/ready")


def config(port: int) -> Config:
    key = {"id": "one", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "admin": True}
    models = [{"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096}]
    router = {"port": port, "drain_s": 1}
    return Config.model_validate(
        {"models": models, "audit": {"sink": "none"}, "router": router, "security": {"keys": [key]}}
    )


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The real listener in front of the real app."""
    settings = config(free_port())
    listener = Listener(
        settings.router, lambda: RouterApp(settings, {"hot": "Hot"}, Pool(), "test", front_door=False), "test"
    )
    listener.start()
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", settings.router.port), 1):
            break
        time.sleep(0.01)
    yield settings.router.port
    asyncio.run(listener.stop())


def answers(port: int, raw: bytes) -> list[tuple[int, bytes]]:
    """Status and body of everything that comes back until the server says that it closes, or says nothing more."""
    got, found, closes = b"", [], False
    with socket.create_connection(("127.0.0.1", port), timeout=_IDLE_S) as connection:
        connection.sendall(raw)
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            while not closes and (data := connection.recv(65536)):
                got += data
                found, closes = _parsed(got, is_head=raw.startswith(b"HEAD "))
    return found


def _parsed(got: bytes, *, is_head: bool) -> tuple[list[tuple[int, bytes]], bool]:
    found, closes = [], False
    while b"\r\n\r\n" in got:
        head, _, rest = got.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        length = 0 if is_head else int(headers.get(b"content-length", 0))
        if len(rest) < length:
            break
        found.append((int(lines[0].split()[1]), rest[:length]))
        got, closes = rest[length:], headers.get(b"connection") == b"close"
    return found, closes


def request(target: str | bytes, method: str = "GET", headers: bytes = b"", body: bytes = b"") -> bytes:
    raw = target if isinstance(target, bytes) else target.encode()
    length = b"content-length: %d\r\n" % len(body) if body else b""
    return (
        method.encode() + b" " + raw + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + headers + length + b"\r\n"
    ) + body


def assert_outside(found: list[tuple[int, bytes]], *, head: bool = False, target: str | bytes = "") -> None:
    """Refused, in the API's shape, with nothing of what is behind."""
    fields = {"type", "message"} if str(target).startswith("/v1/messages") else {"message", "type", "param", "code"}
    for status, body in found:
        assert status in (400, 401), (status, body)
        if not head:
            assert set(json.loads(body)["error"]) == fields
        assert b"hot" not in body


TARGETS = [
    "/",
    "/v1/models",
    "/v1/models/",
    "/v1/models/hot",
    "/v1/chat/completions",
    "//v1/models",
    "///v1//models",
    "/V1/models",
    "/V1/MODELS",
    "/v1/Models",
    "/%76%31/models",
    "/%2fv1/models",
    "/%2Fv1%2Fmodels",
    "/v1%2fmodels",
    "/v1/models%00",
    "/v1/models%2500",
    "/v1/models%20",
    "/v1/models%ff",
    "/v1/../v1/models",
    "/v1/./models",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/health/v1/models",
    "/health/",
    "//health",
    "/HEALTH",
    "/health;/v1/models",
    "/health%3b/v1/models",
    "/health%20",
    "/health%00",
    "/health%0d%0a",
    "/ready/",
    "/v1/models;jsessionid=1",
    "/v1/models;/health",
    "/v1/models?x=/health",
    "/v1/models#/health",
    "/v1\\models",
    "\\v1\\models",
    "/openapi.json",
    "/docs",
    "/redoc",
    "/metrics",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/responses",
    "/v1/messages",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/start_profile",
    "/server_info",
    "/-/routes",
    "/-/healthz",
    "/favicon.ico",
    "/.env",
    "http://x/v1/models",
    "http://x:1/v1/models",
    "https://other.example/v1/models",
    "http://x//v1/models",
    "HTTP://X/V1/models",
    "ftp://x/v1/models",
    "*",
    "v1/models",
    "",
    "?",
    "@/v1/models",
    "x@y/v1/models",
    "/v1/models/" + "a" * 8000,
    "/v1/models/" + "%2e%2e/" * 500,
    "/v1/mödels",
    b"/v1/models\xff",
    b"/v1/\xc0\xafmodels",
    b"/v1/models\x01",
    b"/v1/models\x00",
]


@pytest.mark.case(13)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: repr(target)[:40])
def test_no_way_to_write_a_path_gets_behind_the_door(port: int, target: str | bytes) -> None:
    for method in ("GET", "POST", "HEAD"):
        found = answers(port, request(target, method))
        assert len(found) == 1
        assert_outside(found, head=method == "HEAD", target=target)


METHODS = ["HEAD", "OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "PROPFIND", "CONNECT", "get", "PURGE", "PRI", "X", ""]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", ["/v1/models", "/v1/chat/completions", "x:443", "*"])
def test_no_method_gets_behind_the_door(port: int, method: str, target: str) -> None:
    found = answers(port, request(target, method))
    assert len(found) == 1
    assert_outside(found, head=method == "HEAD")


def test_connect_does_not_make_a_tunnel(port: int) -> None:
    found = answers(port, b"CONNECT 127.0.0.1:8265 HTTP/1.1\r\nhost: 127.0.0.1:8265\r\n\r\n" + request("/v1/models"))
    assert found
    assert_outside(found)


INNER = request("/v1/models")


@pytest.mark.case(13)
@pytest.mark.parametrize(
    "headers",
    [
        b"x-forwarded-for: 127.0.0.1\r\n",
        b"x-real-ip: 127.0.0.1\r\nforwarded: for=127.0.0.1\r\n",
        b"x-original-url: /health\r\n",
        b"x-rewrite-url: /health\r\n",
        b"x-forwarded-prefix: /health\r\n",
        b"x-http-method-override: GET\r\n",
        b"x-switchyard-secret: guess\r\n",
        b"authorization: Bearer\r\n",
        b"authorization: Bearer " + KEY[:-1].encode() + b"\r\n",
        b"authorization: Bearer x\r\nauthorization: Bearer " + KEY.encode() + b"\r\n",
        b"Authorization : Bearer " + KEY.encode() + b"\r\n",
        b"authorization: Bearer\r\n " + KEY.encode() + b"x\r\n",
        b"cookie: authorization=Bearer " + KEY.encode() + b"\r\n",
        b"host: localhost\r\n",
        b"origin: http://127.0.0.1\r\n",
        b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABk\r\n",
        b"upgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\n",
        b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: -1\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"x: \xff\xfe\r\n",
        b"\xff: x\r\n",
        b": x\r\n",
        b"no colon\r\n",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_header_gets_behind_the_door(port: int, method: str, headers: bytes) -> None:
    assert_outside(answers(port, request("/v1/models", method, headers)))


@pytest.mark.parametrize(
    "raw",
    [
        # What one parser takes for a body must not be a request to another.
        request("/health", "POST", b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % len(INNER), b"") + INNER,
        b"POST /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
        b"POST /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + INNER,
        b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" + INNER,
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + INNER,
        b"GET /health HTTP/1.1\nhost: x\n\n" + INNER,
        b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n" + INNER,
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + INNER,
        b"GET /v1/models HTTP/0.9\r\n\r\n",
        b"GET /v1/models HTTP/2.0\r\n\r\n",
        b"GET /v1/models\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n\r\n" + INNER,
        b"\x00" * 100,
        b"GET",
    ],
)
def test_requests_behind_a_probe_need_a_key_of_their_own(port: int, raw: bytes) -> None:
    for status, body in answers(port, raw):
        assert b"hot" not in body
        assert status in (400, 401, 405) or json.loads(body).get("service") == "test", (status, body)


@pytest.mark.case(13)
@pytest.mark.parametrize("path", PROBES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_are_answered_without_a_key_and_name_no_model(port: int, path: str, method: str) -> None:
    ((status, body),) = answers(port, request(path + "?verbose=1", method))
    assert status in (200, 503)
    assert b"hot" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", PROBES)
def test_probes_take_no_other_method(port: int, path: str, method: str) -> None:
    ((status, _),) = answers(port, request(path, method))
    assert status == 405


@pytest.mark.parametrize("header", [b"authorization: Bearer ", b"x-api-key: "])
def test_the_key_opens_it(port: int, header: bytes) -> None:
    ((status, body),) = answers(port, request("/v1/models", headers=header + KEY.encode() + b"\r\n"))
    assert (status, b"hot" in body) == (200, True)


KEYED = b"authorization: Bearer " + KEY.encode() + b"\r\n"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: repr(target)[:40])
def test_with_the_key_no_odd_path_is_a_fault_of_the_server(
    port: int, target: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for method in ("GET", "POST"):
            ((status, _),) = answers(port, request(target, method, KEYED))
            assert status in (200, 400, 404, 405)
    assert not caplog.records
