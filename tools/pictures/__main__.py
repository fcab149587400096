"""`python -m tools.pictures`: record `make run` to its first answer, and take pictures of the page meanwhile."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tools.pictures.page import QUESTION, take
from tools.pictures.terminal import Terminal, drawn

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = REPOSITORY / "docs" / "images"
_START_S = 300.0
_ANSWER_S = 60.0
_STOP_S = 90.0


def main() -> int:
    """Where the environment is not made yet, `make run` makes it, and the recording is as long."""
    IMAGES.mkdir(exist_ok=True)
    port = os.environ.get("PORT", "8000")
    url = f"http://127.0.0.1:{port}"
    run = Terminal("one terminal", 12, {}, REPOSITORY)
    ask = Terminal("another one", 5, {}, REPOSITORY)
    begin = time.monotonic()
    run.type("make run" if port == "8000" else f"make run PORT={port}")
    run.wait_for("Switchyard is ready", _START_S)
    body = f'{{"messages": [{{"role": "user", "content": "{QUESTION}"}}], "temperature": 0}}'
    json = "-H 'content-type: application/json'"
    ask.type(f'curl -s {url}/v1/chat/completions {json} -d \'{body}\' | grep -o \'"content":"[^"]*"\'')
    ask.wait_for('"content":"The capital of France is Paris."', _ANSWER_S)
    end = time.monotonic() + 0.2
    time.sleep(0.3)
    (IMAGES / "run.svg").write_text(drawn([run, ask], begin, end))
    try:
        take(url, IMAGES)
    finally:
        run.interrupt()
        run.wait_for("Stopped.", _STOP_S)
        ask.close()
        run.close()
    for file in sorted(IMAGES.iterdir()):
        print(f"{file.relative_to(REPOSITORY)}: {file.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
