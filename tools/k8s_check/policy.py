"""What we hold every pod to: pinned images, no privileges, time to finish; and agreement with the deployment."""

from __future__ import annotations

import posixpath
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve_app.app import SHUTDOWN_MARGIN_S
from serve_app.config import Config
from tools.k8s_check.pods import Pods, all_pods, whole
from tools.k8s_check.problem import Document, Problem, at, dig, items, mapping
from tools.k8s_check.quantity import number
from tools.k8s_check.references import SECRETS, named, secret_problems

# A registry with a dot or a port, a path in small letters, and a tag with a digit or a digest.
_IMAGE = re.compile(
    r"(?:[a-z0-9][a-z0-9.-]*(?::\d+)?/)?(?P<path>[a-z0-9._-]+(?:/[a-z0-9._-]+)*)"
    r"(?::(?P<tag>v?\d[\w.-]*)|(?:[:][\w.-]+)?@sha256:[0-9a-f]{64})"
)
_KNOWN_IMAGES = ("switchyard-cuda", "switchyard-cpu", "redis")
# Until Serve has stopped a replica whose time is up, and Ray the node.
_AFTER_DRAIN_S = 10
# For a replacement to start before the replicas of a node are stopped, or as long as a hot model loads.
_REPLACEMENT_S = 60
_SPOT = ("karpenter.sh/capacity-type", "cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority")
# Clouds warn two minutes ahead at most.
_SPOT_NOTICE_S = 120
_SHORTEST_S = 15


def pod_problems(documents: Sequence[Document]) -> list[Problem]:
    """Pods that have more power or less care than ours should."""
    pods = all_pods(documents)
    found: list[Problem] = []
    for each in pods:
        found += _images(each)
        found += _privileges(each)
        found += _resources(each)
    images = {dig(each.containers, 0, "image") for each in pods if each.role} | {
        dig(each.containers, 0, "image") for each in pods if each.labels.get("component") == "models"
    }
    if len(images) > 1:
        found.append(
            Problem("images", f"Ray's nodes and the download must run one: {', '.join(sorted(map(str, images)))}")
        )
    pulls = {str(each.spec.get("imagePullSecrets")) for each in pods}
    if len(pulls) > 1:
        found.append(Problem("imagePullSecrets", f"must be the same everywhere: {', '.join(sorted(pulls))}"))
    return found


def agreement_problems(
    document: Document, config: Config, serve: Mapping[str, Any], all_: Sequence[Document]
) -> list[Problem]:
    """Where a RayService's cluster and what is deployed on it contradict each other."""
    checks = (
        _ports(document, config, serve),
        _drain(document, config),
        _files(document, config),
        _redis(document, config, all_),
    )
    return [problem for check in checks for problem in check]


# Any pod


def _images(pods: Pods) -> Iterator[Problem]:
    for index, container in enumerate(pods.containers):
        image = str(container.get("image"))
        found = _IMAGE.fullmatch(image)
        if not found:
            yield Problem(
                pods.container(index, "image"), f"{image}: not pinned; needs a version as its tag, or a digest"
            )
        elif posixpath.basename(found["path"]) not in _KNOWN_IMAGES:
            yield Problem(pods.container(index, "image"), f"{image}: none of {', '.join(_KNOWN_IMAGES)}")


def _privileges(pods: Pods) -> Iterator[Problem]:
    spec = mapping(pods.spec.get("securityContext"))
    where = pods.where("spec", "securityContext")
    if spec.get("runAsNonRoot") is not True or whole(spec.get("runAsUser")) <= 0 or whole(spec.get("runAsGroup")) <= 0:
        yield Problem(where, "must have runAsNonRoot: true, and runAsUser and runAsGroup that are not 0")
    if spec.get("fsGroup") != spec.get("runAsGroup"):
        yield Problem(where, "fsGroup must be the group it runs as, or its volumes cannot be written")
    if dig(spec, "seccompProfile", "type") != "RuntimeDefault":
        yield Problem(where, "must have seccompProfile.type: RuntimeDefault")
    contexts = [(pods.container(index), each.get("securityContext")) for index, each in enumerate(pods.containers)]
    if pods.role == "head":
        options = ("spec", "rayClusterConfig", "autoscalerOptions")
        contexts.append((at(pods.owner, *options), dig(pods.owner, *options, "securityContext")))
        mounts = {mount.get("name") for mount in items(dig(pods.owner, *options, "volumeMounts"))}
        if mounts != {"tmp", "home"}:
            yield Problem(
                at(pods.owner, *options, "volumeMounts"), "must be the head's tmp and home, to write anywhere"
            )
        for mount in items(dig(pods.owner, *options, "volumeMounts")):
            if mount not in items(dig(pods.containers, 0, "volumeMounts")):
                yield Problem(at(pods.owner, *options, "volumeMounts"), f"{mount}: the head has it elsewhere")
    for place, context in contexts:
        context = mapping(context)
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield Problem(f"{place}.securityContext", "must have allowPrivilegeEscalation: false")
        if dig(context, "capabilities", "drop") != ["ALL"] or dig(context, "capabilities", "add"):
            yield Problem(f"{place}.securityContext", "must drop ALL capabilities")
        if context.get("readOnlyRootFilesystem") is not True:
            yield Problem(f"{place}.securityContext", "must have readOnlyRootFilesystem: true")
    if pods.role != "head" and pods.spec.get("automountServiceAccountToken") is not False:
        yield Problem(
            pods.where("spec"), "must have automountServiceAccountToken: false; only the autoscaler needs one"
        )
    if dig(pods.owner, "kind") == "RayService" or pods.labels.get("component") == "models":
        mounts = {mount.get("mountPath") for mount in items(dig(pods.containers, 0, "volumeMounts"))}
        if missing := {"/tmp", "/home/switchyard"} - mounts:
            yield Problem(pods.container(0, "volumeMounts"), f"{', '.join(sorted(missing))}: must be writable")


