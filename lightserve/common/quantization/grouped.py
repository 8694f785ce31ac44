"""Integer codes in groups of neighbouring inputs, packed into int32 words: AWQ, GPTQ and pack-quantized."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightserve.common.ops import INT4_GROUPS, Int4Weight, Int8Weight, QuantizedWeight, pack_int4
from lightserve.common.quantization.packed_words import unpack_words
from lightserve.common.quantization.weight_format import RawTensor, WeightFormat, reads
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files.quantization.grouped import (
    AwqScheme,
    GptqScheme,
    GptqV2Scheme,
    GroupedScheme,
    PackQuantizedScheme,
)

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word, in the order of its outputs
WORDS = (torch.int32,)
S = TypeVar("S", bound=GroupedScheme)


class Unpacked(NamedTuple):
    """Of a whole linear, with a row per output."""

    codes: Tensor  # uint8 [out, in]
    zeros: Tensor  # zero points, uint8 [out, groups]
    scales: Tensor  # [out, groups]


class GroupedFormat(WeightFormat, Generic[S]):
    """4 bits become an Int4Weight, whose larger groups are split; 8 bits become an Int8Weight."""

    def __init__(self, scheme: S) -> None:
        self.scheme = scheme
        self.has_input_order = scheme.is_act_order

    def group_size(self, in_size: int) -> int | None:
        group = self.scheme.group_size or in_size
        if self.scheme.bits == 8:
            return None if group >= in_size else group
        split = math.gcd(group, max(INT4_GROUPS))
        if split < min(INT4_GROUPS):
            raise ModelFilesError(
                f"config.json: 4-bit groups of {group} are not supported (supported: multiples of {min(INT4_GROUPS)}); "
                "use another quantised checkpoint of this model"
            )
        return split

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        kind, has_zeros = Int4Weight if self.scheme.bits == 4 else Int8Weight, not self.scheme.is_symmetric
        return kind.empty(shape, group_size, device, has_offsets=has_zeros, has_zero_points=has_zeros)

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        codes, zeros, scales = self._unpack(raw)
        order = self.input_order(raw)
        if order is not None:
            codes = codes[:, order]
        middle = 2 ** (self.scheme.bits - 1)
        scales = scales.float().contiguous()
        offsets = None if self.scheme.is_symmetric else (middle - zeros.float()) * scales
        if self.scheme.is_symmetric and bool((zeros != middle).any()):
            zero_point = int(zeros[zeros != middle][0])
            raise CheckpointError(
                f"config.json says sym, but the file has the zero point {zero_point} instead of {middle}; "
                "set sym or checkpoint_format in config.json as the model was quantised"
            )
        return self._weight(codes, scales, offsets)

    def _weight(self, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> QuantizedWeight:
        if self.scheme.bits == 8:
            codes = (codes ^ 0x80).view(torch.int8)
            return Int8Weight(codes=codes, scales=scales, offsets=offsets, has_zero_points=offsets is not None)
        group = self.group_size(codes.shape[1])
        assert group is not None
        repeats = codes.shape[1] // group // scales.shape[1]
        scales = scales.repeat_interleave(repeats, dim=1)
        offsets = None if offsets is None else offsets.repeat_interleave(repeats, dim=1)
        packed = pack_int4(codes.view(torch.int8) - 8, group)
        return Int4Weight(codes=packed, scales=scales, offsets=offsets, has_zero_points=offsets is not None)

    def input_order(self, raw: Mapping[str, Tensor]) -> Tensor | None:
        if self.scheme.group_size is None or self._groups_name not in raw:
            return None
        groups = raw[self._groups_name]
        in_order = torch.arange(len(groups), device=groups.device) // self.scheme.group_size
        if not self.scheme.is_act_order:
            if not torch.equal(groups, in_order.to(groups.dtype)):
                raise CheckpointError("g_idx reorders the inputs, but config.json says desc_act false; set it to true")
            return None
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order], in_order.to(groups.dtype)):
            raise CheckpointError(f"g_idx has groups that are not of {self.scheme.group_size} inputs")
        return order

    def _num_groups(self, in_size: int) -> int:
        """That the file has scales for."""
        return math.ceil(in_size / (self.scheme.group_size or in_size))

    _groups_name = "g_idx"

    @abstractmethod
    def _unpack(self, raw: Mapping[str, Tensor]) -> Unpacked: ...


@reads(AwqScheme)
class AwqFormat(GroupedFormat[AwqScheme]):
    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        groups, words = self._num_groups(in_size), _words(out_size, 8, "outputs")
        return {
            "qweight": RawTensor((in_size, words), WORDS),
            "qzeros": RawTensor((groups, words), WORDS),
            "scales": RawTensor((groups, out_size)),
        }

    def _unpack(self, raw: Mapping[str, Tensor]) -> Unpacked:
        codes, zeros = (self._in_order(unpack_words(raw[name], 4, dim=1)) for name in ("qweight", "qzeros"))
        return Unpacked(codes.T.contiguous(), zeros.T, raw["scales"].T)

    @staticmethod
    def _in_order(numbers: Tensor) -> Tensor:
        return numbers.view(len(numbers), -1, 8)[:, :, AWQ_NIBBLES].flatten(1)


@reads(GptqScheme)
class GptqFormat(GroupedFormat[GroupedScheme]):
    _stored_minus = 1  # the file has the zero points minus this

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        groups, per_word = self._num_groups(in_size), 32 // self.scheme.bits
        return {
            "qweight": RawTensor((_words(in_size, per_word, "inputs"), out_size), WORDS),
            "qzeros": RawTensor((groups, _words(out_size, per_word, "outputs")), WORDS),
            "scales": RawTensor((groups, out_size)),
            "g_idx": RawTensor((in_size,), (torch.int32, torch.int64)),
        }

    def _unpack(self, raw: Mapping[str, Tensor]) -> Unpacked:
        bits = self.scheme.bits
        codes = unpack_words(raw["qweight"], bits, dim=0).T.contiguous()
        stored = unpack_words(raw["qzeros"], bits, dim=1).T
        zeros = (stored + self._stored_minus) & (2**bits - 1)
        return Unpacked(codes, zeros, raw["scales"].T)


@reads(GptqV2Scheme)
class GptqV2Format(GptqFormat):
    _stored_minus = 0


@reads(PackQuantizedScheme)
class PackQuantizedFormat(GroupedFormat[PackQuantizedScheme]):
    _groups_name = "weight_g_idx"

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        groups, per_word = self._num_groups(in_size), 32 // self.scheme.bits
        tensors = {
            "weight_packed": RawTensor((out_size, _words(in_size, per_word, "inputs")), WORDS),
            "weight_scale": RawTensor((out_size, groups)),
            "weight_shape": RawTensor((2,), (torch.int64, torch.int32)),
        }
        if not self.scheme.is_symmetric:
            tensors["weight_zero_point"] = RawTensor((math.ceil(out_size / per_word), groups), WORDS)
        if self.scheme.is_act_order:
            tensors["weight_g_idx"] = RawTensor((in_size,), (torch.int32, torch.int64))
        return tensors

    def _unpack(self, raw: Mapping[str, Tensor]) -> Unpacked:
        bits, scales = self.scheme.bits, raw["weight_scale"]
        codes = unpack_words(raw["weight_packed"], bits, dim=1)
        if tuple(raw["weight_shape"].tolist()) != tuple(codes.shape):
            raise CheckpointError(
                f"weight_shape is {raw['weight_shape'].tolist()}, but the codes have shape {list(codes.shape)}"
            )
        if self.scheme.is_symmetric:
            zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8, device=scales.device)
        else:
            zeros = unpack_words(raw["weight_zero_point"], bits, dim=0)[: len(codes)]
        return Unpacked(codes, zeros, scales)


def _words(size: int, per_word: int, what: str) -> int:
    if size % per_word:
        raise ModelFilesError(f"a linear with {size} {what} has no whole words of {per_word}")
    return size // per_word
