"""`check`: every shipped deployment passes, and what is wrong in one is named by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.check import problems, warnings
from serve_app.model_schema import REPOSITORY

DEPLOYMENTS = sorted((REPOSITORY / "deployments").glob("*.yaml"))


@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda file: file.name)
def test_every_shipped_deployment_is_right(file: Path) -> None:
    assert problems(file) == []


def changed(tmp_path: Path, change: Any) -> list[str]:
    """What is found in prod.yaml after a change to its document or its args."""
    document = yaml.safe_load((REPOSITORY / "deployments" / "prod.yaml").read_text())
    change(document, document["applications"][0]["args"])
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(document))
    return problems(file)


def _parallel(model: dict[str, Any], gpus: int) -> None:
    model["engine"]["tensor_parallel_size"] = model["resources"]["num_gpus"] = gpus


@pytest.mark.case(136)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda doc, args: args["models"][0].update(contxt=1), "models[0].contxt: no such key"),
        (lambda doc, args: args["models"][0]["engine"].update(max_num_seq=1), "models[0].engine.max_num_seq: vLLM has"),
        (lambda doc, args: args["models"][0]["engine"].update(max_num_seqs="many"), "models[0].engine.max_num_seqs: "),
        (lambda doc, args: args["models"][0]["engine"].update(reasoning_parser="qwen9"), "models[0].engine"),
        (lambda doc, args: args["models"][1]["engine"].update(tool_call_parser="hermse"), "models[1].engine"),
        (lambda doc, args: args["models"][0].update(context=131072), "models[0].context: 131072 is more than"),
        (lambda doc, args: args["models"][4]["engine"].pop("hf_overrides"), "models[4].context: 131072 is more than"),
        (lambda doc, args: args["models"][0]["engine"].update(tensor_parallel_size=4), "models[0].resources.num_gpus"),
        (lambda doc, args: args["models"][1]["engine"].update(tensor_parallel_size=2), "models[1].engine.tensor_par"),
        (lambda doc, args: args["models"][0]["engine"].update(data_parallel_size=2), "models[0].resources.num_gpus"),
        (
            lambda doc, args: _parallel(args["models"][0], 3),
            "models[0].engine.tensor_parallel_size: 40 attention heads do not divide into 3",
        ),
        (
            lambda doc, args: _parallel(args["models"][0], 5),
            "models[0].engine.tensor_parallel_size: 8 KV heads do not divide into 5",
        ),
        (lambda doc, args: args["models"][0]["resources"].update(num_gpus=0.5), "models[0].engine.gpu_memory_util"),
        (
            lambda doc, args: args["models"][1].update(memory_gb=75),
            "models[1].memory_gb: 75 is more than the pool's 74",
        ),
        (
            lambda doc, args: args["pool"]["resources"].update(num_gpus=0.5),
            "pool.memory_gb: 74 is more than its share of the GPU",
        ),
        (
            lambda doc, args: args["models"][0].update(gpu_memory_gb=24, source="Qwen/Qwen3-14B"),
            "models[0].context: 32768 tokens need 5.4 GB of KV cache beside 29.5 GB of weights",
        ),
        (
            lambda doc, args: args["models"][4].update(memory_gb=30),
            "models[4].memory_gb: 131072 tokens need 21.5 GB of KV cache beside 16.3 GB of weights",
        ),
        (lambda doc, args: args["models"][1].update(gpu_memory_gb=80), "models[1]: resources, gpu_memory_gb, replicas"),
        (lambda doc, args: args["pool"].update(memory_gb=90), "pool.memory_gb: 90 is more than pool.gpu_memory_gb"),
        (
            lambda doc, args: args["models"][0]["engine"].pop("reasoning_parser"),
            "models[0].engine.reasoning_parser: mi",
        ),
        (
            lambda doc, args: args["models"][0]["engine"].update(trust_remote_code=True),
            "models[0].engine.trust_remote_code: write it beside",
        ),
        (
            lambda doc, args: args["models"][1]["engine"].update(middleware=["a.B"]),
            "models[1].engine.middleware: lets",
        ),
        (lambda doc, args: args.update(models=[]), "models: "),
        (lambda doc, args: doc.update(http_option={}), "http_option: no such key"),
        (
            lambda doc, args: doc["applications"][0].update(deployments=[{"name": "Routr"}]),
            "applications[0].deployments[0].name: there is no deployment Routr; there are Router, Resident-qwen3-14b,",
        ),
        (
            lambda doc, args: doc["applications"].append({"name": "x", "import_path": "a:b", "route_prefix": "/"}),
            "applications: Found duplicate applications for route prefix",
        ),
        (lambda doc, args: doc["applications"][0].update(import_path="serve_app.ap:build"), "applications: needs exac"),
        (lambda doc, args: doc.pop("applications"), "applications: missing"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(tmp_path: Path, change: Any, found: str) -> None:
    assert any(problem.startswith(found) for problem in changed(tmp_path, change)), changed(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda args: args["models"][3].update(memory_gb=6), "models[3].memory_gb: 32768 tokens need 3.8 GB"),
        (lambda args: args["models"][4]["sleep"].update(host_gb=9), "models[4].sleep.host_gb: 9; its weights are 16"),
    ],
)  # fmt: skip
def test_what_is_too_small_by_estimate_only_is_a_warning(tmp_path: Path, change: Any, said: str) -> None:
    file = tmp_path / "changed.yaml"
    assert changed(tmp_path, lambda doc, args: change(args)) == []
    (warning,) = warnings(file)
    assert warning.startswith(said)


def test_lazy_models_that_would_each_take_the_whole_gpu_are_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "changed.yaml"
    assert changed(tmp_path, lambda doc, args: args["pool"].pop("gpu_memory_gb")) == []
    assert len(warnings(file)) == 4
    assert warnings(file)[0].startswith("models[1].memory_gb: 12 is not what the engine keeps to")


def test_gpu_that_ray_names_is_known_by_its_accelerator_type(tmp_path: Path) -> None:
    def on_l4(doc: Any, args: Any) -> None:
        args["models"][0].pop("gpu_memory_gb")
        args["models"][0]["source"] = "Qwen/Qwen3-14B"
        args["models"][0]["resources"]["accelerator_type"] = "L4"

    (problem,) = changed(tmp_path, on_l4)
    assert "of a 24.2 GB GPU" in problem


def test_bad_yaml_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("applications:\n  - {name: x\n")
    (problem,) = problems(file)
    assert problem.startswith("line 3")
    assert problems(tmp_path / "none.yaml") == ["no such file"]
