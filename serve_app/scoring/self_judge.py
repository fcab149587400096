"""The scorer `self`: the resident model judges the request before it answers it.

The question goes to the end of the very messages that are to be answered, so the judgement's prefill is the real
request's: with prefix caching the engine computes it once, and the judgement costs one decode step beside it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.routing.control_tokens import cleaned
from serve_app.routing.excerpt import Excerpt
from serve_app.routing.lexical import Score, shipped_lexicon
from serve_app.routing.outgoing import uniform_messages

QUESTION = (
    "Do not answer the request above yet. Judge it: would working through several dependent steps before answering"
    " change whether the answer is right? Reply with one letter, Y or N."
)
# The shares of Y and N come from these many alternatives; vLLM's default limit is 20.
_ALTERNATIVES = 20
_THINK_AT = 0.5
_LETTERS = {"y": True, "yes": True, "n": False, "no": False}

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class NoVerdict(Exception):
    """The model said neither."""


class SelfScorer:
    """`ask` has a chat body answered by the resident model."""

    def __init__(self, model_id: str, ask: Ask) -> None:
        self._model_id = model_id
        self._ask = ask

    async def start(self) -> None:
        """Nothing to get ready: the model is resident."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def score(self, excerpt: Excerpt, body: dict[str, Any]) -> Score:
        """Ask the model. Size is the lexical score's: the model knows its own limits badly."""
        answer = await self._ask(self.question(body))
        words = shipped_lexicon().score(excerpt)
        return Score(share_of_yes(answer), words.large, _THINK_AT, words.small_below, "self")

    def question(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body that asks: the request's messages and tools, as the answer's prefill will have them."""
        asked: dict[str, Any] = {
            "model": self._model_id,
            "messages": [*uniform_messages(body["messages"]), {"role": "user", "content": QUESTION}],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": _ALTERNATIVES,
            "chat_template_kwargs": {**body.get("chat_template_kwargs", {}), "enable_thinking": False},
        }
        if body.get("tools"):
            asked |= {"tools": body["tools"], "tool_choice": "none"}
        clean: dict[str, Any] = cleaned(asked)
        return clean


def share_of_yes(answer: dict[str, Any]) -> float:
    """Of the probability on Y and N, the share of Y. Raises `NoVerdict` where neither is among the alternatives."""
    content = answer["choices"][0]["logprobs"]["content"]
    shares = {True: 0.0, False: 0.0}
    for alternative in content[0]["top_logprobs"]:
        verdict = _LETTERS.get(alternative["token"].strip().lower())
        if verdict is not None:
            shares[verdict] += math.exp(alternative["logprob"])
    total = shares[True] + shares[False]
    if not total:
        raise NoVerdict
    return shares[True] / total
