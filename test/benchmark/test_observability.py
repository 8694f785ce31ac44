"""The benchmark of timelines, traces and profiles."""

from __future__ import annotations

import pytest

from benchmark.serving import observability


def test_the_table_has_a_time_for_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observability, "CALLS", 10)
    monkeypatch.setattr(observability, "RUNS", 2)

    observability.main()

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 4
    assert all(line.endswith(" us") for line in lines)
