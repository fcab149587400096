"""serve_app.router.preview and serve_app.preview: the decision that a body would get, explained; nothing runs."""

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from asgi_call import Call
from judging import CATALOG, talk
from rich.console import Console
from starlette.types import Receive, Scope, Send

from serve_app.catalog import Catalog, catalog_of
from serve_app.config import Config
from serve_app.preview import PreviewError, chat_body, decide_offline, show
from serve_app.router.auth import ANONYMOUS, CALLER, Caller
from serve_app.router.decider import Decider
from serve_app.router.explain import Explain
from serve_app.router.preview import Preview
from serve_app.router.tokens import TokenCounter
from serve_app.routing.policy import ModelState, policy_of
from serve_app.routing_schema import RoutingSettings
from serve_app.service_schema import Anonymous, RouterSettings

FIELDS = {
    "model",
    "thinking",
    "budget",
    "sources",
    "rule",
    "score",
    "size_score",
    "scorer",
    "better_model",
    "fallback",
    "warnings",
    "steps",
    "facts",
    "decision_ms",
}


def preview(catalog: Catalog = CATALOG, **settings: Any) -> Preview:
    """The endpoint, all models awake."""
    policy = policy_of(catalog, RoutingSettings.model_validate(settings))
    view = {model_id: ModelState(awake=True) for model_id in catalog.models}
    return Preview(Decider(policy, view, None, TokenCounter("/nowhere")), Explain("p1"), RouterSettings())


async def asked(body: object, endpoint: Preview | None = None, **headers: str) -> Call:
    """The answer to a body."""
    sent = {key.replace("_", "-"): value for key, value in headers.items()}
    called = endpoint or preview()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CALLER] = Caller(ANONYMOUS, Anonymous())
        await called(scope, receive, send)

    return await Call(app, body, path="/v1/router/preview", headers=sent).done()


async def test_answer_has_the_decision_and_every_step() -> None:
    call = await asked(talk("Prove that the square root of 2 is irrational.", max_tokens=2000))
    assert (call.status, set(call.json)) == (200, FIELDS)
    assert (call.json["model"], call.json["thinking"], call.json["budget"]) == ("large", True, 1500)
    assert call.json["sources"] == {"model": "default", "thinking": "rule"}
    assert call.json["rule"] == "proof"
    assert [step["step"] for step in call.json["steps"] if step["about"] == "thinking"] == [
        "explicit",
        "sticky",
        "rule",
    ]


async def test_answer_has_the_headers_that_the_real_one_would_have() -> None:
    call = await asked(talk("hello", mode="thinking", thinking_token_budget=9), prefer="wait=3")
    assert call.headers["content-type"] == "application/json"
    expected = {
        "x-router-model": "large",
        "x-router-model-source": "default",
        "x-router-thinking": "on",
        "x-router-thinking-source": "thinking_token_budget",
        "x-router-budget": "9",
        "x-router-policy": "p1",
        "preference-applied": "wait=3",
    }
    assert expected.items() <= call.headers.items()


async def test_facts_are_shown_without_a_word_of_the_prompt() -> None:
    call = await asked(talk("patient-4711: translate it"), x_router_debug="true")
    assert "tasks=" in call.headers["x-router-facts"]
    assert "patient" not in call.body.decode() + str(call.headers)


async def test_facts_are_a_header_only_on_request() -> None:
    assert "x-router-facts" not in (await asked(talk("hello"))).headers


async def test_preview_leaves_no_trace_in_the_conversation() -> None:
    endpoint = preview()
    await asked(talk("Prove that pi is irrational."), endpoint)
    call = await asked(talk("Prove that pi is irrational.", "First, …", "go ahead"), endpoint)
    assert call.json["sources"]["thinking"] != "sticky"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (talk("hello", model="nope"), 404, "model_not_found"),
        (talk("hello", mode="both"), 400, "invalid_value"),
        ({"messages": []}, 400, "invalid_value"),
        (b"{", 400, "invalid_json"),
    ],
)
async def test_what_would_be_refused_is_refused(body: object, status: int, code: str) -> None:
    call = await asked(body)
    assert (call.status, call.error["code"]) == (status, code)


async def test_model_whose_name_is_in_no_latin_script_is_previewed_too() -> None:
    model = {"id": "千问", "tier": "resident", "source": "o/q", "context": 4096}
    call = await asked(talk("你好"), preview(catalog_of(Config.model_validate({"models": [model]}))))
    assert (call.status, call.json["model"]) == (200, "千问")


# On paper


def deployment(directory: Path, **routing: Any) -> Path:
    """A deployment file with a resident and a lazy model."""
    models = [
        {"id": "hot", "tier": "resident", "source": "o/h", "context": 4096},
        {"id": "cold", "tier": "lazy", "source": "o/c", "context": 4096},
    ]
    args = {"models": models, "routing": routing}
    file = directory / "deployment.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"import_path": "serve_app.app:build", "args": args}]}))
    return file


def test_decision_offline_has_lazy_models_cold(tmp_path: Path) -> None:
    answer = decide_offline(deployment(tmp_path, small_model="cold"), talk("thanks"))
    assert set(answer) == FIELDS
    assert (answer["model"], answer["better_model"]) == ("hot", "cold")


def test_refusal_offline_says_why(tmp_path: Path) -> None:
    with pytest.raises(PreviewError, match=r"^404: No such model"):
        decide_offline(deployment(tmp_path), talk("hello", model="nope"))


def test_table_shows_the_decision_and_each_steps_verdict(tmp_path: Path) -> None:
    answer = decide_offline(deployment(tmp_path, small_model="cold"), talk("thanks", reasoning_effort="high"))
    out = io.StringIO()
    show(answer, Console(file=out, width=200))
    text = out.getvalue()
    assert "hot (fallback)" in text
    assert "off (unsupported)" in text
    assert "cold is not awake; hot answers" in text
    assert "hot cannot think; reasoning_effort was not followed" in text
    assert all(step["verdict"] in text for step in answer["steps"])


def test_body_is_made_of_a_prompt() -> None:
    assert chat_body("hi", "be kind", "auto", "") == {
        "model": "auto",
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    }
    assert len(chat_body("hi", "", "auto", "")["messages"]) == 1


def test_body_from_a_file_may_name_its_own_model(tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text('{"messages": [], "model": "big"}')
    assert chat_body("", "", "auto", str(file)) == {"messages": [], "model": "big"}
    file.write_text('{"messages": []}')
    assert chat_body("", "", "auto", str(file)) == {"messages": [], "model": "auto"}


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "not valid JSON"), (b"\xff\xfe", "not valid JSON"), (b"[]", "object")]
)
def test_file_that_is_no_body_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(content)
    with pytest.raises(PreviewError, match=message):
        chat_body("", "", "auto", str(file))


def test_missing_file_and_missing_prompt_are_named(tmp_path: Path) -> None:
    with pytest.raises(PreviewError, match=r"body\.json: No such file"):
        chat_body("", "", "auto", str(tmp_path / "body.json"))
    with pytest.raises(PreviewError, match="give a prompt"):
        chat_body("", "", "auto", "")
