"""Experts in GGUF files: forms that other tools than the converter write, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files import resolve
from test.models.architectures.case import Json, Tensors, build, hf_logits
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import GgufCase, Step, save
from test.models.session import Session
from test.models.test_architectures import PROMPT
from test.models.tiny import build_model


def without_dimensions_of_1(tensors: Tensors, config: Json) -> Tensors:
    """As llama.cpp's quantiser writes them."""
    return {name: tensor[0] if len(tensor) == 1 else tensor for name, tensor in tensors.items()}


def with_fused_gate_up(tensors: Tensors, config: Json) -> Tensors:
    """As with the converter's option --fuse-gate-up-exps."""
    done: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts.gate_proj." in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            layer = name.split(".")[2]
            done[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat([tensor, up], dim=1)
        elif ".experts.up_proj." not in name:
            done[name] = tensor
    return done


def without_some_experts(tensors: Tensors, config: Json) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up_exps.weight"}


def with_step(name: str, step: Step) -> GgufCase:
    one = GGUF_CASES[name]
    return GgufCase(one.architecture, one.case, one.metadata, (*one.steps, step))


@pytest.mark.parametrize(
    "one",
    [with_step("qwen2moe", without_dimensions_of_1), with_step("qwen3moe", with_fused_gate_up)],
    ids=["squeezed", "fused"],
)
def test_other_forms_of_experts_give_the_logits_of_transformers(one: GgufCase, tmp_path: Path) -> None:
    tiny = build(one.case)
    source = resolve(str(save(one, tiny, tmp_path / "model.gguf")))

    ours = Session(build_model(source.hf_config(), open_checkpoint(source), max_len=256)).step({0: PROMPT})

    theirs = hf_logits(tiny.hf, PROMPT)[-1:]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_a_tensor_whose_parts_are_not_all_there_is_refused(tmp_path: Path) -> None:
    one = with_step("granitemoe", without_some_experts)
    source = resolve(str(save(one, build(one.case), tmp_path / "model.gguf")))

    with pytest.raises(CheckpointError, match=r"missing for model.layers.1.block_sparse_moe.input_linear.weight"):
        list(open_checkpoint(source))


def test_experts_of_an_architecture_that_has_none_are_refused(tmp_path: Path) -> None:
    one = GGUF_CASES["qwen2"]

    with pytest.raises(ModelFilesError, match="qwen2 models with experts are not supported"):
        resolve(str(save(one, build(one.case), tmp_path / "model.gguf", {"expert_count": 4})))
