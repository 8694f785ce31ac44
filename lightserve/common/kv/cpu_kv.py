"""Blocks of tokens' KV in host memory: what the KV pool has evicted. The router decides which block holds what.

Every pool has blocks of its own format: the pool of all tokens, that of a window, and that of recurrent states, where a
block is the state after its last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.kv.layout import KvGroup, KvLayout
from lightserve.common.kv.mem_manager import MemoryManager

CHUNK_BYTES = 2**30  # pinned memory is allocated in powers of 2
ALIGNMENT = 16

Alloc = Callable[[int], Tensor]  # so many bytes of host memory


class Section(NamedTuple):
    """The part of a block that holds the KV, or the scales, of one group of layers."""

    cache: Tensor  # [layers, slots, words], or [..., 2, words] for some of the heads: a view of the pool
    begin: int  # bytes
    end: int

    def of(self, blocks: Tensor, num_slots: int) -> Tensor:
        """Its view of blocks ``[n, bytes]``: [layers, n, num_slots, words], or [..., 2, words]."""
        layers, _, *words = self.cache.shape
        values = blocks[:, self.begin : self.end].view(self.cache.dtype)
        return values.view(len(blocks), layers, num_slots, *words).transpose(0, 1)


def _words(buffer: Tensor) -> Tensor:
    """[layers, slots, words] of the largest integers that fit: few kernels copy 8-bit floats, and bytes are slow."""
    flat = buffer
    while flat.ndim > 3 and flat.stride(-2) == flat.shape[-1]:
        flat = flat.flatten(-2)
    token_bytes = flat.shape[-1] * flat.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if token_bytes % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat.view(torch.uint8)


def block_bytes(layout: KvLayout, tokens: int) -> int:
    """Of one rank, with a single pool."""
    size = 0
    for group in layout.groups:
        scales = 0 if group.scale_dtype is None else group.num_scales * group.scale_dtype.itemsize * len(group.layers)
        size += _aligned(group.bytes_per_token * tokens - scales * tokens) + _aligned(scales * tokens)
    return size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class BlockFormat:
    """How a block of one pool lies in host memory."""

    def __init__(self, buffers: Iterable[Tensor], num_slots: int) -> None:
        """``buffers`` of the pool, [layers, slots, ...]. A block has ``num_slots`` slots: its tokens, or a state."""
        self.num_slots = num_slots
        self._sections: list[Section] = []
        end = 0
        for buffer in buffers:
            cache, begin = _words(buffer), _aligned(end)
            layers, _, *words = cache.shape
            end = begin + layers * num_slots * math.prod(words) * cache.dtype.itemsize
            self._sections.append(Section(cache, begin, end))
        self.num_bytes = max(_aligned(end), ALIGNMENT)  # a stage of a pipeline may have no layer of a group

    def gather(self, slots: Tensor, blocks: Tensor) -> None:
        """Copy the KV of slots ``[n, num_slots]`` into blocks ``[n, bytes]`` on the device of the pool."""
        for section in self._sections:
            section.of(blocks, self.num_slots).copy_(section.cache[:, slots])

    def scatter(self, blocks: Tensor, slots: Tensor) -> None:
        """The reverse."""
        for section in self._sections:
            values = section.of(blocks, self.num_slots)
            section.cache.index_copy_(1, slots.flatten(), values.flatten(1, 2))


HeadSlices = tuple[slice, ...]  # by group of layers


def block_formats(memory: MemoryManager, block_tokens: int, heads: HeadSlices | None = None) -> tuple[BlockFormat, ...]:
    """Of the pool of all tokens, and of every KV group with a pool of its own. ``heads``: of blocks with only these."""
    pools = range(len(memory.group_sizes))
    windowed = [BlockFormat(_kv_buffers(memory, number, heads), block_tokens) for number in pools]
    states = [BlockFormat((rows for group in memory.state_buffers for rows in group), 1)] if memory.state_rows else []
    of_tokens = [*_kv_buffers(memory, None, heads), *(buffer[None] for buffer in memory.token_buffers)]
    return BlockFormat(of_tokens, block_tokens), *windowed, *states


def _kv_buffers(memory: MemoryManager, pool: int | None, heads: HeadSlices | None) -> Iterator[Tensor]:
    """Of the groups of layers in this pool."""
    for number, buffer in enumerate(memory.buffers):
        group = memory.layout.groups[number]
        if memory.pool_of(group.layers[0]) == pool:
            of_group = [buffer, *([memory.scale_buffers[number]] if number in memory.scale_buffers else [])]
            yield from of_group if heads is None else (_with_heads(kv, group, heads[number]) for kv in of_group)


def _with_heads(buffer: Tensor, group: KvGroup, heads: slice) -> Tensor:
    """The heads of a buffer of KV, or of scales: [layers, slots, heads, ...], or [layers, slots, 2, heads, ...]."""
    layers, slots, rows, *size = buffer.shape
    if rows == group.num_heads:
        return buffer[:, :, heads]
    return buffer.view(layers, slots, 2, group.num_heads, *size)[:, :, :, heads]


class CpuKv:
    """``num_blocks`` blocks of one format, in chunks of memory that ``alloc`` returns."""

    def __init__(self, block_format: BlockFormat, num_blocks: int, alloc: Alloc) -> None:
        self.format = block_format
        size = block_format.num_bytes
        per_chunk = max(CHUNK_BYTES // size, 1)
        self._blocks: list[Tensor] = []  # [num_bytes] uint8 each
        while len(self._blocks) < num_blocks:
            count = min(per_chunk, num_blocks - len(self._blocks))
            self._blocks += alloc(count * size).view(count, size).unbind()

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> Tensor:
        return self._blocks[number]
