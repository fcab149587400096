"""What stands beside Ray: Redis with its configuration, and the models' volume with the job that fills it."""

from __future__ import annotations

import posixpath
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.k8s_check.pods import Pods, all_pods
from tools.k8s_check.problem import Document, Problem, at, dig, items, mapping
from tools.k8s_check.quantity import number

_DIRECTIVES = frozenset({"appendonly", "appendfsync", "dir", "maxmemory", "maxmemory-policy", "user"})
# Redis rewrites its log from a copy of itself; without room for that it is killed while it does.
_ROOM = 1.2


def store_problems(documents: Sequence[Document]) -> list[Problem]:
    """What is wrong with Redis, the models' volume and the job."""
    pods = all_pods(documents)
    found = list(_homes(pods))
    for each in pods:
        if each.owner.get("kind") == "StatefulSet":
            found += _redis(each, documents)
        if each.owner.get("kind") == "Job":
            found += _job(each)
    return found


def _redis(pods: Pods, documents: Sequence[Document]) -> Iterator[Problem]:
    container = mapping(dig(pods.containers, 0))
    mounts = {str(mount.get("mountPath")): str(mount.get("name")) for mount in items(container.get("volumeMounts"))}
    volumes = {str(volume.get("name")): volume for volume in items(pods.spec.get("volumes"))}
    args = container.get("args") or []
    if dig(pods.owner, "spec", "replicas") != 1:
        yield Problem(at(pods.owner, "spec", "replicas"), "must be 1: they would not know of each other")
    if len(args) != 3 or args[1:] != ["--requirepass", "$(REDIS_PASSWORD)"]:
        yield Problem(pods.container(0, "args"), "must be the configuration, --requirepass, $(REDIS_PASSWORD)")
        return
    conf = dig(volumes.get(mounts.get(posixpath.dirname(args[0]), "")), "configMap", "name")
    config = next((each for each in documents if each.get("kind") == "ConfigMap"), {})
    text = dig(config, "data", posixpath.basename(args[0]))
    if conf != dig(config, "metadata", "name") or text is None:
        yield Problem(pods.container(0, "args"), f"{args[0]} is not mounted")
        return
    settings = {}
    for line in str(text).splitlines():
        name, _, value = line.partition(" ")
        if name and not name.startswith("#"):
            settings[name] = value
            if name not in _DIRECTIVES:
                yield Problem(at(config, "data"), f"{posixpath.basename(args[0])}: {name} is no directive that we use")
    if settings.get("dir") not in mounts:
        yield Problem(pods.container(0, "volumeMounts"), f"dir {settings.get('dir')} of redis.conf is on no volume")
    most = number(settings.get("maxmemory", "").removesuffix("mb") + "Mi")
    limit = number(dig(container, "resources", "limits", "memory"))
    if settings.get("appendonly") != "yes" or settings.get("maxmemory-policy") != "noeviction":
        yield Problem(
            at(config, "data"), "appendonly yes, maxmemory-policy noeviction: what Ray knows must not get lost"
        )
    if most is None or limit is None or most * _ROOM > limit:
        yield Problem(at(config, "data"), f"maxmemory {settings.get('maxmemory')}: the pod has too little for that")
    names = {entry.get("name") for entry in items(container.get("env"))}
    if not names >= {"REDIS_PASSWORD", "REDISCLI_AUTH"}:
        yield Problem(pods.container(0, "env"), "REDIS_PASSWORD and REDISCLI_AUTH are needed")
    if dig(container, "readinessProbe", "exec", "command") != ["redis-cli", "ping"]:
        yield Problem(pods.container(0, "readinessProbe"), "must be redis-cli ping")


def _job(pods: Pods) -> Iterator[Problem]:
    command = list(dig(pods.containers, 0, "command", default=[]))
    where = pods.container(0, "command")
    if command[:2] != ["/bin/bash", "-ec"] or len(command) != 4 or 'hf download "$model"' not in command[2]:
        yield Problem(where, "must be bash -ec with a script that runs `hf download` for each of its arguments")
        return
    said = subprocess.run(["bash", "-n", "-c", command[2]], capture_output=True, text=True)
    if said.returncode:
        yield Problem(where, f"bash: {said.stderr.strip()}")


def _homes(pods: Sequence[Pods]) -> Iterator[Problem]:
    """All must look for models where the job puts them: on the claim."""
    homes = {}
    for each in pods:
        if each.role == "head" or each.owner.get("kind") not in ("RayService", "Job"):
            continue
        container = mapping(dig(each.containers, 0))
        env = {str(entry.get("name")): str(entry.get("value")) for entry in items(container.get("env"))}
        home = homes[each.where()] = env.get("HF_HOME", "")
        volumes = {str(volume.get("name")): volume for volume in items(each.spec.get("volumes"))}
        mounts = {str(mount.get("mountPath")): str(mount.get("name")) for mount in items(container.get("volumeMounts"))}
        if "persistentVolumeClaim" not in mapping(volumes.get(_volume(mounts, home), {})):
            yield Problem(each.container(0, "env"), f"HF_HOME: {home or 'missing'}: must be on the models' claim")
    if len(set(homes.values())) > 1:
        yield Problem("HF_HOME", f"must be the same everywhere: {', '.join(sorted(set(homes.values())))}")


def _volume(mounts: Mapping[str, str], path: str) -> str:
    """The volume that a path is on; empty if it is on none."""
    around: list[Any] = [mount for mount in mounts if path == mount or path.startswith(mount.rstrip("/") + "/")]
    return mounts[max(around, key=len)] if around else ""
