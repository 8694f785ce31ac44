"""Quantised weights in the layout of the C library, and their products.

Blocks of 8 rows follow each other, in a block groups of 32 columns, in a group scales, minima and codes: the library
reads a weight from its first byte to its last. It rounds the input of a product to 8 bits with a scale for each 32
numbers, however the weight wants it rounded, and sums the products of codes as integers. The result of a row does not
depend on the rows beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel import _library
from lightserve.common.cpu_kernel._library import BACKEND, library
from lightserve.common.ops import Int4Weight, Int8Weight, Mxfp4Weight, QuantizedWeight, in_groups, pack_int4

Product = Callable[..., Tensor]

BLOCK = 8  # rows
GROUP = 32  # columns
QUADS = GROUP // 4  # of columns whose products are summed by one instruction
LOW_NIBBLES = 0x0F0F0F0F  # of four bytes
HALF_BYTES = 2  # of a scale in float16
HALF_ERROR = 2.0**-10  # relative, up to which scales are stored in float16; rounding the input costs 5 times as much


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Packed(QuantizedWeight, ops.FusesNorm):
    """``codes`` holds scales and minima too, uint8 ``[blocks, groups, bytes]``; ``scales`` is empty.

    Another weight is stored in the same memory. It moves only when scales need float32 for the first time, and only the
    descriptor has its address.
    """

    size: tuple[int, int]
    descriptor: _library.PackedWeight
    address: int  # of the descriptor
    usual: QuantizedWeight  # the weight in the usual layout, on the meta device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def for_loading(self) -> QuantizedWeight:
        return empty_like(self.usual, self.device)

    def store_(self, loaded: QuantizedWeight) -> None:
        loaded = _integers(loaded)
        tensors = _scales(loaded, self.group_size)
        self.descriptor.scale_bytes = tensors[0].element_size()
        self.codes.resize_(*self.codes.shape[:2], sum(_part_sizes(self.descriptor)))
        self.descriptor.data = self.codes.data_ptr()
        torch.cat([*map(_scale_bytes, tensors), _code_bytes(loaded)], dim=-1, out=self.codes)

    @property
    def group_size(self) -> int:
        return int(self.descriptor.group)

    def mm(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert library is not None, "only the library has this layout"
        if x.dtype != torch.float32 or x.dim() != 2 or not x.is_contiguous():
            rows = x.reshape(-1, x.shape[-1]).float().contiguous()
            return self.mm(rows, bias).to(x.dtype).view(*x.shape[:-1], self.size[0])
        count = x.shape[0]
        out = x.new_empty(count, self.size[0])
        bias = None if bias is None else bias.float()
        library.ls_linear_packed(self.address, x.data_ptr(), count, self.size[1], _address(bias), out.data_ptr())
        return out

    def add_rms_norm_linear(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None, gated: bool
    ) -> Tensor | None:
        is_float = x.dtype is torch.float32 and norm_weight.dtype is torch.float32
        if library is None or not is_float or not x.is_contiguous() or not residual.is_contiguous():
            return None
        count, (rows, columns) = x.shape[0], self.size
        out = x.new_empty(count, rows // 2 if gated else rows)
        library.ls_add_norm_linear_packed(
            self.address,
            x.data_ptr(),
            count,
            columns,
            _address(bias),
            out.data_ptr(),
            residual.data_ptr(),
            norm_weight.data_ptr(),
            eps,
            gated,
        )
        return out

    def rows(self, rows: slice | Tensor) -> Any:
        """In the usual layout."""
        return _unpack(self, torch.arange(self.size[0])[rows] if isinstance(rows, slice) else rows)

    def values(self) -> Tensor:
        values: Tensor = self.rows(slice(None)).values()
        return values

    def dequantize(self) -> Tensor:
        weight: Tensor = self.rows(slice(None)).dequantize()
        return weight


class PackedInt4Weight(Packed, Int4Weight):
    pass


class PackedInt8Weight(Packed, Int8Weight):
    pass


def empty_packed(usual: QuantizedWeight, input_bits: int = 8) -> Packed | None:
    """Memory for weights like ``usual`` in the library's layout; None: the library cannot compute with them.

    It has no 4-bit floats: they take 8 bits.
    """
    kinds = Int4Weight | Int8Weight | Mxfp4Weight
    if not isinstance(usual, kinds) or isinstance(usual, Packed) or usual.codes.dim() != 2:
        return None
    rows, columns = usual.shape
    group = min(usual.group_size, GROUP)
    if columns % GROUP or group not in (16, GROUP) or usual.group_size % group:
        return None
    is_int4, parts, has_min = isinstance(usual, Int4Weight), 1 if input_bits == 8 else 2, usual.offsets is not None
    descriptor = _library.PackedWeight(0, rows, columns, 4 if is_int4 else 8, group, HALF_BYTES, parts, has_min)
    codes = torch.empty(-(-rows // BLOCK), columns // GROUP, sum(_part_sizes(descriptor)), dtype=torch.uint8)
    kind = PackedInt4Weight if is_int4 else PackedInt8Weight
    return kind(
        codes=codes,
        scales=torch.empty(0),
        input_quant=usual.input_quant,
        size=(rows, columns),
        descriptor=descriptor,
        address=ctypes.addressof(descriptor),
        usual=empty_like(usual, torch.device("meta")),
    )


def empty_like(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    has_offsets = weight.offsets is not None
    return type(weight).empty(weight.shape, weight.group_size, device, has_offsets=has_offsets)


def pack(weight: QuantizedWeight, input_bits: int = 8) -> QuantizedWeight:
    """In the library's layout; as it is if the library cannot compute with it."""
    packed = empty_packed(weight, input_bits)
    if packed is None:
        return weight
    packed.store_(weight)
    return packed


