"""deployments/ and docs/hardware.md: every file fits the cards that it names, and the table is what `size` computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.hardware_table import table
from serve_app.autoscaling_schema import Autoscaling
from serve_app.check import read_file, warnings
from serve_app.cli import app
from serve_app.config import Config
from serve_app.model_schema import REPOSITORY, Model
from serve_app.sizing.accelerators import GB
from serve_app.sizing.command import sized
from serve_app.sizing.deployment import gpu_bytes_of

DEPLOYMENTS = REPOSITORY / "deployments"
HARDWARE = re.compile(r"# Hardware: (\d+) x (\d+) GB ")
FOR_GPUS = [file for file in sorted(DEPLOYMENTS.glob("*.yaml")) if HARDWARE.match(file.read_text())]


def named(file: Path) -> tuple[int, int]:
    """Cards and GB of each, as the first line says."""
    found = HARDWARE.match(file.read_text())
    assert found
    return int(found[1]), int(found[2])


def test_every_file_with_gpus_names_its_hardware() -> None:
    with_gpus = [file for file in DEPLOYMENTS.glob("*.yaml") if "num_gpus" in file.read_text()]
    assert sorted(with_gpus) == FOR_GPUS
    assert len(FOR_GPUS) == 6


@pytest.mark.parametrize("file", FOR_GPUS, ids=lambda file: file.name)
def test_size_says_that_each_model_fits_the_card_that_the_file_names(file: Path) -> None:
    config = read_file(file).config
    _, gigabytes = named(file)
    for model in [*config.residents, *config.lazy]:
        engine = config.engine_spec(model).args
        this = sized(
            model.source,
            config.models_dir,
            f"{gigabytes}GB",
            context=model.context,
            quantization=None,
            kv_cache=engine.get("kv_cache_dtype", "auto"),
            tensor_parallel=engine.get("tensor_parallel_size", 1),
            concurrency=1,
            utilization=engine["gpu_memory_utilization"],
            max_num_seqs=engine.get("max_num_seqs"),
            max_num_batched_tokens=engine.get("max_num_batched_tokens"),
        )
        assert this.fit.fits, model.id
        assert gpu_bytes_of(config, model) == gigabytes * GB
    assert warnings(file) == []


@pytest.mark.parametrize("file", FOR_GPUS, ids=lambda file: file.name)
def test_all_replicas_have_room_on_the_cards_that_the_file_names(file: Path) -> None:
    cards, _ = named(file)
    assert len(placed(read_file(file).config)) <= cards


def placed(config: Config) -> list[float]:
    """What is taken of each card, the largest replicas first, each on the first card with room, as Ray packs them."""
    wanted = [model.resources.num_gpus for model in config.residents for _ in range(most(model))]
    if config.lazy:
        replicas = config.pool.autoscaling.max_replicas if config.pool.autoscaling else config.pool.replicas
        wanted += [config.pool.resources.num_gpus] * replicas
    cards: list[float] = []
    for share in sorted(wanted, reverse=True):
        whole = max(1, int(share))
        if share >= 1:
            cards += [1.0] * whole
        elif (place := next((at for at, taken in enumerate(cards) if taken + share <= 1), None)) is not None:
            cards[place] += share
        else:
            cards.append(share)
    return cards


def most(model: Model) -> int:
    scaling: Autoscaling | None = model.autoscaling
    return scaling.max_replicas if scaling else model.replicas


def test_the_table_in_the_docs_is_what_is_computed_today() -> None:
    assert table() in (REPOSITORY / "docs" / "hardware.md").read_text(), "run python -m benchmarks.hardware_table"


def test_the_example_in_the_docs_is_what_size_prints() -> None:
    result = CliRunner().invoke(app, ["size", "--gpu", "24GB", "--model", "Qwen/Qwen3-14B", "--context", "16384"])
    assert result.output in (REPOSITORY / "docs" / "hardware.md").read_text()


def test_the_docs_list_every_deployment_for_gpus() -> None:
    text = (REPOSITORY / "docs" / "hardware.md").read_text()
    assert [file.name for file in FOR_GPUS if f"deployments/{file.name})" not in text] == []
