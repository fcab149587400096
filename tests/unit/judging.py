"""A catalogue whose `auto` has a choice, and what a judgement depends on, each with a plain default."""

from collections.abc import Collection, Mapping
from typing import Any

from serve_app.catalog import Catalog, catalog_of
from serve_app.config import Config
from serve_app.routing.decide import decide
from serve_app.routing.decision import Decision, Setting
from serve_app.routing.excerpt import read_excerpt
from serve_app.routing.facts import read_facts
from serve_app.routing.lexical import Score
from serve_app.routing.policy import ModelState, policy_of
from serve_app.routing.sticky import Past, turn_id
from serve_app.routing_schema import RoutingSettings

Body = dict[str, Any]

_THINKS = {"thinking": {"supported": True}}
_PARSERS = {"engine": {"reasoning_parser": "qwen3"}}
_CALLS = {"engine": {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}}
CONFIG = Config.model_validate(
    {
        "models": [
            {"id": "large", "aliases": ["big"], "tier": "resident", "source": "o/l", "context": 8192}
            | _THINKS
            | _PARSERS,
            {"id": "small", "tier": "lazy", "source": "o/s", "context": 4096} | _THINKS | _PARSERS,
            {"id": "coder", "tier": "lazy", "source": "o/c", "context": 8192} | _THINKS | _PARSERS,
            {"id": "plain", "tier": "lazy", "source": "o/p", "context": 8192},
            {"id": "seer", "tier": "lazy", "source": "o/v", "context": 4096, "abilities": ["chat", "vision"]},
            {"id": "hands", "tier": "lazy", "source": "o/h", "context": 6000, "abilities": ["chat", "tools"]}
            | _THINKS
            | _CALLS,
            {"id": "long-hands", "tier": "lazy", "source": "o/lh", "context": 16_000}
            | {"abilities": ["chat", "tools"]}
            | _THINKS
            | _CALLS,
            {"id": "former", "tier": "lazy", "source": "o/f", "context": 4096, "abilities": ["chat", "json"]},
            {"id": "reader", "tier": "lazy", "source": "o/r", "context": 32_000} | _THINKS | _PARSERS,
        ]
    }
)
CATALOG: Catalog = catalog_of(CONFIG)
WAKE_S = 8.0
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def talk(*texts: str, **fields: Any) -> Body:
    """A chat body: user, assistant, user, … in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)], **fields}


def tool_loop(text: str = "what is it worth", rounds: int = 1, **fields: Any) -> Body:
    """A chat body that ends with a tool's answer to the last user message."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    for number in range(rounds):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": "42"})
    return {"messages": messages, "tools": TOOLS, **fields}


def score(think: float = 0.5, large: float = 0.99) -> Score:
    """A scorer's answer, with both thresholds at a half."""
    return Score(think, large, 0.5, 0.5, "test")


def past(body: Body | None = None, **fields: Any) -> Past:
    """What a conversation remembers; with `body` of the turn that it ends with."""
    turn = turn_id(read_excerpt(body["messages"])) if body else ""
    given: dict[str, Any] = {
        "turn": turn,
        "model_id": "large",
        "thinking": False,
        "budget": None,
        "judged": None,
        "by_router": True,
        "tokens": 0,
        "at_s": 0.0,
    }
    return Past(**{**given, **fields})


def rule(name: str = "r", *, when: Mapping[str, Any] | None = None, **then: Any) -> dict[str, Any]:
    """A rule as it stands in the configuration; by default it holds for every text with an `e` or a `题`."""
    return {"name": name, "when": when or {"text": "e|题"}, "then": then}


def judged(
    body: Body,
    *,
    awake: Collection[str] = tuple(CATALOG.models),
    past: Past | None = None,
    score: Score | None = None,
    tokens: int | None = None,
    now_s: float = 0.0,
    **settings: Any,
) -> Decision:
    """The decision for a body by these `routing:` settings; shipped rules are off unless asked for."""
    policy = policy_of(CATALOG, RoutingSettings.model_validate({"shipped_rules": False, **settings}))
    view = {model_id: ModelState(model_id in awake, WAKE_S) for model_id in CATALOG.models}
    return decide(read_facts(body, "chat"), policy, Setting(view, past, score, tokens, now_s))


def verdicts(decision: Decision, about: str) -> list[tuple[str, str]]:
    """The steps about `model` or `thinking`: stage and verdict."""
    return [(step.step, step.verdict) for step in decision.steps if step.about == about]
