"""Loggers with one format. Their level is the only setting that LightServe reads from the environment."""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def init_logger(name: str) -> logging.Logger:
    """The logger ``name`` at the level of ``LIGHTSERVE_LOG_LEVEL`` (INFO if unset). It writes to stderr, once."""
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
    """An unknown level counts as INFO: a typo must not keep the server from starting."""
    name = os.environ.get("LIGHTSERVE_LOG_LEVEL", "INFO").upper()
    return logging.getLevelNamesMapping().get(name, logging.INFO)
