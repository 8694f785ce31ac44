"""Ranks that compute different requests and share the experts sample the tokens of one rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from lightserve.common.parallel import Parallel, ParallelSizes, connect_ranks
from lightserve.config import WorkerConfig
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.worker import ModelWorker
from test.ranks import run_ranks

SLOTS = 200
SAMPLING = SamplingParams(temperature=0.0)
Tokens = list[tuple[int, int]]  # request, token

# Tokens that each group computes of its request in each round. The groups have different numbers of tokens, prompts
# beside decodes, and rounds without any.
ROUNDS = ((9, 3), (1, 1), (0, 4), (0, 1), (1, 0), (1, 0), (0, 0), (7, 1), (1, 0))
PROMPTS = ([5, 17, 3, 9, 40, 11, 2, 77, 8], [19, 61, 30])


def steps_of(group: int) -> list[Step]:
    """A request begins with every chunk, and the one before it ends."""
    steps, slot, req_id = [], 0, 10 * group
    for counts in ROUNDS:
        count, new, free = counts[group], [], []
        if count > 1:
            free, req_id = [req_id], req_id + 1
            prompt = [req_id, *PROMPTS[group], *PROMPTS[group]][:count]
            new = [NewReq(req_id, prompt, SAMPLING, seed=0)]
        rows = [StepRow(req_id, list(range(slot, slot + count)))] if count else []
        steps.append(Step(rows, new, free))
        slot += count
    return steps


def run(folder: str, parallel: Parallel, steps: Sequence[Step]) -> Tokens:
    config = WorkerConfig(
        model_dir=folder,
        device="cpu",
        data_type="float32",
        max_total_token_num=SLOTS,
        max_req_total_len=60,
        running_max_req_size=8,
    )
    worker = ModelWorker(config, resolve(folder), parallel)
    worker.warm_up()
    return [(out.req_id, out.token.id) for step in steps for out in worker.run(step).tokens]


def _run_rank(rank: int, sizes: ParallelSizes, folder: str) -> None:
    torch.set_num_threads(1)
    parallel = connect_ranks(rank, sizes, f"file://{folder}/store", "gloo")
    rounds = zip(*(steps_of(group) for group in range(sizes.dp)), strict=True)
    tokens = run(folder, parallel, [Step([], groups=list(steps)) for steps in rounds])
    Path(folder, f"{rank}.json").write_text(json.dumps(tokens))
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_moe", ParallelSizes(dp=2, ep=2)),
        ("qwen2_moe", ParallelSizes(tp=2, dp=2, ep=4)),  # with a gated shared expert
        ("deepseek_v3", ParallelSizes(dp=2, ep=2)),  # with shared experts and a dense layer
    ],
)
def test_groups_with_different_steps_sample_what_one_rank_samples(
    tmp_path: Path, name: str, sizes: ParallelSizes
) -> None:
    from test.models.architectures.case import build  # transformers begins here
    from test.models.architectures.cases import CASES

    tiny = build(CASES[name])
    (tmp_path / "config.json").write_text(json.dumps(tiny.config_json))
    save_file(tiny.tensors, tmp_path / "model.safetensors")
    alone = [run(str(tmp_path), Parallel(), steps_of(group)) for group in range(sizes.dp)]

    run_ranks(_run_rank, sizes.world, sizes, str(tmp_path))

    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(sizes.world)]
    assert [len(tokens) for tokens in alone] == [6, 5]
    assert ranks == [[list(pair) for pair in alone[rank // sizes.tp]] for rank in range(sizes.world)]
