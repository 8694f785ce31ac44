"""Ranks that have whole experts each give the logits of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightserve.common import cpu_kernel, ops  # noqa: F401  registers its backend
from lightserve.common.parallel import ParallelSizes
from test.models.test_pipeline import run_rank, save_models
from test.ranks import run_ranks

# experts alone, beside shared ones with a gate, beside dense layers, in groups with a bias, with biases and a clamp,
# between latent projections
KINDS = ["mixtral", "qwen2_moe", "qwen3_moe-dense", "deepseek_v3", "gpt_oss", "nemotron_h-latent"]
TOLERANCE = 1e-5  # relative to the largest logit: ranks add up in another order


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    ops.use_backend("cpu")
    yield
    ops.use_backend(ops.REFERENCE)


@pytest.mark.tp
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [ParallelSizes(tp=2, ep=2), ParallelSizes(tp=2, pp=2, ep=2)], ids=["ep", "ep-pp"])
def test_ranks_with_experts_of_their_own_give_the_logits_of_one_rank(sizes: ParallelSizes, tmp_path: Path) -> None:
    names = KINDS if sizes.pp == 1 else KINDS[:2]
    expected = save_models(tmp_path, names)

    run_ranks(run_rank, sizes.world, sizes, str(tmp_path))

    for name, logits in expected.items():
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}.model.{rank}", weights_only=True)
            assert (found - logits).abs().max() <= TOLERANCE * logits.abs().max(), name
