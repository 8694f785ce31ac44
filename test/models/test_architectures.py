"""Every architecture gives the logits of transformers over prompts of more than 150 tokens.

Of half precision and of two ranks, prompts are shorter: what they may break shows in every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
from lightserve.models.registry import read_model_config
from lightserve.parity.compare import row_errors
from test.models.architectures import hybrid
from test.models.architectures.case import MAX_LEN, Tiny, build, hf_logits
from test.models.architectures.cases import CASES
from test.models.architectures.covering import SAMPLE, sampled
from test.models.session import Session
from test.models.tiny import build_model
from test.ranks import run_ranks

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# relative to the largest logit
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}
# rounding changes the experts of a token that is between two of them, and adds up in a state: transformers in bfloat16
# is as far from itself in float32
MOST_ROWS = 0.97


class Prompts(NamedTuple):
    first: list[int]
    chunk: int  # tokens of ``first`` in its first chunk
    prefix: int  # tokens of ``first`` in its first two chunks, which a second request shares
    other: list[int]


LONG = Prompts([(37 * i + i * i // 7) % 131 for i in range(170)], 70, 90, [(11 * i + 3) % 131 for i in range(40)])
PROMPT = LONG.first
# each longer than the context of 32 tokens behind which longrope uses other factors
SHORT = Prompts(PROMPT[:50], 20, 30, LONG.other)
DEADLINE_S = 600.0  # of two ranks with all architectures; 18 of them took 46 s on two cores with a load of 17
ONE_RANK = RankGroup()
SPLIT_CASES = [name for name, case in CASES.items() if case.divides_among_ranks]


@pytest.fixture(params=["triton" if ON_GPU else "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    ops.use_backend(request.param)
    yield
    ops.use_backend(ops.REFERENCE)


def all_logits(
    tiny: Tiny, prompts: Prompts, tp: RankGroup = ONE_RANK, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Of a prompt in chunks beside another, of a request that shares a prefix, and of decode steps.

    Two of the steps are observed: a norm and the linear behind it are then not fused.
    """
    model = build_model(tiny.config_json, tiny.checkpoint(), tp, dtype, DEVICE, max_len=MAX_LEN)
    session = Session(model)
    whole, chunk, prefix, other = prompts
    first = [session.step({0: ids}, logit_rows=LogitRows.ALL) for ids in (whole[:chunk], whole[chunk:prefix])]
    second = session.step({1: other, 0: whole[prefix:]}, logit_rows=LogitRows.ALL)
    session.share_prefix(0, 2, length=prefix)
    with recorded(model, "logits"):
        shared = session.step({2: other}, logit_rows=LogitRows.ALL)
        decoded = [session.step({0: [5], 1: [6], 2: [7]})]
    decoded += [session.step({0: [6 + i], 1: [7 + i], 2: [8 + i]}) for i in range(2)]
    return [torch.cat([*first, second[len(other) :]]), second[: len(other)], shared, *decoded]


def expected_logits(tiny: Tiny, prompts: Prompts) -> list[Tensor]:
    whole, _, prefix, other = prompts
    grown = [[*ids, *range(5 + i, 8 + i)] for i, ids in enumerate([whole, other, whole[:prefix] + other])]
    logits = [hf_logits(tiny.hf, ids) for ids in grown]
    decoded = [torch.stack([one[-3 + i] for one in logits]) for i in range(3)]
    return [logits[0][:-3], logits[1][:-3], logits[2][prefix:-3], *decoded]


def assert_same(
    ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype = torch.float32, min_share: float = 1.0
) -> None:
    """``min_share``: of the rows that must be within the tolerance."""
    largest = max(one.abs().max() for one in theirs)
    errors = torch.cat([row_errors(our, their) for our, their in zip(ours, theirs, strict=True)])
    assert errors.isfinite().all()
    assert (errors <= TOLERANCE[dtype] * largest).float().mean() >= min_share


@pytest.mark.parametrize("name", CASES)
def test_chunks_cached_prefixes_and_decode_give_the_logits_of_transformers(name: str) -> None:
    tiny = build(CASES[name])

    assert_same(all_logits(tiny, LONG), expected_logits(tiny, LONG))


@pytest.mark.parametrize("dtype", [torch.bfloat16] if ON_GPU else [torch.float16])
@pytest.mark.parametrize("name", CASES if ON_GPU else sampled([*CASES]))
def test_half_precision_stays_within_its_tolerance(name: str, dtype: torch.dtype) -> None:
    is_hybrid = name in hybrid.CASES
    tiny = build(hybrid.with_all_experts(CASES[name]) if is_hybrid else CASES[name], dtype)

    config = read_model_config(tiny.config_json, None)
    may_differ = config.experts_name is not None or is_hybrid
    ours, theirs = all_logits(tiny, SHORT, dtype=dtype), expected_logits(tiny, SHORT)
    assert_same(ours, theirs, dtype, MOST_ROWS if may_differ else 1.0)


def _run_rank(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    ops.use_backend("cpu")
    tp = connect_ranks(rank, ParallelSizes(tp=2), f"file://{folder}/store", "gloo").tp
    for name in names:
        tiny = Tiny(None, *torch.load(f"{folder}/{name}.pt", weights_only=True))
        torch.save(all_logits(tiny, SHORT, tp), f"{folder}/{name}.{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="it needs two devices")
@pytest.mark.parametrize(
    "names",
    [
        [name for name in SPLIT_CASES if name in SAMPLE],
        pytest.param([name for name in SPLIT_CASES if name not in SAMPLE], marks=pytest.mark.long),
    ],
    ids=["sample", "rest"],
)
def test_two_ranks_give_the_logits_of_transformers(tmp_path: Path, names: list[str]) -> None:
    """All architectures in one test, because the processes take longer to start than to compute."""
    expected = {}
    for name in names:
        tiny = build(CASES[name])
        expected[name] = expected_logits(tiny, SHORT)
        torch.save((tiny.config_json, tiny.tensors), tmp_path / f"{name}.pt")

    run_ranks(_run_rank, 2, str(tmp_path), names, deadline_s=DEADLINE_S)

    for name in names:
        for rank in range(2):
            assert_same(torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True), expected[name])
