"""The text of a prompt in the order in which models read it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from serve_app.routing.excerpt import text_of
from serve_app.routing.facts import Facts, prompts_of


def texts_of(facts: Facts) -> Iterator[str]:
    """Pieces of it: prompts that begin alike for an engine begin alike here, too."""
    for tool in facts.chat.get("tools") or ():
        yield orjson.dumps(tool).decode()
    for message in facts.chat.get("messages") or ():
        yield str(message.get("role"))
        yield text_of(message.get("content"))
        for call in message.get("tool_calls") or ():
            yield orjson.dumps(call).decode()
    for prompt in prompts_of(facts) if "prompt" in facts.body else ():
        yield from [prompt] if isinstance(prompt, str) else map(str, prompt)
