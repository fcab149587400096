"""Keeps answers in the form that clients expect, whatever engine and decision.

- The reasoning has the names that the configuration says (`reasoning`, `reasoning_content`).
- A tool call that was cut off, or written where no parser looks for it, is no raw markup in `content`.
- What follows a thought begins with its text: the empty lines after the thought are the template's, and a model whose
  budget ran out may end its thought once more (vllm-project/vllm#39697).
- A thought that the client does not want is left out, and with it what would tell its tokens.
- An answer that `max_tokens` ended says so, even if its calls are whole: vLLM (0.32) says it in a stream only.
- Where the model thinks, the client's `stop` strings end the answer, not the thought: vLLM matches them in both
  (vllm-project/vllm#52393), so it is not told of them then.

Byte for byte where nothing is to be done, which is the rule.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from serve_app.errors import ApiError, unavailable
from serve_app.model_schema import Model
from serve_app.router.tally import Tally
from serve_app.routing.decision import Decision
from serve_app.routing.facts import Facts
from serve_app.routing.outgoing import hides_thought, stops_of

Names = Literal["both", "reasoning", "reasoning_content"]

_DATA = b"data: "
_DONE = b"[DONE]"
_END = b"\n\n"
_REASONING = b'"reasoning":'
_FINISHED = b'"finish_reason":"'
_NO_REASONING = b'"reasoning":null'
_TOOL_CALLS = b'"tool_calls":'
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT_END = "</think>"
_BREAKS = "\r\n"
# What a model writes when it says nothing: the end of its thought, line ends, its last token.
_SILENT_TOKENS = 8
_MARKUP = re.compile(rf"\A\s*{_OPEN}|{_OPEN}\s*\{{")


@dataclasses.dataclass(slots=True)
class _Choice:
    """What was seen of one choice of a stream. `held`: content that may be the beginning of a stop string.

    `begun`: its text has. `calls`: the arguments of each call so far.
    """

    held: str = ""
    stopped: str | None = None
    thought: str = ""
    called: bool = False
    begun: bool = False
    calls: defaultdict[int, str] = dataclasses.field(default_factory=lambda: defaultdict(str))


class Shape:
    """What is to be done to one answer. One object for one answer: a stream leaves traces in it.

    `most`: tokens that an only answer, and that it and its prompt may have, where the model chooses whether to call.
    `thinks`: so many choices think first; `hides`: in secret.
    """

    def __init__(
        self,
        *,
        names: Names = "reasoning",
        tools: bool = False,
        most: tuple[int | None, int] | None = None,
        stops: Sequence[str] = (),
        thinks: int = 0,
        hides: bool = False,
        tally: Tally | None = None,
    ) -> None:
        self._names = names
        self._tools = tools
        self._most = most
        self._thinks = thinks
        self._hides = hides
        self._unbegun = thinks
        self._stops = stops
        self._visible = False
        self._tally = tally
        # The end of a stream that has shown nothing, until it is known how much the engine has written.
        self._ending: bytes | None = None
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)

    def whole(self, body: bytes) -> bytes:
        """An answer that is not streamed."""
        renames = self._names != "reasoning" and _REASONING in body
        # No quote stands unescaped inside a JSON string: this can only be the key.
        if (
            renames
            and not (self._tools or self._stops or self._thinks)
            and body.count(_REASONING) == body.count(_NO_REASONING)
        ):
            return body.replace(_NO_REASONING, self._null())
        if not (self._tools or self._stops or self._thinks or renames):
            return body
        answer = whole_object(body)
        for choice in answer.get("choices") or ():
            message = choice.get("message")
            if not isinstance(message, dict):
                continue
            if self._thinks and isinstance(content := message.get("content"), str):
                message["content"] = content.replace(_THOUGHT_END, "").lstrip(_BREAKS) or None
            if self._tools:
                repair(message, choice)
                if choice.get("finish_reason") == "tool_calls" and self._was_cut(answer.get("usage") or {}):
                    choice["finish_reason"] = "length"
            if self._stops:
                self._stop(message, choice)
            if self._hides:
                message["reasoning"] = None
                _without_tokens(choice)
            self._rename(message)
        return orjson.dumps(answer)

    def _was_cut(self, usage: dict[str, Any]) -> bool:
        """An answer whose last token happens to be the last one that it may have is not told from one that was cut."""
        if self._most is None:
            return False
        limit, context = self._most
        return usage.get("completion_tokens") == limit or usage.get("total_tokens", 0) >= context

    def _null(self) -> bytes:
        if self._names == "both":
            return b'"reasoning":null,"reasoning_content":null'
        return b'"reasoning_content":null'

    def _rename(self, message: dict[str, Any]) -> None:
        if self._names == "reasoning" or "reasoning" not in message:
            return
        message["reasoning_content"] = message["reasoning"]
        if self._names == "reasoning_content":
            del message["reasoning"]

    def _stop(self, message: dict[str, Any], choice: dict[str, Any]) -> None:
        content = message.get("content")
        if content and (found := first_stop(content, self._stops)):
            at, stop = found
            message["content"] = content[:at]
            message.pop("tool_calls", None)
            _cut_logprobs(choice, len(content) - at)
            choice["finish_reason"], choice["stop_reason"] = "stop", stop

    def events(self, data: bytes) -> bytes:
        """Whole events of a stream."""
        looks = bool(self._stops) or self._ending is not None or (self._names != "reasoning" and _REASONING in data)
        unseen = self._tools and not (self._visible or self._thinks)
        if unseen and data.count(b'"content":"') > data.count(b'"content":""'):
            self._visible = True
        looks = looks or self._hides or (self._thinks > 0 and (self._unbegun > 0 or _THOUGHT_END.encode() in data))
        looks = looks or (self._tools and (_TOOL_CALLS in data or _REASONING in data or _FINISHED in data))
        if not looks:
            return data
        return b"".join(self._event(event) for event in data.split(_END) if event)

    def _event(self, event: bytes) -> bytes:
        if self._ending is not None:
            # The usage has come by now: `tally` sees a stream first.
            ending, self._ending = self._ending, None
            if self._tally and self._tally.completion - self._tally.reasoning > _SILENT_TOKENS:
                raise _unreadable()
            return ending + self._event(event)
        if not event.startswith(_DATA) or event == _DATA + _DONE:
            return event + _END
        chunk = whole_object(event[len(_DATA) :])
        for choice in chunk.get("choices") or ():
            if isinstance(choice, dict) and isinstance(delta := choice.get("delta"), dict):
                self._delta(choice, delta, self._choices[choice.get("index", 0)])
                if self._says_nothing(choice, delta):
                    self._ending = _DATA + orjson.dumps(chunk) + _END
                    return b""
        if self._hides and _is_empty(chunk.get("choices")):
            return b""
        return _DATA + orjson.dumps(chunk) + _END

    def _says_nothing(self, choice: dict[str, Any], delta: dict[str, Any]) -> bool:
        """Whether an only answer ends, and had neither text nor call: vLLM (0.32) drops a call that it cannot read."""
        return (
            self._tools
            and self._tally is not None
            and choice.get("finish_reason") == "stop"
            and not (self._visible or delta.get("content"))
            and len(self._choices) == 1
        )

    def _delta(self, choice: dict[str, Any], delta: dict[str, Any], seen: _Choice) -> None:
        if self._thinks and delta.get("content"):
            self._begin(delta, seen)
        if self._stops:
            self._hold(choice, delta, seen)
        if self._tools:
            for call in delta.get("tool_calls") or ():
                self._visible = seen.called = True
                if isinstance(function := call.get("function"), dict):
                    # Clients add the pieces up; the first one has none in vLLM.
                    function["arguments"] = function.get("arguments") or ""
                    seen.calls[call.get("index", 0)] += function["arguments"]
            if choice.get("finish_reason") == "tool_calls" and not seen.called:
                # vLLM (0.32) drops it from the stream.
                raise _unreadable()
            if choice.get("finish_reason") in ("tool_calls", "stop") and not all(map(_is_json, seen.calls.values())):
                # Its whole answer would have no call then, and this stream half of one.
                raise _unreadable()
            seen.thought += delta.get("reasoning") or ""
            if choice.get("finish_reason") == "stop" and not self._visible and (text := misplaced(seen.thought)):
                delta["content"] = text
        if self._hides:
            delta.pop("reasoning", None)
            _without_tokens(choice)
        self._rename(delta)

    def _begin(self, delta: dict[str, Any], seen: _Choice) -> None:
        """Leave out what stands between the thought and the text."""
        text = delta["content"].replace(_THOUGHT_END, "")
        if not seen.begun and (text := text.lstrip(_BREAKS)):
            seen.begun = self._visible = True
            self._unbegun -= 1
        delta["content"] = text

    def _hold(self, choice: dict[str, Any], delta: dict[str, Any], seen: _Choice) -> None:
        """Pass on the content up to the first stop string, and nothing that may yet become one."""
        ends = choice.get("finish_reason") is not None
        if seen.stopped is not None:
            delta.pop("content", None)
            delta.pop("tool_calls", None)
            choice["logprobs"] = None
        elif delta.get("content") or ((ends or delta.get("tool_calls")) and seen.held):
            ends = ends or bool(delta.get("tool_calls"))
            text = seen.held + (delta.get("content") or "")
            if found := first_stop(text, self._stops):
                at, seen.stopped = found
                delta["content"], seen.held = text[:at], ""
            else:
                kept = 0 if ends else maybe_stop(text, self._stops)
                delta["content"], seen.held = text[: len(text) - kept], text[len(text) - kept :]
        if choice.get("finish_reason") is not None and seen.stopped is not None:
            choice["finish_reason"], choice["stop_reason"] = "stop", seen.stopped


def _is_empty(choices: Any) -> bool:
    """Whether an event of a stream told of a thought, and of nothing else."""
    return bool(choices) and not any(choice.get("delta") or choice.get("finish_reason") for choice in choices)


def _is_json(arguments: str) -> bool:
    """Whether a call's arguments can be read, half a surrogate pair too, as most clients do; there may be none."""
    try:
        json.loads(arguments or "{}")
    except ValueError:
        return False
    return True


