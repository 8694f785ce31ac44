"""Metadata and tensors of GGUF files that are not read are refused with their names."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files import resolve
from test.model_files.files import finish
from test.models.architectures.case import Case, Json, Tensors, Tiny, build
from test.models.architectures.dense_b import GPT
from test.models.gguf_cases import GGUF_CASES, KV, LAYER, RMS
from test.models.gguf_converter import GgufCase, save

WINDOW, ROTARY = "attention.sliding_window", "rope.dimension_count"
REQUIRED = {
    "block_count": ["llama", "gpt2", "deepseek2-v3"],
    "embedding_length": ["llama", "falcon-7b"],
    "feed_forward_length": ["qwen3", "mpt"],
    "attention.head_count": ["gemma2", "chatglm"],
    RMS: ["llama", "gemma", "glm4", "phi3", "minimax-m2", "glm4moe", "deepseek2-v3"],
    LAYER: ["gpt2", "starcoder", "falcon-7b", "gptneox", "phi2", "stablelm", "nemotron", "olmo", "command-r"],
    "logit_scale": ["granite", "command-r"],
    WINDOW: ["gemma2", "gemma3", "cohere2", "gpt-oss"],
    ROTARY: ["chatglm", "gptneox", "minimax-m2", "deepseek2-v3"],
    "attention.kv_lora_rank": ["deepseek2-lite"],
    "attention.q_lora_rank": ["deepseek2-v3"],
    "attention.max_alibi_bias": ["mpt"],
    "expert_used_count": ["mixtral", "qwen3moe", "gpt-oss", "glm4moe", "deepseek2-v3"],
    "rope.scaling.factor": ["olmo3", "ministral3"],
    "rope.scaling.original_context_length": ["phi3-longrope-long"],
}
WRONG: list[tuple[str, Json]] = [
    ("llama", {"attention.value_length": 8}),
    ("llama", {"attention.causal": False}),
    ("llama", {"attn_logit_softcapping": 30.0}),
    ("llama", {"logit_scale": 0.5}),
    ("llama", {ROTARY: 8}),
    ("llama", {KV: [2, 2]}),
    ("llama", {KV: "two"}),
    ("llama", {"embedding_length": 0}),
    ("llama", {"rope.scaling.type": "longrope"}),
    ("qwen2", {WINDOW: 16}),
    ("deepseek2-v3", {"attention.temperature_scale": 0.5}),
    ("deepseek2-v3", {"attention.key_length_mla": 8}),
    ("deepseek2-lite", {"expert_gating_func": 3}),
    ("glm4moe", {"expert_gating_func": 1}),
    ("minimax-m2", {"expert_gating_func": 1}),
    ("glm4moe", {"nextn_predict_layers": 3}),
    ("qwen3moe", {"expert_weights_norm": 1}),
    ("chatglm", {ROTARY: 8}),
    ("mpt", {"attention.max_alibi_bias": 0.0}),
    ("mpt", {"feed_forward_length": 100}),
    ("gptneox", {"use_parallel_residual": 1}),
    ("olmo3", {"rope.scaling.yarn_ext_factor": 0.5}),
]


@lru_cache
def tiny_of(name: str) -> Tiny:
    return build(GGUF_CASES[name].case)


def refusal(one: GgufCase, tiny: Tiny, path: Path, changes: Json) -> str:
    with pytest.raises(ModelFilesError) as caught:
        resolve(str(save(one, tiny, path, changes)))
    return str(caught.value)


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in REQUIRED.items() for name in names])
def test_a_missing_key_is_named(key: str, name: str, tmp_path: Path) -> None:
    one = GGUF_CASES[name]

    text = refusal(one, tiny_of(name), tmp_path / "model.gguf", {key: None})

    assert f"metadata {one.architecture}.{key} is missing; convert the model again" in text


@pytest.mark.parametrize(("name", "changes"), WRONG, ids=[f"{name}-{next(iter(keys))}" for name, keys in WRONG])
def test_a_value_that_is_not_supported_is_named_with_its_key(name: str, changes: Json, tmp_path: Path) -> None:
    one, (key, value) = GGUF_CASES[name], next(iter(changes.items()))

    text = refusal(one, tiny_of(name), tmp_path / "model.gguf", changes)

    assert f"metadata {one.architecture}.{key} is {value!r}, which is not supported; wanted " in text


def test_starcoder_with_a_key_for_every_head_is_refused_by_its_rows(tmp_path: Path) -> None:
    one = replace(GGUF_CASES["starcoder"], case=Case("gpt_bigcode", {**GPT, "multi_query": False}))

    text = refusal(one, build(one.case), tmp_path / "model.gguf", {})

    assert "tensor blk.0.attn_qkv.weight has 144 rows, which are not those of one KV head" in text


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("granitemoe", "blk.0.ffn_gate_shexp.weight"),
        ("mpt", "blk.0.ffn.act.scales"),
        ("deci", "blk.0.ffn_gate_inp.weight"),
        ("bloom", "position_embd.weight"),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    def add_tensor(tensors: Tensors, config: Json) -> Tensors:
        return tensors | {tensor: torch.ones(4, 4)}

    one = GGUF_CASES[name]
    one = replace(one, steps=(*one.steps, add_tensor))
    source = resolve(str(save(one, tiny_of(name), tmp_path / "model.gguf")))

    with pytest.raises(CheckpointError, match=rf"model.gguf: tensor {tensor} belongs to no \w+ model"):
        list(open_checkpoint(source))


def test_experts_of_a_type_that_is_not_read_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gpt-oss")
    kind = gguf.GGMLQuantizationType.IQ3_XXS
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((2, 4, 98), dtype=np.uint8), raw_dtype=kind)

    with pytest.raises(
        ModelFilesError, match=r"tensor blk.0.ffn_up_exps.weight has type IQ3_XXS; supported types: F32"
    ):
        resolve(str(finish(writer, path)))
