"""The KV tensors: one row per token and layer, addressed by slot. token_slots.py tracks who uses a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.kv.layout import KvLayout


class MemoryManager:
    """``size`` slots per layer, and one more that padding writes to and nothing reads."""

    def __init__(self, size: int, layout: KvLayout, device: torch.device) -> None:
        self.size = size
        self.layout = layout
        # one per group, [layers, slots, *token_shape]; for plain keys and values [layers, slots, 2 * kv_heads, dim]
        self.buffers = [
            torch.empty(len(group.layers), size + 1, *group.token_shape, dtype=group.dtype, device=device)
            for group in layout.groups
        ]
        # one per group with scales, [layers, slots, scales]
        self.scale_buffers = {
            i: torch.empty(len(group.layers), size + 1, group.num_scales, dtype=group.scale_dtype, device=device)
            for i, group in enumerate(layout.groups)
            if group.scale_dtype is not None
        }
        self._layers = self._by_layer(dict(enumerate(self.buffers)))
        self._scales = self._by_layer(self.scale_buffers)

    def _by_layer(self, buffers: dict[int, Tensor]) -> dict[int, Tensor]:
        by_layer: dict[int, Tensor] = {}
        for i, buffer in buffers.items():
            by_layer |= zip(self.layout.groups[i].layers, buffer.unbind(), strict=True)
        return by_layer

    @property
    def padding_slot(self) -> int:
        return self.size

    def layer(self, layer_num: int) -> Tensor:
        """The cache of one layer, ``[slots, *token_shape]``: for plain keys and values ``[slots, 2 * heads, dim]``."""
        return self._layers[layer_num]

    def scales(self, layer_num: int) -> Tensor | None:
        """The scales of one layer, ``[slots, scales]``; None: its cache has none."""
        return self._scales.get(layer_num)

    def copy(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copy the KV of tokens to other slots in every layer.

        All sources of a layer are read before its first target is written, so the two may overlap. It works layer by
        layer: a copy of all layers at once would need memory for the KV of all the tokens.
        """
        source, target = source_slots.long(), target_slots.long()
        for cache in (*self._layers.values(), *self._scales.values()):
            numbers = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # torch copies few 8-bit floats
            numbers.index_copy_(0, target, numbers.index_select(0, source))
