"""What is added up from the records, and `python -m serve_app usage`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli import app as cli
from serve_app.telemetry.audit import read_records, since_of, usage


def record(**fields: Any) -> dict[str, Any]:
    base = {"at": 1.0, "key": "a", "model": "hot", "status": 200, "prompt_tokens": 0, "completion_tokens": 0}
    return {**base, **fields}


def test_usage_adds_up_by_key_and_model_and_the_largest_comes_first() -> None:
    rows = usage(
        [
            record(prompt_tokens=1, completion_tokens=2, reasoning_tokens=1, cached_tokens=1, engine_ms=1500.0),
            record(prompt_tokens=10, completion_tokens=20, engine_ms=600.0),
            record(key="b", prompt_tokens=100, completion_tokens=1, engine_ms=None),
            record(key="b", status=429),
            record(key="b", status=499),
        ],
        ["key", "model"],
    )
    assert [row["key"] for row in rows] == ["b", "a"]
    small = rows[1]
    assert (small["requests"], small["refused"], small["engine_s"]) == (2, 0, 2.1)
    assert [small[name] for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")] == [
        11,
        22,
        1,
        1,
    ]
    assert (rows[0]["requests"], rows[0]["refused"], rows[0]["ttft_p50_ms"]) == (3, 2, None)


@pytest.mark.parametrize(
    ("values", "p50", "p99"),
    [([5], 5, 5), ([1, 2], 1, 2), ([3, 1, 2], 2, 3), (list(range(1, 101)), 50, 99), (list(range(1, 1001)), 500, 990)],
)
def test_percentiles_are_the_smallest_value_that_so_many_do_not_exceed(values: list[int], p50: int, p99: int) -> None:
    (row,) = usage([record(ttft_ms=value) for value in values] + [record(ttft_ms=None)], ["key"])
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (p50, p99)


def test_since_is_a_time_ago_or_a_date() -> None:
    assert [since_of(text, 1_000_000.0) for text in ("30s", "30m", "12h", "7d")] == [999_970, 998_200, 956_800, 395_200]
    assert since_of("2026-01-02T03:04:05+00:00") == 1767323045
    assert since_of("2026-01-02") < since_of("2026-01-03")
    for wrong in ("", "d", "soon", "-1d", "1.5h", "1w", "²d"):
        with pytest.raises(ValueError, match=r".*"):
            since_of(wrong)


def test_faulty_lines_and_old_records_are_skipped(tmp_path: Path) -> None:
    lines = [
        b'{"at": 5}',
        b'{"at": 50}',
        b'{"at": 60',
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'{"at": null}',
        b"",
        b'{"at": 70}',
    ]
    (tmp_path / "audit-x-1.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "other.jsonl").write_bytes(b'{"at": 99}')
    assert [found["at"] for found in read_records(tmp_path, 10)] == [50, 70]


def test_file_that_is_removed_while_the_others_are_read_is_passed_over(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"audit-x-{number}.jsonl").write_text(f'{{"at": {number}}}\n')
    reading = read_records(tmp_path)
    assert next(reading)["at"] == 0
    (tmp_path / "audit-x-1.jsonl").unlink()
    assert [each["at"] for each in reading] == [2]


def command(*args: str) -> Any:
    return CliRunner().invoke(cli, ["usage", *args])


def written(tmp_path: Path) -> Path:
    now = time.time()
    records = [
        record(at=now, key="team-with-a-long-name", prompt_tokens=1234567, completion_tokens=7654321, ttft_ms=12345.6),
        record(at=now, key="b", prompt_tokens=5, engine_ms=98765432.1),
        record(at=now - 7200, key="old", prompt_tokens=3),
    ]
    (tmp_path / "audit-x-1.jsonl").write_text("\n".join(json.dumps(each) for each in records))
    return tmp_path


def test_command_prints_every_number_whole_however_narrow_the_terminal(tmp_path: Path) -> None:
    shown = command("--since", "1h", "--directory", str(written(tmp_path)))
    assert shown.exit_code == 0
    for whole in ("team-with-a-long-name", "1234567", "7654321", "12345.6", "98765.4"):
        assert whole in shown.output
    assert "old" not in shown.output
    assert shown.output.index("team-with") < shown.output.index("\n b ")


def test_command_prints_json_for_another_program(tmp_path: Path) -> None:
    shown = command("--json", "--by", "key", "--directory", str(written(tmp_path)))
    rows = json.loads(shown.output)
    assert [row["key"] for row in rows] == ["team-with-a-long-name", "b", "old"]


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    wrong = command("--since", "soon", "--directory", str(tmp_path))
    assert (wrong.exit_code, "soon" in wrong.output) == (1, True)
    empty = command("--directory", str(tmp_path))
    assert (empty.exit_code, "no record" in empty.output) == (1, True)
