"""What memory a GPU has, by the names that Ray gives accelerators. Pure data."""

from __future__ import annotations

import re

GB = 1_000_000_000
_MIB = 1024**2

# MiB as `nvidia-smi` shows them; a driver or ECC keeps some of the size on the box. Where one name stands for several
# sizes (A100, V100) there is no entry: a guess would be wrong for half of the cards.
_MIB_OF = {
    "T4": 15360,
    "L4": 23034,
    "A10G": 23028,
    "RTX-3090": 24576,
    "RTX-4090": 24564,
    "RTX-5090": 32607,
    "A100-40G": 40960,
    "L40S": 46068,
    "A100-80G": 81920,
    "H100": 81559,
    "H20": 97871,
    "RTX-PRO-6000": 97887,
    "H200": 143771,
    "B200": 183359,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|G|GIB)?", re.IGNORECASE)
_MANY_SIZES = {"A100": "A100-40G or A100-80G", "V100": "16GB or 32GB"}


def accelerator_bytes(name: str) -> int | None:
    """Memory of a GPU by its name, e.g. of `accelerator_type`; None where it is not known or not said by the name."""
    mib = _MIB_OF.get(name.strip().upper().replace(" ", "-").removeprefix("NVIDIA-"))
    return mib * _MIB if mib else None


def gpu_bytes(text: str) -> int:
    """Memory of what a person calls a GPU: a name, or a size such as 24GB.

    GB are decimal: no card that is sold as so many GB has less. Raises `ValueError`.
    """
    if (known := accelerator_bytes(text)) is not None:
        return known
    if sizes := _MANY_SIZES.get(text.strip().upper()):
        raise ValueError(f"{text} comes in several sizes; say {sizes}")
    if not (match := _SIZE.fullmatch(text.strip())):
        raise ValueError(f"{text} is neither a size such as 24GB nor one of {', '.join(_MIB_OF)}")
    size = float(match[1]) * (1024**3 if (match[2] or "").upper() == "GIB" else GB)
    if not GB <= size <= 10_000 * GB:
        raise ValueError(f"{text}: between 1 and 10000 GB, please")
    return int(size)
