"""What a request claims before anything is known of it: its importance, and tokens of its key's rate."""

from __future__ import annotations

from starlette.types import Scope

from serve_app.errors import bad_request
from serve_app.router.auth import Caller
from serve_app.router.body import encoded

# In the scope of a request that the router makes itself (a line of a batch): its priority, whatever its body says.
PRIORITY = "switchyard.priority"
_ANSWER_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def priority_of(parsed: object, scope: Scope, caller: Caller) -> int:
    """How important a request is: as it says, up to what its key may; 0 where it says nothing."""
    if (given := scope.get(PRIORITY)) is not None:
        return int(given)
    asked = parsed.get("priority", 0) if isinstance(parsed, dict) else 0
    if asked is None:
        asked = 0
    if not isinstance(asked, int) or isinstance(asked, bool):
        raise bad_request("`priority` must be a whole number; higher goes first.", "priority")
    return min(asked, caller.limits.max_priority)


def rough_tokens(caller: Caller, parsed: object) -> int:
    """What a request will cost, before anything is known of it: four bytes a token, and the answers it asks for."""
    if caller.limits.tokens_per_minute is None:
        return 0
    fields = parsed if isinstance(parsed, dict) else {}
    answer = _count_in(next((fields[name] for name in _ANSWER_FIELDS if fields.get(name) is not None), 0))
    return len(encoded(fields)) // 4 + answer * max(1, _count_in(fields.get("n")))


def _count_in(value: object) -> int:
    """A number as a client may have written one, before it is checked; 0 for what is none."""
    return int(value) if isinstance(value, int | float) and value > 0 else 0
