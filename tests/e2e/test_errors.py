"""Whatever a client does wrong gets the right 4xx, in OpenAI's shape, and echoes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.service import Service

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"
SECRET = "xyzzy-do-not-echo"
HELLO = [{"role": "user", "content": SECRET}]


@pytest.mark.case(4, 5, 14, 65)
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nope", "messages": HELLO}, 404, "model"),
        ({"model": SECRET, "messages": HELLO}, 404, "model"),
        ({"model": 7, "messages": HELLO}, 400, "model"),
        ({"model": "", "messages": HELLO}, 400, "model"),
        ({"messages": {"role": "user", "content": SECRET}}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({}, 400, "messages"),
        ({"messages": [SECRET]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "messages[0].content"),
        ({"messages": HELLO, "temperature": SECRET}, 400, "temperature"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 9_000_000, "stream": True}, 400, "max_tokens"),
        ({"messages": HELLO, "stream": "yes"}, 400, "stream"),
        ({"messages": HELLO, "reasoning_effort": "turbo"}, 400, "reasoning_effort"),
        ({"messages": HELLO, "reasoning_effort": [SECRET]}, 400, "reasoning_effort"),
        ({"messages": HELLO, "chat_template_kwargs": {"enable_thinking": SECRET}}, 400, None),
        ([SECRET], 400, None),
        (SECRET, 400, None),
    ],
)
def test_a_wrong_body_is_refused_by_field(fake: Service, body: Any, status: int, param: str | None) -> None:
    got, _, answer = fake.request(CHAT, body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    if param:
        assert answer["error"]["param"] == param
    assert SECRET not in str(answer)


@pytest.mark.case(4, 118)
@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        (b"{not json", {}, 400),
        (b"", {}, 400),
        (b'{"messages": "\xff"}', {}, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-encoding": "gzip"}, 415),
        (b'{"messages": "' + b"x" * (9 << 20) + b'"}', {}, 413),
    ],
)
def test_a_body_that_is_no_json_is_refused(fake: Service, data: bytes, headers: dict[str, str], status: int) -> None:
    got, _, answer = fake.request(CHAT, data=data, headers=headers)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/metrics", 404),
        ("GET", "/v1/models/nope", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("POST", "/V1/chat/completions", 404),
        ("POST", "/sleep", 404),
    ],
)
def test_a_wrong_path_or_method_is_refused(fake: Service, method: str, path: str, status: int) -> None:
    got, headers, answer = fake.request(path, method=method, data=b"{}" if method == "POST" else None)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert headers["allow"]


@pytest.mark.case(82)
def test_the_clients_request_id_comes_back_and_a_bad_one_is_replaced(fake: Service) -> None:
    for given, kept in (("job/42", True), ("x" * 300, False), ("two words", False)):
        _, headers, _ = fake.request(CHAT, {"messages": HELLO}, headers={"x-request-id": given})
        assert (headers["x-request-id"] == given) is kept
