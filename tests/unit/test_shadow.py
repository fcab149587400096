"""serve_app.telemetry.shadow: the record holds choices and no text, and what it says is added up."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from judging import judged, rule, score, talk
from rich.console import Console

from serve_app.preview import show_comparison
from serve_app.routing.excerpt import read_excerpt
from serve_app.routing.facts import Facts, read_facts
from serve_app.telemetry.shadow import ShadowRecord, compare

SECRET = "patient-4711"
HARD = score(think=0.95123, large=0.95)


def facts_of(body: dict[str, Any]) -> Facts:
    """Facts as the Router has them: with the excerpt."""
    return dataclasses.replace(read_facts(body, "chat"), excerpt=read_excerpt(body["messages"]))


async def recorded(file: Path, *bodies: dict[str, Any], **setting: Any) -> list[dict[str, Any]]:
    """The lines that a record gets for these bodies, decided by the setting."""
    record = ShadowRecord(str(file))
    for body in bodies:
        record.record(judged(body, thinking="default"), judged(body, **setting), facts_of(body))
    await record.flush()
    return lines_of(file)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_record_has_both_choices_and_where_they_came_from(tmp_path: Path) -> None:
    rules = [rule("picks", model="coder")]
    (line,) = await recorded(tmp_path / "s.jsonl", talk("hello"), score=HARD, rules=rules)
    assert line["applied"] == {
        "model": "large",
        "model_source": "default",
        "thinking": False,
        "thinking_source": "default",
        "rule": None,
        "score": None,
    }
    assert line["decided"] == {
        "model": "coder",
        "model_source": "rule",
        "thinking": True,
        "thinking_source": "scorer",
        "rule": "picks",
        "score": 0.9512,
    }
    assert (line["language"], line["prompt_tokens"] > 0, line["at"] > 1e9) == ("en", True, True)
    assert set(line) == {"at", "applied", "decided", "language", "prompt_tokens"}


async def test_record_names_the_model_that_was_wanted_though_it_was_cold(tmp_path: Path) -> None:
    rules = [rule("picks", model="coder")]
    (line,) = await recorded(tmp_path / "s.jsonl", talk("hello"), rules=rules, awake=["large"])
    assert line["decided"]["model"] == "coder"


async def test_record_holds_no_word_of_the_client(tmp_path: Path) -> None:
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": f"system {SECRET}"},
            {"role": "user", "content": f"before {SECRET}"},
            {"role": "assistant", "content": f"reply {SECRET}"},
            {"role": "user", "content": f"hello {SECRET} e"},
        ],
        "user": SECRET,
        "conversation": SECRET,
        "tools": [{"type": "function", "function": {"name": SECRET}}],
    }
    await recorded(tmp_path / "s.jsonl", body, rules=[rule(thinking=True)])
    assert SECRET not in (tmp_path / "s.jsonl").read_text()


async def test_lines_are_appended_and_directories_are_made(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "er" / "s.jsonl"
    assert len(await recorded(file, talk("one"), talk("two"))) == 2
    assert len(await recorded(file, talk("three"))) == 3


async def test_record_that_cannot_be_written_is_said_and_costs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = ShadowRecord(str(tmp_path))
    record.record(judged(talk("hello")), judged(talk("hello")), facts_of(talk("hello")))
    await record.flush()
    assert "cannot be written" in caplog.text


# Comparison


def choice(
    model: str = "large", thinking: bool = False, source: str = "scorer", rule: str | None = None
) -> dict[str, Any]:
    return {"model": model, "thinking": thinking, "thinking_source": source, "rule": rule}


def line(decided: dict[str, Any], applied: dict[str, Any] | None = None, language: str | None = "en") -> str:
    return json.dumps({"applied": applied or choice(), "decided": decided, "language": language})


def file_of(directory: Path, *lines: str, name: str = "s.jsonl") -> Path:
    file = directory / name
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_changes_are_counted_by_kind(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        line(choice()),
        line(choice("small")),
        line(choice("small", thinking=True)),
        line(choice(thinking=True)),
        line(choice(), applied=choice(thinking=True)),
        line(choice(thinking=True), applied=choice(thinking=True)),
    )
    found = compare([file])
    assert (found.requests, found.other_model, found.more_thinking, found.less_thinking) == (6, 2, 2, 1)
    assert found.models == {"large": 4, "small": 2}


def test_sources_are_counted_rules_by_name(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        line(choice()),
        line(choice(source="rule", rule="proof")),
        line(choice(source="rule", rule="proof")),
        line(choice(source="rule", rule="thanks")),
    )
    assert compare([file]).sources == {"scorer": 1, "rule: proof": 2, "rule: thanks": 1}


def test_source_does_not_name_a_rule_that_only_chose_the_model(tmp_path: Path) -> None:
    assert compare([file_of(tmp_path, line(choice(source="scorer", rule="picks")))]).sources == {"scorer": 1}


def test_languages_are_counted_apart(tmp_path: Path) -> None:
    lines = [line(choice(thinking=True), language="zh"), line(choice(), language="zh"), line(choice(), language=None)]
    found = compare([file_of(tmp_path, *lines)]).by_language
    assert found["zh"] == {"requests": 2, "thinking": 1}
    assert (found["other"]["requests"], found["other"]["thinking"]) == (1, 0)


def test_several_files_are_one_comparison(tmp_path: Path) -> None:
    files = [file_of(tmp_path, line(choice()), name=name) for name in ("a", "b")]
    assert compare(files).requests == 2
    assert compare([]).requests == 0


async def test_what_was_recorded_can_be_compared(tmp_path: Path) -> None:
    await recorded(tmp_path / "s.jsonl", talk("hello"), talk("你好，请问"), score=HARD)
    found = compare([tmp_path / "s.jsonl"])
    assert (found.requests, found.more_thinking, set(found.by_language)) == (2, 2, {"en", "zh"})


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        "",
        "[]",
        "7",
        "null",
        '"text"',
        "{}",
        '{"applied": {}}',
        '{"applied": {}, "decided": {}}',
        '{"applied": null, "decided": null}',
        json.dumps({"applied": choice(), "decided": {**choice(), "model": []}}),
        json.dumps({"applied": choice(), "decided": {**choice(), "thinking": "yes"}}),
        json.dumps({"applied": choice(), "decided": {**choice(), "rule": 7}}),
        json.dumps({"applied": choice(), "decided": choice(), "language": ["en"]}),
    ],
)
def test_line_that_is_none_is_named(tmp_path: Path, bad: str) -> None:
    file = file_of(tmp_path, line(choice()), bad, line(choice()))
    with pytest.raises(ValueError, match=r"s\.jsonl:2: not a line of a shadow record"):
        compare([file])


def test_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(line(choice()).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"s\.jsonl:2: not a line of a shadow record"):
        compare([file])


def test_table_has_shares_and_stands_an_empty_record(tmp_path: Path) -> None:
    out = io.StringIO()
    show_comparison(
        compare([file_of(tmp_path, line(choice("small", thinking=True)), line(choice()))]), Console(file=out)
    )
    assert "1 (50.0%)" in out.getvalue()
    show_comparison(compare([]), Console(file=out))
    assert "0 requests" in out.getvalue()
