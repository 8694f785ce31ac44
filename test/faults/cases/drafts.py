"""A rank that dies or hangs while steps compute drafts, and a full pool. The server has two ranks."""

from __future__ import annotations

import signal
from pathlib import Path

from benchmark.models import TINY, save_model
from test.faults.case import Case
from test.faults.cases.scheduling import PREEMPTED_THEN_COMPLETED, SMALL_POOL, fill_the_pool
from test.faults.cases.stages import rank_case

CONFIG = '{"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write a model below ``base``; returns the flags of a server with it."""
    save_model(base, None, TINY)
    model = ("--model_dir", str(base), "--load_format", "dummy", "--deterministic", "--device", "cpu")
    return (*model, "--tp", "2", "--speculative_config", CONFIG)


CASES = [
    rank_case("kill -9 a rank with drafts", "ls-worker-1", signal.SIGKILL),
    rank_case("a rank with drafts is stopped", "ls-worker", signal.SIGSTOP),
    Case(
        "answers of eight times the pool, with drafts",
        fill_the_pool,
        PREEMPTED_THEN_COMPLETED,
        flags=SMALL_POOL,
        within_s=60.0,
        is_long=True,
    ),
]
