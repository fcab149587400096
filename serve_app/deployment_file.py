"""Reads a deployment file's YAML: a key that stands twice is refused, and every key is found again by its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from serve_app.config import ConfigError

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
# Octal and sexagesimal numbers of YAML 1.1.
_OTHER_NUMBER = re.compile(r"[-+]?0[0-7_]+|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
# A path of ours is below the args of the application; Serve's own is below the document.
_BELOW_ARGS = re.compile(r"(applications\[\d+\]\.args)\.")


def read_yaml(path: Path) -> dict[str, Any]:
    """The document. Raises `ConfigError` where it cannot be read, is no YAML or no mapping, or says a key twice."""
    text = _text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError("not valid YAML: it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise ConfigError("not a mapping; see deployments/local.yaml for the form")
    # YAML itself takes the last one, and whoever edits the first wonders.
    if found := [*_doubled(root, "", ()), *_other_numbers(root, "", ())]:
        raise ConfigError("\n".join(found))
    return raw


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise ConfigError("no such file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("not valid YAML: it is no UTF-8") from None


def _doubled(node: yaml.Node | None, path: str, above: tuple[int, ...]) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.value in lines and key.tag != "tag:yaml.org,2002:merge":
                where = f"{path}.{key.value}" if path else str(key.value)
                yield f"{where}: stands twice, in lines {lines[key.value]} and {key.start_mark.line + 1}"
            lines[key.value] = key.start_mark.line + 1
    for where, child in _children(node, path, above):
        yield from _doubled(child, where, (*above, id(node)))


def _other_numbers(node: yaml.Node | None, path: str, above: tuple[int, ...]) -> Iterator[str]:
    """Numbers that are not what they look like: to YAML 010 is 8, and 1:30 is 90."""
    number = isinstance(node, yaml.ScalarNode) and node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    if node and number and _OTHER_NUMBER.fullmatch(node.value):
        yield f"{path}: YAML reads {node.value} as {yaml.safe_load(node.value):g}; write that, or quote a name"
    for where, child in _children(node, path, above):
        yield from _other_numbers(child, where, (*above, id(node)))


def _children(node: yaml.Node | None, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, yaml.Node]]:
    if id(node) in above:
        raise ConfigError(f"{path}: an anchor that holds itself")
    if isinstance(node, yaml.SequenceNode):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        yield from ((f"{path}.{key.value}" if path else str(key.value), value) for key, value in node.value)


def line_of(path: Path, problem: str) -> int | None:
    """The line of what a problem names (`models[0].context: ...`), or of the key above it that is there."""
    try:
        root = yaml.compose(_text(path), Loader=yaml.SafeLoader)
    except (ConfigError, yaml.YAMLError):
        return None
    where = problem.partition(": ")[0]
    applications = _child(root, "applications")
    count = len(applications.value) if isinstance(applications, yaml.SequenceNode) else 0
    candidates = [where, *(f"applications[{index}].args.{where}" for index in range(count))]
    found = [(_depth_and_line(root, candidate), candidate) for candidate in candidates]
    # The way on which most of the path is there.
    (depth, line), candidate = max(found, key=lambda each: each[0][0] - 3 * bool(_BELOW_ARGS.match(each[1])))
    own = depth - (3 if _BELOW_ARGS.match(candidate) else 0)
    return line if own > 0 else None


def _depth_and_line(node: yaml.Node | None, path: str) -> tuple[int, int]:
    depth, line = 0, 0
    for name, index in _STEP.findall(path):
        node, at = _step(node, name, index)
        if node is None:
            break
        depth, line = depth + 1, at
    return depth, line


def _step(node: yaml.Node | None, name: str, index: str) -> tuple[yaml.Node | None, int]:
    if index and isinstance(node, yaml.SequenceNode) and int(index) < len(node.value):
        found = node.value[int(index)]
        return found, found.start_mark.line + 1
    if name and isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == name:
                return value, key.start_mark.line + 1
    return None, 0


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    return _step(node, name, "")[0]
