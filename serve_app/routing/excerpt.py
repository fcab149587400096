"""What the last turn of a chat asks, and in which setting: the little of a body that routing judges. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import orjson

Language = Literal["zh", "en", "mixed"]

# Blocks that agent harnesses and chat front ends put into user messages; the person did not write them.
# Claude Code, Cline and Roo, Codex, Cursor, Open WebUI (RAG template, title and tag tasks).
_HARNESS_TAGS = (
    "system-reminder",
    "environment_details",
    "environment_context",
    "user_instructions",
    "additional_data",
    "user_info",
    "chat_history",
    "context",
    "attached_files",
)
_AFTER_TAG = frozenset({">", " ", "\n", "\t"})
_WIDE = re.compile("[\u4e00-\u9fff]+")
_LATIN = re.compile("[A-Za-z]+")
# A request is stated at the beginning or the end of a long message; what lies between is material.
_CLIP = 2000
_INSTRUCTION = 350
_CONTEXT_CLIP = 600
# Characters that make up a token, roughly, of text in ASCII and of Chinese (Qwen3's tokenizer on mixed prose).
_ASCII_PER_TOKEN = 4.0
_WIDE_PER_TOKEN = 1.4
# The chat template's own tokens.
_TOKENS_PER_MESSAGE = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Excerpt:
    """The last user turn and its setting. Texts are clipped; `ask_tokens` and `prompt_tokens` are estimates.

    `instruction`: beginning and end of the ask; `previous`: the ask before it, `before`: less of that.
    `turns`: user messages. `in_tool_loop`: tools answered last.
    """

    ask: str
    instruction: str
    before: str
    previous: str
    reply: str
    system: str
    language: Language
    ask_tokens: int
    prompt_tokens: int
    turns: int
    tools: bool
    tool_names: tuple[str, ...]
    in_tool_loop: bool
    images: bool
    prefilled: bool


def read_excerpt(messages: Sequence[dict[str, Any]], tools: Iterable[Any] = ()) -> Excerpt:
    """Read the messages of a checked chat body (see `facts`)."""
    last = _last_user(messages)
    raw = text_of(messages[last].get("content")) if last >= 0 else ""
    typed = without_harness(raw)
    ask = clipped(typed, _CLIP)
    instruction = instruction_of(ask)
    previous = _before(messages, last, "user")
    names = tuple(filter(None, (_tool_name(tool) for tool in tools or ())))
    return Excerpt(
        ask=ask,
        instruction=instruction,
        before=clipped(previous, _CONTEXT_CLIP),
        previous=previous,
        reply=clipped(_before(messages, last, "assistant"), _CONTEXT_CLIP),
        system=_system(messages),
        language=language_of(instruction),
        ask_tokens=tokens_in(typed),
        prompt_tokens=_prompt_tokens(messages, tools or ()),
        turns=len([message for message in messages if message["role"] == "user"]),
        tools=bool(names),
        tool_names=names,
        in_tool_loop=messages[-1]["role"] in ("tool", "function"),
        images=any(map(has_image, messages)),
        prefilled=messages[-1]["role"] == "assistant",
    )


def _last_user(messages: Sequence[dict[str, Any]]) -> int:
    return next((index for index in reversed(range(len(messages))) if messages[index]["role"] == "user"), -1)


def _before(messages: Sequence[dict[str, Any]], end: int, role: str) -> str:
    """The last text of this role before the last user turn."""
    for message in reversed(messages[: max(end, 0)]):
        if message["role"] == role and (text := text_of(message.get("content"))):
            return clipped(without_harness(text), _CLIP)
    return ""


def _system(messages: Sequence[dict[str, Any]]) -> str:
    texts = (text_of(message.get("content")) for message in messages if message["role"] in ("system", "developer"))
    return clipped(" ".join(texts), _CONTEXT_CLIP)


def text_of(content: object) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def clipped(text: str, half: int) -> str:
    """The first and last `half` characters of a text that is longer than both."""
    return text if len(text) <= 2 * half + 2 else f"{text[:half]}\n\n{text[-half:]}"


def instruction_of(ask: str) -> str:
    """Beginning and end of an ask: what it wants is said there."""
    return clipped(ask, _INSTRUCTION)


def without_harness(text: str) -> str:
    """The text without blocks that a harness put in; all of it where nothing else would be left."""
    if "</" not in text:
        return text
    left = text
    for tag in _HARNESS_TAGS:
        if f"</{tag}>" in left:
            left = "".join(_outside(left, tag))
    return left.strip() or text


def _outside(text: str, tag: str) -> Iterator[str]:
    opening, closing = f"<{tag}", f"</{tag}>"
    at = seen = 0
    while (begin := text.find(opening, seen)) >= 0:
        seen = begin + len(opening)
        if text[seen : seen + 1] not in _AFTER_TAG:
            continue  # another tag, whose name begins like this one
        if (end := text.find(closing, seen)) < 0:
            break
        yield text[at:begin]
        at = seen = end + len(closing)
    yield text[at:]


def language_of(text: str) -> Language:
    """Chinese, English (which stands for every other), or Chinese with a good part of English words."""
    if text.isascii() or not (wide := len(text) - len(_WIDE.sub("", text))):
        return "en"
    latin = len(text) - len(_LATIN.sub("", text))
    # A Chinese character weighs as much as two letters of English.
    return "mixed" if latin > 0.25 * (latin + 2 * wide) else "zh"


def tokens_in(text: str) -> int:
    """Estimated tokens of a text, within about a third for prose; code and digits are denser."""
    size = len(text.encode("utf-8", "replace"))
    # Chinese characters have three bytes: what is beyond one byte a character is two thirds of them.
    wide = min((size - len(text)) / 2, len(text))
    return round((len(text) - wide) / _ASCII_PER_TOKEN + wide / _WIDE_PER_TOKEN)


def _prompt_tokens(messages: Iterable[dict[str, Any]], tools: Iterable[Any]) -> int:
    tokens = 0
    for message in messages:
        tokens += _message_tokens(message)
    for tool in tools:
        tokens += _json_tokens(tool)
    return tokens


def _message_tokens(message: dict[str, Any]) -> int:
    tokens = tokens_in(text_of(message.get("content"))) + _TOKENS_PER_MESSAGE
    if calls := message.get("tool_calls"):
        tokens += _json_tokens(calls)
    return tokens


def _json_tokens(value: Any) -> int:
    try:
        return round(len(orjson.dumps(value)) / _ASCII_PER_TOKEN)
    except orjson.JSONEncodeError:
        return 0  # nested too deeply: refused when the body is written for the engine


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name[:64] if isinstance(name, str) else ""


def has_image(message: dict[str, Any]) -> bool:
    """Whether a message holds an image part."""
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in ("image_url", "input_image", "image") for part in content
    )
