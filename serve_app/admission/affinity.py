"""Which replica a request should go to, by load and by what of its prompt each has in its prefix cache. Pure.

vLLM keeps the KV cache of prompts in blocks, found again by their contents from the beginning on (automatic prefix
caching): a conversation, or a shared system prompt, costs its prefill once for each replica that it is sent to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

# Prompts are compared in steps of so many characters (of English some 256 tokens), and so many steps at most.
STEP_CHARS = 1024
MAX_STEPS = 128
# One request more in flight weighs as much as so many characters that a replica need not prefill: some 500 tokens,
# which take a GPU about as long as a few dozen steps in which that request would share.
CHARS_A_REQUEST = 2048


def steps_of(model: str, texts: Iterable[str]) -> tuple[int, ...]:
    """Marks of a prompt's beginnings, each longer than the one before it by `STEP_CHARS`. Equal for equal beginnings.

    Only whole steps count: what is left over is prefilled anyway. The marks hold in this process only.
    """
    marks: list[int] = []
    mark, rest = hash(model), ""
    for text in texts:
        rest = f"{rest}{text}\x00" if rest else f"{text}\x00"
        start = 0
        while len(rest) - start >= STEP_CHARS:
            mark = hash((mark, rest[start : start + STEP_CHARS]))
            marks.append(mark)
            if len(marks) == MAX_STEPS:
                return tuple(marks)
            start += STEP_CHARS
        rest = rest[start:]
    return tuple(marks)


class Prefixes:
    """Which replicas were sent which beginnings lately: the `size` last ones.

    It is a guess: an engine may have given a block up, and other Routers send prompts, too.
    """

    def __init__(self, size: int = 65536) -> None:
        self._sent: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._size = size

    def known(self, replica: str, steps: Sequence[int]) -> int:
        """Characters of the prompt that the replica has seen, from its beginning."""
        sent = self._sent
        low, high = 0, len(steps)
        # Who saw a beginning saw every shorter one.
        while low < high:
            middle = (low + high) // 2
            if (replica, steps[middle]) in sent:
                low = middle + 1
            else:
                high = middle
        return low * STEP_CHARS

    def sent(self, replica: str, steps: Sequence[int]) -> None:
        """The prompt goes to the replica."""
        # The longest first, so that its beginnings, which others share, are forgotten last.
        for step in reversed(steps):
            self._sent[replica, step] = None
            self._sent.move_to_end((replica, step))
        while len(self._sent) > self._size:
            self._sent.popitem(last=False)


def cost_of(in_flight: int, known: int) -> int:
    """What a request more costs on a replica with so many in flight that knows so many characters of its prompt."""
    return in_flight * CHARS_A_REQUEST - known
