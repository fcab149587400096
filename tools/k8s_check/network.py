"""What the network policies let through, against what must get through and what must not.

An evaluator of `networking.k8s.io/v1` as far as our policies go: pods and namespaces by labels, numbers of ports.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.k8s_check.problem import Document, Problem, at, dig, items, mapping, walk

HEAD = {"app": "switchyard", "component": "head"}
WORKER = {"app": "switchyard", "component": "worker"}
MODELS = {"app": "switchyard", "component": "models"}
REDIS = {"app": "switchyard-redis"}
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
DNS = {"k8s-app": "kube-dns"}
STRANGER = {"app": "somebody-else"}
_OURS = (HEAD, WORKER, MODELS, REDIS)


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """A connection. `source` or `target` None: an address outside of the cluster."""

    source: Mapping[str, str] | None
    target: Mapping[str, str] | None
    port: int
    protocol: str = "TCP"
    same_namespace: bool = True

    def __str__(self) -> str:
        words = [_shown(self.source), "to", _shown(self.target)]
        return " ".join(
            [*words, f"{self.protocol} {self.port}", "" if self.same_namespace else "(other namespace)"]
        ).strip()


def _shown(labels: Mapping[str, str] | None) -> str:
    return "/".join(labels.values()) if labels else "outside"


_ANY = 20000  # one of the ports that Ray and engines choose
_NEEDED = (
    *(Flow(source, target, port) for source in (HEAD, WORKER) for target in (HEAD, WORKER) for port in (6379, _ANY)),
    *(Flow(source, REDIS, 6379) for source in (HEAD, WORKER)),
    *(Flow(source, DNS, 53, protocol, False) for source in (HEAD, WORKER, MODELS) for protocol in ("UDP", "TCP")),
    *(Flow(source, None, 443) for source in (HEAD, WORKER, MODELS)),
    Flow(HEAD, None, 6443),
    *(Flow(STRANGER, WORKER, 8000, same_namespace=same) for same in (True, False)),
    *(Flow(OPERATOR, HEAD, port, same_namespace=same) for port in (8265, 8001, 52365) for same in (True, False)),
    *(Flow(PROMETHEUS, target, 8080, same_namespace=False) for target in (HEAD, WORKER)),
    Flow(PROMETHEUS, WORKER, 8000, same_namespace=False),  # the engines' metrics, by way of a Router
)
_CLOSED = (
    *(Flow(STRANGER, HEAD, port, same_namespace=same) for port in (6379, 8265, 10001, 8000) for same in (True, False)),
    *(Flow(STRANGER, WORKER, port, same_namespace=same) for port in (8001, 8080, _ANY) for same in (True, False)),
    *(Flow(STRANGER, target, 8000, "UDP") for target in (WORKER,)),
    *(Flow(source, REDIS, 6379, same_namespace=same) for source in (STRANGER, OPERATOR) for same in (True, False)),
    *(Flow(WORKER, REDIS, port) for port in (22,)),
    *(Flow(OPERATOR, target, 10001, same_namespace=False) for target in (HEAD, WORKER)),
    *(Flow(PROMETHEUS, target, 6379, same_namespace=False) for target in (HEAD, WORKER)),
    *(Flow(PROMETHEUS, target, 8080, "UDP", False) for target in (HEAD, WORKER)),
    *(Flow(OPERATOR, HEAD, port, "UDP", False) for port in (8265, 8001, 52365)),
    *(Flow(source, STRANGER, 6379) for source in (HEAD, WORKER, REDIS)),
    *(Flow(source, None, port) for source in (HEAD, WORKER) for port in (25, 80)),
    *(Flow(source, None, 443, "UDP") for source in (HEAD, WORKER)),
    Flow(HEAD, None, 6443, "UDP"),
    *(Flow(source, DNS, 22, "TCP", False) for source in (HEAD, WORKER)),
    *(Flow(REDIS, None, port) for port in (443, 53)),
    Flow(REDIS, WORKER, _ANY),
    *(Flow(None, target, port) for target in (HEAD, WORKER) for port in (6379, 8000, 8265)),
    *(Flow(source, DNS, 22, "UDP", False) for source in (HEAD, WORKER)),
    *(Flow(source, STRANGER, 53, protocol, False) for source in (HEAD, WORKER) for protocol in ("UDP", "TCP")),
    *(Flow(source, None, 53, "UDP") for source in (HEAD, WORKER)),
    Flow(WORKER, REDIS, 6379, "UDP"),
)


def network_problems(documents: Sequence[Document]) -> list[Problem]:
    """Connections that are cut and must not be, and the other way round."""
    policies = [each for each in documents if each.get("kind") == "NetworkPolicy"]
    found = [Problem("network policies", f"cut {flow}") for flow in _NEEDED if not passes(policies, flow)]
    found += [Problem("network policies", f"let through {flow}") for flow in _CLOSED if passes(policies, flow)]
    return found + [problem for policy in policies for problem in _peers(policy, _is_offline(documents))]


def _is_offline(documents: Sequence[Document]) -> bool:
    """Whether the pods are told that there is no hub."""
    return any(value == {"name": "HF_HUB_OFFLINE", "value": "1"} for each in documents for _, value in walk(each))


def _peers(policy: Document, offline: bool) -> Iterator[Problem]:
    for direction, key in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(items(dig(policy, "spec", direction))):
            where = at(policy, "spec", direction, index)
            for peer in items(rule.get(key)):
                if not peer:
                    yield Problem(where, "an empty peer")
                try:
                    ipaddress.ip_network(str(dig(peer, "ipBlock", "cidr", default="10.0.0.0/8")))
                except ValueError as error:
                    yield Problem(where, str(error))
            if offline and direction == "egress" and not rule.get("to"):
                yield Problem(where, "leads anywhere, from a cluster that is told to be offline")


def passes(policies: Sequence[Document], flow: Flow) -> bool:
    """Whether both ends let it through; only ours have policies."""
    leaves = _allows(policies, "Egress", flow) if flow.source in _OURS else True
    arrives = _allows(policies, "Ingress", flow) if flow.target in _OURS else True
    return leaves and arrives


def _allows(policies: Sequence[Document], direction: str, flow: Flow) -> bool:
    own, other = (flow.source, flow.target) if direction == "Egress" else (flow.target, flow.source)
    about = [
        policy
        for policy in policies
        if direction in dig(policy, "spec", "policyTypes", default=[])
        and _matches(mapping(dig(policy, "spec", "podSelector")), own or {})
    ]
    rules = [rule for policy in about for rule in items(dig(policy, "spec", direction.lower()))]
    return not about or any(_rule(rule, direction, flow, other) for rule in rules)


def _rule(rule: Mapping[str, Any], direction: str, flow: Flow, other: Mapping[str, str] | None) -> bool:
    peers = rule.get("to" if direction == "Egress" else "from")
    ports = items(rule.get("ports"))
    if "ports" in rule and not any(
        port.get("port", flow.port) == flow.port and port.get("protocol", "TCP") == flow.protocol for port in ports
    ):
        return False
    return not peers or any(_peer(peer, flow.same_namespace, other) for peer in items(peers))


def _peer(peer: Mapping[str, Any], same_namespace: bool, other: Mapping[str, str] | None) -> bool:
    if other is None:
        return "ipBlock" in peer
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" not in peer and not same_namespace:
        return False
    if mapping(peer.get("namespaceSelector")):
        return False  # a namespace by its labels; we have no such policy, and know none of them
    return _matches(mapping(peer.get("podSelector")), other)


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted = mapping(selector.get("matchLabels"))
    return all(labels.get(key) == value for key, value in wanted.items())
