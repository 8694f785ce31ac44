"""Blocks of tokens' KV in host memory: what the KV pool has evicted. The router decides which block holds what."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.kv.layout import KvLayout
from lightserve.common.kv.mem_manager import MemoryManager

CHUNK_BYTES = 2**30  # pinned memory is allocated in powers of 2
ALIGNMENT = 16

Alloc = Callable[[int], Tensor]  # so many bytes of host memory


class Section(NamedTuple):
    """The part of a block that holds the KV, or the scales, of one group of layers."""

    cache: Tensor  # [layers, slots, words], a view of the pool
    begin: int  # bytes
    end: int

    def of(self, blocks: Tensor, tokens: int) -> Tensor:
        """Its view of blocks ``[n, bytes]``: [layers, n, tokens, words]."""
        layers, _, words = self.cache.shape
        values = blocks[:, self.begin : self.end].view(self.cache.dtype)
        return values.view(len(blocks), layers, tokens, words).transpose(0, 1)


def _words(buffer: Tensor) -> Tensor:
    """[layers, slots, words] of the largest integers that fit: few kernels copy 8-bit floats, and bytes are slow."""
    flat = buffer.flatten(2)
    token_bytes = flat.shape[-1] * flat.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if token_bytes % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat.view(torch.uint8)


def block_bytes(layout: KvLayout, tokens: int) -> int:
    """Of one rank."""
    size = 0
    for group in layout.groups:
        scales = 0 if group.scale_dtype is None else group.num_scales * group.scale_dtype.itemsize * len(group.layers)
        size += _aligned(group.bytes_per_token * tokens - scales * tokens) + _aligned(scales * tokens)
    return size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class CpuKv:
    """``num_blocks`` blocks of ``block_tokens`` tokens each, in chunks of memory that ``alloc`` returns."""

    def __init__(self, memory: MemoryManager, num_blocks: int, block_tokens: int, alloc: Alloc) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes(memory.layout, block_tokens)
        self._sections = self._make_sections(memory)
        per_chunk = max(CHUNK_BYTES // self.block_bytes, 1)
        self._blocks: list[Tensor] = []  # [block_bytes] uint8 each
        while len(self._blocks) < num_blocks:
            count = min(per_chunk, num_blocks - len(self._blocks))
            self._blocks += alloc(count * self.block_bytes).view(count, self.block_bytes).unbind()

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> Tensor:
        return self._blocks[number]

    def gather(self, slots: Tensor, blocks: Tensor) -> None:
        """Copy the KV of tokens ``[n, block_tokens]`` into blocks ``[n, bytes]`` on the device of the pool."""
        for section in self._sections:
            section.of(blocks, self.block_tokens).copy_(section.cache[:, slots])

    def scatter(self, blocks: Tensor, slots: Tensor) -> None:
        """The reverse."""
        for section in self._sections:
            values = section.of(blocks, self.block_tokens)
            section.cache.index_copy_(1, slots.flatten(), values.flatten(1, 2))

    def _make_sections(self, memory: MemoryManager) -> list[Section]:
        sections: list[Section] = []
        begin = 0
        for i, buffer in enumerate(memory.buffers):
            for tensor in (buffer, memory.scale_buffers.get(i)):
                if tensor is None:
                    continue
                cache = _words(tensor)
                layers, _, words = cache.shape
                end = begin + layers * self.block_tokens * words * cache.dtype.itemsize
                sections.append(Section(cache, begin, end))
                begin = _aligned(end)
        return sections