def _resources(pods: Pods) -> Iterator[Problem]:
    for index, container in enumerate(pods.containers):
        requests, limits = (mapping(dig(container, "resources", kind)) for kind in ("requests", "limits"))
        where = pods.container(index, "resources")
        for name in ("cpu", "memory"):
            if name not in requests or name not in limits:
                yield Problem(where, f"{name}: must be in requests and in limits")
        for name in requests.keys() & limits.keys():
            wanted, most = number(requests[name]), number(limits[name])
            if wanted is None or most is None or wanted <= 0 or wanted > most:
                yield Problem(where, f"{name}: {requests[name]} of at most {limits[name]} makes no sense")
            elif pods.role and wanted != most:
                yield Problem(where, f"{name}: Ray counts with the limit; requests must be the same")
        for name in requests.keys() ^ limits.keys():
            yield Problem(where, f"{name}: in requests and limits, or in neither")


# Ray's pods and the deployment


def _ports(document: Document, config: Config, serve: Mapping[str, Any]) -> Iterator[Problem]:
    serve_port = whole(dig(serve, "http_options", "port"), 8000)
    for pods in all_pods([document]):
        wanted = {"serve": serve_port, "metrics": 8080} | (
            {"front-door": config.router.port} if pods.role == "worker" else {}
        )
        if pods.role == "head":
            wanted |= {"gcs": 6379, "dashboard": 8265, "client": 10001}
        for name, port in wanted.items():
            if pods.ports().get(name) != port:
                yield Problem(pods.container(0, "ports"), f"{name} must be {port}, and is {pods.ports().get(name)}")
        for name in pods.ports().keys() - wanted.keys():
            yield Problem(pods.container(0, "ports"), f"{name}: nobody listens there")
        probe = mapping(dig(pods.containers, 0, "readinessProbe"))
        if pods.role == "worker" and dig(probe, "httpGet", "path") != "/ready":
            yield Problem(pods.container(0, "readinessProbe"), "must ask /ready: the front door's Service goes by it")
        if pods.role == "worker" and dig(probe, "httpGet", "port") not in ("front-door", config.router.port):
            yield Problem(pods.container(0, "readinessProbe"), "must ask the front door")
        noticed_s = whole(dig(probe, "periodSeconds"), 10) * whole(dig(probe, "failureThreshold"), 3)
        if pods.role == "worker" and config.router.leave_s <= noticed_s:
            yield Problem(
                pods.container(0, "readinessProbe"),
                f"notices after {noticed_s} s that a Router goes;"
                f" router.leave_s: {config.router.leave_s:g} must be more",
            )
        if dig(probe, "httpGet", "scheme", default="HTTP") != "HTTP":
            yield Problem(pods.container(0, "readinessProbe"), "the front door speaks HTTP")
        if "livenessProbe" in mapping(dig(pods.containers, 0)):
            yield Problem(
                pods.container(0, "livenessProbe"), "KubeRay's own looks at Ray; a Router is replaced by Serve"
            )
    where = at(document, "spec", "serveConfigV2")
    if config.router.host not in ("0.0.0.0", "::") or dig(serve, "http_options", "host") not in ("0.0.0.0", "::"):
        yield Problem(where, "router.host and http_options.host: must be 0.0.0.0, or nobody gets in")
    if config.engine_host != "node":
        yield Problem(where, "engine_host: must be node; routers of other pods cannot reach the engines")


