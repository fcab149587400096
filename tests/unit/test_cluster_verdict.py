"""What the drills of `make cluster-sim` hold clients' failures to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.clients import WHOLE, Seen
from tests.chaos.report import Act
from tests.cluster_sim.verdict import Killed, as_json, broken_promises

STRUCK, DEAD, HEALED_S = 100.0, 100.2, 20.0
THERE, ELSEWHERE = 40001, 40002
REPLICAS = {"on-it": "gone", "elsewhere": "alive"}
KILLED = Killed(DEAD, {"gone"}, {ELSEWHERE})


def act(**fields: Any) -> Act:
    whole = Seen("whole", "hot", True, ELSEWHERE, began=99, ended=101, outcome=WHOLE)
    request = {"id": "elsewhere", "port": ELSEWHERE, "began": 99.0, "ended": 101.0, "first_byte": 99.1, **fields}
    return Act("kill", STRUCK, HEALED_S, [whole, Seen(kind="hot", stream=True, **request)])


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "event engine_died", "id": "on-it"},
        {"outcome": "cut", "port": THERE},
        {"outcome": "cut", "port": THERE, "first_byte": 0.0},
        {"outcome": "503 engine_died", "retry_after": "1", "began": 110.0},
    ],
)
def test_what_was_on_the_killed_node_may_break_and_a_refusal_may_say_when_to_come_again(fields: Any) -> None:
    assert broken_promises(act(**fields), KILLED, REPLICAS) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"outcome": "cut"}, "hot: cut mid-stream, and was not on what was killed × 1"),
        ({"outcome": "event engine_died"}, "hot: event engine_died, and was not on what was killed × 1"),
        ({"outcome": "cut", "port": THERE, "began": 101.0}, "hot: cut mid-stream, and was not on what was killed × 1"),
        ({"outcome": "503 no_replica"}, "hot: 503 no_replica, which no client may see × 1"),
        ({"outcome": "500 internal", "id": "on-it"}, "hot: 500 internal, which no client may see × 1"),
        (
            {"outcome": "503 busy", "retry_after": "1", "began": 121.0},
            "hot: 503 busy, after all was there again × 1",
        ),
        (
            {"outcome": "cut", "port": THERE, "began": 121.0, "first_byte": 0.0},
            "hot: cut before the first byte, after all was there again × 1",
        ),
    ],
)
def test_nothing_else_may_fail_and_afterwards_nothing_at_all(fields: Any, said: str) -> None:
    assert broken_promises(act(**fields), KILLED, REPLICAS) == [said]


def test_where_nothing_that_serves_was_killed_not_even_a_refusal_is_allowed() -> None:
    refused = act(outcome="503 no_replica", retry_after="1")
    assert broken_promises(refused, None, {}) == ["hot: 503 no_replica, and was not on what was killed × 1"]


def test_the_report_says_how_many_were_sent_and_how_and_when_each_of_the_others_failed() -> None:
    report = as_json(act(outcome="cut", port=THERE), [], REPLICAS)
    assert (report["sent"], report["finished"], report["failed"]) == (2, 1, {"hot: cut mid-stream": 1})
    assert (report["recovered_s"], report["failed_after_recovery"]) == (20.0, 0)
    (failure,) = report["failures"]
    assert (failure["phase"], failure["began_s"], failure["replica"]) == ("mid-stream", -1.0, "alive")
