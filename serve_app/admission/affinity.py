"""Which replica a request should go to, by load and by what of its prompt each has in its prefix cache. Pure.

vLLM keeps the KV cache of prompts in blocks, found again by their contents from the beginning on (automatic prefix
caching): a conversation, or a shared system prompt, costs its prefill once for each replica that it is sent to.

So a conversation is worth staying with, and what many conversations share is not: every replica will have it soon, and
whoever followed it would send all of them to the replica that had it first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

# Prompts are compared in steps of so many characters (of English some 128 tokens), and so many steps at most.
STEP_CHARS = 512
MAX_STEPS = 256
# One request more in flight weighs as much as so many characters of a conversation that a replica need not prefill:
# some 500 tokens, which take a GPU about as long as a few dozen steps in which that request would share. With 512
# short conversations gather where they began: `make bench-prefix` on two cores was 44 % slower than by load alone.
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
    """Which replicas were sent which beginnings lately, and where prompts part: the `size` last ones of each.

    It is a guess: an engine may have given a block up, and other Routers send prompts, too.
    """

    def __init__(self, size: int = 65536) -> None:
        self._sent: OrderedDict[tuple[str, int], None] = OrderedDict()
        # The mark that came after each; None where there were several.
        self._after: OrderedDict[int, int | None] = OrderedDict()
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

    def shared(self, steps: Sequence[int]) -> int:
        """Characters of the prompt, from its beginning, that other conversations have begun with, too."""
        after = self._after
        parted = (index for index in range(len(steps) - 1, -1, -1) if after.get(steps[index], 0) is None)
        return (next(parted, -1) + 1) * STEP_CHARS

    def sent(self, replica: str, steps: Sequence[int]) -> None:
        """The prompt goes to the replica."""
        # The longest first, so that its beginnings, which others share, are forgotten last.
        for step in reversed(steps):
            self._sent[replica, step] = None
            self._sent.move_to_end((replica, step))
        after = self._after
        for step, next_one in itertools.pairwise(steps):
            if after.setdefault(step, next_one) != next_one:
                after[step] = None
            after.move_to_end(step)
        for table in (self._sent, after):
            while len(table) > self._size:
                table.popitem(last=False)


def cost_of(in_flight: int, known: int, shared: int) -> tuple[int, int]:
    """What a request more costs on a replica with so many in flight that knows so many characters of its prompt, of
    which others share so many: the less comes first. Where it is equal, who knows more.
    """
    return in_flight * CHARS_A_REQUEST - max(0, known - shared), -known
