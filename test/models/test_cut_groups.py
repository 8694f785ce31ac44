"""Ranks that cut groups of inputs: each has the scale of its part of a group, and their outputs add up to the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from lightserve.common.basemodel import CheckpointTensor, Parallel, RankGroup, WeightContext
from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.common.basemodel.layer_weights.linears import RowWeight
from lightserve.common.basemodel.layer_weights.loader import load_weights
from lightserve.common.quantization import LinearSpec, QuantizedLinear
from lightserve.common.quantization.weight_format import format_of
from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization import EightBitScheme, OnLoadScheme, Scheme
from lightserve.model_files.quantization.bitsandbytes import Bnb4Scheme
from lightserve.model_files.quantization.grouped import AwqScheme, GptqScheme, PackQuantizedScheme
from lightserve.model_files.quantization.pack_quantized import Mxfp4PackScheme
from test.models import packers
from test.models.eight_bit_files import ct_fp8_block, int8_groups

OUT = 40
Pack = Callable[[Tensor], Mapping[str, Tensor]]


def tensors_of(packer: packers.Packer) -> Pack:
    return lambda weight: packer(weight).tensors


FP8_BLOCK = EightBitScheme("fp8", "block", "group")
FORMATS: dict[str, tuple[Scheme, int, Pack]] = {  # 4 ranks cut groups, and 2 ranks those of 64 and 128
    "fp8-block": (FP8_BLOCK, 128 * 3, ct_fp8_block),
    "fp8-one-block": (FP8_BLOCK, 128, ct_fp8_block),
    "int8-groups": (EightBitScheme("int8", "group", "none", 32), 32 * 6, int8_groups),
    "awq": (AwqScheme(4, 128, False), 128 * 3, tensors_of(partial(packers.awq, group=128))),
    "gptq": (GptqScheme(4, 64, True), 64 * 3, tensors_of(partial(packers.gptq, group=64))),
    "gptq-8-bit": (GptqScheme(8, 64, True), 64 * 3, tensors_of(partial(packers.gptq, bits=8, group=64))),
    "pack-quantized": (
        PackQuantizedScheme(4, 64, False),
        64 * 3,
        tensors_of(partial(packers.pack_quantized, group=64, sym=False)),
    ),
    "nf4": (Bnb4Scheme("nf4", False), 64 * 3, tensors_of(packers.bnb4)),
    "mxfp4": (Mxfp4PackScheme(), 32 * 6, tensors_of(packers.mxfp4)),
    "w4": (OnLoadScheme("w4"), 32 * 6, lambda weight: {"weight": weight}),
}


class Layer(LayerWeight):
    def __init__(self, scheme: Scheme, in_size: int, tp: RankGroup) -> None:
        def method(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> QuantizedLinear:
            return QuantizedLinear(spec, dtype, device, format_of(scheme))

        context = WeightContext(Parallel(tp=tp), torch.float32, torch.device("cpu"), method)
        self.down_proj = RowWeight("down_proj", in_size, OUT, context)

    def load(self, tensors: Mapping[str, Tensor]) -> Layer:
        load_weights([self], [CheckpointTensor(f"down_proj.{name}", t, "memory") for name, t in tensors.items()], 1)
        return self


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_the_outputs_of_ranks_that_cut_groups_add_up_to_the_whole(name: str, size: int) -> None:
    scheme, in_size, pack = FORMATS[name]
    weight = torch.randn(OUT, in_size, generator=torch.Generator().manual_seed(0))
    x, tensors = torch.randn(5, in_size, generator=torch.Generator().manual_seed(1)), pack(weight)
    whole = Layer(scheme, in_size, RankGroup()).load(tensors).down_proj.partial_mm(x)

    total = torch.zeros_like(whole)
    for rank in range(size):
        own = Layer(scheme, in_size, RankGroup(rank, size)).load(tensors).down_proj
        total += own.partial_mm(x[:, rank * in_size // size : (rank + 1) * in_size // size])

    torch.testing.assert_close(total, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize(("ranks", "group"), [(1, 128), (2, 64), (4, 32), (8, 16)])
def test_a_cut_group_becomes_the_largest_ones_that_every_rank_has_whole(ranks: int, group: int) -> None:
    method = Layer(FP8_BLOCK, 128 * 3, RankGroup(ranks - 1, ranks)).down_proj.method

    assert isinstance(method, QuantizedLinear)
    assert method.weight.group_size == group


def test_groups_of_fewer_than_16_are_refused() -> None:
    message = "down_proj: a rank has the inputs 8 to 16, which cuts groups of 128 into groups of 8; the least is 16; "

    with pytest.raises(ModelFilesError, match=f"{message}use a smaller --tp"):
        Layer(FP8_BLOCK, 128, RankGroup(1, 16))
