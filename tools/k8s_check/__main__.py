"""`python -m tools.k8s_check`: check k8s/, or with --write make what it takes from deployments/."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tools.k8s_check.check import all_problems, with_component
from tools.k8s_check.generate import drift, write
from tools.k8s_check.manifests import CheckError, build, file_problems, folders, kustomize
from tools.k8s_check.schemas import KUBERAY, KUBERNETES, KubeRay, find_crd

_REPOSITORY = Path(__file__).resolve().parents[2]


def main(
    write_files: Annotated[bool, typer.Option("--write", help="Write the generated files, and check nothing.")] = False,
    crds: Annotated[
        Path | None, typer.Option(envvar="CRDS", help=f"Folder with the CRDs of KubeRay {KUBERAY}.")
    ] = None,
    root: Annotated[Path, typer.Option(help="The folder to check.")] = _REPOSITORY / "k8s",
) -> None:
    """Check k8s/ offline: schemas, the operator's rules, Serve's and ours, references, room for every replica."""
    try:
        status = _write(root) if write_files else _check(root, crds)
    except CheckError as error:
        print(f"k8s-check: {error}", file=sys.stderr)
        status = 2
    raise typer.Exit(status)


def _write(root: Path) -> int:
    for path in write(root.resolve()):
        print(f"{path}: written")
    return 0


def _check(root: Path, crds: Path | None) -> int:
    root = root.resolve()
    definition, origin = find_crd(crds, _REPOSITORY)
    kuberay, command = KubeRay(definition), kustomize()
    print(f"KubeRay {KUBERAY} from {origin}; Kubernetes {KUBERNETES}; built by {Path(command[0]).name}")
    found = file_problems(root) or drift(root)
    failed = bool(found)
    for problem in found:
        print(problem, file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        targets = list(folders(root))
        for component in sorted(path.parent for path in (root / "components").glob("*/kustomization.yaml")):
            targets.append(with_component(root / "base", component, Path(scratch).resolve()))
        for target in targets:
            documents = build(target, command)
            problems = all_problems(documents, kuberay)
            failed = failed or bool(problems)
            for problem in problems:
                print(f"{target.name}: {problem}", file=sys.stderr)
            if not problems:
                print(f"{target.name}: ok, {len(documents)} objects")
    return int(failed)


if __name__ == "__main__":
    typer.run(main)
