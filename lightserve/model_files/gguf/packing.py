"""Which tensors of a GGUF file may stay packed. The reader expands all others to float32."""

from __future__ import annotations

import math
from typing import Any

from lightserve.model_files.gguf.architectures import GgufArchitecture, Join, RowOrder, architecture_of
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.names import GgufTensor, model_tensors
from lightserve.model_files.quantization.gguf import PACKED_TYPES, GgufModule

# The names of linears and vocabularies in llama.cpp. Norms, routers, learned positions and experts are expanded, and so
# is attn_kv_b, which latent attention multiplies in parts.
LINEARS = frozenset(
    (
        *("token_embd", "per_layer_token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
        *("ffn_gate", "ffn_up", "ffn_down", "attn_q_a", "attn_q_b", "attn_kv_a_mqa"),
        *("attn_gate", "ssm_in", "ssm_out", "shortconv.in_proj", "shortconv.out_proj"),
    )
)

OTHER_COLUMNS = (RowOrder.TRANSPOSED, RowOrder.TILED_VALUE_COLUMNS)


def quantization_table(header: GgufHeader) -> dict[str, Any] | None:
    """``quantization_config`` of a config.json for the packed tensors; None: there are none."""
    architecture = architecture_of(header)
    modules: dict[str, GgufModule] = {}
    for tensor in model_tensors(header, architecture):
        if stays_packed(header, architecture, tensor):
            modules |= _modules(header, tensor)
    return {"quant_method": "gguf", "modules": modules} if modules else None


def stays_packed(header: GgufHeader, architecture: GgufArchitecture, tensor: GgufTensor) -> bool:
    """Rows of blocks can be reordered and joined. Blocks cannot be transposed, and columns not reordered."""
    base_name, entry = tensor.base_name, tensor.entry
    if (
        tensor.kind != "weight"
        or base_name not in LINEARS
        or base_name in architecture.expanded
        or len(entry.shape) != 2
    ):
        return False
    if entry.encoding.name not in PACKED_TYPES or architecture.row_orders.get(base_name) in OTHER_COLUMNS:
        return False
    if tensor.joined is None:
        return True
    return tensor.joined.how in (Join.ROWS, Join.KEY_HEADS) and len(_types_of_parts(header, tensor)) == 1


def _types_of_parts(header: GgufHeader, tensor: GgufTensor) -> set[str]:
    assert tensor.joined is not None
    parts = (header.tensors.get(f"{tensor.block}{key}") for key in tensor.joined.parts)
    return {entry.encoding.name for entry in parts if entry is not None}


def _modules(header: GgufHeader, tensor: GgufTensor) -> dict[str, GgufModule]:
    names = tensor.targets if tensor.joined is None else (f"{tensor.prefix}{tensor.joined.name}",)
    parts = 1 if tensor.joined is None else len(tensor.joined.parts)
    weights = math.prod(tensor.entry.shape) * parts // len(names)
    return {name.removesuffix(".weight"): GgufModule(tensor.entry.encoding.name, weights) for name in names}
