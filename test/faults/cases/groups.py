"""Ranks of data-parallel attention that die or hang. The server has a tiny model with experts in two groups."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from benchmark.models import TINY, save_model
from test.faults.cases.stages import rank_case

EXPERTS = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GROUPS = ("--tp", "2", "--ep", "2", "--enable_dp_attention")


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write a model below ``base``; returns the flags of a server with it."""
    save_model(base, None, TINY)
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | EXPERTS))
    return ("--model_dir", str(base), "--load_format", "dummy", "--deterministic", "--device", "cpu", *GROUPS)


CASES = [
    rank_case("kill -9 a rank of a group", "ls-worker-1", signal.SIGKILL),
    rank_case("a rank of a group is stopped", "ls-worker-1", signal.SIGSTOP),
]
