"""Watches the servers that are not ours, and keeps the tables from which the Router picks its targets."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from serve_app.config import Config
from serve_app.external_schema import External
from serve_app.model_schema import Model, resolve_dir
from serve_app.models.replicas import Foreign, PublishedModel, Replica, set_replicas
from serve_app.router.relay import Relay

logger = logging.getLogger(__name__)

_OPENAI = "/v1"
_MODELS = "/v1/models"


class Externals:
    """All external models of a configuration. `tables`: by model id, the name of its table; see `replicas`."""

    def __init__(self, config: Config, tables: Mapping[str, str], relay: Relay) -> None:
        self._models = [
            _Servers(model, model.external, tables[model.id], relay) for model in config.residents if model.external
        ]

    async def run(self) -> None:
        """Ask every server how it is, again and again."""
        async with asyncio.TaskGroup() as group:
            for servers in self._models:
                for index in range(len(servers.settings.urls)):
                    group.create_task(servers.watch(index))


class _Servers:
    """The servers of one model, which are its replicas."""

    def __init__(self, model: Model, settings: External, table: str, relay: Relay) -> None:
        self.settings = settings
        self._model = model
        self._table = table
        self._relay = relay
        self._key = ""
        self._tls: ssl.SSLContext | None = None
        self._complaint = ""
        self._states = [PublishedModel("loading") for _ in settings.urls]

    async def watch(self, index: int) -> None:
        """Ask one of them for ever."""
        while True:
            self._read_secrets()
            self._publish()
            reason = await self._ask(index)
            if reason and self._states[index].failure != reason:
                logger.warning("%s: %s", self._replica(index).id, reason)
            self._states[index] = PublishedModel("failed" if reason else "awake", failure=reason)
            self._publish()
            await asyncio.sleep(self.settings.health_every_s)

    async def _ask(self, index: int) -> str:
        """Why it cannot be used; empty if it can."""
        path = self.settings.health_path or _MODELS
        target = self._replica(index).target(self._model.id)
        status = await self._relay.probe(target, path, self.settings.health_timeout_s)
        if status == 200:
            return ""
        if status in (401, 403):
            return "it refuses the router's key"
        return f"it answers {status} to {path}" if status else "it does not answer"

    def _read_secrets(self) -> None:
        """Read key and certificates, which may have changed; what is gone or faulty changes nothing."""
        try:
            key = _key_of(self.settings)
            if self.settings.ca_file and self._tls is None:
                self._tls = ssl.create_default_context(cafile=str(resolve_dir(self.settings.ca_file)))
        except (OSError, ValueError) as error:
            # Neither what is in the file nor the key.
            complaint = (error.strerror or "unreadable") if isinstance(error, OSError) else str(error)
            if complaint != self._complaint:
                logger.error("%s: its key or certificates cannot be read: %s", self._model.id, complaint)
            self._complaint = complaint
            return
        self._key, self._complaint = key, ""

    def _publish(self) -> None:
        set_replicas(self._table, [self._replica(index) for index in range(len(self._states))])

    def _replica(self, index: int) -> Replica:
        parts = urlsplit(self.settings.urls[index])
        root, api = f"{parts.scheme}://{parts.netloc}", parts.path
        if api.endswith(_OPENAI):
            # What lies beside /v1 (/tokenize, /health) lies beside it here, too.
            root, api = root + api.removesuffix(_OPENAI), _OPENAI
        places = self._model.max_ongoing_requests
        return Replica(
            id=f"{self._model.id}@{parts.netloc}{parts.path.removesuffix(_OPENAI)}",
            urls={self._model.id: root},
            secret="",
            models={self._model.id: self._states[index]},
            moving=True,
            foreign=Foreign(api, places, self.settings.connect_timeout_s, self._key, self._tls),
        )


def _key_of(settings: External) -> str:
    """The key; empty where none is asked for. Raises `OSError`, or `ValueError` that quotes nothing."""
    if settings.api_key_file:
        key = resolve_dir(settings.api_key_file).read_text().strip()
    elif settings.api_key_env:
        key = os.environ.get(settings.api_key_env, "").strip()
    else:
        return ""
    if not key:
        raise ValueError("there is none")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("it is more than one line of ASCII")
    return key
