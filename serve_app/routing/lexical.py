"""The cheap score: words and shape of a request against a trained table of weights. Pure, some 50 µs.

A logistic regression with an L1 penalty over sparse features, so that the table stays small and can be read.
`training/lexical.py` makes `lexicon.json`; the features here and there are the same function.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path

from serve_app.routing.excerpt import Excerpt, clipped

_WORD = re.compile(r"[a-z][a-z']{1,18}|[\u4e00-\u9fff]+")
_DIGITS = re.compile(r"[0-9]+")
_SYMBOLS = re.compile(r"[=<>+*/^≤≥≠∑∫√∈∀∃±×÷|%°²³→]")
_HALF = 200
# Below this many characters the ask says little by itself; what it follows then counts too.
_SHORT = 40
_NONE = (0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Probabilities that thinking changes the outcome, and that the large model is needed.

    `think_at`, `small_below`: where this scorer was calibrated to switch. `kind` names it.
    """

    think: float
    large: float
    think_at: float
    small_below: float
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class Lexicon:
    """Weights by feature, for thinking and for size; each with its intercept and its threshold."""

    weights: Mapping[str, tuple[float, float]]
    think_bias: float
    large_bias: float
    think_at: float
    small_below: float

    def score(self, excerpt: Excerpt) -> Score:
        """Judge a request."""
        text = clipped(excerpt.instruction, _HALF).lower()
        think, large = self.think_bias, self.large_bias
        weights = self.weights
        for word in weights.keys() & _words_of(excerpt, text):
            pair = weights[word]
            think += pair[0]
            large += pair[1]
        for name, value in _shape_of(excerpt, text).items():
            if (pair := weights.get(name, _NONE)) is not _NONE:
                think += pair[0] * value
                large += pair[1] * value
        return Score(_logistic(think), _logistic(large), self.think_at, self.small_below, "lexical")


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))


@functools.cache
def shipped_lexicon() -> Lexicon:
    """The table that ships."""
    table = json.loads((Path(__file__).parent / "lexicon.json").read_text())
    table["weights"] = {name: tuple(pair) for name, pair in table["weights"].items()}
    return Lexicon(**table)


def features(excerpt: Excerpt) -> dict[str, float]:
    """Sparse features: words, Chinese single characters and pairs, and the shape of the text."""
    text = clipped(excerpt.instruction, _HALF).lower()
    return dict.fromkeys(_words_of(excerpt, text), 1.0) | _shape_of(excerpt, text)


def _words_of(excerpt: Excerpt, text: str) -> set[str]:
    words = _words(text)
    if len(excerpt.ask) < _SHORT:
        words.update("<" + word for word in _words(clipped(excerpt.before, _HALF).lower()))
    return words


def _shape_of(excerpt: Excerpt, text: str) -> dict[str, float]:
    numbers = len(_DIGITS.findall(text))
    symbols = len(_SYMBOLS.findall(text))
    count = text.count
    size = math.log1p(len(excerpt.ask))
    return {
        "#size": size,
        "#size2": (size - 4) ** 2,
        "#numbers": math.log1p(numbers),
        "#symbols": math.log1p(symbols),
        "#density": 10 * (numbers + symbols) / (len(text) + 10),
        "#commas": math.log1p(count(",") + count("，") + count("、") + count(";") + count("；")),
        "#questions": math.log1p(count("?") + count("？")),
        "#quotes": math.log1p(count('"') + count("“") + count("「")),
        "#lines": math.log1p(count("\n")),
        "#fence": float("```" in excerpt.ask),
        "#wide": float(excerpt.language != "en"),
        "#long": float(excerpt.ask_tokens > 600),
        "#tools": float(excerpt.tools),
        "#system": float(bool(excerpt.system)),
        "#later": float(excerpt.turns > 1),
    }


def _words(text: str) -> set[str]:
    words: set[str] = set()
    previous = ""
    for run in _WORD.findall(text):
        if run[0] < "\u4e00":
            words.add(run)
            if previous:
                words.add(f"{previous} {run}")
            previous = run
        else:
            previous = ""
            words.update(run)
            words.update(map(operator.add, run, run[1:]))
    return words
