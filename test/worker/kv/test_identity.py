"""KV is sent and found only where it means the same: whatever changes keys and values changes their identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightserve.common.basemodel.rotary import rotary_table
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.messages.worker_calls import NO_STORE, KvFlush, KvLookup
from lightserve.model_files.config.model_config import ROPE_TYPES, RopeConfig
from lightserve.model_files.source import resolve
from lightserve.worker.kv.identity import exchanged_identity, rank_identity, rank_of
from lightserve.worker.worker import ModelWorker

ORIGINAL_LEN = 64
DIM = 16
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 2 * DIM,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": ORIGINAL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * (DIM // 2), "long_factor": [4.0] * (DIM // 2)},
}
LONG = {"max_req_total_len": 2 * ORIGINAL_LEN}


def make(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> ModelWorker:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PHI3 | (changes or {})))
    defaults = {"device": "cpu", "data_type": "float32", "load_format": "dummy", "max_total_token_num": 1000}
    config = WorkerConfig(model_dir=str(folder), running_max_req_size=2, **defaults | LONG | options)  # type: ignore[arg-type]
    worker = ModelWorker(config, resolve(str(folder), needs_weights=False), Parallel())
    worker.add_cpu_offload(config, 1)
    return worker


@pytest.mark.parametrize(
    ("options", "changes", "is_same"),
    [
        ({"max_total_token_num": 500}, {}, True),
        ({"max_req_total_len": ORIGINAL_LEN + 1}, {}, True),
        ({}, {"transformers_version": "9"}, True),
        ({"max_req_total_len": ORIGINAL_LEN}, {}, False),
        ({"data_type": "bfloat16"}, {}, False),
        ({"kv_dtype": "int8"}, {}, False),
        ({"deterministic": True}, {}, False),
        ({"quantization": "int8"}, {}, False),
        ({"packed_input_bits": 8}, {}, False),
        ({}, {"rope_theta": 20000.0}, False),
        ({}, {"rope_scaling": PHI3["rope_scaling"] | {"attention_factor": 2.0}}, False),  # type: ignore[operator]
        ({}, {"num_key_value_heads": 1}, False),
    ],
)
def test_another_computation_has_another_identity(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], is_same: bool
) -> None:
    first = make(tmp_path / "first").kv_identity

    other = make(tmp_path / "other", changes, **options).kv_identity

    assert (other == first) == is_same
    assert (rank_identity(other, 0) == rank_identity(first, 0)) == is_same
    assert rank_identity(first, 1) != rank_identity(first, 0)


def test_blocks_of_other_angles_are_not_found_in_a_lower_tier(tmp_path: Path) -> None:
    """A server is started again with another --max_req_total_len on the same folder."""
    disk: dict[str, Any] = {"kv_ram_gb": 0.01, "kv_disk_gb": 0.1, "kv_disk_dir": str(tmp_path / "kv")}
    key = b"k" * 32
    short, again, long = (
        make(tmp_path / "model", **disk, max_req_total_len=length).storage_tiers
        for length in (ORIGINAL_LEN, ORIGINAL_LEN, 2 * ORIGINAL_LEN)
    )
    assert short is not None
    assert again is not None
    assert long is not None

    short.flush(KvFlush(0, [key], [0]))

    assert again.lookup(KvLookup([key])) == [0]
    assert long.lookup(KvLookup([key])) == [NO_STORE]


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_the_factors_are_all_that_angles_have_from_the_longest_request(rope_type: str) -> None:
    """A rope type for which this does not hold must change KvIdentity."""
    rope = RopeConfig(
        rope_type,
        factor=4.0,
        original_max_position=ORIGINAL_LEN,
        trained_len=ORIGINAL_LEN,
        short_factor=(1.0,) * (DIM // 2),
        long_factor=(4.0,) * (DIM // 2),
    )
    tables = {max_len: rotary_table(rope, DIM, max_len) for max_len in (ORIGINAL_LEN, ORIGINAL_LEN + 1, 256)}

    for max_len, table in tables.items():
        for other_len, other in tables.items():
            common = min(max_len, other_len)
            are_equal = all(torch.equal(a[:common], b[:common]) for a, b in zip(table, other, strict=True))
            assert are_equal == (rope.factors(max_len) == rope.factors(other_len))


@pytest.mark.parametrize(("options", "is_divisible"), [({}, True), ({"deterministic": True}, False)])
def test_kv_goes_to_other_numbers_of_ranks_unless_their_sums_must_be_the_same(
    tmp_path: Path, options: dict[str, Any], is_divisible: bool
) -> None:
    worker = make(tmp_path / "model", **options)

    exchanged = exchanged_identity(worker.kv_identity, worker.model, 0)

    assert exchanged.is_divisible == is_divisible
    first, second = (rank_of(exchanged, worker.model, rank).identity for rank in range(2))
    assert (first == second) == is_divisible
