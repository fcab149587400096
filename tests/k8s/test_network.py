"""The evaluator of network policies, on small ones."""

from __future__ import annotations

from typing import Any

from tools.k8s_check.network import HEAD, REDIS, STRANGER, WORKER, Flow, passes


def policy(selector: dict[str, str], **spec: Any) -> dict[str, Any]:
    types = [word.capitalize() for word in ("ingress", "egress") if word in spec]
    return {"kind": "NetworkPolicy", "spec": {"podSelector": {"matchLabels": selector}, "policyTypes": types, **spec}}


def test_a_pod_without_a_policy_is_open() -> None:
    assert passes([], Flow(STRANGER, REDIS, 6379))


def test_a_policy_without_rules_lets_nothing_in() -> None:
    assert not passes([policy(REDIS, ingress=[])], Flow(WORKER, REDIS, 6379))


def test_one_rule_of_one_policy_is_enough() -> None:
    both = [policy(REDIS, ingress=[]), policy(REDIS, ingress=[{"from": [{"podSelector": {"matchLabels": WORKER}}]}])]
    assert passes(both, Flow(WORKER, REDIS, 6379))
    assert not passes(both, Flow(HEAD, REDIS, 6379))


def test_a_pod_selector_alone_means_this_namespace() -> None:
    here = [policy(REDIS, ingress=[{"from": [{"podSelector": {"matchLabels": WORKER}}]}])]
    assert not passes(here, Flow(WORKER, REDIS, 6379, same_namespace=False))
    anywhere = [policy(REDIS, ingress=[{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": WORKER}}]}])]
    assert passes(anywhere, Flow(WORKER, REDIS, 6379, same_namespace=False))


def test_a_port_is_of_its_protocol_and_tcp_is_the_default() -> None:
    one = [policy(REDIS, ingress=[{"ports": [{"port": 6379}]}])]
    assert passes(one, Flow(WORKER, REDIS, 6379))
    assert not passes(one, Flow(WORKER, REDIS, 6379, "UDP"))
    assert not passes(one, Flow(WORKER, REDIS, 6380))


def test_both_ends_must_agree() -> None:
    leaves = policy(WORKER, egress=[{"to": [{"podSelector": {"matchLabels": REDIS}}]}])
    assert passes([leaves], Flow(WORKER, REDIS, 6379))
    assert not passes([leaves], Flow(WORKER, STRANGER, 6379))
    assert not passes([leaves, policy(REDIS, ingress=[])], Flow(WORKER, REDIS, 6379))


def test_outside_is_reached_by_addresses_only() -> None:
    assert not passes([policy(WORKER, egress=[{"to": [{"namespaceSelector": {}}]}])], Flow(WORKER, None, 443))
    assert passes([policy(WORKER, egress=[{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}])], Flow(WORKER, None, 443))
    assert passes([policy(WORKER, egress=[{}])], Flow(WORKER, None, 443))
