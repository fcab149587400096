"""docs/field-cases.md and the tests' `case` marks say the same, and leave out none of the collection's ranks."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
# Of the cases that a scripted engine (S), a real one (M) or a configuration (C) can show.
RANKS = {
    "API compat": {4, 14, 28, 46, 49, 50, 52, 97, 98, 109, 110, 113, 116, 118, 119},
    "cold start": {11, 23, 34, 37, 38, 91, 121},
    "config": {70, 73, 74, 86, 124, 136},
    "disconnect": {59, 107, 125, 140},
    "eviction": {7, 8, 35, 89, 122, 127},
    "k8s": {71, 80},
    "observability": {67, 82, 83, 115, 134, 143},
    "overload": {22, 26, 61, 68},
    "reasoning": {1, 2, 10, 17, 20, 29, 32, 62, 64, 65, 88, 112, 139},
    "security": {13, 47, 85, 103, 104},
    "streaming": {5, 19, 44, 53, 55, 56, 58, 106},
    "structured": {25, 31, 100, 101},
    "tools": {16, 40, 41, 43, 92, 94, 95, 137, 142},
}
_ROW = re.compile(r"\| (\d+) \| ([^|]+) \| ([^|]*) \|")
_TEST = re.compile(r"`([\w/]+\.py::test_\w+)`")
_NOT_MET = "Not met"


def marked() -> dict[int, set[str]]:
    """By rank: the tests that are marked with it."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for rank in _ranks(node):
                    found[rank].add(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def _ranks(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    marks = [mark for mark in function.decorator_list if isinstance(mark, ast.Call)]
    return [
        int(ast.literal_eval(rank))
        for mark in marks
        if ast.unparse(mark.func) == "pytest.mark.case"
        for rank in mark.args
    ]


def documented() -> dict[str, dict[int, tuple[str, set[str]]]]:
    """By section, which is a kind or what is not met, and rank: what is said, and the tests."""
    _, *sections = (REPOSITORY / "docs" / "field-cases.md").read_text().split("\n## ")
    return {
        section.partition("\n")[0]: {
            int(rank): (said, set(_TEST.findall(tests))) for rank, said, tests in _ROW.findall(section)
        }
        for section in sections
    }


def test_every_case_is_met_or_says_why_not() -> None:
    sections = documented()
    not_met = sections.pop(_NOT_MET)
    for kind, ranks in RANKS.items():
        assert set(sections[kind]) == ranks - set(not_met)
    assert set(not_met) <= set().union(*RANKS.values())


def test_the_documented_tests_are_those_that_are_marked() -> None:
    rows = {rank: tests for section in documented().values() for rank, (_, tests) in section.items() if tests}
    assert rows == dict(marked())


def test_every_test_that_is_named_exists() -> None:
    named = set(_TEST.findall((REPOSITORY / "docs" / "field-cases.md").read_text()))
    files = {name.partition("::")[0] for name in named}
    existing = {
        f"{file}::{node.name}"
        for file in files
        for node in ast.walk(ast.parse((TESTS / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert named - existing == set()


def test_what_is_met_has_a_test() -> None:
    sections = documented()
    del sections[_NOT_MET]
    assert [rank for section in sections.values() for rank, (_, tests) in section.items() if not tests] == []
