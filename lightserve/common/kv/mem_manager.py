"""The KV tensors, with a slot for each token, and the states of recurrent layers, with a row for each request.

The router tracks who uses a slot or a row (router/kv/slots.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage

from lightserve.common.kv.layout import KvContent, KvGroup, KvLayout

Value = TypeVar("Value")


class PoolMemory(Protocol):
    """Memory whose addresses stay while it is given back: a MappedMemory of a device."""

    def tensor(self) -> Tensor: ...

    def release(self) -> None: ...

    def restore(self) -> None: ...


TakeMemory = Callable[[int], PoolMemory]  # so many bytes


class MemoryManager:
    """``size`` slots per layer, and one more that padding writes to and nothing reads.

    ``group_sizes``: slots of KV groups, which are pools with slot numbers of their own. The first one has the layers
    with a window. ``state_rows``: rows of the states, and one more for padding as well. ``take_memory``: for all
    tensors; None: torch's.
    """

    def __init__(
        self,
        size: int,
        layout: KvLayout,
        device: torch.device,
        group_sizes: tuple[int, ...] = (),
        state_rows: int = 0,
        take_memory: TakeMemory | None = None,
    ) -> None:
        self.size = size
        self._device = device
        self._take_memory = take_memory
        self._mapped: list[PoolMemory] = []
        self.state_rows = state_rows
        self.group_sizes = group_sizes
        self.layout = layout
        windowed = [group for group in layout.groups if group_sizes and group.window is not None]
        self._pool_of = self._with_readers({layer: 0 for group in windowed for layer in group.layers})
        # one per group, [layers, slots, *token_shape]; for plain keys and values [layers, slots, 2 * kv_heads, dim]
        self.buffers = [
            self._empty((len(group.layers), self._slots(group), *group.token_shape), group.dtype)
            for group in layout.groups
        ]
        # one per group with scales, [layers, slots, scales]
        self.scale_buffers = {
            i: self._empty((len(group.layers), self._slots(group), group.num_scales), group.scale_dtype)
            for i, group in enumerate(layout.groups)
            if group.scale_dtype is not None
        }
        by_group = dict(enumerate(self.buffers))
        self._layers = self._with_readers(self._by_layer(by_group, KvContent.KV))
        self._index_keys = self._by_layer(by_group, KvContent.INDEX_KEYS)
        self._key_parts = self._by_layer(by_group, KvContent.KEY_PARTS)
        self._scales = self._with_readers(self._by_layer(self.scale_buffers, KvContent.KV))
        # for each group its tensors, [layers, rows, *shape]
        self.state_buffers = [
            tuple(
                self._empty((len(group.layers), state_rows + 1, *tensor.shape), tensor.dtype)
                for tensor in group.tensors
            )
            for group in layout.states
        ]
        # [slots, ...]: what else is known of the tokens of these slots, and moves with their KV
        self.token_buffers: list[Tensor] = []
        self._states: dict[int, tuple[Tensor, ...]] = {}
        for state_group, buffers in zip(layout.states, self.state_buffers, strict=True):
            self._states |= zip(state_group.layers, zip(*buffers, strict=True), strict=True)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._take_memory is None or not num_bytes:  # a stage of a pipeline may have no layer of a group
            return torch.empty(shape, dtype=dtype, device=self._device)
        self._mapped.append(self._take_memory(num_bytes))
        return self._mapped[-1].tensor().view(dtype).view(shape)

    def _with_readers(self, by_layer: dict[int, Value]) -> dict[int, Value]:
        """Also for the layers that read the cache of another one."""
        readers = self.layout.readers
        return by_layer | {layer: by_layer[source] for layer, source in readers if source in by_layer}

    def _slots(self, group: KvGroup) -> int:
        """With the slot of padding, and those behind it."""
        pool = self.pool_of(group.layers[0])
        return (self.size if pool is None else self.group_sizes[pool]) + 1 + group.extra_slots

    def _by_layer(self, buffers: dict[int, Tensor], content: KvContent) -> dict[int, Tensor]:
        by_layer: dict[int, Tensor] = {}
        for i, buffer in buffers.items():
            group = self.layout.groups[i]
            if group.content == content:
                by_layer |= zip(group.layers, buffer.unbind(), strict=True)
        return by_layer

    @property
    def padding_slot(self) -> int:
        return self.size

    @property
    def padding_row(self) -> int:
        return self.state_rows

    @property
    def group_padding_slots(self) -> tuple[int, ...]:
        return self.group_sizes

    @property
    def keeps_addresses(self) -> bool:
        """Whether tensors have the same addresses after ``restore``."""
        return self._take_memory is not None

    def release(self) -> None:
        """Free the memory of all pools. Their tensors stay, and may not be used until ``restore``."""
        for memory in self._mapped:
            memory.release()
        if not self.keeps_addresses:
            for storage, _ in self._storages():
                storage.resize_(0)

    def restore(self) -> None:
        """Take the memory again. The pools hold nothing."""
        for memory in self._mapped:
            memory.restore()
        if not self.keeps_addresses:
            for storage, num_bytes in self._storages():
                storage.resize_(num_bytes)

    def _storages(self) -> Iterator[tuple[UntypedStorage, int]]:
        """With their sizes."""
        states = (tensor for tensors in self.state_buffers for tensor in tensors)
        for tensor in (*self.buffers, *self.scale_buffers.values(), *states):
            yield tensor.untyped_storage(), tensor.nbytes

    def pool_of(self, layer_num: int) -> int | None:
        """The number of the KV group in whose pool the layer's KV is; None: it is in the pool of all tokens."""
        return self._pool_of.get(layer_num)

    def layer(self, layer_num: int) -> Tensor:
        """The cache of one layer, ``[slots, *token_shape]``: for plain keys and values ``[slots, 2 * heads, dim]``."""
        return self._layers[layer_num]

    def index_keys(self, layer_num: int) -> Tensor:
        """The keys by which one layer chooses tokens, ``[slots, 1, dim]``."""
        return self._index_keys[layer_num]

    def key_parts(self, layer_num: int) -> Tensor | None:
        """What a layer with quantised latents stores besides, ``[slots, 1, rope]``; None: it has no such latents."""
        return self._key_parts.get(layer_num)

    def scales(self, layer_num: int) -> Tensor | None:
        """The scales of one layer, ``[slots, scales]``; None: its cache has none."""
        return self._scales.get(layer_num)

    def states(self, layer_num: int) -> tuple[Tensor, ...]:
        """The states of one recurrent layer, each ``[rows, *shape]``. A row that nothing wrote has no value."""
        return self._states[layer_num]
