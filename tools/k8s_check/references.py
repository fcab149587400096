"""What one object says of another: selectors, ports, volumes, secrets, names.

Kubernetes accepts a reference to nothing; the pod then waits, or the Service has no endpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.k8s_check.pods import Pods, all_pods, selected
from tools.k8s_check.problem import Document, Problem, at, dig, items, mapping, name_of, walk
from tools.k8s_check.vocabulary import is_somebody_else

# Made by the operator's hand (docs/kubernetes.md), never in these files, with the keys that they have.
SECRETS: Mapping[str, frozenset[str]] = {
    "switchyard-keys": frozenset({"keys.yaml"}),
    "switchyard-redis": frozenset({"password"}),
    "switchyard-hub": frozenset({"token"}),
    "switchyard-registry": frozenset({".dockerconfigjson"}),
    "switchyard-tls": frozenset({"tls.crt", "tls.key"}),
}
# Ray's dashboard agent listens there, and no container names it.
_AGENT_PORT = 52365


def reference_problems(documents: Sequence[Document]) -> list[Problem]:
    """References to what is not there."""
    pods = all_pods(documents)
    found = list(_namespaces(documents))
    for document in documents:
        check = _BY_KIND.get(str(document.get("kind")))
        if check:
            found += check(document, documents, pods)
    for each in pods:
        found += _volumes(each, documents)
        found += _environment(each)
        found += _port_names(each)
        found += _pull_secrets(each)
        found += _spread(each)
    return found + list(_reachable(documents, pods))


def named(documents: Sequence[Document], kind: str, name: Any) -> Document | None:
    """The object of this kind and name."""
    return next((each for each in documents if name_of(each) == f"{kind}/{name}"), None)


def _namespaces(documents: Sequence[Document]) -> Iterator[Problem]:
    spaces = {dig(each, "metadata", "name") for each in documents if each.get("kind") == "Namespace"}
    for document in documents:
        space = dig(document, "metadata", "namespace")
        if document.get("kind") != "Namespace" and space not in spaces:
            yield Problem(at(document, "metadata", "namespace"), f"{space}: there is no such namespace")


# Objects


def _selector(document: Document, selector: Mapping[str, Any], chosen: Sequence[Pods]) -> Iterator[Problem]:
    """One kind of pods, and none of another application that happens to use the same word."""
    where = at(document, "spec", "selector")
    if not chosen:
        yield Problem(where, "matches no pod")
    if "app" not in selector:
        yield Problem(where, "must name the app")
    if len({each.labels.get("component") for each in chosen}) > 1:
        yield Problem(where, "matches pods of several components")


def _service(document: Document, documents: Sequence[Document], pods: Sequence[Pods]) -> Iterator[Problem]:
    selector = mapping(dig(document, "spec", "selector"))
    chosen = selected(pods, selector)
    yield from _selector(document, selector, chosen)
    for index, port in enumerate(items(dig(document, "spec", "ports"))):
        target = port.get("targetPort", port.get("port"))
        where = at(document, "spec", "ports", index, "targetPort")
        if any(target not in each.ports() and target not in each.ports().values() for each in chosen):
            yield Problem(where, f"{target} is no port of the pods")
        if chosen and not str(port.get("name", "")):
            yield Problem(where, "the port needs a name")


def _budget(document: Document, documents: Sequence[Document], pods: Sequence[Pods]) -> Iterator[Problem]:
    selector = mapping(dig(document, "spec", "selector", "matchLabels"))
    chosen = selected(pods, selector)
    least, always = dig(document, "spec", "minAvailable"), sum(each.count for each in chosen)
    yield from _selector(document, selector, chosen)
    if not isinstance(least, int) or isinstance(least, bool) or dig(document, "spec", "maxUnavailable") is not None:
        yield Problem(at(document, "spec", "minAvailable"), "must be a number; KubeRay's pods support nothing else")
    elif chosen and not 0 < least < always:
        yield Problem(at(document, "spec", "minAvailable"), f"{least} of {always} pods: must be 1 to {always - 1}")
    if dig(document, "spec", "unhealthyPodEvictionPolicy") != "AlwaysAllow":
        yield Problem(
            at(document, "spec", "unhealthyPodEvictionPolicy"),
            "must be AlwaysAllow: a node whose pods are not ready could never be drained",
        )


def _stateful(document: Document, documents: Sequence[Document], pods: Sequence[Pods]) -> Iterator[Problem]:
    wanted = mapping(dig(document, "spec", "selector", "matchLabels"))
    own = mapping(dig(document, "spec", "template", "metadata", "labels"))
    if not wanted or any(own.get(key) != value for key, value in wanted.items()):
        yield Problem(at(document, "spec", "selector"), "does not match the labels of its own pods")
    if named(documents, "Service", dig(document, "spec", "serviceName")) is None:
        yield Problem(at(document, "spec", "serviceName"), "there is no such Service")


def _ingress(document: Document, documents: Sequence[Document], pods: Sequence[Pods]) -> Iterator[Problem]:
    hosts = set()
    for index, rule in enumerate(items(dig(document, "spec", "rules"))):
        hosts.add(rule.get("host"))
        for place, path in enumerate(items(dig(rule, "http", "paths"))):
            where = at(document, "spec", "rules", index, "http", "paths", place, "backend")
            service = named(documents, "Service", dig(path, "backend", "service", "name"))
            ports = items(dig(service, "spec", "ports"))
            wanted = mapping(dig(path, "backend", "service", "port"))
            if service is None:
                yield Problem(where, "there is no such Service")
            elif not any(wanted in ({"name": port.get("name")}, {"number": port.get("port")}) for port in ports):
                yield Problem(where, f"{wanted} is no port of the Service")
            if path.get("path") != "/":
                yield Problem(where, f"{path.get('path')}: must be /, the paths are the API's own")
    for index, tls in enumerate(items(dig(document, "spec", "tls"))):
        if tls.get("secretName") not in SECRETS:
            yield Problem(at(document, "spec", "tls", index, "secretName"), "is not a secret of docs/kubernetes.md")
        if not set(tls.get("hosts") or ()) or set(tls.get("hosts") or ()) - hosts:
            yield Problem(at(document, "spec", "tls", index, "hosts"), "are not the hosts of the rules")


def _policy(document: Document, documents: Sequence[Document], pods: Sequence[Pods]) -> Iterator[Problem]:
    chosen = selected(pods, mapping(dig(document, "spec", "podSelector", "matchLabels")))
    types = dig(document, "spec", "policyTypes", default=[])
    if not chosen or "app" not in mapping(dig(document, "spec", "podSelector", "matchLabels")):
        yield Problem(at(document, "spec", "podSelector"), "matches no pod, or does not name the app")
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        if dig(document, "spec", direction) is not None and direction.capitalize() not in types:
            yield Problem(at(document, "spec", "policyTypes"), f"without {direction.capitalize()} its rules do nothing")
        for index, rule in enumerate(items(dig(document, "spec", direction))):
            where = at(document, "spec", direction, index)
            others = []
            for peer in items(rule.get(peers)):
                selector = mapping(dig(peer, "podSelector", "matchLabels"))
                matched = selected(pods, selector)
                others += matched
                if selector and not matched and not is_somebody_else(selector):
                    yield Problem(where, f"{dict(selector)} is no pod of ours and none that we know")
                if is_somebody_else(selector) != ("namespaceSelector" in peer) and selector:
                    yield Problem(where, f"{dict(selector)}: a namespaceSelector belongs to pods of others only")
            to = chosen if direction == "ingress" else others
            known = {_AGENT_PORT, *(port for each in to for port in each.ports().values())}
            for port in items(rule.get("ports")):
                if to and port.get("port") not in known:
                    yield Problem(where, f"{port.get('port')} is no port of the pods that it is about")


_BY_KIND = {
    "Service": _service,
    "PodDisruptionBudget": _budget,
    "StatefulSet": _stateful,
    "Ingress": _ingress,
    "NetworkPolicy": _policy,
}


def _reachable(documents: Sequence[Document], pods: Sequence[Pods]) -> Iterator[Problem]:
    """Where a policy closes a pod, some policy must let in what its Service sends there."""
    policies = [each for each in documents if each.get("kind") == "NetworkPolicy"]
    for service in documents:
        if service.get("kind") != "Service":
            continue
        for each in selected(pods, mapping(dig(service, "spec", "selector"))):
            over = [
                policy
                for policy in policies
                if each in selected(pods, mapping(dig(policy, "spec", "podSelector", "matchLabels")))
            ]
            for port in items(dig(service, "spec", "ports")):
                target = each.ports().get(str(port.get("targetPort")), port.get("targetPort"))
                open_to = [
                    rule
                    for policy in over
                    for rule in items(dig(policy, "spec", "ingress"))
                    if any(entry.get("port") == target for entry in items(rule.get("ports")))
                ]
                if over and not open_to:
                    yield Problem(at(service, "spec", "ports"), f"no network policy lets anybody in at {target}")


# Pods


def _volumes(pods: Pods, documents: Sequence[Document]) -> Iterator[Problem]:
    volumes = {str(volume.get("name")): volume for volume in items(pods.spec.get("volumes"))}
    claims = {str(dig(claim, "metadata", "name")) for claim in items(dig(pods.owner, "spec", "volumeClaimTemplates"))}
    used = set()
    for index, container in enumerate(pods.containers):
        paths = [mount.get("mountPath") for mount in items(container.get("volumeMounts"))]
        for mount in items(container.get("volumeMounts")):
            used.add(str(mount.get("name")))
            if str(mount.get("name")) not in volumes.keys() | claims:
                yield Problem(pods.container(index, "volumeMounts"), f"there is no volume {mount.get('name')}")
            if not str(mount.get("mountPath")).startswith("/") or paths.count(mount.get("mountPath")) > 1:
                yield Problem(pods.container(index, "volumeMounts"), f"{mount.get('mountPath')} cannot be mounted")
    for name, volume in volumes.items():
        where = pods.where("spec", "volumes")
        if name not in used:
            yield Problem(where, f"{name} is mounted nowhere")
        if len(volume) != 2:
            yield Problem(where, f"{name}: needs one source")
        secret, config = dig(volume, "secret", "secretName"), dig(volume, "configMap", "name")
        claim = dig(volume, "persistentVolumeClaim", "claimName")
        if "secret" in volume and secret not in SECRETS:
            yield Problem(where, f"{name}: {secret} is not a secret of docs/kubernetes.md")
        if "configMap" in volume and named(documents, "ConfigMap", config) is None:
            yield Problem(where, f"{name}: there is no ConfigMap {config}")
        if "persistentVolumeClaim" in volume and named(documents, "PersistentVolumeClaim", claim) is None:
            yield Problem(where, f"{name}: there is no claim {claim}")
    for name in claims - used:
        yield Problem(at(pods.owner, "spec", "volumeClaimTemplates"), f"{name} is mounted nowhere")


def _environment(pods: Pods) -> Iterator[Problem]:
    for index, container in enumerate(pods.containers):
        names = [entry.get("name") for entry in items(container.get("env"))]
        for entry in items(container.get("env")):
            if names.count(entry.get("name")) > 1:
                yield Problem(pods.container(index, "env"), f"{entry.get('name')} is there twice")
            if ("value" in entry) == ("valueFrom" in entry):
                yield Problem(pods.container(index, "env"), f"{entry.get('name')}: needs one of value and valueFrom")
            source = mapping(dig(entry, "valueFrom", "secretKeyRef"))
            if "valueFrom" in entry:
                yield from secret_problems(pods.container(index, "env"), source)
    for path, value in walk(pods.owner.get("spec")):
        if path[-1:] == ("redisPassword",):
            yield from secret_problems(at(pods.owner, "spec", *path), mapping(dig(value, "valueFrom", "secretKeyRef")))


def secret_problems(where: str, source: Mapping[str, Any]) -> Iterator[Problem]:
    """A reference to a secret that the operator is not told to make, or to a key that it does not have."""
    if source.get("name") not in SECRETS:
        yield Problem(where, f"{source.get('name')} is not a secret of docs/kubernetes.md")
    elif source.get("key") not in SECRETS[source["name"]]:
        yield Problem(where, f"{source['name']} has no key {source.get('key')}")


def _port_names(pods: Pods) -> Iterator[Problem]:
    for index, container in enumerate(pods.containers):
        numbers = [port.get("containerPort") for port in items(container.get("ports"))]
        names = [port.get("name") for port in items(container.get("ports"))]
        if len(set(numbers)) < len(numbers) or len(set(names)) < len(names):
            yield Problem(pods.container(index, "ports"), "two have the same name or number")
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            for action in ("httpGet", "tcpSocket"):
                port = dig(container, probe, action, "port")
                if port is not None and port not in names and port not in numbers:
                    yield Problem(pods.container(index, probe), f"{port} is no port of the container")
            actions = mapping(container.get(probe)).keys() & {"httpGet", "tcpSocket", "exec", "grpc"}
            if probe in container and len(actions) != 1:
                yield Problem(pods.container(index, probe), "needs one of httpGet, tcpSocket, exec, grpc")


def _pull_secrets(pods: Pods) -> Iterator[Problem]:
    for secret in items(pods.spec.get("imagePullSecrets")):
        if secret.get("name") not in SECRETS:
            yield Problem(
                pods.where("spec", "imagePullSecrets"), f"{secret.get('name')} is not a secret that is told of"
            )


def _spread(pods: Pods) -> Iterator[Problem]:
    for constraint in items(pods.spec.get("topologySpreadConstraints")):
        wanted = mapping(dig(constraint, "labelSelector", "matchLabels"))
        if not selected([pods], wanted):
            yield Problem(pods.where("spec", "topologySpreadConstraints"), "does not match its own pods")
