"""Paths that clients put together with a slash too many: a base URL that ends in one, a path that does. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.types import Scope

_SEVERAL = re.compile("/{2,}")


def without_slashes(scope: Scope, known: Collection[str]) -> Scope:
    """The request as if to the one of these paths that it means; itself where it means none.

    A redirect would say the same, but many clients send no body a second time, or no key.
    """
    path: str = scope["path"]
    if "//" not in path and not path.endswith("/"):
        return scope
    meant = _SEVERAL.sub("/", path).rstrip("/")
    return {**scope, "path": meant} if meant in known else scope
