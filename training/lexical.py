"""Train the lexical score: `python -m training.lexical` writes serve_app/routing/lexicon.json."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
from sklearn.feature_extraction import DictVectorizer
from sklearn.linear_model import LogisticRegression

from serve_app.routing.lexical import features
from training.generated import generated_rows
from training.rows import ROOT, Row, fold_of, read_seeds

OUT = ROOT / "serve_app" / "routing" / "lexicon.json"
# A false alarm costs a user seconds, a miss an answer that is a little worse: precision first.
FALSE_ALARMS = 0.04
FOLDS = 5
STRENGTH = 1.5


def fit(rows: list[Row], *, size: bool, strength: float) -> tuple[DictVectorizer, LogisticRegression]:
    found = [features(row.excerpt) for row in rows]
    counts = Counter(name for named in found for name in named)
    vectorizer = DictVectorizer(sparse=False)  # liblinear does not take the sparse indices that it makes
    matrix = vectorizer.fit_transform(
        [{name: value for name, value in named.items() if counts[name] >= 3} for named in found]
    )
    labels = [row.large if size else row.think for row in rows]
    model = LogisticRegression(l1_ratio=1.0, C=strength, solver="liblinear", max_iter=2000, random_state=0)
    model.fit(matrix, [label == 1 for label in labels])
    return vectorizer, model


def out_of_fold(rows: list[Row], *, size: bool, strength: float, folds: int = FOLDS) -> np.ndarray:
    """Probabilities for each row by a model that saw none of its topic; rows of either label are not learned from."""
    scores = np.zeros(len(rows))
    for fold in range(folds):
        train = [row for row in rows if fold_of(row, folds) != fold and (row.large if size else row.think) != 0.5]
        test = [index for index, row in enumerate(rows) if fold_of(row, folds) == fold]
        vectorizer, model = fit(train, size=size, strength=strength)
        scores[test] = model.predict_proba(vectorizer.transform([features(rows[i].excerpt) for i in test]))[:, 1]
    return scores


def table(rows: list[Row], *, size: bool, strength: float) -> tuple[dict[str, float], float]:
    vectorizer, model = fit(rows, size=size, strength=strength)
    pairs = zip(vectorizer.get_feature_names_out(), model.coef_[0], strict=True)
    weights = {str(name): round(float(weight), 3) for name, weight in pairs if abs(weight) >= 0.01}
    return dict(sorted(weights.items())), round(float(model.intercept_[0]), 3)


def _one_weight_a_line(made: dict[str, object]) -> str:
    return json.dumps(made, ensure_ascii=False).replace('], "', '],\n"').replace('"weights": {', '"weights": {\n')


def main() -> None:
    random.seed(0)
    seeds = [*read_seeds(), *generated_rows()]
    think_rows = [row for row in seeds if row.think in (0, 1)]
    size_rows = [row for row in seeds if row.large in (0, 1)]
    scores = out_of_fold(think_rows, size=False, strength=STRENGTH)
    negatives = np.sort(scores[[row.think == 0 for row in think_rows]])
    think_at = float(negatives[int(len(negatives) * (1 - FALSE_ALARMS))])
    positives = scores[[row.think == 1 for row in think_rows]]
    print(f"topic-wise cross-validation: recall {np.mean(positives > think_at):.3f} at false alarms {FALSE_ALARMS}")
    sizes = out_of_fold(size_rows, size=True, strength=STRENGTH)
    large = np.array([row.large == 1 for row in size_rows])
    cuts = np.linspace(0.2, 0.8, 61)
    small_below = float(max(cuts, key=lambda cut: np.mean((sizes >= cut) == large)))
    print(f"size accuracy {np.mean((sizes >= small_below) == large):.3f} at {small_below:.2f}")
    think, think_bias = table(think_rows, size=False, strength=STRENGTH)
    large_weights, large_bias = table(size_rows, size=True, strength=STRENGTH)
    made = {
        "think_at": round(think_at, 3),
        "small_below": round(small_below, 3),
        "think_bias": think_bias,
        "large_bias": large_bias,
        "weights": {
            name: [think.get(name, 0), large_weights.get(name, 0)] for name in sorted({*think, *large_weights})
        },
    }
    Path(OUT).write_text(_one_weight_a_line(made) + "\n")
    print(f"{len(made['weights'])} weights in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
