"""What the router asks of the lazy models' pool, answered by a script; tests publish its replicas themselves."""

import asyncio
from collections.abc import Collection
from typing import Any

SECRET = "the-engines-secret"


class Pool:
    """Answers who wants a model once `woken` is set, and orders at once; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.spread: list[tuple[str, tuple[str, ...]]] = []
        self.orders: list[tuple[str, str, str | None]] = []
        self.called = asyncio.Event()
        self.woken = asyncio.Event()
        self.answers: list[dict[str, Any] | Exception] = []
        self.order_answers: list[dict[str, Any] | Exception] = []

    async def acquire(self, model: str, avoid: Collection[str] = ()) -> dict[str, Any]:
        if avoid:
            self.spread.append((model, tuple(avoid)))
        else:
            self.asked.append(model)
        self.called.set()
        await self.woken.wait()
        return _said(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    async def order(self, model: str, order: str, only: str | None = None) -> dict[str, Any]:
        self.orders.append((model, order, only))
        return _said(self.order_answers.pop(0) if self.order_answers else {})

    def will_be_at(self, url: str) -> None:
        self.answers.append({"target": {"replica_id": "pool-1", "url": url, "secret": SECRET}})


def _said(answer: dict[str, Any] | Exception) -> dict[str, Any]:
    if isinstance(answer, Exception):
        raise answer
    return answer
