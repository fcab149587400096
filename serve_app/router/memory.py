"""What this Router remembers of conversations: their last decisions, for a time, the least recently used go first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from serve_app.routing.sticky import Past
from serve_app.routing_schema import Sticky


class Memory:
    """Conversations by key."""

    def __init__(self, settings: Sticky, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._pasts: OrderedDict[str, Past] = OrderedDict()

    def recall(self, key: str) -> Past | None:
        """The conversation's last decision, unless it is too old."""
        past = self._pasts.get(key)
        if past and self._clock() - past.at_s > self._settings.ttl_s:
            del self._pasts[key]
            return None
        return past

    def remember(self, key: str, past: Past) -> None:
        """Keep the decision."""
        self._pasts[key] = past
        self._pasts.move_to_end(key)
        if len(self._pasts) > self._settings.entries:
            self._pasts.popitem(last=False)
