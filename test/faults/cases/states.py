"""A worker that dies with the states of recurrent layers. The server has a tiny model with such layers."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from benchmark.models import TINY, save_model
from test.faults.cases.stages import rank_case

RECURRENT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write a model below ``base``; returns the flags of a server with it."""
    save_model(base, None, TINY)
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | RECURRENT))
    return ("--model_dir", str(base), "--load_format", "dummy", "--device", "cpu", "--max_state_rows", "32")


CASES = [rank_case("kill -9 a worker with recurrent states", "ls-worker", signal.SIGKILL)]
