"""The weights of bitsandbytes: nf4 and fp4 in blocks of 64 along the flattened matrix, and int8 rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightserve.common.ops import Codebook4Weight, Int4Weight, Int8Weight, QuantizedWeight, pack_int4
from lightserve.common.quantization.weight_format import ANY_SIZE, RawTensor, WeightFormat, reads
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files.quantization.bitsandbytes import Bnb4Scheme, Bnb8Scheme

BLOCK = 64  # inputs with the same scale; transformers has no option for it
NESTED_BLOCK = 256  # scales with the same scale
# nf4: the quantiles of a normal distribution, from the QLoRA paper
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (0.0, 1 / 192, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
CODEBOOKS = {"nf4": NF4, "fp4": (*FP4, *(-number for number in FP4))}


@reads(Bnb4Scheme)
class Bnb4Format(WeightFormat):
    """A Codebook4Weight: the numbers of nf4 are no multiples of anything, so 8-bit integers would round them."""

    def __init__(self, scheme: Bnb4Scheme) -> None:
        self._scheme = scheme
        self._codebook = torch.tensor(CODEBOOKS[scheme.quant_type])
        self._state_name = f"weight.quant_state.bitsandbytes__{scheme.quant_type}"

    def group_size(self, in_size: int) -> int | None:
        return BLOCK

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        if in_size % BLOCK:
            raise ModelFilesError(f"a linear with {in_size} inputs has blocks of {BLOCK} that cross its rows")
        blocks = out_size * in_size // BLOCK
        tensors = {
            "weight": RawTensor((out_size * in_size // 2, 1), (torch.uint8,)),
            "weight.absmax": RawTensor((blocks,), (torch.uint8 if self._scheme.is_nested else torch.float32,)),
            "weight.quant_map": RawTensor((16,), (torch.float32,)),
            self._state_name: RawTensor((ANY_SIZE,), (torch.uint8,)),
        }
        if self._scheme.is_nested:
            tensors["weight.nested_absmax"] = RawTensor((-(-blocks // NESTED_BLOCK),), (torch.float32,))
            tensors["weight.nested_quant_map"] = RawTensor((256,), (torch.float32,))
        return tensors

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        state = self._checked_state(raw)
        numbers = raw["weight"].flatten()
        codes = torch.stack((numbers >> 4, numbers & 0x0F), dim=-1).view(state["shape"])  # the first one is high
        scales = self._scales(raw, state).view(len(codes), -1)
        packed = pack_int4(codes.view(torch.int8) - 8, BLOCK)
        return Codebook4Weight(codes=packed, scales=scales, codebook=self._codebook.to(packed.device))

    def _checked_state(self, raw: Mapping[str, Tensor]) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(bytes(raw[self._state_name].tolist()))
            settings = state["blocksize"], state["quant_type"], state.get("nested_blocksize", NESTED_BLOCK)
            rows, columns = (int(size) for size in state["shape"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self._state_name} is damaged ({error!r}); download the file again") from error
        wanted = BLOCK, self._scheme.quant_type, NESTED_BLOCK
        if settings != wanted or rows * columns != 2 * raw["weight"].numel():
            raise CheckpointError(
                f"{self._state_name} has blocksize, quant_type, nested_blocksize {settings} and shape "
                f"{rows} x {columns}; supported are {wanted} and the shape of the linear"
            )
        if not torch.allclose(raw["weight.quant_map"].cpu(), self._codebook, atol=1e-6):
            raise CheckpointError(f"weight.quant_map is not that of {self._scheme.quant_type}")
        return {**state, "shape": (rows, columns)}

    def _scales(self, raw: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
        absmax = raw["weight.absmax"]
        if not self._scheme.is_nested:
            return absmax.clone()  # not a view of the file
        of_block = raw["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(absmax)]
        return raw["weight.nested_quant_map"][absmax.int()] * of_block + float(state["nested_offset"])

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        memory = Int4Weight.empty(shape, group_size, device)
        return Codebook4Weight(codes=memory.codes, scales=memory.scales, codebook=self._codebook.to(device))


@reads(Bnb8Scheme)
class Bnb8Format(WeightFormat):
    """LLM.int8 computes outliers of the input in 16 bits. Here all of the input stays as it is."""

    def __init__(self, scheme: Bnb8Scheme) -> None: ...

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        return {
            "weight": RawTensor((out_size, in_size), (torch.int8,)),
            "SCB": RawTensor((out_size,), (torch.float32,)),
        }

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        return Int8Weight(codes=raw["weight"], scales=(raw["SCB"] / 127)[:, None])

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        return Int8Weight.empty(shape, group_size, device)
