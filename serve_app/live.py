"""PURE. What `serve deploy` changes in the running service: `user_config` over the application's `args`.

Serve (2.60) takes every change of `args` for new code and replaces each replica of the application; a change of a
deployment's `user_config` it hands to the running ones. All our deployments are given the same `user_config`, and
each takes from it what concerns it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from serve_app.config import Config, ConfigError, problems_of

# Sections and those of their keys that the running Routers can change.
LIVE_KEYS: Mapping[str, frozenset[str]] = {
    "routing": frozenset(
        {
            "thinking",
            "small_model",
            "warm",
            "rules",
            "shipped_rules",
            "min_answer_tokens",
            "thinking_budget",
            "reasoning_fields",
        }
    ),
    "security": frozenset({"keys", "keys_file", "anonymous", "cors_origins"}),
    "router": frozenset(
        {
            "max_body_bytes",
            "body_timeout_s",
            "max_in_flight",
            "hold_s",
            "max_held",
            "max_held_per_model",
            "viewers",
            "degrade",
            "comment_s",
            "loading_comment_s",
        }
    ),
}
# These have the engines of a resident model started anew, one replica after the other.
ENGINE_KEYS = frozenset({"engine", "engine_env", "fake"})
# Of a resident model that is in `args`.
RESIDENT_KEYS = frozenset(
    {
        "id",
        "aliases",
        "thinking",
        "sampling",
        "queue",
        "max_prompt_tokens",
        "max_answer_tokens",
        "ttft_timeout_s",
        "idle_timeout_s",
        "total_timeout_s",
        *ENGINE_KEYS,
    }
)
_MODEL = re.compile(r"^models\[(\d+)\]")


def with_live(args: Mapping[str, Any], live: object) -> Config:
    """The configuration of `args` with `user_config` over it. Raises `ConfigError`; its paths begin with user_config.

    Sections are merged key by key. `models` are lazy models that are not in `args`, or what is different about
    one that is.
    """
    if live is None:
        live = {}
    if not isinstance(live, dict):
        raise ConfigError("user_config: must be a mapping")
    if problems := _not_live(args, live):
        raise ConfigError("\n".join(problems))
    merged = dict(args)
    for section in LIVE_KEYS.keys() & live.keys():
        merged[section] = {**(args.get(section) or {}), **live[section]}
    merged["models"], places = _models(args["models"], live.get("models", []))
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(_placed(line, live, places) for line in problems_of(error))) from None


def _not_live(args: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """What stands in `user_config` and could not be done by the running replicas."""
    found = [
        f"user_config.{key}: cannot change without a restart; it belongs into args"
        for key in live.keys() - LIVE_KEYS.keys() - {"models"}
    ]
    for section in LIVE_KEYS.keys() & live.keys():
        if not isinstance(live[section], dict):
            found.append(f"user_config.{section}: must be a mapping")
            continue
        found += [
            f"user_config.{section}.{key}: cannot change without a restart; it belongs into args"
            for key in live[section].keys() - LIVE_KEYS[section]
        ]
    models = live.get("models", [])
    if not isinstance(models, list):
        return [*found, "user_config.models: must be a list"]
    in_args = {model["id"]: model for model in args["models"]}
    for place, model in enumerate(models):
        where = f"user_config.models[{place}]"
        if not isinstance(model, dict) or not isinstance(model.get("id"), str):
            found.append(f"{where}.id: missing")
            continue
        known = in_args.get(model["id"])
        if known and known["tier"] == "resident":
            found += [
                f"{where}.{key}: of a resident model this cannot change without a restart; it belongs into args"
                for key in model.keys() - RESIDENT_KEYS
            ]
        elif not known and model.get("tier") != "lazy" and not model.get("base"):
            found.append(f"{where}.tier: only lazy models can come while the service runs; others belong into args")
    return sorted(found)


def _models(given: list[dict[str, Any]], live: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """All models, and by place in that list the place in `live` of those that stand there."""
    models = list(given)
    by_id = {model["id"]: place for place, model in enumerate(models)}
    places = {}
    for place, model in enumerate(live):
        at = by_id.get(model["id"])
        # A new model twice is left for the schema to refuse.
        if at is None or at in places:
            models.append(model)
            places[len(models) - 1] = place
        else:
            models[at] = {**models[at], **model}
            places[at] = place
    return models, places


def _placed(problem: str, live: Mapping[str, Any], places: Mapping[int, int]) -> str:
    """The path of a problem as it is in the file."""
    if (found := _MODEL.match(problem)) and int(found[1]) in places:
        return f"user_config.models[{places[int(found[1])]}]{problem[found.end() :]}"
    section = re.split(r"[.:\[]", problem, maxsplit=1)[0]
    return f"user_config.{problem}" if section in live else problem
