"""The sections of the configuration that are about the service rather than its models."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from serve_app.strict import Strict

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


def _redis_url(value: str) -> str:
    if value and not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must begin with redis://, rediss:// or unix://")
    if value and not value.startswith("unix://") and not re.fullmatch(r"/?|/\d+", _split(value)):
        raise ValueError("must end in the number of a database, such as /0, or in none")
    return value


def _collector_url(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    if value and _split(value) in ("", "/"):
        # It is sent to as it stands; a collector answers 404 to what comes without a path, and it is lost.
        raise ValueError("has no path; a collector's is /v1/traces for traces and /v1/logs for records")
    return value


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _split(url: str) -> str:
    """The path of a URL. Raises `ValueError`, which does not quote it, where host or port are none."""
    try:
        parts = urlsplit(url)
        well_formed = bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise ValueError("names no host, or no number as its port")
    return parts.path


def is_address(host: str) -> bool:
    """Whether this is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Degrade(Strict):
    """What is given up before requests are refused. `load`: taken places over all places of the model's replicas."""

    shrink_thinking_at: Annotated[float, Field(ge=0)] = Field(
        0.9, description="From this load on thinking that the client did not ask for in tokens is cut to..."
    )
    thinking_budget: Annotated[int, Field(ge=0)] = Field(1024, description="...so many tokens.")
    lighter_model_at: Annotated[float, Field(ge=0)] = Field(
        1.0, description="From this load on `auto` is answered by a lighter model that is awake, where one can."
    )


class RouterSettings(Strict):
    """The front door."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    replicas: Annotated[int, Field(ge=1)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024
    body_timeout_s: Annotated[float, Field(gt=0)] = 30
    max_in_flight: Annotated[int, Field(ge=1)] = Field(4096, description="Requests in flight in one replica.")
    max_connections: Annotated[int, Field(ge=1)] = Field(
        16_384, description="Client connections of one replica; one more closes the one that is idle for the longest."
    )
    hold_s: Annotated[float, Field(ge=0)] = Field(
        120, description="How long a request waits for its lazy model to load."
    )
    max_held: Annotated[int, Field(ge=1)] = Field(
        1024, description="Requests that wait for a lazy model in one replica; the next is refused with 503."
    )
    max_held_per_model: Annotated[int, Field(ge=1)] = Field(256, description="The same, for one model.")
    viewers: Annotated[int, Field(ge=0)] = Field(
        64,
        description="Connections to /v1/router/events in one replica; the next is refused with 503. 0: there are none.",
    )
    degrade: Degrade = Degrade()
    comment_s: Annotated[float, Field(gt=0)] = Field(
        15, description="A stream that waits in a queue, or whose engine says nothing, gets a comment this often."
    )
    loading_comment_s: Annotated[float, Field(gt=0)] = Field(
        1.0, description="A held stream gets a comment about the load this often."
    )
    keep_alive_s: Annotated[int, Field(ge=1)] = Field(
        620, description="Idle connections are kept this long; longer than common load balancers do (600 s)."
    )
    connect_timeout_s: Annotated[float, Field(gt=0)] = 5
    prefix_affinity: bool = Field(
        True, description="Of several replicas prefer one that has the beginning of the prompt in its prefix cache."
    )
    leave_s: Annotated[float, Field(ge=0)] = Field(
        0,
        description="On shutdown, scale-down and upgrade /ready is 503 for this long before nobody new is let in: time"
        " for a load balancer to look elsewhere.",
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        600, description="On shutdown, scale-down and upgrade running streams get this long to finish."
    )

    @field_validator("host")
    @classmethod
    def _can_be_listened_on(cls, value: str) -> str:
        # All digits and dots is an address that is none, such as 10.0.0.256.
        if not is_address(value) and (not _HOST_NAME.fullmatch(value) or re.fullmatch(r"[0-9.]+", value)):
            raise ValueError("must be an address or a host name alone, such as 0.0.0.0; the port is in router.port")
        return value


class ApiKey(Strict):
    """One API key, by its hash, and what its owner may do."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@-]+$")] = Field(
        description="A name for records and metrics; never the key."
    )
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = Field(description="Hex SHA-256 of the key.")
    models: list[str] | None = Field(None, description="Ids of the models it may use; null: all.")
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Prompt tokens and max_tokens of what was let in, corrected when the answer is counted."
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(None, description="Requests at once, in each Router.")
    max_priority: int = Field(0, description="The highest `priority` that its requests may ask for; 0 without one.")
    admin: bool = Field(False, description="May load, unload and pin models.")


