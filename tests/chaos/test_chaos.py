"""Parts of a running service are killed, or lose what they need, while clients ask (`make chaos`).

All of them check their answers token by token, whatever happens; `Stage.act` checks that afterwards nothing is left.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from tests.chaos.clients import WHOLE, Load, Seen
from tests.chaos.report import Act
from tests.chaos.stage import KEYS, Stage
from tests.e2e.service import wait_until

pytestmark = pytest.mark.e2e
HEAL_DEADLINE_S = 60.0
# From the moment of the kill until everybody who is left knows.
NOTICED_S = 1.5


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def heals(stage: Stage, act: Act) -> None:
    wait_until(stage.all_there, HEAL_DEADLINE_S, "all is there again")
    act.healed()


def recorded(stage: Stage, act: Act, *, missing: int = 0) -> None:
    """All that was answered is in the audit, but for so many."""

    def lost() -> list[Seen]:
        records = stage.records()
        return [one for one in act.seen if one.outcome == WHOLE and records.get(one.id, {}).get("status") != 200]

    wait_until(lambda: len(lost()) <= missing, 10, "every answer has its record")
    act.notes.append(f"{len(lost())} answers without a record")


def only_one_replica_was_hurt(stage: Stage, act: Act) -> None:
    records = stage.records()
    # It may be that it had nothing to do just then.
    assert len({records[one.id]["replica"] for one in act.hurt if one.id in records}) <= 1
    assert act.last_hurt_s < NOTICED_S


def of_one_replica(stage: Stage, name: str, victim: psutil.Process) -> None:
    """Kill a process, and see that only requests of its replica were hurt."""
    with stage.act(name) as (act, _):
        act.strikes()
        victim.kill()
        wait_until(lambda: gone(victim), 10, "it is gone")
        heals(stage, act)
    only_one_replica_was_hurt(stage, act)
    recorded(stage, act)


def test_an_engine_is_killed(stage_: Stage) -> None:
    of_one_replica(stage_, "kill -9 an engine", stage_.engines()[0])


def test_a_lazy_models_engine_is_killed(stage_: Stage) -> None:
    with stage_.act("kill -9 a lazy engine") as (act, clients):
        act.strikes()
        stage_.engines("LazyPool")[0].kill()
        wait_until(
            lambda: any(
                one.kind == "lazy" and one.outcome == WHOLE and one.began > act.struck_at for one in clients.seen
            ),
            HEAL_DEADLINE_S,
            "the lazy model answers again",
        )
        act.healed()
    assert {one.kind for one in act.hurt} <= {"lazy"}
    recorded(stage_, act)


def test_a_replica_is_killed(stage_: Stage) -> None:
    of_one_replica(stage_, "kill -9 a model replica", stage_.replicas()[0])


def kills_router(stage: Stage, act: Act, clients: Load, victim: psutil.Process) -> None:
    """Kill one, and see that nobody else is hurt."""
    (other,) = [router for router in stage.routers() if router.pid != victim.pid]
    # Frozen: so none of its connections is over before they were counted.
    victim.suspend()
    of_victim, of_other = stage.held_by(victim), stage.held_by(other)
    act.strikes()
    victim.kill()
    wait_until(lambda: gone(victim), 10, "it is gone")
    heals(stage, act)
    assert {one.outcome for one in clients.seen if one.outcome != WHOLE} <= {"cut"}
    assert not [one for one in clients.seen if one.outcome != WHOLE and one.port in of_other - of_victim]
    act.notes.append(f"it held {len(of_victim)} of {len(of_victim | of_other)} connections")


def test_a_router_is_killed(stage_: Stage) -> None:
    with stage_.act("kill -9 a Router replica") as (act, clients):
        kills_router(stage_, act, clients, stage_.routers()[0])
    assert act.last_hurt_s < NOTICED_S
    # What it had answered and not yet written: records wait for a moment, so that no answer waits for a disk.
    recorded(stage_, act, missing=4)


def test_the_router_that_runs_a_batch_is_killed(stage_: Stage, tmp_path: Path) -> None:
    client = OpenAI(base_url=stage_.service.base_url + "/v1", api_key=KEYS[0], max_retries=5)
    texts = {f"line-{number}": f"a{number} b{number} c{number}" for number in range(60)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "hot", "messages": [{"role": "user", "content": f"fake[ttft_s=0.4,text={text}]"}]},
        }
        for name, text in texts.items()
    ]
    with stage_.act("kill -9 the Router that runs a batch") as (act, clients):
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch_id = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        before = wait_until(
            lambda: (batch := client.batches.retrieve(batch_id)).request_counts.completed >= 8 and batch,
            HEAL_DEADLINE_S,
            "lines are answered",
        )
        (worker,) = [
            router
            for router in stage_.routers()
            if any(file.path.endswith("/active/lane") and _locks(router, file.path) for file in router.open_files())
        ]
        (log,) = stage_.batches.glob(f"batches/key-*/{batch_id}/results.jsonl")
        kills_router(stage_, act, clients, worker)
        kept = log.read_bytes().splitlines()
        batch = wait_until(
            lambda: (one := client.batches.retrieve(batch_id)).status == "completed" and one,
            HEAL_DEADLINE_S,
            "the batch is over",
        )
        result = client.files.content(batch.output_file_id).text.splitlines()
    found = [json.loads(line) for line in result]
    assert Counter(one["custom_id"] for one in found) == dict.fromkeys(texts, 1)
    assert {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in found} == texts
    assert batch.request_counts.completed == len(texts)
    assert before.request_counts.completed <= len(kept)
    assert {json.loads(line)["id"] for line in kept} <= {one["id"] for one in found}
    act.notes.append(f"{len(texts)} of {len(texts)} lines, each once; {before.request_counts.completed} before")
    recorded(stage_, act, missing=4)


def _locks(process: psutil.Process, path: str) -> bool:
    inode = Path(path).stat().st_ino
    return any(
        line.split()[4] == str(process.pid) and line.split()[5].endswith(f":{inode}")
        for line in Path("/proc/locks").read_text().splitlines()
    )


@pytest.mark.parametrize("hangs", [False, True])
def test_redis_is_lost(stage_: Stage, hangs: bool) -> None:
    with stage_.act(f"{'kill -STOP' if hangs else 'kill -9'} Redis, for 4 s") as (act, clients):
        redis, process = stage_.redis, psutil.Process(stage_.redis.pid)
        lose, regain = (process.suspend, process.resume) if hangs else (redis.kill, redis.start)
        act.strikes()
        lose()
        wait_until(
            lambda: time.monotonic() - act.struck_at > 4 and clients.answered_since(act.struck_at) > 100,
            HEAL_DEADLINE_S,
            "clients are answered without Redis",
        )
        back = time.monotonic()
        regain()
        wait_until(
            lambda: any(one.began > back and one.conversation == "kept" and not one.rates for one in clients.seen),
            HEAL_DEADLINE_S,
            "Redis is used again",
        )
        act.healed()
    assert not act.hurt
    without = [one for one in act.seen if act.struck_at + NOTICED_S < one.began and one.ended < back]
    assert {one.rates != "" for one in without} == {True}
    assert {one.conversation for one in without if one.kind == "conversation"} == {"unavailable"}
    assert act.slowest_s() < 4
    act.notes.append(f"{len(without)} answers without Redis, all say so; every turn that was kept is there again")
    recorded(stage_, act)


def test_the_disk_of_the_audit_is_full(stage_: Stage) -> None:
    with stage_.act(f"fill the audit's disk, for 4 s ({stage_.disk.how})") as (act, clients):
        routers = stage_.routers()
        act.strikes()
        stage_.disk.fill(routers)
        full = time.monotonic()
        wait_until(
            lambda: time.monotonic() - full > 4 and clients.answered_since(full) > 100,
            HEAL_DEADLINE_S,
            "clients are answered without an audit",
        )
        freed = time.monotonic()
        stage_.disk.free(routers)
        wait_until(
            lambda: any(one.began > freed and one.id in stage_.records() for one in clients.seen),
            HEAL_DEADLINE_S,
            "records are written again",
        )
        act.healed()
    assert not act.hurt
    lines = [line for path in stage_.disk.directory.glob("audit-*") for line in path.read_bytes().splitlines()]
    assert all(isinstance(json.loads(line), dict) for line in lines), "half a record"
    records = stage_.records()
    lost = [one for one in act.seen if one.id not in records]
    assert lost, "the disk was full"
    assert all(full - NOTICED_S < one.ended < freed + NOTICED_S for one in lost)
    act.notes.append(f"{len(lost)} records lost while it was full, none else and no half one")
