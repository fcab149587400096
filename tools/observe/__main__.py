"""`python -m tools.observe` writes what is made of the tables; `--check` only says whether it is as they have it."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.observe.written import files

REPOSITORY = Path(__file__).resolve().parents[2]


def stale() -> list[str]:
    """The files that are not as the tables have them."""
    return [
        name
        for name, content in files().items()
        if not (REPOSITORY / name).exists() or (REPOSITORY / name).read_text() != content
    ]


def main() -> None:
    """See the module."""
    found = stale()
    if "--check" in sys.argv[1:]:
        if found:
            raise SystemExit(f"not as the tables have them: {', '.join(found)}; run python -m tools.observe")
        return
    for name in found:
        path = REPOSITORY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files()[name])
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
