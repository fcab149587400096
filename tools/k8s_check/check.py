"""All checks, over all that an operator would build."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from serve_app.check import IMPORT_PATH, DeploymentFile, problems, read_file
from serve_app.config import ConfigError
from tools.k8s_check.bounds import bound_problems
from tools.k8s_check.generate import hub_models
from tools.k8s_check.network import network_problems
from tools.k8s_check.operator_rules import operator_problems
from tools.k8s_check.placement import head_problems, placement_problems, router_options
from tools.k8s_check.pods import all_pods
from tools.k8s_check.policy import agreement_problems, pod_problems
from tools.k8s_check.problem import Document, Problem, at, dig, name_of
from tools.k8s_check.references import reference_problems
from tools.k8s_check.schemas import KubeRay, kubernetes_problems
from tools.k8s_check.stores import store_problems
from tools.k8s_check.vocabulary import vocabulary_problems

# Others ask for these by name: clients, docs/kubernetes.md, KubeRay's own Services.
EXPECTED = (
    "Namespace/switchyard",
    "Service/switchyard",
    "Service/switchyard-redis",
    "StatefulSet/switchyard-redis",
    "PersistentVolumeClaim/switchyard-models",
    "Job/switchyard-models",
    "RayService/switchyard",
)


def all_problems(documents: Sequence[Document], kuberay: KubeRay, *, engines: bool = True) -> list[Problem]:
    """Everything wrong with what kustomize made. `engines`: ask vLLM about its arguments, too (seconds)."""
    found = schema_problems(documents, kuberay)
    if found:
        return sorted(set(found))  # what follows may rely on the form
    names = [name_of(document) for document in documents]
    found += [Problem("objects", f"there is no {name}") for name in EXPECTED if name not in names]
    found += [Problem("objects", f"{name} needs a name") for name in names if name.endswith("/None")]
    for document in documents:
        found += vocabulary_problems(document) + bound_problems(document)
    found += reference_problems(documents) + network_problems(documents) + pod_problems(documents)
    found += store_problems(documents)
    for document in documents:
        if document.get("kind") == "RayService":
            found += operator_problems(document) + serve_problems(document, documents, engines=engines)
    return sorted(set(found))


def schema_problems(documents: Sequence[Document], kuberay: KubeRay) -> list[Problem]:
    """What the API server would refuse."""
    found: list[Problem] = []
    for document in documents:
        if document.get("kind") == "RayService" and document.get("apiVersion") == "ray.io/v1":
            # Metadata, and the pods, have a schema of their own.
            standing = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": document.get("metadata")}
            found += [Problem(at(document), each.what) for each in kubernetes_problems(standing)]
            for pods in all_pods([document]):
                pod = {"apiVersion": "v1", "kind": "Pod", **pods.template}
                found += [Problem(pods.where(), str(each)) for each in kubernetes_problems(pod)]
            found += kuberay.problems(document)
        else:
            found += kubernetes_problems(document)
    return found


def serve_problems(document: Document, documents: Sequence[Document], *, engines: bool) -> list[Problem]:
    """What Serve and Switchyard say of `serveConfigV2`, and whether the cluster has what it asks for."""
    where = at(document, "spec", "serveConfigV2")
    serve = _read(str(dig(document, "spec", "serveConfigV2", default="")), engines)
    if not isinstance(serve, DeploymentFile):
        return [Problem(where, each) for each in serve]
    application = next(app for app in serve.raw["applications"] if app.get("import_path") == IMPORT_PATH)
    found = placement_problems(document, serve.config, router_options({"applications": [application]}))
    found += agreement_problems(document, serve.config, serve.raw, documents)
    for pods in all_pods([document]):
        if pods.role == "head":
            found += head_problems(pods, document)
    return found + _downloads(documents, hub_models(serve.raw))


@functools.cache
def _read(text: str, engines: bool) -> DeploymentFile | tuple[str, ...]:
    """A deployment file, or what is wrong with it."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "serve.yaml"
        path.write_text(text)
        try:
            return (tuple(problems(path)) if engines else ()) or read_file(path)
        except ConfigError as error:
            return tuple(str(error).splitlines())


def _downloads(documents: Sequence[Document], wanted: Sequence[str]) -> list[Problem]:
    for document in documents:
        container = dig(document, "spec", "template", "spec", "containers", 0)
        if document.get("kind") == "Job" and dig(container, "args") != list(wanted):
            return [Problem(at(document), "does not download the models of serveConfigV2; `make k8s` writes its args")]
    return []


def with_component(folder: Path, component: Path, scratch: Path) -> Path:
    """A folder that builds an overlay with a component; below `scratch`, which is in the same tree."""
    target = scratch / f"{folder.name}-{component.name}"
    target.mkdir()
    names = {"resources": [_relative(folder, target)], "components": [_relative(component, target)]}
    text = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **names}
    (target / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return target


def _relative(path: Path, start: Path) -> str:
    return str(Path(*[".."] * len(start.relative_to(start.anchor).parts)) / path.relative_to(path.anchor))
