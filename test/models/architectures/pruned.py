"""Models whose layers differ in heads or width. The oracle has whole layers; what was removed adds nothing in it."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from lightserve.model_files.config.layer_shapes import LayerShape
from test.models.architectures.case import SMALL, Case, Json, Tensors

DIM = 8
WHOLE = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 6}
SHAPES = [LayerShape(6, 2, 64), LayerShape(4, 4, 32), LayerShape(0, 0, 48), LayerShape(2, 2, 0)]
NAS_SHAPES = [LayerShape(6, 6, 512), LayerShape(6, 2, 256), LayerShape(0, 0, 256), LayerShape(0, 0, 0)]
KV_SHAPES = [LayerShape(6, heads, 64) for heads in (2, 6, 2, 6)]
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


def prune(tensors: Tensors, shapes: list[LayerShape]) -> Tensors:
    """What is left: the first heads, of each group of them one key and value, and the first rows of the FFN."""
    return {name: kept for name, tensor in tensors.items() if (kept := _kept(name, tensor, shapes)) is not None}


def _kept(name: str, tensor: Tensor, shapes: list[LayerShape]) -> Tensor | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return tensor
    shape, rest = shapes[int(match[1])], match[2]
    is_attention = rest.startswith(("self_attn", "input_layernorm"))
    if not (shape.num_heads if is_attention else shape.intermediate_size):
        return None
    if ".k_proj" in rest or ".v_proj" in rest:
        heads = _heads(tensor)[: shape.num_heads : shape.num_heads // shape.num_kv_heads]
        return heads.flatten(0, 1)
    if ".q_proj" in rest:
        return tensor[: shape.num_heads * DIM]
    if rest == "self_attn.o_proj.weight":
        return tensor[:, : shape.num_heads * DIM]
    if "gate_proj" in rest or "up_proj" in rest:
        return tensor[: shape.intermediate_size]
    return tensor[:, : shape.intermediate_size] if rest == "mlp.down_proj.weight" else tensor


def prune_oracle(hf: Any, shapes: list[LayerShape]) -> Any:
    for layer, shape in zip(hf.model.layers, shapes, strict=True):
        layer.self_attn.o_proj.weight.data[:, shape.num_heads * DIM :] = 0
        layer.mlp.down_proj.weight.data[:, shape.intermediate_size :] = 0
        if shape.num_heads:
            _repeat_heads(layer.self_attn.k_proj, shape)
            _repeat_heads(layer.self_attn.v_proj, shape)
    return hf


def _heads(tensor: Tensor) -> Tensor:
    return tensor.view(-1, DIM, *tensor.shape[1:])


def _repeat_heads(linear: Any, shape: LayerShape) -> None:
    """The query heads of a group have the same key and value."""
    group = shape.num_heads // shape.num_kv_heads
    for parameter in linear.parameters():
        heads = _heads(parameter.data)[: shape.num_heads]
        heads.copy_(heads[::group].repeat_interleave(group, dim=0))


def _to_deci(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    config.pop("num_key_value_heads")
    lists = {"num_key_value_heads_per_layer": [shape.num_kv_heads for shape in KV_SHAPES]}
    return {**config, "model_type": "deci", **lists}, prune(tensors, KV_SHAPES)


def _to_lists(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    heads, kv_heads, widths = (list(column) for column in zip(*SHAPES, strict=True))
    lists = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": widths}
    return {**config, "head_dim": DIM, **lists}, prune(tensors, SHAPES)


def _to_nemotron_nas(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    blocks = [
        {
            "attention": {
                "no_op": not shape.num_heads,
                "n_heads_in_group": shape.num_heads // shape.num_kv_heads if shape.num_heads else None,
                "replace_with_linear": False,
            },
            "ffn": {"no_op": not shape.intermediate_size, "ffn_mult": shape.intermediate_size / 32 - 1},
        }
        for shape in NAS_SHAPES
    ]
    fields = {"model_type": "nemotron-nas", "block_configs": blocks, "num_key_value_heads": None}
    return {**config, **fields, "intermediate_size": None}, prune(tensors, NAS_SHAPES)


DECI = Case("llama", WHOLE, _to_deci, lambda hf: prune_oracle(hf, KV_SHAPES))
LLAMA = Case("llama", WHOLE, _to_lists, lambda hf: prune_oracle(hf, SHAPES))
QWEN2 = Case("qwen2", WHOLE, _to_lists, lambda hf: prune_oracle(hf, SHAPES))
NEMOTRON_NAS = Case(
    "llama", {**WHOLE, "intermediate_size": 512}, _to_nemotron_nas, lambda hf: prune_oracle(hf, NAS_SHAPES)
)
