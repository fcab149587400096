"""The one logger set-up: what our processes say, on stderr, where Ray collects it."""

from __future__ import annotations

import contextvars
import logging
import sys
import traceback
from typing import Literal

import orjson

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
Style = Literal["text", "json"]

# The request that a task works on: its id, and that of its trace, if there is one.
_about: contextvars.ContextVar[tuple[str, str | None]] = contextvars.ContextVar("about", default=("", None))


def configure(level: str, style: Style = "text") -> None:
    """Let loggers below `serve_app` speak from this level on; safe to call again."""
    logger = logging.getLogger("serve_app")
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.handlers[0].setFormatter(JsonLines() if style == "json" else TextLines(FORMAT))


def about(request_id: str, trace_id: str | None) -> None:
    """What this task logs from now on is about this request."""
    _about.set((request_id, trace_id))


class TextLines(logging.Formatter):
    """Lines for people; about a request, they end with its ids."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        request_id, trace_id = _about.get()
        line = super().formatMessage(record)
        if request_id:
            line += f" request={request_id}"
        return f"{line} trace={trace_id}" if trace_id else line


class JsonLines(logging.Formatter):
    """One JSON object a line, for what collects logs."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        request_id, trace_id = _about.get()
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id:
            line["request"] = request_id
        if trace_id:
            line["trace"] = trace_id
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def fault(logger: logging.Logger, error: Exception) -> None:
    """Log where something broke that must not. Not the error's own words: they may quote a request."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a fault of the router's own: %s\n%s", type(error).__name__, where)