def _integers(weight: QuantizedWeight) -> QuantizedWeight:
    """4-bit floats are multiples of a half."""
    if not isinstance(weight, Mxfp4Weight):
        return weight
    return Int8Weight(codes=(2 * weight.values()).to(torch.int8), scales=weight.float_scales() / 2)


def _scales(weight: QuantizedWeight, group: int) -> list[Tensor]:
    """Scales and, if there are offsets, minima: float16 or float32 ``[blocks, groups, of a group, rows]``.

    A value is scale * code + minimum, with codes 0 to 15 in 4 bits.
    """
    tensors = [weight.scales.float()]
    if weight.offsets is not None:
        least = -8 if isinstance(weight, Int4Weight) else 0
        tensors.append(weight.offsets.float() + least * tensors[0])
    half = [tensor.half() for tensor in tensors]
    if all(torch.all((a.float() - b).abs() <= HALF_ERROR * b.abs()) for a, b in zip(half, tensors, strict=True)):
        tensors = half
    repeats, of_group = weight.group_size // group, GROUP // group
    wide = [_in_blocks(tensor).repeat_interleave(repeats, dim=-1) for tensor in tensors]
    return [tensor.reshape(*tensor.shape[:2], -1, of_group).permute(0, 2, 3, 1).contiguous() for tensor in wide]


def _scale_bytes(scales: Tensor) -> Tensor:
    return scales.flatten(2).view(torch.uint8)


def _code_bytes(weight: QuantizedWeight) -> Tensor:
    """``[blocks, groups, bytes]``.

    Four bytes are computed as one integer: 3,072 rows of 576 numbers take 1.8 ms in 4 bits, byte by byte 5.0.
    """
    words = weight.codes.contiguous().view(torch.int32)
    if isinstance(weight, Int8Weight):
        return _in_quads(words).flatten(2).view(torch.uint8)
    half = in_groups(words, weight.group_size // 8)
    codes = torch.cat((half & LOW_NIBBLES, (half >> 4) & LOW_NIBBLES), dim=-1).flatten(-2)  # one a byte
    low, high = _in_quads(codes).chunk(2, dim=3)  # rows
    return (low | (high << 4)).flatten(2).view(torch.uint8)


def _in_quads(words: Tensor) -> Tensor:
    """``[rows, columns / 4]`` as ``[blocks, groups, quads, rows of a block]``."""
    blocks = _in_blocks(words)
    return blocks.view(len(blocks), BLOCK, -1, QUADS).permute(0, 2, 3, 1)


def _in_blocks(tensor: Tensor) -> Tensor:
    """``[rows, n]`` as ``[blocks, 8, n]``, with rows of 0 at the end."""
    padding = -len(tensor) % BLOCK
    padded = torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
    return padded.view(-1, BLOCK, tensor.shape[1])


def _unpack(weight: Packed, rows: Tensor) -> QuantizedWeight:
    """Some rows in the usual layout."""
    described = weight.descriptor
    blocks, count, lanes = weight.codes[rows // BLOCK], torch.arange(len(rows)), rows % BLOCK
    of_group, dtype = GROUP // described.group, torch.float16 if described.scale_bytes == 2 else torch.float32
    shape = blocks.shape[:2]
    parts = blocks.split_with_sizes(_part_sizes(described), dim=-1)
    scales, *minima = (
        field.contiguous().view(dtype).view(*shape, of_group, BLOCK)[count, :, :, lanes].float().flatten(1)
        for field in parts[:-1]
    )
    if described.bits == 8:
        codes = parts[-1].reshape(*shape, QUADS, BLOCK, 4)[count, :, :, lanes].flatten(1).view(torch.int8)
        return Int8Weight(codes=codes, scales=scales, offsets=minima[0] if minima else None)
    both = parts[-1].reshape(*shape, QUADS, BLOCK // 2, 4)
    codes = torch.cat((both & 0x0F, both >> 4), dim=3)[count, :, :, lanes].flatten(1)
    packed = pack_int4(codes.to(torch.int8) - 8, described.group)
    return Int4Weight(codes=packed, scales=scales, offsets=minima[0] + 8 * scales if minima else None)


def _part_sizes(described: _library.PackedWeight) -> list[int]:
    """Bytes of scales, minima and codes, in a group of a block."""
    scales = GROUP // described.group * BLOCK * described.scale_bytes
    return [*[scales] * (1 + described.has_min), BLOCK * GROUP * described.bits // 8]


def _define_products() -> None:
    def product_of(plain: Product) -> Product:
        def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
            return weight.mm(x, bias) if isinstance(weight, Packed) else plain(x, weight, bias)

        return product

    for op in (ops.linear_int4, ops.linear_int8):
        op.impl(BACKEND)(product_of(op.impls[ops.REFERENCE]))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


if library is not None:
    _define_products()
