"""Layers of one model may have different numbers of KV heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import CheckpointTensor, LayerSpec, ModelArgs, ModelConfig, Parallel, RankGroup
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.models.llama.model import LlamaTpPartModel
from test.models.session import Session
from test.models.test_parity import ON_GPU, assert_same
from test.models.tiny import build_hf, checkpoint_of, hf_logits
from test.ranks import run_ranks

KV_HEADS = [8, 2]  # of the two layers; all layers of the model in transformers have 8
DIM = 8
PROMPTS = [[5, 17, 3, 99, 42, 8, 1], [77, 2, 130], [64]]
LATER = [[*PROMPTS[0], 11], [*PROMPTS[1], 12], [*PROMPTS[2], 14]]


class UnevenLlama(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> LayerSpec:
        return replace(super().layer_spec(layer_num), num_kv_heads=KV_HEADS[layer_num])


def build_pair() -> tuple[Any, list[CheckpointTensor]]:
    """A model whose second layer repeats two KV heads four times each, and a checkpoint with just the two."""
    hf = build_hf("llama-tied-mha")
    return hf, list(_without_repeats(hf))


def _without_repeats(hf: Any) -> Iterator[CheckpointTensor]:
    for name, tensor, file in checkpoint_of(hf):
        if "layers.1.self_attn.k_proj" in name or "layers.1.self_attn.v_proj" in name:
            heads = tensor.view(8, DIM, -1)
            heads.copy_(heads[::4].repeat_interleave(4, dim=0))
            yield CheckpointTensor(name, heads[::4].flatten(0, 1), file)
        else:
            yield CheckpointTensor(name, tensor, file)


def run(checkpoint: list[CheckpointTensor], hf: Any, tp: RankGroup) -> tuple[UnevenLlama, Tensor]:
    config = ModelConfig.from_hf(hf.config.to_dict())
    args = ModelArgs(config, torch.float32, torch.device("cpu"), Parallel(tp=tp), checkpoint, 64, 4, 64)
    model = UnevenLlama(args)
    session = Session(model)
    prefill = session.step(dict(enumerate(PROMPTS)))
    return model, torch.cat([prefill, session.step({0: [11], 1: [12], 2: [14]})])


def test_each_layer_caches_its_own_heads_and_the_logits_are_right() -> None:
    hf, checkpoint = build_pair()

    model, ours = run(checkpoint, hf, RankGroup())

    assert [tuple(model.mem_manager.layer(i).shape) for i in range(2)] == [(65, 16, DIM), (65, 4, DIM)]
    assert model.kv_layout.bytes_per_token == (16 + 4) * DIM * 4
    assert_same(ours, hf_logits(hf, [*PROMPTS, *LATER]))


def test_layers_with_other_heads_are_of_another_kind() -> None:
    hf, checkpoint = build_pair()
    model, _ = run(checkpoint, hf, RankGroup())

    with model.distinct_layers_only():
        assert len(model.layers_infer) == 2


def _run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    tp = connect_ranks(rank, ParallelSizes(tp=size), f"file://{folder}/store", "gloo").tp
    hf, checkpoint = build_pair()
    torch.save(run(checkpoint, hf, tp)[1], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_ranks_split_every_layer_by_its_own_heads(tmp_path: Path) -> None:
    run_ranks(_run_rank, 4, 4, str(tmp_path))

    hf, _ = build_pair()
    for rank in range(4):
        ours = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert_same(ours, hf_logits(hf, [*PROMPTS, *LATER]))


@pytest.mark.skipif(ON_GPU, reason="the kernels run in the interpreter here")
def test_kernels_plan_a_step_for_each_number_of_heads() -> None:
    hf, checkpoint = build_pair()
    prompt = [(7 * i) % 131 for i in range(60)]
    ops.use_backend("triton")
    try:
        config = ModelConfig.from_hf(hf.config.to_dict())
        args = ModelArgs(config, torch.float32, torch.device("cpu"), Parallel(), checkpoint, 64, 4, 64)
        ours = Session(UnevenLlama(args)).step({0: prompt})
    finally:
        ops.use_backend(ops.REFERENCE)

    assert_same(ours, hf_logits(hf, [prompt]))
