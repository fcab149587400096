"""Kubernetes' quantities (`500m`, `112Gi`) as numbers."""

from __future__ import annotations

import re
from typing import Any

_FORM = re.compile(r"([+-]?[0-9.]+)(Ki|Mi|Gi|Ti|Pi|Ei|m|k|M|G|T|P|E|)")
_FACTORS = {
    "": 1.0,
    "m": 1e-3,
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}


def number(quantity: Any) -> float | None:
    """The number that a quantity stands for; None for what is none."""
    if isinstance(quantity, bool) or not isinstance(quantity, str | int | float):
        return None
    found = _FORM.fullmatch(str(quantity))
    try:
        return float(found[1]) * _FACTORS[found[2]] if found else None
    except ValueError:
        return None
