"""Where a model's `config.json` is: its directory, what is known here, the hub's cache, or the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.known_models import known_config
from serve_app.sizing.quantization import SizingError

_TIMEOUT_S = 10.0
_INSTEAD = "give the directory of its files, or of its config.json alone"


def config_here(source: str) -> Mapping[str, Any] | None:
    """The `config.json` of a directory or hub id, without a network; None if it is not on this machine.

    Raises `SizingError` for a directory or file that holds none.
    """
    from huggingface_hub import try_to_load_from_cache

    path = Path(source).expanduser()
    if path.is_dir():
        return _read(path / "config.json")
    if path.is_absolute():
        raise SizingError(f"{source}: no such directory")
    if (known := known_config(source)) is not None:
        return known
    try:
        cached = try_to_load_from_cache(source, "config.json")
    except ValueError:
        raise SizingError(f"{source}: neither a directory nor a hub id such as Qwen/Qwen3-14B") from None
    return _read(Path(cached)) if isinstance(cached, str) else None


def find_config(source: str) -> Mapping[str, Any]:
    """The same, from the hub if need be. Raises `SizingError`."""
    if (config := config_here(source)) is not None:
        return config
    import httpx
    from huggingface_hub import constants, get_token, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        raise SizingError(f"{source}: not on this machine, and HF_HUB_OFFLINE is set; {_INSTEAD}")
    try:
        # Not by hf_hub_download: without a network it tries for half a minute.
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(
            hf_hub_url(source, "config.json"), headers=headers, follow_redirects=True, timeout=_TIMEOUT_S
        )
    except httpx.HTTPError as error:
        raise SizingError(
            f"{source}: not on this machine, and the hub cannot be reached ({type(error).__name__}); {_INSTEAD}"
        ) from None
    if answer.status_code in (401, 403, 404):
        raise SizingError(f"{source}: no such model on the hub, or one that HF_TOKEN may not read")
    if answer.status_code != 200:
        raise SizingError(f"{source}: the hub answers {answer.status_code}; {_INSTEAD}")
    return _parsed(answer.text, f"{source}/config.json")


def _read(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text()
    except FileNotFoundError:
        raise SizingError(f"{file.parent}: holds no config.json") from None
    except (OSError, UnicodeDecodeError):
        raise SizingError(f"{file}: cannot be read") from None
    return _parsed(text, str(file))


def _parsed(text: str, where: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        raise SizingError(f"{where}: not valid JSON") from None
    if not isinstance(config, dict):
        raise SizingError(f"{where}: not a JSON object")
    return config
