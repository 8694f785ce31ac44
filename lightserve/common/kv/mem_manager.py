"""The KV tensors: one row a token, addressed by slot. Who owns a slot is token_slots.py's to say."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.model_files.model_config import ModelConfig


class MemoryManager:
    """``size`` slots a layer and one more, which padding writes and nobody reads."""

    def __init__(self, size: int, config: ModelConfig, tp_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        heads = 2 * config.kv_heads_of_rank(tp_size)
        self.kv_buffer = torch.empty(
            config.num_layers, size + 1, heads, config.head_dim, dtype=dtype, device=device
        )  # [layers, slots, 2 * kv_heads, dim], keys first
        self._layers = list(self.kv_buffer.unbind())

    @property
    def padding_slot(self) -> int:
        return self.size

    def layer(self, layer_num: int) -> Tensor:
        """One layer's cache, ``[slots, 2 * kv_heads, dim]``."""
        return self._layers[layer_num]

    def copy(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copy the KV of tokens to other slots in every layer. The two may overlap."""
        source, target = source_slots.long(), target_slots.long()
        for cache in self._layers:
            cache.index_copy_(0, target, cache.index_select(0, source))


def kv_bytes_per_token(config: ModelConfig, tp_size: int, dtype: torch.dtype) -> int:
    return config.num_layers * 2 * config.kv_heads_of_rank(tp_size) * config.head_dim * dtype.itemsize
