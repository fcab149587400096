"""The section of a model's configuration that names a server which is not ours."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from serve_app.strict import Strict


class External(Strict):
    """An OpenAI-compatible server that runs elsewhere: `vllm serve`, llama.cpp, SGLang, a gateway, a provider."""

    urls: Annotated[list[str], Field(min_length=1)] = Field(
        description="Base URLs as OpenAI's clients take them; /v1 where one has no path. Several are its replicas."
    )
    model: str = Field("", description="What the server calls the model; unset: as its id here.")
    api_key_file: str = Field(
        "",
        description="File with the server's key, read again when it changes. Relative: below the repository.",
    )
    api_key_env: str = Field("", description="Or an environment variable of the Router's node that holds it.")
    ca_file: str = Field(
        "", description="Certificates (PEM) to trust for https instead of the system's. Relative: below the repository."
    )
    health_path: Annotated[str, Field(pattern="^(/[^?#]*)?$")] = Field(
        "",
        description="Path beside /v1 that answers 200 while it is well; unset: the API's list of models.",
    )
    health_every_s: Annotated[float, Field(gt=0)] = 5
    health_timeout_s: Annotated[float, Field(gt=0)] = 2
    connect_timeout_s: Annotated[float, Field(gt=0)] = 5

    @field_validator("urls")
    @classmethod
    def _base_urls(cls, value: list[str]) -> list[str]:
        return [_base_url(index, url) for index, url in enumerate(value)]

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.api_key_file and self.api_key_env:
            raise ValueError("api_key_env: the key comes from api_key_file already; remove one of the two")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: names a server twice")
        return self


def _base_url(index: int, url: str) -> str:
    """The URL without a slash at its end, and with an API's path. Raises `ValueError`, which does not quote it."""
    try:
        parts = urlsplit(url)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or any(character.isspace() for character in url):
        raise ValueError(f"[{index}]: is no http:// or https:// URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"[{index}]: holds a secret; use api_key_file or api_key_env")
    if parts.query or parts.fragment:
        raise ValueError(f"[{index}]: a base URL has neither ? nor #")
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"
