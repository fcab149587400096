"""The small catalogue that the routing tests ask: a thinker, a plain model, ids that hold `/` and `:`."""

from typing import Any

from serve_app.catalog import Catalog, catalog_of
from serve_app.config import Config
from serve_app.routing.decide import decide
from serve_app.routing.decision import Decision, Setting
from serve_app.routing.facts import Endpoint, read_facts
from serve_app.routing.outgoing import engine_body
from serve_app.routing.policy import ModelState, Policy, policy_of
from serve_app.routing_schema import RoutingSettings

CONFIG = Config.model_validate(
    {
        "models": [
            {
                "id": "thinker",
                "aliases": ["big", "alias:with:colons"],
                "tier": "resident",
                "source": "org/thinker",
                "context": 40_000,
                "abilities": ["chat", "completions", "tools"],
                "thinking": {"supported": True},
                "engine": {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"},
                "sampling": {
                    "thinking": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
                    "plain": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
                },
            },
            {"id": "org/plain:1b", "tier": "lazy", "source": "org/plain", "context": 2048},
            {
                "id": "eager",
                "tier": "lazy",
                "source": "org/eager",
                "context": 2048,
                "thinking": {"supported": True, "default": True},
                "engine": {"reasoning_parser": "qwen3"},
            },
            {
                "id": "named:fast",
                "tier": "lazy",
                "source": "org/named",
                "context": 2048,
                "thinking": {"supported": True},
                "engine": {"reasoning_parser": "qwen3"},
            },
            {"id": "embedder", "tier": "lazy", "source": "o/e", "context": 512, "abilities": ["embeddings"]},
        ]
    }
)
CATALOG: Catalog = catalog_of(CONFIG)
ALL_AWAKE = {model_id: ModelState(awake=True) for model_id in CATALOG.models}
# Only what the client says counts; what the router itself would judge is tested in test_judgement.py.
PLAIN: Policy = policy_of(CATALOG, RoutingSettings(thinking="default"))


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat body with one user message."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def decided(body: dict[str, Any], endpoint: Endpoint = "chat", policy: Policy = PLAIN, **setting: Any) -> Decision:
    """The decision for a body."""
    return decide(read_facts(body, endpoint), policy, Setting(**{"view": ALL_AWAKE, **setting}))


def sent(body: dict[str, Any], endpoint: Endpoint = "chat", policy: Policy = PLAIN) -> dict[str, Any]:
    """What the engine would be sent for a body."""
    facts = read_facts(body, endpoint)
    decision = decide(facts, policy, Setting(ALL_AWAKE))
    return engine_body(facts, decision, CATALOG.models[decision.model_id])
