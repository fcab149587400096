"""`python -m serve_app preview` and `shadow`: decisions on paper."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from starlette.datastructures import Headers

from serve_app.catalog import catalog_of
from serve_app.check import read_file
from serve_app.config import Config
from serve_app.errors import ApiError
from serve_app.router.decider import Decider
from serve_app.router.explain import facts_in_words
from serve_app.router.tokens import TokenCounter
from serve_app.routing.decision import as_json
from serve_app.routing.policy import ModelState, policy_of
from serve_app.scoring.embedding import EmbeddingScorer
from serve_app.scoring.guard import Guarded
from serve_app.telemetry.shadow import Comparison

_SCORER_START_S = 60.0
_SERVICE_TIMEOUT_S = 30.0


class PreviewError(Exception):
    """No decision; the message says why."""


def chat_body(prompt: str, system: str, model: str, body: str) -> dict[str, Any]:
    """The body to decide: from a file or standard input, or made of the prompt."""
    if not body:
        if not prompt:
            raise PreviewError("give a prompt, or --body with a JSON file")
        messages = [{"role": "system", "content": system}] if system else []
        return {"model": model, "messages": [*messages, {"role": "user", "content": prompt}]}
    try:
        raw = sys.stdin.read() if body == "-" else Path(body).read_text()
        found = json.loads(raw)
    except OSError as error:
        raise PreviewError(f"{body}: {error.strerror}") from None
    except ValueError:
        raise PreviewError(f"{'standard input' if body == '-' else body}: not valid JSON") from None
    if not isinstance(found, dict):
        raise PreviewError("the body must be a JSON object with messages")
    return {"model": model, **found}


def decide_offline(file: Path, body: dict[str, Any]) -> dict[str, Any]:
    """Decide by a deployment file, resident models awake, lazy ones not. For `self` the lexical score stands in."""
    return asyncio.run(_decide(read_file(file).config, body))


async def _decide(config: Config, body: dict[str, Any]) -> dict[str, Any]:
    catalog = catalog_of(config)
    view = {model.id: ModelState(model.tier == "resident", model.expected_load_s) for model in config.models}
    scorer = await _ready_scorer(config)
    decider = Decider(policy_of(catalog, config.routing), view, scorer, TokenCounter(config.models_dir))
    try:
        decided = await decider.decide(body, "chat", Headers())
    except ApiError as error:
        raise PreviewError(f"{error.status}: {error.message}") from None
    finally:
        await decider.close()
    return as_json(decided.shadowed or decided.decision) | {
        "facts": facts_in_words(decided.facts),
        "decision_ms": round(decided.seconds * 1000, 3),
    }


async def _ready_scorer(config: Config) -> Guarded | None:
    if config.routing.scorer.kind != "embedding":
        return None
    scorer = EmbeddingScorer(config.routing.scorer.threads)
    await scorer.start()
    try:
        await asyncio.wait_for(scorer.ready(), _SCORER_START_S)
    except TimeoutError:
        await scorer.close()
        raise PreviewError("the scorer does not start; is the extra `scorer` installed?") from None
    return Guarded(scorer, config.routing.scorer)


def show(answer: dict[str, Any], console: Console) -> None:
    """The decision as a table, with each step's verdict."""
    summary = Table(show_header=False, box=None)
    budget = f", budget {answer['budget']} tokens" if answer["budget"] is not None else ""
    summary.add_row("model", f"[bold]{answer['model']}[/] ({answer['sources']['model']})")
    thinking = "on" if answer["thinking"] else "off"
    summary.add_row("thinking", f"[bold]{thinking}[/] ({answer['sources']['thinking']}{budget})")
    if answer["score"] is not None:
        summary.add_row("score", f"{answer['score']:.3f} ({answer['scorer']})")
    for name in ("rule", "fallback", "better_model"):
        if answer[name]:
            summary.add_row(name.replace("_", " "), str(answer[name]))
    for warning in answer["warnings"]:
        summary.add_row("warning", warning)
    summary.add_row("facts", answer["facts"])
    summary.add_row("decided in", f"{answer['decision_ms']:.2f} ms")
    console.print(summary)
    steps = Table("step", "about", "verdict")
    for step in answer["steps"]:
        steps.add_row(step["step"], step["about"], step["verdict"])
    console.print(steps)


def show_comparison(found: Comparison, console: Console) -> None:
    """What a shadow record says."""

    def share(part: int) -> str:
        return f"{part} ({part / found.requests:.1%})" if found.requests else "0"

    summary = Table("would change", "requests", title=f"{found.requests} requests")
    summary.add_row("other model", share(found.other_model))
    summary.add_row("think where it did not", share(found.more_thinking))
    summary.add_row("not think where it did", share(found.less_thinking))
    console.print(summary)
    for title, counts in (("thinking decided by", found.sources), ("model", found.models)):
        table = Table(title, "requests")
        for name, number in counts.most_common():
            table.add_row(name, share(number))
        console.print(table)
    languages = Table("language", "requests", "thinking")
    for language, counts in sorted(found.by_language.items()):
        languages.add_row(language, str(counts["requests"]), f"{counts['thinking'] / counts['requests']:.1%}")
    console.print(languages)
