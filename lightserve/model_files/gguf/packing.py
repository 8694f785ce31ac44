"""Which tensors of a GGUF file may stay packed. The reader expands all others to float32."""

from __future__ import annotations

import math
from typing import Any

from lightserve.model_files.gguf.architectures import GgufArchitecture, Join, RowOrder, architecture_of
from lightserve.model_files.gguf.fields import count
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.names import GgufTensor, model_tensors
from lightserve.model_files.quantization.gguf import PACKED_TYPES, GgufModule

# The names of linears and vocabularies in llama.cpp. Norms, routers and learned positions are expanded, and so is
# attn_kv_b, which latent attention multiplies in parts.
LINEARS = frozenset(
    (
        *("token_embd", "per_layer_token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
        *("ffn_gate", "ffn_up", "ffn_down", "attn_q_a", "attn_q_b", "attn_kv_a_mqa"),
        *("attn_gate", "ssm_in", "ssm_out", "shortconv.in_proj", "shortconv.out_proj"),
        *("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_latent_down", "ffn_latent_up"),
    )
)
# All experts of a layer are one tensor. The linears before the activation become one weight.
EXPERT_INPUTS, EXPERT_DOWN = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"), "ffn_down_exps"
VALUE_HEADS = "ssm.time_step_rank"


def quantization_table(header: GgufHeader) -> dict[str, Any] | None:
    """``quantization_config`` of a config.json for the packed tensors; None: there are none."""
    architecture = architecture_of(header)
    modules: dict[str, GgufModule] = {}
    for tensor in model_tensors(header, architecture):
        if stays_packed(header, architecture, tensor):
            modules |= _modules(header, architecture, tensor)
    return {"quant_method": "gguf", "modules": modules} if modules else None


def stays_packed(header: GgufHeader, architecture: GgufArchitecture, tensor: GgufTensor) -> bool:
    """Rows of blocks can be reordered and joined, and columns by whole groups. Blocks cannot be transposed."""
    base_name, entry = tensor.base_name, tensor.entry
    if base_name in EXPERT_INPUTS or base_name == EXPERT_DOWN:
        return tensor.kind == "weight" and _experts_stay_packed(header, tensor.block)
    if (
        tensor.kind != "weight"
        or base_name not in LINEARS
        or base_name in architecture.expanded
        or len(entry.shape) != 2
    ):
        return False
    order = architecture.row_orders.get(base_name)
    if entry.encoding.name not in PACKED_TYPES or order is RowOrder.TRANSPOSED:
        return False
    if order is RowOrder.TILED_VALUE_COLUMNS:
        return entry.shape[1] // count(header, VALUE_HEADS) % PACKED_TYPES[entry.encoding.name].group_size == 0
    if tensor.joined is None:
        return True
    return tensor.joined.how in (Join.ROWS, Join.KEY_HEADS) and len(_types_of_parts(header, tensor)) == 1


def _experts_stay_packed(header: GgufHeader, block: str) -> bool:
    """All of a layer or none."""
    inputs = [entry for name in EXPERT_INPUTS if (entry := header.tensors.get(f"{block}{name}.weight"))]
    down = header.tensors.get(f"{block}{EXPERT_DOWN}.weight")
    if down is None or len({entry.encoding.name for entry in inputs}) != 1:
        return False
    return all(entry.encoding.name in PACKED_TYPES and len(entry.shape) == 3 for entry in (*inputs, down))


def _types_of_parts(header: GgufHeader, tensor: GgufTensor) -> set[str]:
    assert tensor.joined is not None
    parts = (header.tensors.get(f"{tensor.block}{key}") for key in tensor.joined.parts)
    return {entry.encoding.name for entry in parts if entry is not None}


def _modules(header: GgufHeader, architecture: GgufArchitecture, tensor: GgufTensor) -> dict[str, GgufModule]:
    names = tensor.targets if tensor.joined is None else (f"{tensor.prefix}{tensor.joined.name}",)
    parts = 1 if tensor.joined is None else len(tensor.joined.parts)
    weights = math.prod(tensor.entry.shape) * parts // len(names)
    is_tiled = architecture.row_orders.get(tensor.base_name) is RowOrder.TILED_VALUE_COLUMNS
    module = GgufModule(tensor.entry.encoding.name, weights, _tiles(header) if is_tiled else (1, 1))
    return {name.removesuffix(".weight"): module for name in names}


def _tiles(header: GgufHeader) -> tuple[int, int]:
    """Of the value heads: in how many turns they come, and of how many key heads."""
    keys = count(header, "ssm.group_count")
    return count(header, VALUE_HEADS) // keys, keys
