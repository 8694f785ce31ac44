from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmark.engine import static
from benchmark.engine.static import StaticBench, decode_work, prefill_work
from lightserve.bench.ceilings import Ceilings
from lightserve.bench.model_cost import ModelCost, Work
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.errors import ServerError
from lightserve.model_files.source import resolve
from lightserve.worker.worker import ModelWorker

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


HYBRID = TINY | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "partial_rotary_factor": 0.25,
}


@pytest.fixture
def bench(folder: Path) -> StaticBench:
    config = WorkerConfig(
        model_dir=str(folder), load_format="dummy", device="cpu", max_total_token_num=400, running_max_req_size=4
    )
    return StaticBench(ModelWorker(config, resolve(str(folder), needs_weights=False), Parallel()), batch_max_tokens=16)


def test_a_load_is_a_batch_of_tokens_behind_cached_ones() -> None:
    assert decode_work("8x1150") == Work(batch=8, new=1, cached=1150)
    assert prefill_work("128") == Work(batch=1, new=128, cached=0)
    assert prefill_work("4x512+8000") == Work(batch=4, new=512, cached=8000)
    with pytest.raises(argparse.ArgumentTypeError, match="8y9"):
        prefill_work("8y9")


def test_a_prompt_goes_in_steps_that_are_full_and_ends_with_a_token_each(bench: StaticBench) -> None:
    steps = list(bench.prefill_steps(Work(batch=3, new=10, cached=5)))

    sizes = [[len(row.slots) for row in step.rows] for step in steps]
    assert sizes == [[10, 6], [4, 10], []]
    slots = [slot for step in steps for row in step.rows for slot in row.slots]
    cached = [slot for new in steps[0].new for slot in new.cached_slots]
    assert sorted(slots + cached) == list(range(45))
    tokens = [out.req_id for step in steps for out in bench.worker.run(step).tokens]
    assert sorted(tokens) == sorted(new.req_id for new in steps[0].new)


def test_every_decode_step_gives_every_request_a_token(bench: StaticBench) -> None:
    steps = list(bench.decode_steps(Work(batch=4, new=1, cached=20), count=3))

    tokens = [len(bench.worker.run(step).tokens) for step in steps]

    assert tokens == [4, 4, 4, 0]
    assert bench.worker.model.req_manager.num_free == 4


def test_what_does_not_fit_is_said(bench: StaticBench) -> None:
    assert "running_max_req_size=4" in str(bench.why_not(Work(5, 1, 10)))
    assert "max_req_total_len=256" in str(bench.why_not(Work(1, 1, 250), steps=6))
    assert "400 tokens" in str(bench.why_not(Work(4, 1, 100)))
    assert bench.why_not(Work(4, 1, 90), steps=9) is None


def test_the_floor_counts_what_must_be_read_and_multiplied(bench: StaticBench) -> None:
    layer = (64 + 2 * 32) * 64 + 64 * 64 + 3 * 96 * 64
    head = 131 * 64

    cost = bench.cost

    assert cost == ModelCost(
        weight_bytes=4 * (2 * (layer + 2 * 64) + head),
        layer_params=2 * layer,
        head_params=head,
        kv_token_bytes=2 * 4 * 16 * 4,
        pair_flops=4 * 2 * 4 * 16,
    )
    memory_bound = Ceilings(bytes_per_s=1.0, flops_per_s=1e30)
    assert cost.floor_s(Work(2, 1, 9), memory_bound) == cost.weight_bytes + 20 * cost.kv_token_bytes
    compute_bound = Ceilings(bytes_per_s=1e30, flops_per_s=1.0)
    pairs = 2 * (10 + 11 + 12)
    assert cost.floor_s(Work(2, 3, 9), compute_bound) == (
        2 * (6 * cost.layer_params + 2 * head) + pairs * cost.pair_flops
    )


def test_the_tables_have_a_row_for_every_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--load_format dummy --device cpu --max_total_token_num 400 --steps 3 --repeats 1"
    static.main(["--model_dir", str(folder), *options.split(), "--decode", "2x9", "9x99", "--prefill", "3+4"])

    first, *_ = lines = capsys.readouterr().out.splitlines()
    assert first.startswith("llama in float32 on cpu; copy ")
    assert [line.split()[0] for line in lines[1:]] == ["decode:", "2x9", "9x99", "prefill:", "1x3+4"]


def test_a_profile_needs_a_gpu(folder: Path) -> None:
    with pytest.raises(ServerError, match="GPU"):
        static.main(["--model_dir", str(folder), "--load_format", "dummy", "--device", "cpu", "--profile"])


def test_a_model_with_recurrent_states_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    options = "--load_format dummy --device cpu --max_total_token_num 400 --steps 3 --repeats 1"

    static.main(["--model_dir", str(tmp_path), *options.split(), "--decode", "2x9", "--prefill", "3+4"])

    lines = capsys.readouterr().out.splitlines()
    times = {name: figure for name, figure, *_ in map(str.split, lines)}
    assert float(times["2x9"]) > 0
    assert float(times["1x3+4"]) > 0
