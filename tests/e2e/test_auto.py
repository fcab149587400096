"""`auto` as a client sees it: explained, steady in a tool loop, never held up by a cold model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.service import Service, running, wait_until

pytestmark = pytest.mark.e2e

EASY = "hello there"
HARD = "Prove that every tree with n vertices has n - 1 edges."
LOAD_S = 3.0
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def models() -> list[dict[str, Any]]:
    thinker = {"thinking": {"supported": True}, "abilities": ["chat", "tools", "json"], "context": 4096}
    slow = {"tier": "lazy", "idle_unload_s": 2, "expected_load_s": 2}
    return [
        {"id": "large", "tier": "resident", **thinker, "fake": {}},
        {"id": "small", **thinker, **slow, "fake": {"load_s": LOAD_S}},
        {"id": "coder", **thinker, **slow, "fake": {"load_s": LOAD_S}},
        {"id": "never", **thinker, **slow, "load_timeout_s": 60, "fake": {"hang_load": True}},
        {"id": "huge", **thinker, "tier": "lazy", "context": 100_000, "fake": {"load_s": 0.1, "context": 100_000}},
    ]


ROUTING = {
    "small_model": "small",
    "rules": [
        {"name": "rust", "when": {"text": r"\bcargo\b"}, "then": {"model": "coder"}},
        {"name": "nightly", "when": {"header": {"x-team": "^night"}}, "then": {"model": "never", "thinking": False}},
    ],
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(models(), pool={"memory_gb": 8, "min_residency_s": 0.1}, routing=ROUTING) as started:
        yield started


def send(
    service: Service, text: str, *more: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any
) -> Any:
    body = {"messages": [{"role": "user", "content": text}, *more], **fields}
    return service.request("/v1/chat/completions", body, headers=headers)


def said(headers: dict[str, str], *names: str) -> tuple[str | None, ...]:
    return tuple(headers.get(f"x-router-{name}") for name in names)


def sent_to_engine(answer: Any) -> dict[str, Any]:
    return dict(answer["fake_request"])


def test_every_answer_says_which_model_and_why(service: Service) -> None:
    _, headers, answer = send(service, HARD)
    assert said(headers, "model", "thinking", "thinking-source", "rule") == ("large", "on", "rule", "proof")
    assert sent_to_engine(answer)["chat_template_kwargs"] == {"enable_thinking": True}
    assert float(headers["x-router-decision-ms"]) >= 0
    _, headers, answer = send(service, "which of the two clauses binds the tenant, and why", model="large")
    assert said(headers, "model-source", "thinking-source", "scorer") == ("explicit", "scorer", "lexical")
    assert 0 <= float(headers["x-router-score"]) <= 1


def test_a_stream_says_it_before_its_first_byte(service: Service) -> None:
    _, headers, text = send(service, HARD, stream=True)
    assert said(headers, "model", "thinking") == ("large", "on")
    assert text.endswith("data: [DONE]\n\n")


def test_a_cold_model_never_blocks_auto_and_is_loaded_meanwhile(service: Service) -> None:
    service.in_state("small", "stopped")
    began = time.monotonic()
    _, headers, _ = send(service, EASY)
    assert time.monotonic() - began < LOAD_S - 0.5
    assert said(headers, "model", "model-source", "fallback") == (
        "large",
        "fallback",
        "small is not awake; large answers",
    )
    service.in_state("small", "awake")
    _, headers, _ = send(service, EASY, headers={"x-session-id": "another"})
    assert said(headers, "model", "model-source") == ("small", "rule")


def test_a_client_may_rather_wait_for_the_better_model(service: Service) -> None:
    service.in_state("coder", "stopped")
    _, headers, _ = send(service, "cargo build fails", headers={"prefer": "wait=20"})
    assert said(headers, "model", "model-source") == ("coder", "rule")
    assert headers["preference-applied"] == "wait=20"


def test_a_wait_that_is_over_falls_back(service: Service) -> None:
    began = time.monotonic()
    status, headers, _ = send(service, "report", headers={"prefer": "wait=1", "x-team": "nightly"})
    assert 1 <= time.monotonic() - began < 5
    assert (status, *said(headers, "model", "model-source")) == (200, "large", "fallback")


def test_a_wait_for_a_named_model_that_is_over_is_a_503(service: Service) -> None:
    status, headers, answer = send(service, "hi", model="never", headers={"prefer": "wait=1"})
    assert (status, answer["error"]["code"]) == (503, "model_loading")
    assert int(headers["retry-after"]) >= 1


def test_a_prompt_too_long_for_the_default_goes_to_a_model_that_has_room(service: Service) -> None:
    status, headers, _ = send(service, "word " * 20_000)
    assert (status, *said(headers, "model", "model-source")) == (200, "huge", "constraint")
    status, _, answer = send(service, "word " * 400_000)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "100000" in answer["error"]["message"]


def test_a_tool_loop_keeps_model_and_mode(service: Service) -> None:
    session = {"x-session-id": "loop"}
    _, first, _ = send(service, HARD, tools=[TOOL], headers=session)
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    turns: list[dict[str, Any]] = []
    for step in range(3):
        turns += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": f"thanks, cargo, result {step}"},
        ]
        _, headers, _ = send(service, HARD, *turns, tools=[TOOL], headers=session)
        assert said(headers, "model", "thinking", "thinking-source") == (first["x-router-model"], "on", "sticky")


def test_a_follow_up_inherits_and_thanks_do_not(service: Service) -> None:
    session = {"x-session-id": "follow"}
    send(service, HARD, headers=session)
    reply = {"role": "assistant", "content": "By induction; shall I write it out?"}
    for text, wanted in (("go ahead", ("on", "sticky")), ("thanks!", ("off", "rule"))):
        _, headers, _ = send(service, HARD, reply, {"role": "user", "content": text}, headers=session)
        assert said(headers, "thinking", "thinking-source") == wanted


def test_debug_shows_facts_and_no_text(service: Service) -> None:
    secret = "zanzibar"
    _, headers, _ = send(service, f"{HARD} {secret}", headers={"x-router-debug": "true"}, tools=[TOOL])
    facts = headers["x-router-facts"]
    assert "tasks=" in facts
    assert "proof" in facts
    assert "tools=1" in facts
    assert secret not in str(headers)
    assert "x-router-facts" not in send(service, HARD)[1]


def test_preview_decides_and_runs_nothing(service: Service) -> None:
    before = service.model("large")["in_flight"]
    body = {"model": "auto", "messages": [{"role": "user", "content": HARD}], "max_tokens": 1000}
    status, headers, preview = service.request("/v1/router/preview", body)
    assert status == 200
    assert (preview["model"], preview["thinking"], preview["budget"]) == ("large", True, 750)
    assert preview["sources"] == {"model": "rule", "thinking": "rule"}
    assert preview["rule"] == "proof"
    assert {"step", "about", "verdict"} <= set(preview["steps"][0])
    assert service.model("large")["in_flight"] == before
    assert headers["x-router-model"] == "large"
    status, _, refused = service.request("/v1/router/preview", {"messages": "no"})
    assert (status, refused["error"]["param"]) == (400, "messages")


def test_shadow_mode_applies_the_default_and_records_what_would_have_been(tmp_path: Any) -> None:
    record = tmp_path / "shadow.jsonl"
    routing = {**ROUTING, "shadow": {"enabled": True, "file": str(record)}}
    with running(
        models()[:2], pool={"memory_gb": 8}, routing={"small_model": "small", "shadow": routing["shadow"]}
    ) as service:
        _, headers, answer = send(service, HARD)
        assert said(headers, "model", "thinking", "thinking-source") == ("large", "off", "default")
        assert sent_to_engine(answer)["chat_template_kwargs"] == {"enable_thinking": False}
        assert "thinking=on" in headers["x-router-shadow"]
        send(service, EASY)
        assert service.model("small")["state"] == "stopped"
        wait_until(lambda: record.exists() and len(record.read_text().splitlines()) == 2, 10, "two lines")
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    assert [entry["decided"]["thinking"] for entry in entries] == [True, False]
    assert "tree" not in record.read_text()
