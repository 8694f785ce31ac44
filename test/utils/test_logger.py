"""Lines of a process that serves one of several engines say which."""

from __future__ import annotations

import io
import json
import logging

import pytest

from lightserve.utils.logger import JsonFormatter, TextFormatter, name_engine
from lightserve.utils.terminal import Style


def line(monkeypatch: pytest.MonkeyPatch, formatter: logging.Formatter, engine: int | None) -> str:
    """What a process of this engine logs."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter)
    logger = logging.getLogger("lightserve")
    monkeypatch.setattr(logger, "handlers", [handler])
    if engine is not None:
        name_engine(engine)
    logger.warning("the queue is full")
    return written.getvalue()


def test_a_text_line_begins_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    formatter = TextFormatter(Style(io.StringIO()))

    assert "lightserve: the queue is full" in line(monkeypatch, formatter, None)
    assert "lightserve: engine 3: the queue is full" in line(monkeypatch, formatter, 3)


def test_a_json_line_has_its_engine_as_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "engine" not in json.loads(line(monkeypatch, JsonFormatter(), None))
    assert json.loads(line(monkeypatch, JsonFormatter(), 3))["engine"] == 3
