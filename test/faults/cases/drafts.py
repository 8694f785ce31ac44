"""A rank that dies or hangs while steps compute drafts, and a full pool. The server has two ranks.

All cases run with each drafter: without a model, with draft heads, with a draft model, and in a pipeline whose first
stage has recurrent layers.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.models import TINY, save_model
from test.faults.case import Case
from test.faults.cases import states
from test.faults.cases.scheduling import PREEMPTED_THEN_COMPLETED, SMALL_POOL, fill_the_pool
from test.faults.cases.stages import rank_case


def _suffix(base: Path) -> dict[str, Any]:
    return {"method": "suffix", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def _eagle3(base: Path) -> dict[str, Any]:
    fields = {"num_hidden_layers": 1, "draft_vocab_size": 500, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    return {"method": "eagle3", "model": _head(base, "LlamaForCausalLMEagle3", fields)}


def _dflash(base: Path) -> dict[str, Any]:
    of_dflash = {"mask_token_id": 1, "target_layer_ids": [0]}
    fields = {"num_hidden_layers": 2, "block_size": 4, "dflash_config": of_dflash}
    return {"method": "dflash", "model": _head(base, "DFlashDraftModel", fields)}


def _head(base: Path, architecture: str, fields: dict[str, Any]) -> str:
    """Its layers are those of the model but for ``fields``."""
    head = base / "head"
    head.mkdir()
    config = json.loads((base / "config.json").read_text()) | {"architectures": [architecture], **fields}
    (head / "config.json").write_text(json.dumps(config))
    return str(head)


def _draft_model(base: Path) -> dict[str, Any]:
    smaller = base / "smaller"
    smaller.mkdir()
    save_model(smaller, None, {**TINY, "intermediate_size": 64})
    return {"method": "draft_model", "model": str(smaller)}


IN_STAGES = "suffix, recurrent layers in stages"
DRAFTERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "suffix": _suffix,
    IN_STAGES: _suffix,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "draft_model": _draft_model,
}


def worker_flags(base: Path, drafter: str) -> tuple[str, ...]:
    """Write a model below ``base``, and what drafts for it; returns the flags of a server with both."""
    model = (*states.worker_flags(base), "--pp", "2") if drafter == IN_STAGES else _two_ranks(base)
    config = DRAFTERS[drafter](base) | {"num_speculative_tokens": 3}
    return (*model, "--speculative_config", json.dumps(config))


def _two_ranks(base: Path) -> tuple[str, ...]:
    save_model(base, None, TINY)
    return ("--model_dir", str(base), "--load_format", "dummy", "--deterministic", "--device", "cpu", "--tp", "2")


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
