"""Checkpoints with one byte per weight: fp8 and int8, with scales per tensor, row, group or block."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightserve.common.checkpoint.piece import FLOATS
from lightserve.common.ops import Fp8Weight, InputQuant, Int8Weight, QuantizedWeight, active_traits
from lightserve.common.quantization.linear_method import LinearSpec
from lightserve.common.quantization.weight_format import RawTensor, WeightFormat, reads
from lightserve.model_files.quantization.eight_bit import BLOCK, EightBitScheme

KINDS: dict[str, type[QuantizedWeight]] = {"fp8": Fp8Weight, "int8": Int8Weight}
SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)
INPUT_SCALE = RawTensor((), other_shapes=((1,),))


def supported_input_quant(kind: type[QuantizedWeight], wanted: InputQuant) -> InputQuant:
    """``wanted``, if the device gains from rounded inputs. A CPU does not, and older GPUs have no fp8."""
    return wanted if active_traits().has_dot(kind.code_dtype) else InputQuant.NONE


@reads(EightBitScheme)
class EightBitFormat(WeightFormat):
    def __init__(self, scheme: EightBitScheme) -> None:
        self._scheme = scheme
        self._kind = KINDS[scheme.code]

    def group_size(self, in_size: int) -> int | None:
        """Blocks that do not divide the inputs become smaller groups, because all groups of a row have one size."""
        if self._scheme.scales == "row":
            return None
        return math.gcd(BLOCK, in_size) if self._scheme.scales == "block" else self._scheme.group_size

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        scale = self._scale(out_size, in_size)
        tensors = {"weight": RawTensor((out_size, in_size), (self._kind.code_dtype,)), "weight_scale": scale}
        if self._scheme.has_zero_points:
            tensors["weight_zero_point"] = scale._replace(dtypes=(self._kind.code_dtype,))
        if self._scheme.inputs == "static":
            tensors["input_scale"] = INPUT_SCALE
        for name in self._scheme.stored_input:
            tensors[name] = INPUT_SCALE._replace(dtypes=(*FLOATS, torch.int8, torch.float8_e4m3fn))
        return tensors

    def _scale(self, out_size: int, in_size: int) -> RawTensor:
        if self._scheme.scales == "row":
            return RawTensor((out_size, 1), SCALE_DTYPES, other_shapes=((out_size,), (), (1,), (1, 1)))
        if self._scheme.scales == "group":
            return RawTensor((out_size, in_size // self._scheme.group_size), SCALE_DTYPES)
        rows, columns = -(-out_size // BLOCK), -(-in_size // BLOCK)
        return RawTensor((rows, columns), SCALE_DTYPES, other_shapes=((rows, 1, columns, 1),))

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        codes = raw["weight"]
        scales = self._expand(raw["weight_scale"], codes)
        offsets = None
        if self._scheme.has_zero_points:
            offsets = -self._expand(raw["weight_zero_point"], codes) * scales
        input_scale = raw["input_scale"].float().reshape(()) if self._scheme.inputs == "static" else None
        return self._kind(codes=codes, scales=scales, offsets=offsets, input_scale=input_scale)

    def _expand(self, scale: Tensor, codes: Tensor) -> Tensor:
        """``[out, groups]``"""
        scale, (out_size, in_size) = scale.float(), codes.shape
        if self._scheme.scales == "group":
            return scale
        if self._scheme.scales == "row":
            return scale.reshape(-1, 1).expand(out_size, 1)
        group = math.gcd(BLOCK, in_size)
        blocks = scale.reshape(-(-out_size // BLOCK), -1)
        by_row = blocks.repeat_interleave(BLOCK, dim=0)[:out_size]
        return by_row.repeat_interleave(BLOCK // group, dim=1)[:, : in_size // group]

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        input_quant = supported_input_quant(self._kind, InputQuant(self._scheme.inputs))
        has_offsets = self._scheme.has_zero_points
        return self._kind.empty(shape, group_size, device, has_offsets=has_offsets, input_quant=input_quant)

    def in_final_layout(self, weight: QuantizedWeight, spec: LinearSpec) -> QuantizedWeight:
        """Kernels of a GPU read one scale per block. Ranks and fused linears may cut blocks of rows."""
        if not isinstance(weight, Fp8Weight) or self._scheme.scales != "block" or weight.device.type == "cpu":
            return weight
        return weight.share_scales(BLOCK) if has_whole_blocks(spec) and not spec.scales_rows else weight


def has_whole_blocks(spec: LinearSpec) -> bool:
    """Whether each ``BLOCK`` rows of this rank's weight are of one block of rows in the checkpoint."""
    prefixes = [linear_part.prefix for linear_part in spec.parts]
    blocks = torch.full((spec.out_size, 2), -1)  # of each row: its linear, and the block of rows there
    for linear_part, weight_rows in spec.parts_with_rows():
        blocks[weight_rows, 0] = prefixes.index(linear_part.prefix)
        blocks[weight_rows, 1] = torch.arange(linear_part.out_size)[linear_part.rows] // BLOCK
    first = blocks[::BLOCK].repeat_interleave(BLOCK, dim=0)[: len(blocks)]
    return torch.equal(blocks, first)
