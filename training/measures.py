"""Measures of a classifier."""

from __future__ import annotations

import numpy as np


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a positive scores above a negative, ties counted half."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    above = (positive[:, None] > negative).mean()
    return float(above + (positive[:, None] == negative).mean() / 2)
