"""What the benchmark says about a profile."""

from __future__ import annotations

from typing import Any

from benchmark.serving.server_profile import report


def span(name: str, ts: float, dur: float, pid: int, category: str = "") -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": 1, "cat": category}


def test_kernels_outside_of_steps_are_noticed() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "router"}},
        span("prefill step", 0.0, 1000.0, 1),
        span("decode step", 5000.0, 1000.0, 1),
        *(span("kernel", at, 10.0, 0, "kernel") for at in (100.0, 900.0, 5100.0, 3000.0)),
    ]

    text = report(events)

    assert "router: 2 spans" in text
    assert "2 steps, 4 kernels" in text
    assert "75.00% of the GPU spans lie inside a step" in text