def _without_tokens(choice: dict[str, Any]) -> None:
    for field in ("logprobs", "token_ids"):
        if field in choice:
            choice[field] = None


def whole_object(raw: bytes) -> dict[str, Any]:
    """A JSON object of the engine's. Raises `ApiError` for anything else: half an answer is none."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise unavailable("The engine answered what is no answer; try again.", code="engine_error", retry_after_s=2)
    return found


def _unreadable() -> ApiError:
    """For a call that is none: the client would get nothing, or be told of a call that it does not get."""
    return unavailable(
        "The model wrote a tool call that cannot be read; try again.", code="invalid_tool_call", retry_after_s=1
    )


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first: the same wherever the text is cut into chunks."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1:] if found else None


def _cut_logprobs(choice: dict[str, Any], characters: int) -> None:
    """Drop the entries of the last so many characters."""
    entries = (choice.get("logprobs") or {}).get("content")
    while entries and characters > 0:
        characters -= len(entries.pop()["token"])


def maybe_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    sizes = ((stop, size) for stop in stops for size in range(1, min(len(stop), len(text) + 1)))
    return max((size for stop, size in sizes if text.endswith(stop[:size])), default=0)


def repair(message: dict[str, Any], choice: dict[str, Any]) -> None:
    """Take call markup out of the content: what max_tokens cut off, or what no parser could read.

    vLLM (0.32, hermes) gives a cut call back as text. Its streaming parser delivers the calls before it; so do we.
    """
    content = message.get("content")
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
        if isinstance(content, str) and choice.get("finish_reason") in ("length", "tool_calls"):
            text, markup = _split_markup(content, cut=choice["finish_reason"] == "length")
            if markup:
                message["content"] = text or None
                if calls := _complete_calls(markup):
                    message["tool_calls"] = calls
        elif isinstance(content, str) and _MARKUP.search(content):
            message["content"] = content.replace(_OPEN, "").replace(_CLOSE, "").strip()
            if not message["content"]:
                raise _unreadable()
        if choice.get("finish_reason") == "tool_calls" and not message.get("tool_calls"):
            choice["finish_reason"] = "length"
        elif choice.get("finish_reason") == "stop" and not content:
            message["content"] = misplaced(message.get("reasoning") or "") or content


def _split_markup(content: str, *, cut: bool) -> tuple[str, str]:
    """The text before the first tool call, and the rest; a marker that was itself cut belongs to the rest."""
    if (at := content.find(_OPEN)) < 0 and cut:
        size = max((size for size in range(2, len(_OPEN)) if content.endswith(_OPEN[:size])), default=0)
        at = len(content) - size if size else -1
    return (content[:at].rstrip(), content[at:]) if at >= 0 else (content, "")


def _complete_calls(markup: str) -> list[dict[str, Any]]:
    calls = []
    for part in markup.split(_OPEN)[1:]:
        inner, closed, _ = part.partition(_CLOSE)
        try:
            call = orjson.loads(inner) if closed else None
        except orjson.JSONDecodeError:
            call = None
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = orjson.dumps(call.get("arguments") or {}).decode()
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return calls


def misplaced(thought: str) -> str:
    """A tool call that was written inside the thought and so was not parsed, as plain text; empty without one.

    The client would otherwise get neither an answer nor a call (vllm-project/vllm#39056).
    """
    _, opened, call = thought.rpartition(_OPEN)
    return call.partition(_CLOSE)[0].strip() if opened else ""


def _most(facts: Facts, model: Model) -> tuple[int | None, int] | None:
    chooses = facts.body.get("tool_choice", "auto") == "auto" and facts.body.get("n", 1) == 1
    return (facts.max_tokens, model.context) if chooses and not model.external else None


def shape_of(facts: Facts, decision: Decision, model: Model, names: Names, tally: Tally | None = None) -> Shape:
    """What this request's answer needs."""
    if facts.endpoint != "chat":
        return Shape()
    return Shape(
        names=names if model.thinking.supported else "reasoning",
        tools=bool(facts.body.get("tools")) and facts.body.get("tool_choice") != "none",
        most=_most(facts, model),
        stops=stops_of(facts, decision),
        # Another server may give the thought as text, for its clients to find.
        thinks=facts.body.get("n", 1) if decision.thinking and not model.external else 0,
        hides=hides_thought(facts, decision, model),
        tally=tally,
    )
