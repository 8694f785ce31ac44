"""Packed blocks of GGUF files, repacked without loss to codes of 4 or 8 bits while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common.checkpoint.gguf_blocks import BLOCK_TYPES, CHUNK, mxfp4_nibbles, one_thread
from lightserve.common.ops import Int4Weight, Int8Weight, Mxfp4Weight, QuantizedWeight, pack_int4
from lightserve.common.quantization.weight_format import RawTensor, WeightFormat, reads
from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization import PACKED_TYPES, GgufScheme

DEVICE_CHUNK = 1 << 26  # numbers repacked at a time on a GPU: what is computed in between takes some hundred MB
UNSIGNED = ("Q4_1", "Q4_K")  # their numbers are 0 to 15, those of an Int4Weight -8 to 7
FIRST_NIBBLE = {"Q4_0": 2, "Q4_1": 4}  # bytes before the nibbles, which are in the order of an Int4Weight already


@reads(GgufScheme)
class GgufFormat(WeightFormat):
    """The tensor is uint8 ``[..., out, bytes of a row]``: experts may be a leading dimension."""

    has_row_per_output = True

    def __init__(self, scheme: GgufScheme) -> None:
        self._encoding, self._column_tiles = scheme.encoding, scheme.column_tiles
        self._packed = PACKED_TYPES[scheme.encoding.name]

    def group_size(self, in_size: int) -> int:
        return self._packed.group_size

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        name, block, n_bytes = self._encoding
        if in_size % block:
            raise ModelFilesError(f"a linear with {in_size} inputs has no whole {name} blocks, which are of {block}")
        return {"weight": RawTensor((out_size, in_size // block * n_bytes), (torch.uint8,))}

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        tensor = raw["weight"]
        name, block, n_bytes = self._encoding
        *leading, row_bytes = tensor.shape
        shape = (*leading, row_bytes // n_bytes * block)
        weight = self.empty(shape, self._packed.group_size, tensor.device)
        blocks = tensor.reshape(-1, n_bytes)
        is_cpu = tensor.device.type == "cpu"
        chunk = (CHUNK if is_cpu else DEVICE_CHUNK) // block
        if isinstance(weight, Mxfp4Weight):  # rows of its scales may have gaps between them
            weight.scales.copy_(blocks[:, 0].view(weight.scales.shape))
        with one_thread() if is_cpu else nullcontext():
            for begin in range(0, len(blocks), chunk):
                _repack(name, blocks, weight, slice(begin, begin + chunk))
        return weight if self._column_tiles == (1, 1) else _untiled(weight, *self._column_tiles)

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        if self._encoding.name == "MXFP4":
            return Mxfp4Weight.empty(shape, group_size, device)
        kind = Int4Weight if self._packed.code_bits == 4 else Int8Weight
        return kind.empty(shape, group_size, device, has_offsets=self._packed.has_offsets)


def _untiled(weight: QuantizedWeight, tiles: int, heads: int) -> QuantizedWeight:
    """From columns of one part of every head, then of the next part, to all parts of a head. Parts are whole groups."""

    def reorder(tensor: Tensor) -> Tensor:
        parts = tensor.reshape(*tensor.shape[:-1], tiles, heads, -1)
        return parts.transpose(-3, -2).reshape(tensor.shape)

    offsets = None if weight.offsets is None else reorder(weight.offsets)
    return replace(weight, codes=reorder(weight.codes), scales=reorder(weight.scales), offsets=offsets)


def _repack(name: str, blocks: Tensor, weight: QuantizedWeight, chunk: slice) -> None:
    """Write some of the blocks to where they belong in ``weight``, whose codes are contiguous."""
    chunk_blocks, count = blocks[chunk], len(blocks)
    codes = weight.codes.view(count, -1)[chunk]
    if isinstance(weight, Mxfp4Weight):
        nibbles = mxfp4_nibbles(chunk_blocks)
        codes.copy_(nibbles[:, ::2] | (nibbles[:, 1::2] << 4))
        return
    scales, offsets = BLOCK_TYPES[name].read_scales(chunk_blocks)
    weight.scales.view(count, -1)[chunk] = scales
    if weight.offsets is not None and offsets is not None:
        weight.offsets.view(count, -1)[chunk] = offsets + 8 * scales if name in UNSIGNED else offsets
    if isinstance(weight, Int4Weight):
        codes.copy_(_int4_codes(name, chunk_blocks))
    else:
        codes.copy_(BLOCK_TYPES[name].read_numbers(chunk_blocks))


def _int4_codes(name: str, blocks: Tensor) -> Tensor:
    if name in FIRST_NIBBLE:
        return blocks[:, FIRST_NIBBLE[name] :]
    if name == "Q4_K":
        return _regrouped(blocks[:, 16:])
    return pack_int4(BLOCK_TYPES[name].read_numbers(blocks), BLOCK_TYPES[name].group_size)


def _regrouped(nibbles: Tensor) -> Tensor:
    """From 32 bytes with a group in the low nibbles and the next one in the high ones to 16 bytes for each group."""
    halves = nibbles.reshape(len(nibbles), 4, 2, 16)
    first, second = halves[:, :, 0], halves[:, :, 1]
    return torch.stack(((first & 0x0F) | (second << 4), (first >> 4) | (second & 0xF0)), dim=2).flatten(1)
