"""Experts in a GGUF file, where each of their linears is one tensor for all experts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from lightserve.model_files.gguf_architectures import ARCHITECTURES, WITH_EXPERTS
from test.model_files.files import add_to, finish, start_gguf
from test.models.architectures.case import SMALL, Case, Tiny, build, hf_logits
from test.models.session import Session
from test.models.tiny import build_model

PROMPT = [(37 * i + i * i // 7) % 131 for i in range(60)]
MOE = {**SMALL, "num_experts_per_tok": 3}
QWEN = {**MOE, "num_experts": 6, "moe_intermediate_size": 28}
CASES = {
    "llama": Case("mixtral", {**SMALL, "num_local_experts": 5}),
    "qwen2moe": Case("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 44}),
    "qwen3moe": Case("qwen3_moe", {**QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": Case("olmoe", {**MOE, "num_experts": 6}),
}


def save(tiny: Tiny, architecture: str, path: Path, *, is_squeezed: bool = False) -> Path:
    """As llama.cpp's converter does; ``is_squeezed``: without dimensions of 1, as its quantiser does."""
    known = WITH_EXPERTS if architecture in WITH_EXPERTS else ARCHITECTURES
    names = {name: gguf_name for gguf_name, name in known[architecture].tensors.items()}
    config = SimpleNamespace(**tiny.config_json)
    writer = start_gguf(path, architecture, config)
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tiny.tensors.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)", name)
        if layer is None:
            writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", tensor.numpy())
            continue
        number, part, kind = layer.groups()
        expert = re.search(r"experts\.(\d+)\.", part)
        gguf_name = f"blk.{number}.{names[re.sub(r'experts[.][0-9]+', 'experts.*', part)]}.{kind}"
        if expert is not None:
            stacks.setdefault(gguf_name, {})[int(expert[1])] = tensor
        else:
            tensor = rotary_pairs(tensor, part, config) if architecture == "llama" else tensor
            writer.add_tensor(gguf_name, (tensor[0] if is_squeezed and len(tensor) == 1 else tensor).numpy())
    for gguf_name, experts in stacks.items():
        writer.add_tensor(gguf_name, torch.stack([experts[i] for i in range(len(experts))]).numpy())
    for field, value in {"expert_count": expert_count(config), "expert_used_count": config.num_experts_per_tok}.items():
        add_to(writer, f"{architecture}.{field}", value)
    return finish(writer, path)


def expert_count(config: Any) -> int:
    count: int = getattr(config, "num_experts", None) or config.num_local_experts
    return count


def rotary_pairs(tensor: Tensor, part: str, config: Any) -> Tensor:
    if not part.endswith(("q_proj", "k_proj")):
        return tensor
    heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()


@pytest.mark.parametrize("architecture", CASES)
@pytest.mark.parametrize("is_squeezed", [False, True])
def test_a_gguf_file_with_experts_gives_the_logits_of_transformers(
    architecture: str, is_squeezed: bool, tmp_path: Path
) -> None:
    tiny = build(CASES[architecture])
    source = resolve(str(save(tiny, architecture, tmp_path / "model.gguf", is_squeezed=is_squeezed)))

    model = build_model(source.hf_config(), open_checkpoint(source))
    ours = Session(model).step({0: PROMPT})

    theirs = hf_logits(tiny.hf, PROMPT)[-1:]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_experts_of_an_architecture_that_has_none_are_refused(tmp_path: Path) -> None:
    tiny = build(Case("qwen2", SMALL))
    path = tmp_path / "model.gguf"
    writer = start_gguf(path, "qwen2", SimpleNamespace(**tiny.config_json))
    writer.add_tensor("token_embd.weight", tiny.tensors["model.embed_tokens.weight"].numpy())
    add_to(writer, "qwen2.expert_count", 4)

    with pytest.raises(ModelFilesError, match="qwen2 models with experts are not supported"):
        resolve(str(finish(writer, path))).hf_config()
