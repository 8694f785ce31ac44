"""Weights in few bits: codes, and scales for groups of neighbouring inputs.

``weight[o, i] = value(code[o, i]) * scale[o, i // group_size] + offset[o, i // group_size]``. Every format of a
checkpoint is converted to one of the kinds below while it is loaded. All kinds may have leading dimensions, such as the
experts of a layer. One scale per output row is one group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

import torch
from torch import Tensor

FP8_MAX = 448.0  # of e4m3, which has no infinity: larger values must be clamped before the cast
INT4_GROUPS = (16, 32, 64, 128)
SCALE_BYTES = 16  # rows of scales of a byte each are padded to a multiple, so that several can be loaded at once


class InputQuant(Enum):
    """How a product rounds its input to the type of the weight's codes."""

    NONE = "none"  # the input stays as it is
    TOKEN = "token"  # a scale per token: its largest value becomes the largest code
    GROUP = "group"  # a scale per token and group of inputs
    STATIC = "static"  # the scale ``input_scale``, from the checkpoint


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantizedWeight(ABC):
    """``codes`` ``[..., out, in / codes_per_byte]``, ``scales`` and ``offsets`` ``[..., out, in / group_size]``."""

    code_dtype: ClassVar[torch.dtype]
    codes_per_byte: ClassVar[int] = 1
    scale_dtype: ClassVar[torch.dtype] = torch.float32

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None  # float32; None: 0
    has_zero_points: bool = False  # offsets are whole multiples of the scales: kernels may add those to the codes
    input_quant: InputQuant = InputQuant.NONE
    input_scale: Tensor | None = None  # float32 scalar, for InputQuant.STATIC

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        group_size: int,
        device: torch.device,
        *,
        has_offsets: bool = False,
        has_zero_points: bool = False,
        input_quant: InputQuant = InputQuant.NONE,
    ) -> Self:
        """Memory for a weight of ``shape`` ``[..., out, in]``."""
        *leading, in_size = shape
        groups = (*leading, in_size // group_size)
        is_static = input_quant is InputQuant.STATIC
        return cls(
            codes=torch.empty((*leading, in_size // cls.codes_per_byte), dtype=cls.code_dtype, device=device),
            scales=cls._empty_scales(groups, device),
            offsets=torch.empty(groups, dtype=torch.float32, device=device) if has_offsets else None,
            has_zero_points=has_zero_points,
            input_quant=input_quant,
            input_scale=torch.zeros((), dtype=torch.float32, device=device) if is_static else None,
        )

    @classmethod
    def _empty_scales(cls, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=cls.scale_dtype, device=device)

    def for_loading(self) -> QuantizedWeight:
        """Memory in the usual layout, into which the parts of a checkpoint are copied before ``store_``.

        It is the memory of this weight where this has that layout.
        """
        if self.input_scale is not None:
            self.input_scale.zero_()  # the largest of the parts counts
        return self

    def store_(self, loaded: QuantizedWeight) -> None:  # noqa: B027  the usual layout needs nothing
        """Overwrite with ``loaded``, which is what ``for_loading`` returned."""

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, packed = self.codes.shape
        return *leading, packed * self.codes_per_byte

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @abstractmethod
    def values(self) -> Tensor:
        """What the codes stand for before they are scaled, float32 ``[..., out, in]``."""

    def dequantize(self) -> Tensor:
        """The weight in float32, ``[..., out, in]``."""
        scaled = in_groups(self.values(), self.group_size) * self.float_scales().unsqueeze(-1)
        return (scaled if self.offsets is None else scaled + self.offsets.unsqueeze(-1)).flatten(-2)

    def float_scales(self) -> Tensor:
        return self.scales

    def expert(self, number: int) -> Self:
        """One weight ``[out, in]`` of those that lie along the first dimension."""
        return self._map(lambda tensor: tensor[number])

    def rows(self, rows: slice | Tensor) -> Self:
        """Some of the output rows; a tensor has their numbers."""
        return self._map(lambda tensor: tensor[..., rows, :])

    def columns(self, columns: slice) -> Self:
        """Some of the inputs. A group that they cut becomes smaller groups (``group_of_columns``)."""
        start, stop = columns.start, columns.stop

        def cut(tensor: Tensor) -> Tensor:
            per_number = self.shape[-1] // tensor.shape[-1]
            return tensor[..., start // per_number : stop // per_number]

        if self.scales.shape[-1] == 1 and self.codes_per_byte == 1:
            return replace(self, codes=cut(self.codes))
        group = self.group_size
        smaller = group_of_columns(group, columns)
        if smaller == group:
            return self._map(cut)
        first, last = start // group * group, -(-stop // group) * group
        whole = self.columns(slice(first, last))._in_smaller_groups(smaller)
        return whole.columns(slice(start - first, stop - first))

    def _in_smaller_groups(self, group_size: int) -> Self:
        """The same numbers; the groups of a former one have the same scale."""
        repeats = self.group_size // group_size
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(repeats, dim=-1)
        scales = self.scales.repeat_interleave(repeats, dim=-1)
        return replace(self, codes=self._codes_in_groups(group_size), scales=scales, offsets=offsets)

    def _codes_in_groups(self, group_size: int) -> Tensor:
        """``codes``, where their layout depends on the groups."""
        return self.codes

    def copy_(self, source: Self) -> None:
        """Overwrite with ``source``, which has the same shape. Its ``input_scale`` counts if it is larger."""
        tensors, new = self._tensors(), source._tensors()
        if tensors.keys() != new.keys():
            raise ValueError(f"a weight with {', '.join(new)} cannot be copied to one with {', '.join(tensors)}")
        for name, tensor in tensors.items():
            if tensor.shape != new[name].shape:
                raise ValueError(f"{name} of shape {tuple(new[name].shape)} cannot be copied to {tuple(tensor.shape)}")
            tensor.copy_(new[name])
        if self.input_scale is not None and source.input_scale is not None:
            self.input_scale.copy_(torch.maximum(self.input_scale, source.input_scale.to(self.device)))

    def randomize_(self, generator: torch.Generator, std: float) -> None:
        """Random codes, with scales that give the weight the standard deviation ``std``."""
        bits = torch.randint(0, 256, self.codes.shape, generator=generator, device=self.device, dtype=torch.uint8)
        self.codes.copy_(self._valid(bits).view(self.codes.dtype))
        self._set_scale(std / max(float(self.rows(slice(0, 16)).values().std()), 1e-6))
        if self.offsets is not None:
            self.offsets.zero_()
        if self.input_scale is not None:
            self.input_scale.fill_(4 / FP8_MAX)

    def _valid(self, bits: Tensor) -> Tensor:
        """Random bytes that are all codes."""
        return bits

    def _set_scale(self, scale: float) -> None:
        self.scales.fill_(scale)

    def _tensors(self) -> dict[str, Tensor]:
        """Those with a row per output."""
        named = ((name, getattr(self, name)) for name in ("codes", "scales", "offsets"))
        return {name: tensor for name, tensor in named if tensor is not None}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, codes=change(self.codes), scales=change(self.scales), offsets=offsets)


class Int4Weight(QuantizedWeight):
    """``codes`` uint8 of two numbers each, which stand for -8 to 7.

    Groups are of 16, 32, 64 or 128. Byte j of a group has number j in its low nibble, and in its high one number
    ``group_size / 2 + j``: unpacking needs no interleaving.
    """

    code_dtype = torch.uint8
    codes_per_byte = 2

    def values(self) -> Tensor:
        return unpack_nibbles(self.codes, self.group_size).float() - 8

    def _codes_in_groups(self, group_size: int) -> Tensor:
        return pack_nibbles(unpack_nibbles(self.codes, self.group_size), group_size)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Codebook4Weight(QuantizedWeight):
    """``codes`` uint8 of two numbers each, in the places of an Int4Weight, which are numbers of ``codebook``.

    For nf4, whose 16 numbers are no multiples of anything.
    """

    code_dtype = torch.uint8
    codes_per_byte = 2

    codebook: Tensor  # float32 [16]

    def values(self) -> Tensor:
        return self.codebook[unpack_nibbles(self.codes, self.group_size).int()]

    def _codes_in_groups(self, group_size: int) -> Tensor:
        return pack_nibbles(unpack_nibbles(self.codes, self.group_size), group_size)


class Int8Weight(QuantizedWeight):
    """``codes`` int8, which stand for themselves."""

    code_dtype = torch.int8

    def values(self) -> Tensor:
        return self.codes.float()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fp8Weight(QuantizedWeight):
    """``codes`` float8_e4m3fn. ``scales`` may be shared by blocks of rows: ``[out / rows_per_scale, groups]``."""

    code_dtype = torch.float8_e4m3fn

    rows_per_scale: int = 1

    def values(self) -> Tensor:
        return self.codes.float()

    def float_scales(self) -> Tensor:
        if self.rows_per_scale == 1:
            return self.scales
        return self.scales.repeat_interleave(self.rows_per_scale, dim=-2)[..., : self.codes.shape[-2], :]

    def rows(self, rows: slice | Tensor) -> Self:
        if self.rows_per_scale == 1:
            return QuantizedWeight.rows(self, rows)
        return replace(self, scales=self.float_scales(), rows_per_scale=1).rows(rows)

    def share_scales(self, rows: int) -> Self:
        """The same weight with a scale for each ``rows`` rows, which must have the same."""
        return replace(self, scales=self.scales[..., ::rows, :].contiguous(), rows_per_scale=rows)

    def for_loading(self) -> QuantizedWeight:
        QuantizedWeight.for_loading(self)
        if self.rows_per_scale == 1:
            return self
        *leading, _, groups = self.scales.shape
        scales = self.scales.new_empty(*leading, self.codes.shape[-2], groups)
        return replace(self, scales=scales, rows_per_scale=1)

    def store_(self, loaded: QuantizedWeight) -> None:
        if self.rows_per_scale > 1:
            self.scales.copy_(loaded.scales[..., :: self.rows_per_scale, :])

    def _valid(self, bits: Tensor) -> Tensor:
        return torch.where(bits & 0x7F == 0x7F, bits ^ 1, bits)  # not NaN


class Mxfp4Weight(QuantizedWeight):
    """``codes`` uint8 of two e2m1 numbers each, the first in the low nibble; ``scales`` uint8: powers of 2 plus 127."""

    code_dtype = torch.uint8
    codes_per_byte = 2
    scale_dtype = torch.uint8

    def values(self) -> Tensor:
        codes = torch.stack((self.codes & 0x0F, self.codes >> 4), dim=-1).flatten(-2)
        return _E2M1.to(self.device)[codes.int()]

    @classmethod
    def _empty_scales(cls, shape: tuple[int, ...], device: torch.device) -> Tensor:
        *leading, groups = shape
        padded = -(-groups // SCALE_BYTES) * SCALE_BYTES
        return torch.zeros((*leading, padded), dtype=cls.scale_dtype, device=device)[..., :groups]

    def float_scales(self) -> Tensor:
        exponents = self.scales.int() - 127
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)

    def _set_scale(self, scale: float) -> None:
        self.scales.fill_(127 + round(math.log2(scale)))


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat((_E2M1, -_E2M1))


def in_groups(tensor: Tensor, group_size: int) -> Tensor:
    """``[..., in]`` as ``[..., groups, group_size]``."""
    return tensor.reshape(*tensor.shape[:-1], -1, group_size)


def unpack_nibbles(codes: Tensor, group_size: int) -> Tensor:
    """The numbers 0 to 15 of an Int4Weight, uint8 ``[..., out, in]``."""
    half = in_groups(codes, group_size // 2)
    return torch.cat((half & 0x0F, half >> 4), dim=-1).flatten(-2)


def pack_int4(numbers: Tensor, group_size: int) -> Tensor:
    """The ``codes`` of an Int4Weight, from numbers -8 to 7 ``[..., out, in]``."""
    return pack_nibbles((numbers + 8).to(torch.uint8), group_size)


def pack_nibbles(numbers: Tensor, group_size: int) -> Tensor:
    """The ``codes`` of an Int4Weight, from numbers 0 to 15 of type uint8."""
    if group_size not in INT4_GROUPS:
        raise ValueError(f"4-bit groups of {group_size} numbers; supported are {INT4_GROUPS}")
    low, high = in_groups(numbers, group_size).chunk(2, dim=-1)
    return (low | (high << 4)).flatten(-2)


def group_of_columns(group_size: int, columns: slice) -> int:
    """The group size of some of the inputs: smaller than ``group_size`` if they cut groups.

    Kernels take ``min(INT4_GROUPS)`` and more.
    """
    return math.gcd(group_size, columns.start, columns.stop)
