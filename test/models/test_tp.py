"""Tensor parallel ranks give the logits of a single rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightserve.common.device import device_named
from lightserve.common.parallel import ParallelSizes, RankGroup, connect_ranks
from lightserve.errors import ModelFilesError
from test.models.session import Session
from test.models.tiny import HF_CONFIGS, build_hf, build_ours, build_with_kv, hf_logits
from test.ranks import run_ranks

KV_DTYPES = ("fp8", "int8")
KV_SCALES = {"model.layers.1.self_attn.k_scale": torch.tensor([0.3, 0.02])}  # of two KV heads
PROMPTS = [[5, 17, 3, 99, 42, 8, 1], [77, 2, 130], [64]]


def _logits(session: Session) -> torch.Tensor:
    prefill = session.step(dict(enumerate(PROMPTS)))
    return torch.cat([prefill, session.step({0: [11], 1: [12, 13], 2: [14]})])


def _run_rank(rank: int, size: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    device_named("cpu").bind(torch.device("cpu"))
    tp = connect_ranks(rank, ParallelSizes(tp=size), f"file://{store}", "gloo").tp
    for name in HF_CONFIGS:
        ours = _logits(Session(build_ours(build_hf(name), tp)))
        torch.save(ours, f"{folder}/{name}.{rank}.pt")
    for kv_dtype in KV_DTYPES:
        ours = _logits(Session(build_with_kv(build_hf("llama-gqa"), kv_dtype, tp, KV_SCALES)))
        torch.save(ours, f"{folder}/{kv_dtype}.{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The logits of every model on every rank, as files. The ranks start once for all models."""
    folder = tmp_path_factory.mktemp(f"tp{request.param}")
    run_ranks(_run_rank, request.param, request.param, str(folder / "store"), str(folder))
    return request.param, folder


@pytest.mark.tp
@pytest.mark.slow
@pytest.mark.parametrize("name", HF_CONFIGS)
def test_every_rank_has_the_logits_of_one_rank_and_of_transformers(name: str, ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    hf = build_hf(name)
    alone = _logits(Session(build_ours(hf)))
    theirs = hf_logits(hf, [*PROMPTS, [*PROMPTS[0], 11], [*PROMPTS[1], 12, 13], [*PROMPTS[2], 14]])

    for rank in range(size):
        ours = torch.load(folder / f"{name}.{rank}.pt", weights_only=True)

        assert (ours - alone).abs().max() <= 1e-5 * alone.abs().max()
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.tp
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_rank_quantises_its_own_kv_heads(kv_dtype: str, ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    alone = _logits(Session(build_with_kv(build_hf("llama-gqa"), kv_dtype, scales=KV_SCALES)))

    for rank in range(size):
        ours = torch.load(folder / f"{kv_dtype}.{rank}.pt", weights_only=True)

        assert (ours - alone).abs().max() <= 1e-3 * alone.abs().max()


@pytest.mark.parametrize(("name", "size"), [("llama-gqa", 3), ("bloom-12-heads", 8)])
def test_heads_that_do_not_divide_among_the_ranks_are_refused_before_loading(name: str, size: int) -> None:
    with pytest.raises(ModelFilesError, match=f"do not divide among tp={size} ranks"):
        build_ours(build_hf(name), RankGroup(0, size))