class Anonymous(Strict):
    """What everybody may where there are no keys."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    max_priority: int = 0


class Security(Strict):
    """Who may do what. Without keys everybody may do all but give orders, and these too on the loopback address."""

    keys: list[ApiKey] = Field(default_factory=list)
    keys_file: str = Field(
        "", description="A YAML list of more keys, read again when it changes; relative: below the repository."
    )
    redis_url: str = Field(
        "", description="Redis that counts rates over all Routers, e.g. redis://host:6379/0; unset: each on its own."
    )
    anonymous: Anonymous = Field(Anonymous(), description="Limits of all clients together where there are no keys.")
    cors_origins: list[Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+)$")]] = Field(
        default_factory=list,
        description="Origins whose web pages may call the API, e.g. https://chat.example.org; * for all.",
    )

    hosts: list[Annotated[str, Field(pattern=r"^[a-z0-9-]+(\.[a-z0-9-]+)+$")]] = Field(
        default_factory=list,
        description="Public host names that a proxy in front passes on, e.g. llm.example.org. Asked only where there"
        " are no keys and the router listens on the loopback address.",
    )

    _is_redis = field_validator("redis_url")(_redis_url)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for field in ("id", "sha256"):
            values = Counter(getattr(key, field) for key in self.keys)
            if doubled := [place for place, key in enumerate(self.keys) if values[getattr(key, field)] > 1]:
                raise ValueError(f"keys[{doubled[-1]}].{field}: another key has the same")
        return self


class Page(Strict):
    """The page for people at `/ui`. Where others reach the router it needs keys."""

    enabled: bool = Field(False, description="Served by the front door, never by Serve's own ingress.")


class AuditSettings(Strict):
    """One record for each request; without prompts and keys."""

    sink: Literal["file", "stdout", "otlp", "none"] = "file"
    directory: str = Field(".audit", description="Of the files; relative: below the repository.")
    max_bytes: Annotated[int, Field(ge=1024)] = Field(64 * 1024 * 1024, description="A new file is begun at this size.")
    keep: Annotated[int, Field(ge=1)] = Field(
        10,
        description="Files that nobody writes any more, of ended Routers too, take at most so many times `max_bytes`"
        " together; the oldest go first.",
    )
    queue: Annotated[int, Field(ge=1)] = Field(10_000, description="Records that may wait to be written; more drop.")
    otlp_endpoint: str = Field("", description="For sink otlp, e.g. http://host:4318/v1/logs.")

    _is_collector = field_validator("otlp_endpoint")(_collector_url)

    @model_validator(mode="after")
    def _endpoint(self) -> Self:
        if self.sink == "otlp" and not self.otlp_endpoint:
            raise ValueError("otlp_endpoint: missing; sink otlp sends to it")
        return self


class Batches(Strict):
    """Files and batches. Without a directory there are none."""

    directory: str = Field(
        "", description="Where they are kept, shared by all Routers. Relative: below the repository. Unset: off."
    )
    max_file_bytes: Annotated[int, Field(ge=1024)] = 200 * 1024 * 1024
    max_lines: Annotated[int, Field(ge=1)] = 50_000
    concurrency: Annotated[int, Field(ge=1)] = Field(8, description="Lines that run at once, at most.")
    run_below_load: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="Share of a model's places that lines and interactive requests take together; where interactive"
        " requests alone take so many, no line runs.",
    )
    keep_days: Annotated[float, Field(gt=0)] = Field(30, description="Then files and ended batches are removed.")


class Telemetry(Strict):
    """What leaves the service besides answers and Ray's metrics."""

    otlp_endpoint: str = Field(
        "", description="OTLP/HTTP collector for traces, the engines' too, e.g. http://host:4318/v1/traces."
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Part of the traces that are kept, of requests whose client has not chosen (`traceparent`)."
    )

    _is_collector = field_validator("otlp_endpoint")(_collector_url)


class Conversations(Strict):
    """History that the Router keeps for clients which name their conversation, and answers of `/v1/responses`."""

    enabled: bool = False
    ttl_s: Annotated[float, Field(gt=0)] = Field(86_400, description="Kept so long after the last turn.")
    max_tokens: Annotated[int, Field(ge=1)] = Field(
        16_384, description="Of one conversation (estimated); whole turns go from the oldest. The newest always stays."
    )
    max_conversations: Annotated[int, Field(ge=1)] = Field(
        10_000, description="In memory: those unused for the longest go first. Redis has its own maxmemory."
    )
    redis_url: str = Field(
        "", description="Keeps them in Redis: needed with more than one Router, and to outlive a restart."
    )

    _is_redis = field_validator("redis_url")(_redis_url)
