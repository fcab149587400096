"""Keys as their owners see them: known, unknown, and changed while the Router runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.datastructures import Headers

from serve_app.config import Config
from serve_app.errors import ApiError
from serve_app.router.auth import Keys

MODELS = [{"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096}]


def key(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "sha256": hashlib.sha256(f"{name}-key".encode()).hexdigest(), **more}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Door:
    """Keys from a file that tests write; a second passes with each look."""

    def __init__(self, file: Path | None = None, **security: Any) -> None:
        if file:
            security["keys_file"] = str(file)
        self._clock = Clock()
        self._file = file
        self._writes = 0
        self._keys = Keys(Config.model_validate({"models": MODELS, "security": security}), clock=self._clock)

    def write(self, text: object) -> None:
        assert self._file
        self._writes += 1
        self._file.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
        os.utime(self._file, (self._writes, self._writes))

    def opens(self, **headers: str) -> str:
        """Who is let in; `401 code` where nobody is."""
        self._clock.now += 1
        try:
            return self._keys.caller(Headers({name.replace("_", "-"): value for name, value in headers.items()})).id
        except ApiError as error:
            return f"{error.status} {error.code}"

    def to(self, name: str) -> str:
        return self.opens(authorization=f"Bearer {name}-key")


def test_without_keys_everybody_is_anonymous_whatever_they_say() -> None:
    door = Door()
    assert [door.opens(), door.to("a")] == ["anonymous", "anonymous"]


@pytest.mark.parametrize(
    ("headers", "who"),
    [
        ({"authorization": "Bearer a-key"}, "a"),
        ({"authorization": "bearer  a-key "}, "a"),
        ({"x_api_key": "a-key"}, "a"),
        ({"authorization": "Basic a-key"}, "401 missing_api_key"),
        ({"authorization": "Bearer "}, "401 missing_api_key"),
        ({"authorization": "Bearer b-key"}, "401 invalid_api_key"),
        ({"authorization": f"Bearer {hashlib.sha256(b'a-key').hexdigest()}"}, "401 invalid_api_key"),
        ({}, "401 missing_api_key"),
    ],
)
def test_only_a_known_key_is_let_in(headers: dict[str, str], who: str) -> None:
    assert Door(keys=[key("a")]).opens(**headers) == who


def test_file_is_read_again_when_it_changes_and_adds_to_the_configured_keys(tmp_path: Path) -> None:
    door = Door(tmp_path / "keys.yaml", keys=[key("a")])
    assert [door.to("a"), door.to("b")] == ["a", "401 invalid_api_key"]
    door.write([key("b")])
    assert [door.to("a"), door.to("b")] == ["a", "b"]
    door.write([key("c")])
    assert [door.to("a"), door.to("b"), door.to("c")] == ["a", "401 invalid_api_key", "c"]


@pytest.mark.parametrize(
    "faulty",
    ["- id: [", "text", [{"id": "x"}], [key("c", typo=1)], "- \x00"],
    ids=["yaml", "text", "hash", "typo", "0"],
)
def test_faulty_file_leaves_the_keys_as_they_were(tmp_path: Path, faulty: object) -> None:
    door = Door(tmp_path / "keys.yaml")
    door.write([key("b")])
    assert door.to("b") == "b"
    door.write(faulty)
    assert door.to("b") == "b"
    door.write([key("c")])
    assert [door.to("b"), door.to("c")] == ["401 invalid_api_key", "c"]


def test_missing_file_lets_nobody_in_until_it_is_there(tmp_path: Path) -> None:
    door = Door(tmp_path / "keys.yaml")
    assert [door.opens(), door.to("b")] == ["401 missing_api_key", "401 invalid_api_key"]
    door.write([key("b")])
    assert door.to("b") == "b"
    (tmp_path / "keys.yaml").unlink()
    assert door.to("b") == "b"


def test_relative_path_of_the_file_is_below_the_repository_wherever_ray_runs_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.config.REPOSITORY", tmp_path)
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump([key("b")]))
    monkeypatch.chdir("/")
    assert Door(Path("keys.yaml")).to("b") == "b"
