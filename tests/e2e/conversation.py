"""Chats with the real engine: what is asked; one answer, streamed or not, as a client sees it; what holds for all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import QWEN
from tests.e2e.service import MODELS_DIR, Service

ON = {"chat_template_kwargs": {"enable_thinking": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "北京"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# Without `strict` vLLM leaves the arguments to the regex of a test.
LOOSE = {
    **WEATHER,
    "function": {name: value for name, value in WEATHER["function"].items() if name != "strict"},
}
# All tokens are about as likely with random weights: this much makes one of them the tenth of all, or wins outright.
_LIKELY, _SURE = 9.5, 14.0


def leaning_to(*texts: str, likely: float = _SURE) -> dict[str, float]:
    """A `logit_bias` towards the tokens of these texts."""
    tokenizer = Tokenizer.from_file(str(MODELS_DIR / "tiny-qwen3" / "tokenizer.json"))
    return {str(token): likely for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids}


# A thought of about ten tokens.
ENDS_THE_THOUGHT: dict[str, Any] = {"top_k": -1, "top_p": 1, "logit_bias": leaning_to("</think>", likely=_LIKELY)}
# A budget counts from `<think>`, which these weights would not say by themselves; here within some ten tokens.
BEGINS_THE_THOUGHT: dict[str, Any] = {
    "top_k": -1,
    "top_p": 1,
    "temperature": 1,
    "seed": 1,
    "logit_bias": leaning_to("<think>", likely=_LIKELY),
}
# Where a grammar admits any white space, random weights would write nothing else.
COMPACT_CALL = leaning_to('{"', '"', "city", '"city', '":', ":", '"Oslo', "Oslo", '"}', "}", '"}}', "</tool_call>")
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def user(text: str) -> list[dict[str, Any]]:
    """One user message."""
    return [{"role": "user", "content": text}]


def body(text: str = "2+2?", **fields: Any) -> dict[str, Any]:
    """A request to the model that has Qwen3's template and parsers."""
    return {"model": QWEN, "messages": user(text), "max_tokens": 40, "temperature": 0, **fields}


def forced(regex: str) -> dict[str, Any]:
    """Lets random weights say this."""
    return {"structured_outputs": {"regex": regex}}


@dataclasses.dataclass
class Answer:
    """The first choice, put together; `error` where there is none."""

    status: int
    headers: dict[str, str]
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    error: dict[str, Any] = dataclasses.field(default_factory=dict)
    ids: set[str] = dataclasses.field(default_factory=set)
    raw: Any = None


def ask(
    service: Service, body: dict[str, Any], *, stream: bool = False, headers: dict[str, str] | None = None
) -> Answer:
    """Send a chat body and read the whole answer."""
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    status, got, text = service.request("/v1/chat/completions", body, headers=headers, timeout_s=200)
    if status != 200:
        return Answer(status, got, error=text["error"], raw=text)
    answer = _joined(status, got, text) if stream else _whole(status, got, text)
    _check(answer, body)
    return answer


def _whole(status: int, headers: dict[str, str], body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    message = choice["message"]
    return Answer(
        status,
        headers,
        content=message["content"],
        reasoning=message.get("reasoning"),
        reasoning_content=message.get("reasoning_content"),
        calls=[call["function"] | {"id": call["id"]} for call in message.get("tool_calls") or ()],
        finish=choice["finish_reason"],
        usage=body["usage"],
        logprobs=(choice.get("logprobs") or {}).get("content") or [],
        ids={body["id"]},
        raw=body,
    )


def _joined(status: int, headers: dict[str, str], text: str) -> Answer:
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "data: [DONE]", "the stream has no end"
    answer = Answer(status, headers)
    answer.raw = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    pieces: dict[str, list[str]] = {"content": [], "reasoning": [], "reasoning_content": []}
    for chunk in answer.raw:
        assert "error" not in chunk, chunk
        answer.ids.add(chunk["id"])
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            if choice["index"]:
                continue
            assert "finish_reason" in choice, "null, where it goes on"
            answer.finish = choice["finish_reason"] or answer.finish
            answer.logprobs += (choice.get("logprobs") or {}).get("content") or []
            for name, found in pieces.items():
                found.append(choice["delta"].get(name) or "")
            for delta in choice["delta"].get("tool_calls") or ():
                if delta["index"] == len(answer.calls):
                    answer.calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
                answer.calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    answer.content, answer.reasoning, answer.reasoning_content = ("".join(found) or None for found in pieces.values())
    return answer


def _check(answer: Answer, body: dict[str, Any]) -> None:
    """What the field cases ask of every reply."""
    content = answer.content or ""
    assert len(answer.ids) == 1, "one id a stream"
    if body.get("tools"):
        assert "<tool_call" not in content
    assert not content.startswith(("<think>", "</think>"))
    assert "\ufffd" not in content
    assert (answer.reasoning or None) == (answer.reasoning_content or None)
    for call in answer.calls[: -1 if answer.finish == "length" else None]:
        assert isinstance(json.loads(call["arguments"]), dict)
    assert all(call["id"] for call in answer.calls)
    assert answer.finish in ("stop", "length", "tool_calls")
    if answer.finish == "tool_calls":
        assert answer.calls
    usage = answer.usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    # There is none where the model has no reasoning parser.
    if details := usage.get("completion_tokens_details"):
        assert 0 <= details["reasoning_tokens"] <= usage["completion_tokens"]
