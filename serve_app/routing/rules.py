"""Rules: conditions on a request's facts, in order of priority. Pure.

All patterns of all rules are one RE2 set, searched in one pass: 100 patterns over 4 kB take 10 µs, and no pattern
can take longer than linear time (RE2's guarantee), whoever wrote it and whatever a client sends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import re2
import yaml

from serve_app.routing.excerpt import Excerpt
from serve_app.routing_schema import Range, Rule, Task, Then, When

_HERE = Path(__file__).parent
# RE2 builds its automaton as it reads; what does not fit is searched again and again, or fails to compile.
_SET_PATTERNS = 100
_SET_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What rules can ask about. `header`: looks up a request header; `key`: fingerprint of the API key."""

    excerpt: Excerpt
    tasks: frozenset[str]
    model: str | None = None
    json_schema: bool = False
    header: Callable[[str], str | None] = lambda name: None
    key: str = ""


_Check = Callable[[Request], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    rule: Rule
    text: frozenset[int]
    not_text: frozenset[int]
    checks: tuple[_Check, ...]


class Patterns:
    """Many RE2 patterns searched at once; each found by its number."""

    def __init__(self, patterns: Sequence[str]) -> None:
        options = re2.Options()
        options.max_mem = _SET_BYTES
        self._sets = []
        for first in range(0, len(patterns), _SET_PATTERNS):
            found = re2.Set.SearchSet(options)
            for pattern in patterns[first : first + _SET_PATTERNS]:
                found.Add(pattern)
            found.Compile()
            self._sets.append((first, found))

    def found(self, text: str) -> frozenset[int]:
        """The numbers of the patterns that occur in the text."""
        raw = text.encode("utf-8", "replace")
        return frozenset(first + number for first, found in self._sets for number in found.Match(raw) or ())


class Rules:
    """A rule set, compiled."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        numbers: dict[str, int] = {}

        def numbered(patterns: Sequence[str]) -> frozenset[int]:
            return frozenset(numbers.setdefault(pattern, len(numbers)) for pattern in patterns)

        ordered = sorted(rules, key=lambda rule: -rule.priority)
        self._rules = [
            _Compiled(rule, numbered(rule.when.text), numbered(rule.when.not_text), _checks(rule.when))
            for rule in ordered
        ]
        self._patterns = Patterns(list(numbers))
        # Most rules have patterns, and most patterns are not found: those rules are not even looked at.
        self._without_text = [index for index, compiled in enumerate(self._rules) if not compiled.text]
        self._with_text: defaultdict[int, list[int]] = defaultdict(list)
        for index, compiled in enumerate(self._rules):
            for number in compiled.text:
                self._with_text[number].append(index)

    def decisive(self, request: Request) -> tuple[Rule | None, Rule | None]:
        """The rule that decides about thinking, and the one that decides about the model; None where none does."""
        found = self._patterns.found(request.excerpt.ask)
        thinking: Rule | None = None
        model: Rule | None = None
        candidates = {*self._without_text, *(index for number in found for index in self._with_text.get(number, ()))}
        for index in sorted(candidates):
            compiled = self._rules[index]
            then = compiled.rule.then
            useful = (thinking is None and then.thinking is not None) or (model is None and _names_model(then))
            if useful and _holds(compiled, found, request):
                if then.thinking is not None:
                    thinking = thinking or compiled.rule
                if _names_model(then):
                    model = model or compiled.rule
                if thinking and model:
                    break
        return thinking, model


def _names_model(then: Then) -> bool:
    return then.model is not None or then.size is not None


def _holds(compiled: _Compiled, found: frozenset[int], request: Request) -> bool:
    if compiled.not_text and not compiled.not_text.isdisjoint(found):
        return False
    return all(check(request) for check in compiled.checks)


def _checks(when: When) -> tuple[_Check, ...]:
    made: list[_Check] = []
    if when.task:
        made.append(_tasks(frozenset(when.task), wanted=True))
    if when.not_task:
        made.append(_tasks(frozenset(when.not_task), wanted=False))
    if when.language:
        made.append(_is_one_of(lambda request: request.excerpt.language, frozenset(when.language)))
    if when.model:
        made.append(_is_one_of(lambda request: request.model, frozenset(when.model)))
    if when.key:
        made.append(_is_one_of(lambda request: request.key, frozenset(when.key)))
    for bounds, count in (
        (when.ask_tokens, lambda request: request.excerpt.ask_tokens),
        (when.prompt_tokens, lambda request: request.excerpt.prompt_tokens),
        (when.turns, lambda request: request.excerpt.turns),
    ):
        if bounds is not None:
            made.append(_within(bounds, count))
    for wanted, fact in (
        (when.tools, lambda request: request.excerpt.tools),
        (when.tool_loop, lambda request: request.excerpt.in_tool_loop),
        (when.json_schema, lambda request: request.json_schema),
        (when.images, lambda request: request.excerpt.images),
        (when.system, lambda request: bool(request.excerpt.system)),
    ):
        if wanted is not None:
            made.append(_is(wanted, fact))
    made += [_header(name, pattern) for name, pattern in when.header.items()]
    return tuple(made)


def _tasks(tasks: frozenset[str], *, wanted: bool) -> _Check:
    return lambda request: tasks.isdisjoint(request.tasks) is not wanted


def _is_one_of(fact: Callable[[Request], str | None], values: Collection[str | None]) -> _Check:
    return lambda request: fact(request) in values


def _within(bounds: Range, count: Callable[[Request], int]) -> _Check:
    low, high = bounds.min, bounds.max
    return lambda request: low <= count(request) and (high is None or count(request) <= high)


def _is(wanted: bool, fact: Callable[[Request], bool]) -> _Check:
    return lambda request: fact(request) is wanted


def _header(name: str, pattern: str) -> _Check:
    compiled = re2.compile(pattern)
    return lambda request: (value := request.header(name)) is not None and bool(compiled.search(value))


@functools.cache
def _task_patterns() -> tuple[Patterns, tuple[Task, ...]]:
    markers: Mapping[Task, list[str]] = yaml.safe_load((_HERE / "tasks.yaml").read_text())
    pairs = [(task, pattern) for task, patterns in markers.items() for pattern in patterns]
    return Patterns([pattern for _, pattern in pairs]), tuple(task for task, _ in pairs)


def tasks_of(instruction: str) -> frozenset[str]:
    """The task markers that a text shows."""
    patterns, tasks = _task_patterns()
    return frozenset(tasks[number] for number in patterns.found(instruction))


@functools.cache
def shipped_rules() -> tuple[Rule, ...]:
    """The rules of rules.yaml."""
    return tuple(Rule.model_validate(entry) for entry in yaml.safe_load((_HERE / "rules.yaml").read_text()))
