"""Every architecture gives the logits of transformers over prompts of more than 150 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.common import (
    cpu_kernel,  # noqa: F401  registers its backend
    ops,
    triton_kernel,  # noqa: F401  registers its backend
)
from lightserve.common.basemodel import LogitRows
from lightserve.common.basemodel.hooks import recorded
from lightserve.common.parallel import ParallelSizes, RankGroup, connect_ranks
from test.models.architectures.case import MAX_LEN, Tiny, build, hf_logits
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.tiny import build_model
from test.ranks import run_ranks

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# relative to the largest logit
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}
MOST_ROWS = 0.97  # rounding changes the experts of a token that is between two of them
PROMPT = [(37 * i + i * i // 7) % 131 for i in range(170)]
OTHER = [(11 * i + 3) % 131 for i in range(40)]
PREFIX = 90  # tokens of PROMPT that a second request shares
ONE_RANK = RankGroup()
SPLIT_CASES = {name: case for name, case in CASES.items() if case.divides_among_ranks}


@pytest.fixture(params=["triton" if ON_GPU else "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    ops.use_backend(request.param)
    yield
    ops.use_backend(ops.REFERENCE)


def all_logits(tiny: Tiny, tp: RankGroup = ONE_RANK, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of PROMPT in chunks beside OTHER, of a request that shares a prefix, and of decode steps.

    Two of the steps are observed: a norm and the linear behind it are then not fused.
    """
    model = build_model(tiny.config_json, tiny.checkpoint(), tp, dtype, DEVICE, max_len=MAX_LEN)
    session = Session(model)
    first = session.step({0: PROMPT[:70]}, logit_rows=LogitRows.ALL)
    second = session.step({1: OTHER, 0: PROMPT[70:]}, logit_rows=LogitRows.ALL)
    session.share_prefix(0, 2, length=PREFIX)
    with recorded(model, "logits"):
        shared = session.step({2: OTHER}, logit_rows=LogitRows.ALL)
        decoded = [session.step({0: [5], 1: [6], 2: [7]})]
    decoded += [session.step({0: [6 + i], 1: [7 + i], 2: [8 + i]}) for i in range(2)]
    return [torch.cat([first, second[len(OTHER) :]]), second[: len(OTHER)], shared, *decoded]


def expected_logits(tiny: Tiny) -> list[Tensor]:
    grown = [[*ids, *range(5 + i, 8 + i)] for i, ids in enumerate([PROMPT, OTHER, PROMPT[:PREFIX] + OTHER])]
    logits = [hf_logits(tiny.hf, ids) for ids in grown]
    decoded = [torch.stack([one[-3 + i] for one in logits]) for i in range(3)]
    return [logits[0][:-3], logits[1][:-3], logits[2][PREFIX:-3], *decoded]


def assert_same(
    ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype = torch.float32, min_share: float = 1.0
) -> None:
    """``min_share``: of the rows that must be within the tolerance."""
    largest = max(one.abs().max() for one in theirs)
    errors = torch.cat([(our.float() - their).abs().amax(-1) for our, their in zip(ours, theirs, strict=True)])
    assert errors.isfinite().all()
    assert (errors <= TOLERANCE[dtype] * largest).float().mean() >= min_share


@pytest.mark.parametrize("name", CASES)
def test_chunks_cached_prefixes_and_decode_give_the_logits_of_transformers(name: str) -> None:
    tiny = build(CASES[name])

    assert_same(all_logits(tiny), expected_logits(tiny))


@pytest.mark.parametrize("dtype", [torch.bfloat16] if ON_GPU else [torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_stays_within_its_tolerance(name: str, dtype: torch.dtype) -> None:
    tiny = build(CASES[name], dtype)

    has_experts = "num_experts_per_tok" in tiny.config_json
    assert_same(all_logits(tiny, dtype=dtype), expected_logits(tiny), dtype, MOST_ROWS if has_experts else 1.0)


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    ops.use_backend("cpu")
    tp = connect_ranks(rank, ParallelSizes(tp=2), f"file://{folder}/store", "gloo").tp
    for name in SPLIT_CASES:
        tiny = Tiny(None, *torch.load(f"{folder}/{name}.pt", weights_only=True))
        torch.save(all_logits(tiny, tp), f"{folder}/{name}.{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="it needs two devices")
def test_two_ranks_give_the_logits_of_transformers(tmp_path: Path) -> None:
    """All architectures in one test, because the processes take longer to start than to compute."""
    expected = {}
    for name, case in SPLIT_CASES.items():
        tiny = build(case)
        expected[name] = expected_logits(tiny)
        torch.save((tiny.config_json, tiny.tensors), tmp_path / f"{name}.pt")

    run_ranks(_run_rank, 2, str(tmp_path))

    for name in SPLIT_CASES:
        for rank in range(2):
            assert_same(torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True), expected[name])
