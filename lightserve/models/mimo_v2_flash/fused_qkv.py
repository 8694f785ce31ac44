"""The projections of MiMo-V2.5: one tensor with the rows of q, k and v of the ranks that wrote it, one after another.

Blocks of fp8 begin anew at each of these ranks and end inside of heads, so the projections are read as floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightserve.common import basemodel as bm

FUSED = ".self_attn.qkv_proj."
SCALES = "weight_scale"  # as the format of fp8 names them
BLOCK = 128


def with_split_qkv(
    checkpoint: Iterable[bm.CheckpointTensor], config: bm.ModelConfig, value_dim: int
) -> Iterator[bm.CheckpointTensor]:
    """As files with three tensors. Codes wait for their scales, which may be in another file."""
    waiting: dict[str, dict[str, bm.CheckpointTensor]] = {}
    for tensor in checkpoint:
        if FUSED not in tensor.name:
            yield tensor
            continue
        module, _, kind = tensor.name.rpartition(".")
        parts = waiting.setdefault(module, {})
        parts[kind] = tensor
        codes, scales = parts.get("weight"), parts.get(SCALES)
        is_whole = codes is not None and (scales is not None or codes.tensor.dtype != torch.float8_e4m3fn)
        if codes is None or not is_whole:
            continue
        del waiting[module]
        sizes = _sizes(config, int(module.split(".")[2]), value_dim)
        ranks = min(shape.num_kv_heads for shape in config.layer_shapes)
        weight = codes.tensor if scales is None else _dequantized(codes.tensor, scales.tensor, ranks)
        by_rank = weight.view(ranks, -1, weight.shape[1]).split_with_sizes([size // ranks for size in sizes], dim=1)
        for name, rows in zip("qkv", by_rank, strict=True):
            yield codes._replace(name=f"{module.replace('qkv_proj', f'{name}_proj')}.weight", tensor=rows.flatten(0, 1))


def _sizes(config: bm.ModelConfig, layer: int, value_dim: int) -> list[int]:
    shape = config.layer_shapes[layer]
    return [shape.num_heads * config.head_dim, shape.num_kv_heads * config.head_dim, shape.num_kv_heads * value_dim]


def _dequantized(codes: Tensor, scales: Tensor, ranks: int) -> Tensor:
    """Each rank has scales of its own for its last block, which may be smaller."""
    rows, columns = (torch.arange(size) for size in codes.shape)
    of_rank = len(codes) // ranks
    blocks = -(-of_rank // BLOCK)
    of_rows = rows // of_rank * blocks + rows % of_rank // BLOCK
    return codes.float() * scales.float()[of_rows][:, columns // BLOCK]
