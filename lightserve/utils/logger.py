"""Loggers of one format; the level is the only thing LightServe reads from the environment."""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def init_logger(name: str) -> logging.Logger:
    """The logger ``name`` at the level of ``LIGHTSERVE_LOG_LEVEL`` (INFO if unset), writing to stderr once."""
    logger = logging.getLogger(name)
    logger.setLevel(_level())
    root = logging.getLogger("lightserve")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)
        root.propagate = False
    return logger


def _level() -> int:
    """INFO too where the variable names no level: a typo must not keep a server from starting."""
    name = os.environ.get("LIGHTSERVE_LOG_LEVEL", "INFO").upper()
    return logging.getLevelNamesMapping().get(name, logging.INFO)
