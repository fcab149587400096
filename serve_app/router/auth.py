"""Who calls: API keys by their hashes, from the configuration or from a file that may change while we run."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers

from serve_app.config import Anonymous, ApiKey, Config, problems_of, resolve_dir
from serve_app.errors import ApiError

logger = logging.getLogger(__name__)

ANONYMOUS = "anonymous"
CALLER = "switchyard.caller"
_LOOK_EVERY_S = 1.0
_KEY_FILE = TypeAdapter(list[ApiKey])


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and what they may. `id` is the key's name, and never the key. `models`: None: all."""

    id: str
    limits: ApiKey | Anonymous
    models: frozenset[str] | None = None
    admin: bool = False


class Keys:
    """The API keys. Without any everybody is `anonymous`, and an operator where only this machine can reach us."""

    def __init__(self, config: Config, *, front_door: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        settings = config.security
        self._configured = settings.keys
        self._clock = clock
        self._path = resolve_dir(settings.keys_file) if settings.keys_file else None
        self._seen: tuple[int, int] | None = None
        self._looked_at = -math.inf
        self._by_hash = _by_hash(settings.keys)
        # Serve's own ingress listens where `http_options` say, which is not known here.
        local = front_door and is_loopback(config.router.host)
        self._anonymous = Caller(ANONYMOUS, settings.anonymous, admin=local)
        self._closed = bool(settings.keys or settings.keys_file)

    def caller(self, headers: Headers) -> Caller:
        """Who sent a request with these headers. Raises `ApiError` (401)."""
        if not self._closed:
            return self._anonymous
        self._look()
        key = given_key(headers)
        if not key:
            raise ApiError(401, "This needs an API key: `Authorization: Bearer KEY`.", code="missing_api_key")
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = self._by_hash.get(digest)
        # The lookup compares hashes, of which an attacker knows nothing; and then the whole in constant time.
        if found is None or not hmac.compare_digest(found.sha256, digest):
            raise ApiError(401, "This API key is not known.", code="invalid_api_key")
        models = None if found.models is None else frozenset(found.models)
        return Caller(found.id, found, models, found.admin)

    def _look(self) -> None:
        """Read the file again if it has changed; a faulty one leaves the keys as they were."""
        now = self._clock()
        if self._path is None or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            stat = os.stat(self._path)
            if (stat.st_mtime_ns, stat.st_size) == self._seen:
                return
            self._seen = (stat.st_mtime_ns, stat.st_size)
            self._by_hash = _by_hash([*self._configured, *read_keys(self._path)])
        except (OSError, ValueError) as error:
            logger.error("%s: the keys stay as they were: %s", self._path, error)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises `ValueError` that names what is wrong in it, `OSError`."""
    try:
        return _KEY_FILE.validate_python(yaml.safe_load(path.read_text()) or [])
    except ValidationError as error:
        raise ValueError("; ".join(problems_of(error))) from None
    except yaml.YAMLError:
        raise ValueError("it is not YAML") from None


def given_key(headers: Headers) -> str:
    """The key that a request carries: OpenAI's header, or Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _by_hash(keys: Iterable[ApiKey]) -> Mapping[str, ApiKey]:
    return {key.sha256: key for key in keys}
