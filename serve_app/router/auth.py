"""Who calls: API keys by their hashes, from the configuration or from a file that may change while we run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping

import yaml
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers

from serve_app.config import Config
from serve_app.errors import ApiError
from serve_app.model_schema import resolve_dir
from serve_app.service_schema import Anonymous, ApiKey, is_loopback

logger = logging.getLogger(__name__)

ANONYMOUS = "anonymous"
CALLER = "switchyard.caller"
_LOOK_EVERY_S = 1.0
# RFC 6761, RFC 6762, and ICANN's resolution 2024.07.29.06.
_NEVER_PUBLIC = frozenset({"localhost", "local", "internal", "test", "invalid", "example"})
_KEY_FILE = TypeAdapter(list[ApiKey])


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and what they may. `id` is the key's name, and never the key.

    `models`: ids of models that are here; None: all.
    """

    id: str
    limits: ApiKey | Anonymous
    models: frozenset[str] | None = None
    admin: bool = False


class Keys:
    """The API keys. Without any everybody is `anonymous`, and an operator where only this machine can reach us."""

    def __init__(self, config: Config, *, front_door: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        settings = config.security
        self._configured = settings.keys
        self._models = frozenset(model.id for model in config.models)
        self._clock = clock
        self._path = resolve_dir(settings.keys_file) if settings.keys_file else None
        self._seen: tuple[int, ...] = ()
        self._looked_at = -math.inf
        self._complaint = ""
        self._by_hash = _by_hash(settings.keys, ())
        # Serve's own ingress listens where `http_options` say, which is not known here.
        loopback = is_loopback(config.router.host)
        local = front_door and loopback
        self._hosts = frozenset(settings.hosts) if loopback else None
        self._anonymous = Caller(ANONYMOUS, settings.anonymous, admin=local)
        self._closed = bool(settings.keys or settings.keys_file)
        self._origins = frozenset(settings.cors_origins)
        self._own_names = frozenset(settings.hosts) if config.ui.enabled and local else None

    def caller(self, headers: Headers) -> Caller:
        """Who sent a request with these headers. Raises `ApiError` (401, 403)."""
        if not self._closed:
            self._check_origin(headers)
            return self._anonymous
        self._look()
        key = given_key(headers)
        if not key:
            how = "`Authorization: Bearer KEY`, or `x-api-key: KEY`"
            raise ApiError(401, f"This needs an API key: {how}.", code="missing_api_key")
        digest = digest_of(key)
        found = self._by_hash.get(digest)
        # The lookup compares hashes, of which an attacker knows nothing; and then the whole in constant time.
        if found is None or not hmac.compare_digest(found.sha256, digest):
            raise ApiError(401, "This API key is not known.", code="invalid_api_key")
        return self._as_caller(found)

    def named(self, key_id: str) -> Caller | None:
        """Who has the key of this id now: what is done later for a caller is done with what they may then."""
        if not self._closed:
            return self._anonymous if key_id == ANONYMOUS else None
        self._look()
        return next((self._as_caller(key) for key in self._by_hash.values() if key.id == key_id), None)

    def _as_caller(self, key: ApiKey) -> Caller:
        models = None if key.models is None else self._models.intersection(key.models)
        return Caller(key.id, key, models, key.admin)

    def _check_origin(self, headers: Headers) -> None:
        """Without keys any web page in a browser on this machine could send requests, if not read the answers.

        Browsers say whose page it is. (Keys they do not send of their own accord.)
        """
        origin = headers.get("origin")
        listed = origin is None or origin in self._origins or "*" in self._origins
        if not listed and not self._is_own_page(origin or "", headers.get("host", "")):
            raise ApiError(403, "This web page may not call the API; see security.cors_origins.", code="wrong_origin")
        # A page whose name was bound anew to this machine's address is of the same origin to its browser, which names
        # no origin then when it reads. Nobody but this machine should come here, and it knows itself by no public name.
        if self._hosts is not None and (host := _public_name(headers.get("host", ""))) and host not in self._hosts:
            raise ApiError(
                403, "This service does not answer to that host name; see security.hosts.", code="wrong_host"
            )

    def _is_own_page(self, origin: str, host: str) -> bool:
        """Whether our own `/ui` asks: its origin is the address at which we are asked, by a name that is ours."""
        if self._own_names is None or origin.partition("://")[2] != host.lower():
            return False
        name = _name_of(host)
        return is_loopback(name) or name in self._own_names

    def _look(self) -> None:
        """Read the file again if it has changed; a faulty one leaves the keys as they were."""
        now = self._clock()
        if self._path is None or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            stat = os.stat(self._path)
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
            if seen == self._seen:
                return
            raw = self._path.read_bytes()
            self._seen = seen  # a faulty one is read again when it has changed, one that cannot be read at every look
            self._by_hash = _by_hash(self._configured, keys_in(raw))
        except (OSError, ValueError) as error:
            self._complain(error.strerror or "unreadable" if isinstance(error, OSError) else str(error))
            return
        self._complaint = ""
        for key in self._by_hash.values():
            if not set(key.models or ()) <= self._models:
                logger.warning("%s: the key %s names a model that is not the id of one here", self._path, key.id)

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            logger.error("%s: the keys stay as they were: %s", self._path, why)
        self._complaint = why


def keys_in(raw: bytes) -> list[ApiKey]:
    """The keys of a file. Raises `ValueError` that says what is wrong and quotes nothing."""
    try:
        listed = yaml.safe_load(raw)
    except Exception:  # PyYAML raises this and that, some of it with a piece of the text
        raise ValueError("it is not YAML") from None
    if listed is None:
        # What a writer has just cut and not yet filled must lock nobody out.
        raise ValueError("it is empty; a list without keys is `[]`")
    try:
        return _KEY_FILE.validate_python(listed)
    except ValidationError as error:
        raise ValueError("; ".join(_problems(error))) from None


def _problems(error: ValidationError) -> list[str]:
    """As `config.problems_of`, without names that we do not know: one may be a key in the wrong place."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        known = [part for part in problem["loc"] if isinstance(part, int) or part in ApiKey.model_fields]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in known)
        lines.append(f"{path or 'the file'}: {problem['msg']}")
    return lines


def given_key(headers: Headers) -> str:
    """The key that a request carries: OpenAI's header, or Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def digest_of(key: str) -> str:
    """The hex SHA-256 of a key as it came in a header: of the very bytes that were sent."""
    return hashlib.sha256(key.encode("latin-1", "replace")).hexdigest()


def new_key(key_id: str, *, models: list[str] | None = None, admin: bool = False) -> tuple[str, ApiKey]:
    """A random key, and what the configuration or the file says of it."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, ApiKey(id=key_id, sha256=digest_of(key), models=models, admin=admin)


def _name_of(host: str) -> str:
    """The name or the address in a `Host` header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.lower().rpartition(":")[0] or host.lower()).rstrip(".")


@functools.lru_cache(1024)
def _public_name(host: str) -> str:
    """The name in a `Host` header, if somebody could own it in the public DNS; else an empty string."""
    name = _name_of(host)
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return ""
    return "" if "." not in name or name.rpartition(".")[2] in _NEVER_PUBLIC else name


def _by_hash(configured: Collection[ApiKey], listed: Collection[ApiKey]) -> Mapping[str, ApiKey]:
    """All keys. Raises `ValueError` where one of the file has the id or the hash of another."""
    found = {key.sha256: key for key in configured}
    ids = {key.id for key in configured}
    for place, key in enumerate(listed):
        if key.id in ids or key.sha256 in found:
            raise ValueError(f"[{place}]: another key has the same {'id' if key.id in ids else 'sha256'}")
        found[key.sha256] = key
        ids.add(key.id)
    return found