def _drain(document: Document, config: Config) -> Iterator[Problem]:
    """A pod must be given the time that its streams have: to replacements, to them, and to Ray."""
    replacement_s = max([_REPLACEMENT_S, *(model.expected_load_s for model in config.residents)])
    needed = replacement_s + config.router.leave_s + config.router.drain_s + SHUTDOWN_MARGIN_S
    longest = 0
    for pods in reversed(all_pods([document])):
        command = dig(pods.containers, 0, "lifecycle", "preStop", "exec", "command", default=[])
        where = pods.container(0, "lifecycle", "preStop")
        head = ["--head"] if pods.role == "head" else []
        if command[:-1] != ["python3", "-m", "serve_app", "drain", *head, "--deadline-s"] or not _digits(command[-1]):
            shown = " ".join(["python3 -m serve_app drain", *head, "--deadline-s N"])
            yield Problem(where, f"must run {shown}; a pod that is deleted cuts its streams otherwise")
            continue
        deadline, grace = int(command[-1]), whole(pods.spec.get("terminationGracePeriodSeconds"), 30)
        if deadline < _SHORTEST_S:
            yield Problem(where, f"--deadline-s {deadline}: {_SHORTEST_S} at least, or nothing can be finished")
        if grace < deadline + _AFTER_DRAIN_S:
            yield Problem(where, f"terminationGracePeriodSeconds {grace} must be {_AFTER_DRAIN_S} more than {deadline}")
        if pods.role == "worker" and _may_vanish(pods):
            if grace > _SPOT_NOTICE_S:
                yield Problem(
                    where, f"terminationGracePeriodSeconds {grace}: spot nodes are gone after {_SPOT_NOTICE_S} s"
                )
        elif pods.role == "worker" and deadline < needed:
            yield Problem(where, f"--deadline-s {deadline}: its load, router.leave_s and drain_s need {needed:.0f}")
        elif pods.role == "head" and deadline < longest:
            yield Problem(where, f"--deadline-s {deadline}: the workers' is {longest}, and they need the head")
        longest = max(longest, deadline)
    delay = dig(document, "spec", "rayClusterDeletionDelaySeconds")
    if whole(delay, 60) < 10:
        yield Problem(
            at(document, "spec", "rayClusterDeletionDelaySeconds"), "must be 10 or more: Services change first"
        )


def _digits(value: Any) -> bool:
    return isinstance(value, str) and value.isdigit()


def _may_vanish(pods: Pods) -> bool:
    terms = dig(
        pods.spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
    )
    return bool(items(terms)) and all(
        any(expression.get("key") in _SPOT for expression in items(term.get("matchExpressions")))
        for term in items(terms)
    )


def _files(document: Document, config: Config) -> Iterator[Problem]:
    """Paths in the configuration against what is mounted where."""
    for pods in all_pods([document]):
        if pods.role != "worker":
            continue
        mounts = {str(mount.get("mountPath")): mount for mount in items(dig(pods.containers, 0, "volumeMounts"))}
        volumes = {volume.get("name"): volume for volume in items(pods.spec.get("volumes"))}
        where = pods.container(0, "volumeMounts")
        keys = mounts.get(posixpath.dirname(config.security.keys_file))
        secret = dig(volumes.get(keys.get("name")), "secret", "secretName") if keys else None
        if posixpath.basename(config.security.keys_file) not in SECRETS.get(str(secret), ()):
            yield Problem(
                where, f"security.keys_file: {config.security.keys_file or 'unset'} is not in a mounted secret"
            )
        elif keys and ("subPath" in keys or keys.get("readOnly") is not True):
            yield Problem(where, "the keys: must be mounted as a whole folder, read-only")
        written = {"audit.directory": config.audit.directory}
        if config.batches.directory:
            written["batches.directory"] = config.batches.directory
        for name, path in written.items():
            if not any(str(path).startswith(mount.rstrip("/") + "/") or path == mount for mount in mounts):
                yield Problem(where, f"{name}: {path} is on no volume, and the root is read-only")


def _redis(document: Document, config: Config, documents: Sequence[Document]) -> Iterator[Problem]:
    options = ("spec", "rayClusterConfig", "gcsFaultToleranceOptions")
    address = str(dig(document, *options, "redisAddress", default=""))
    addresses = {at(document, *options, "redisAddress"): address.removeprefix("redis://")}
    for name, url in (("security", config.security.redis_url), ("conversations", config.conversations.redis_url)):
        if url:
            parts = urllib.parse.urlsplit(url)
            addresses[at(document, "spec.serveConfigV2", f"{name}.redis_url")] = parts.netloc.rpartition("@")[2]
    for where, found in addresses.items():
        host, _, port = found.partition(":")
        service = named(documents, "Service", host)
        if service is None or port not in {str(each.get("port")) for each in items(dig(service, "spec", "ports"))}:
            yield Problem(where, f"{found} is no Service here and port of it")
    yield from secret_problems(
        at(document, *options), mapping(dig(document, *options, "redisPassword", "valueFrom", "secretKeyRef"))
    )
