"""The one logger set-up: what our processes say, on stderr, where Ray collects it."""

from __future__ import annotations

import logging
import sys
import traceback

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: str) -> None:
    """Let loggers below `serve_app` speak from this level on; safe to call again."""
    logger = logging.getLogger("serve_app")
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)


def fault(logger: logging.Logger, error: Exception) -> None:
    """Log where something broke that must not. Not the error's own words: they may quote a request."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a fault of the router's own: %s\n%s", type(error).__name__, where)
