"""Records what programs write to a terminal, and draws it as an SVG that moves."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pyte

COLUMNS = 100
_KEY_S = 0.03
_READ = 65536
# A spinner turns oftener than anybody needs to see.
_LEAST_S = 0.24
_LINE_PX, _CHAR_PX, _MARGIN_PX = 18, 7.8, 14


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What the screen showed from this moment on, `at` in seconds of the monotonic clock."""

    at: float
    lines: tuple[str, ...]


class Terminal:
    """A shell on a terminal of its own, `rows` high. `title` is drawn above it."""

    def __init__(self, title: str, rows: int, environment: dict[str, str], directory: Path) -> None:
        self.title, self.rows = title, rows
        self.frames: list[Frame] = []
        self._screen = pyte.Screen(COLUMNS, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
        given = {**os.environ, **environment, "PS1": "$ ", "TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=directory,
            env=given,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_for("$ ", 10)

    def type(self, line: str) -> None:
        """Type a line as a person does, and press Enter."""
        for key in line:
            os.write(self._end, key.encode())
            time.sleep(_KEY_S)
        os.write(self._end, b"\n")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._end, b"\x03")

    def text(self) -> str:
        """What is on the screen, long lines as one."""
        with self._lock:
            return "".join(self._screen.display)

    def wait_for(self, words: str, deadline_s: float) -> None:
        """Wait until these words are on the screen. Raises `TimeoutError` with what is there instead."""
        deadline = time.monotonic() + deadline_s
        while words not in self.text():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{words!r} did not come; the screen says:\n" + "\n".join(self._screen.display))
            time.sleep(0.05)

    def close(self) -> None:
        """End the shell."""
        os.write(self._end, b"exit\n")
        self.process.wait(timeout=60)
        os.close(self._end)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._end, _READ)
            except OSError:
                return
            if not data:
                return
            with self._lock:
                self._stream.feed(data)
                frame = Frame(time.monotonic(), tuple(line.rstrip() for line in self._screen.display))
            self.frames.append(frame)


def thinned(frames: Sequence[Frame], until: float) -> list[Frame]:
    """Those that a person would see: of many in a moment the last one."""
    seen = [frame for frame in frames if frame.at <= until]
    return [
        frame
        for place, frame in enumerate(seen)
        if place + 1 == len(seen) or seen[place + 1].at - frame.at >= _LEAST_S or place % 12 == 0
    ]


def drawn(terminals: Sequence[Terminal], begin: float, end: float, pause_s: float = 3.0) -> str:
    """The terminals, one below the other, as one SVG that runs from `begin` to `end`, rests, and begins again."""
    length = end - begin + pause_s
    width = round(COLUMNS * _CHAR_PX + 2 * _MARGIN_PX)
    y, body, styles = 0.0, [], []
    moments: dict[tuple[float, float], str] = {}

    def shown(first: float, last: float) -> str:
        """The class of what is there for this part of the time."""
        part = (round(100 * (first - begin) / length, 2), round(100 * (last - begin) / length, 2))
        if part not in moments:
            name = moments[part] = f"m{len(moments)}"
            start = "" if part[0] <= 0 else f"0%{{opacity:0}}{part[0]}%{{opacity:1}}"
            stop = "" if part[1] >= 100 else f"{part[1]}%{{opacity:0}}100%{{opacity:0}}"
            first_on = "0%{opacity:1}" if part[0] <= 0 else ""
            styles.append(
                f"@keyframes {name}{{{first_on}{start}{stop}}}"
                f".{name}{{animation:{name} {length:.2f}s step-end infinite}}"
            )
        return moments[part]

    for terminal in terminals:
        frames = [*thinned(terminal.frames, end)]
        height = (terminal.rows + 1.6) * _LINE_PX + _MARGIN_PX
        body.append(f'<rect class="pane" x="1" y="{y + 1:.0f}" width="{width - 2}" height="{height - 4:.0f}" rx="8"/>')
        body.append(f'<text class="title" x="{_MARGIN_PX}" y="{y + 20:.0f}">{escape(terminal.title)}</text>')
        for row in range(terminal.rows):
            at = y + (row + 2.4) * _LINE_PX
            for text, first, last in _spans(frames, row, begin, begin + length):
                body.append(
                    f'<text class="{shown(first, last)}" x="{_MARGIN_PX}" y="{at:.0f}"'
                    f' textLength="{len(text) * _CHAR_PX:.1f}">{escape(text)}</text>'
                )
        y += height
    style = (
        "text{font:13px ui-monospace,DejaVu Sans Mono,Menlo,Consolas,monospace;fill:#e8eaef;white-space:pre}"
        ".pane{fill:#14161a;stroke:#373d49}.title{fill:#a5adba}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y:.0f}" width="{width}" height="{y:.0f}">'
        f"<style>{style}{''.join(styles)}</style>{''.join(body)}</svg>\n"
    )


def _spans(frames: Sequence[Frame], row: int, begin: float, end: float) -> list[tuple[str, float, float]]:
    """What one row said, and from when to when."""
    spans: list[tuple[str, float, float]] = []
    for place, frame in enumerate(frames):
        text = frame.lines[row]
        last = frames[place + 1].at if place + 1 < len(frames) else end
        first = max(frame.at, begin)
        if last <= begin or last <= first:
            continue
        if spans and spans[-1][0] == text and spans[-1][2] == frame.at:
            spans[-1] = (text, spans[-1][1], last)
        else:
            spans.append((text, first, last))
    return [span for span in spans if span[0]]
