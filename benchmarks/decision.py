"""What a decision costs: `make bench-decision`. No engine, no network: from the parsed body to the decision.

Rules and lexical score decide; every request is a new conversation, and no rule matches, so that every stage runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from typing import Any

from starlette.datastructures import Headers

from serve_app.catalog import catalog_of
from serve_app.config import Config, parse_config
from serve_app.router.decider import Decider
from serve_app.router.tokens import TokenCounter
from serve_app.routing.policy import ModelState, policy_of

ENGLISH = "The rota for the allotment changed again and nobody told us which beds are ours, so the beans went in late. "
CHINESE = "周末的值班表又改了一次，没有人通知我们哪几块地归谁，所以豆子种晚了，大家都有点着急。"


def config_of(models: int, rules: int) -> Config:
    patterns = [rf"(?i)\b(refund|invoice|return) (no|number|id) ?{number}\b" for number in range(rules // 2)]
    patterns += [rf"第{number}号(合同|工单|发票)(退款|作废)" for number in range(rules - len(patterns))]
    return parse_config(
        {
            "models": [
                {
                    "id": f"model-{number}",
                    "tier": "resident" if number == 0 else "lazy",
                    "context": 1_000_000,
                    "thinking": {"supported": True},
                    "fake": {},
                }
                for number in range(models)
            ],
            "routing": {
                "small_model": "model-1",
                "rules": [
                    {
                        "name": f"rule-{number}",
                        "when": {"text": pattern, "ask_tokens": {"min": 1}, "language": ["en", "zh"], "tools": False},
                        "then": {"thinking": bool(number % 2)},
                    }
                    for number, pattern in enumerate(patterns)
                ],
            },
        }
    )


def body_of(size: int, text: str, number: int) -> dict[str, Any]:
    """A conversation of about `size` bytes: a long first message, a reply, a question."""
    unit = len(text.encode())
    return {
        "model": "auto",
        "messages": [
            {"role": "system", "content": f"Assistant {number}."},
            {"role": "user", "content": text * max(1, size // 2 // unit)},
            {"role": "assistant", "content": text * max(1, size // 4 // unit)},
            {"role": "user", "content": text * max(1, size // 4 // unit) + "?"},
        ],
    }


async def measure(decider: Decider, size: int, text: str, rounds: int) -> list[float]:
    bodies = [body_of(size, text, number) for number in range(rounds)]
    headers = Headers({"content-type": "application/json"})
    for body in bodies[:50]:
        await decider.decide(body, "chat", headers)
    gc.collect()
    times = []
    for body in bodies:
        began = time.perf_counter()
        decided = await decider.decide(body, "chat", headers)
        times.append((time.perf_counter() - began) * 1e6)
        decider.remember(decided)
    return sorted(times)


async def run(rounds: int) -> None:
    print("models  rules     body  text      median        p99")
    for models, rules, size in (
        (100, 100, 4_000),
        (1_000, 100, 4_000),
        (100, 1_000, 4_000),
        (100, 100, 100_000),
        (100, 100, 1_000_000),
        (1_000, 1_000, 1_000_000),
    ):
        config = config_of(models, rules)
        view = {model.id: ModelState(awake=True) for model in config.models}
        for name, text in (("english", ENGLISH), ("chinese", CHINESE)):
            decider = Decider(
                policy_of(catalog_of(config), config.routing), view, None, TokenCounter(config.models_dir)
            )
            times = await measure(decider, size, text, max(50, min(rounds, 200_000_000 // size)))
            p99 = times[int(len(times) * 0.99)]
            print(
                f"{models:6} {rules:6} {size / 1000:5.0f} kB  {name} {statistics.median(times):8.0f} µs {p99:8.0f} µs"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    asyncio.run(run(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
