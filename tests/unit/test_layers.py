"""Imports only go down (design, §2): the pure core knows no effects, vLLM and Ray each live in one place."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import serve_app

PACKAGE = Path(serve_app.__file__).parent
# What the pure core may use of ours: plain types. And nothing that does something.
PLAIN = {
    "serve_app.config",
    "serve_app.catalog",
    "serve_app.errors",
    "serve_app.engine_arguments",
    "serve_app.external_schema",
    "serve_app.engines.base",
    "serve_app.gpu_shares",
    "serve_app.autoscaling_schema",
    "serve_app.model_schema",
    "serve_app.routing_schema",
    "serve_app.service_schema",
    "serve_app.strict",
}
EFFECTS = {
    "ray",
    "vllm",
    "asyncio",
    "threading",
    "socket",
    "subprocess",
    "time",
    "random",
    "aiohttp",
    "starlette",
}
# Tools that a person runs: they may know everything.
TOOLS = {"cli", "launch", "check", "deployment_file", "drain", "fetch", "preview", "quantize", "status", "__main__"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, anywhere in it, in full."""
    found: set[str] = set()
    known = {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return frozenset(found)


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] == "serve_app"}


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


SIZING = ("accelerators", "quantization", "shape", "memory", "deployment")
PURE = [
    (name, path) for name, path in modules() if below(name, "serve_app.routing") or below(name, "serve_app.admission")
] + [
    ("serve_app.residency.policy", PACKAGE / "residency" / "policy.py"),
    ("serve_app.residency.events", PACKAGE / "residency" / "events.py"),
    ("serve_app.residency.demand", PACKAGE / "residency" / "demand.py"),
    *((f"serve_app.sizing.{name}", PACKAGE / "sizing" / f"{name}.py") for name in SIZING),
    ("serve_app.batches.plan", PACKAGE / "batches" / "plan.py"),
    ("serve_app.batches.state", PACKAGE / "batches" / "state.py"),
    ("serve_app.telemetry.traffic", PACKAGE / "telemetry" / "traffic.py"),
]


@pytest.mark.parametrize(("name", "path"), PURE, ids=[name for name, _ in PURE])
def test_pure_modules_import_plain_types_and_themselves_only(name: str, path: Path) -> None:
    package = name.rpartition(".")[0] if name.count(".") > 1 else name
    assert {found for found in ours(path) if not below(found, package)} <= PLAIN
    assert not roots(path) & EFFECTS


@pytest.mark.parametrize("name", ["history", "answer", "items"])
def test_what_is_kept_of_a_conversation_is_decided_without_effects(name: str) -> None:
    path = PACKAGE / "conversations" / f"{name}.py"
    assert ours(path) <= {"serve_app.conversations.history", "serve_app.routing.excerpt"}
    assert not roots(path) & (EFFECTS | {"redis"})


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_plain_types_import_plain_types_only(name: str) -> None:
    path = dict(modules())[name]
    assert ours(path) <= PLAIN
    assert not roots(path) & {"ray", "vllm", "aiohttp"}


def test_only_the_vllm_engine_imports_vllm() -> None:
    importers = {name for name, path in modules() if "vllm" in roots(path)}
    tools = {f"serve_app.{tool}" for tool in TOOLS}
    assert importers - tools <= {"serve_app.engines.vllm"}


def test_only_deployments_and_the_application_import_ray() -> None:
    importers = {name for name, path in modules() if "ray" in roots(path)}
    allowed = {
        "serve_app.app",
        "serve_app.router.deployment",
        "serve_app.telemetry.ray_metrics",
        *(f"serve_app.{tool}" for tool in TOOLS),
    }
    assert {name for name in importers if not below(name, "serve_app.models")} <= allowed


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        (
            "serve_app.engines",
            ("serve_app.router", "serve_app.models", "serve_app.residency", "serve_app.routing"),
        ),
        ("serve_app.residency", ("serve_app.router", "serve_app.models", "serve_app.routing")),
        ("serve_app.models", ("serve_app.router", "serve_app.routing")),
        ("serve_app.batches", ("serve_app.router", "serve_app.models", "serve_app.residency", "serve_app.routing")),
        ("serve_app", ("serve_app.app",)),
    ],
)
def test_no_module_imports_what_stands_above_it(lower: str, higher: tuple[str, ...]) -> None:
    tools = {f"serve_app.{tool}" for tool in TOOLS}
    wrong = {
        (name, found)
        for name, path in modules()
        if below(name, lower) and name not in tools
        for found in ours(path)
        if any(below(found, package) for package in higher)
    }
    assert not wrong
