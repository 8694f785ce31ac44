"""Loggers with one format: text for people, or one JSON object per line for programs.

LIGHTSERVE_LOG_LEVEL and LIGHTSERVE_LOG_FORMAT are settings of every process. ``--log_format`` sets the second one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from lightserve.utils.terminal import CLEAR_LINE, Style

FORMAT_VARIABLE = "LIGHTSERVE_LOG_FORMAT"
LogFormat = Literal["text", "json"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(origin)s%(message)s"
_COLORS = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


def init_logger(name: str) -> logging.Logger:
    """The logger ``name`` at the level of ``LIGHTSERVE_LOG_LEVEL`` (INFO if unset). It writes to stderr, once."""
    logger = logging.getLogger(name)
    logger.setLevel(_level())
    root = logging.getLogger("lightserve")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_formatter())
        root.addHandler(handler)
        root.propagate = False
        _log_libraries()
    return logger


def set_log_format(log_format: LogFormat) -> None:
    """For this process and for those that it starts."""
    os.environ[FORMAT_VARIABLE] = log_format
    for handler in logging.getLogger("lightserve").handlers:
        handler.setFormatter(_formatter())
    _log_libraries()


def name_engine(engine: int) -> None:
    """Every line of this process says which of several engines it is from: as text, or as the field ``engine``."""

    def add_engine(record: logging.LogRecord) -> bool:
        record.origin, record.engine = f"engine {engine}: ", engine
        return True

    for handler in logging.getLogger("lightserve").handlers:
        handler.addFilter(add_engine)


def _log_libraries() -> None:
    """With JSON, the warnings of libraries are objects too. As text they have no prefix."""
    [handler, *_] = logging.getLogger("lightserve").handlers
    if is_json() and handler not in logging.getLogger().handlers:
        logging.getLogger().addHandler(handler)


def is_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE) == "json"


def fields(**values: Any) -> dict[str, Any]:
    """``extra`` of a log call: values that JSON lines have as fields of their own. Text lines leave them out."""
    return {"fields": values}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if hasattr(record, "engine"):
            line["engine"] = record.engine
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """On a terminal a line replaces a progress bar that stands there, and has the colour of its level."""

    def __init__(self, style: Style) -> None:
        super().__init__(_FORMAT, defaults={"origin": ""})
        self._terminal = style

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno in _COLORS and self._terminal.has_colors:
            level = self._terminal.paint(_COLORS[record.levelno], record.levelname)
            text = text.replace(record.levelname, level, 1)
        return CLEAR_LINE + text if self._terminal.is_terminal else text


def _formatter() -> logging.Formatter:
    return JsonFormatter() if is_json() else TextFormatter(Style(sys.stderr))


def _level() -> int:
    """An unknown level counts as INFO: a typo must not keep the server from starting."""
    name = os.environ.get("LIGHTSERVE_LOG_LEVEL", "INFO").upper()
    return logging.getLevelNamesMapping().get(name, logging.INFO)
