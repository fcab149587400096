"""serve_app.router.memory: conversations are remembered for a time, and only so many."""

from judging import past

from serve_app.router.memory import Memory
from serve_app.routing_schema import Sticky


def test_what_is_remembered_is_recalled() -> None:
    memory = Memory(Sticky(), lambda: 0.0)
    memory.remember("a", past(model_id="reader"))
    assert memory.recall("a") == past(model_id="reader")
    assert memory.recall("b") is None


def test_last_decision_is_what_counts() -> None:
    memory = Memory(Sticky(), lambda: 0.0)
    memory.remember("a", past(model_id="reader"))
    memory.remember("a", past(model_id="large"))
    assert memory.recall("a") == past(model_id="large")


def test_conversation_is_forgotten_after_its_idle_time() -> None:
    now = [0.0]
    memory = Memory(Sticky(ttl_s=100), lambda: now[0])
    memory.remember("a", past(at_s=0.0))
    now[0] = 100.0
    assert memory.recall("a")
    now[0] = 100.1
    assert memory.recall("a") is None
    now[0] = 0.0
    assert memory.recall("a") is None


def test_oldest_conversation_makes_room() -> None:
    memory = Memory(Sticky(entries=2), lambda: 0.0)
    for key in ("a", "b", "a", "c"):
        memory.remember(key, past())
    assert [key for key in "abc" if memory.recall(key)] == ["a", "c"]
