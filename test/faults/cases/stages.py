"""Pipeline stages that die or hang. The server has a tiny model in two stages."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from benchmark.models import TINY, save_model
from test.faults.case import Case
from test.faults.cases.processes import send_signal
from test.faults.harness import STREAMING
from test.faults.reactions import STREAMS_CONTINUE

STEP_TIMEOUT = ("--step_timeout", "4")


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write a model below ``base``; returns the flags of a server with it."""
    save_model(base, None, {**TINY, "num_hidden_layers": 2})
    return ("--model_dir", str(base), "--load_format", "dummy", "--deterministic", "--device", "cpu", "--pp", "2")


def rank_case(name: str, worker: str, number: signal.Signals) -> Case:
    """A rank gets a signal. All ranks are replaced."""
    options: dict[str, Any] = {"flags": STEP_TIMEOUT, "restarts": 1, "is_long": True}
    return Case(f"{name}, streaming", send_signal(worker, number), STREAMS_CONTINUE, STREAMING, **options)


CASES = [
    rank_case("kill -9 the first stage", "ls-worker", signal.SIGKILL),
    rank_case("kill -9 the last stage", "ls-worker-1", signal.SIGKILL),
    rank_case("the first stage is stopped", "ls-worker", signal.SIGSTOP),
    rank_case("the last stage is stopped", "ls-worker-1", signal.SIGSTOP),
]
