"""The benchmark of the router's and the worker's Python runs to its end, with few and short requests."""

from __future__ import annotations

import sys

import pytest

from benchmark.engine import host_overhead


def test_every_table_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["host_overhead", "--running", "3", "--prefix", "300", "--steps", "6"])

    host_overhead.main()

    printed = capsys.readouterr().out
    for expected in ("plan+report", "admission of one request", "close", "blocked", "waiting prompts"):
        assert expected in printed
