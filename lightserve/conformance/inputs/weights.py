"""Weights of products, experts and adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.conformance.inputs.tensors import ints, randn


def floats(weight: Tensor | ops.QuantizedWeight) -> Tensor:
    """A weight that is not quantised."""
    assert isinstance(weight, Tensor)
    return weight


def experts_params(
    experts: int, hidden: int, width: int, dtype: torch.dtype, device: str, *, clamps: bool = False
) -> ops.ExpertsParams:
    """Random experts with a gate; ``clamps``: with biases and the activation of gpt-oss."""

    def weight(*shape: int, seed: int) -> Tensor:
        return randn(*shape, dtype=dtype, device=device, seed=seed).mul_(shape[-1] ** -0.5)

    w13, w2 = weight(experts, 2 * width, hidden, seed=11), weight(experts, hidden, width, seed=12)
    if not clamps:
        return ops.ExpertsParams(w13, w2)
    b13, b2 = (randn(*w.shape[:2], dtype=dtype, device=device, seed=13) for w in (w13, w2))
    return ops.ExpertsParams(w13, w2, b13, b2, ops.GatedSilu(alpha=1.702, limit=1.5, up_offset=1.0))


def plain_experts_params(
    experts: int, hidden: int, width: int, dtype: torch.dtype, device: str, *, has_bias: bool = False
) -> ops.ExpertsParams:
    """Random experts without a gate. What they square is about as large as what a gate multiplies."""
    gated = experts_params(experts, hidden, width, dtype, device, clamps=has_bias)
    b13 = None if gated.b13 is None else gated.b13[:, :width] * 0.5
    return replace(gated, w13=floats(gated.w13)[:, :width] * 0.5, b13=b13, activation=ops.Relu2())


def eight_bit_weight(out_size: int, in_size: int, dtype: torch.dtype, device: str, **more: Any) -> Any:
    """An Int8Weight or, for the dtype float8_e4m3fn, an Fp8Weight, with random codes.

    ``group``: inputs with the same scale; ``has_offsets``.
    """
    group = more.pop("group", in_size)
    codes = randn(out_size, in_size, seed=5) * 60
    codes = codes.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else codes.clamp(-448, 448).to(dtype)
    scales = torch.rand(out_size, in_size // group, generator=torch.Generator().manual_seed(6)) * in_size**-0.5 / 60
    if more.pop("has_offsets", False):
        more["offsets"] = (scales * 7).to(device)
    kind = ops.Int8Weight if dtype == torch.int8 else ops.Fp8Weight
    return kind(codes=codes.to(device), scales=scales.to(device), **more)


def int4_weight(out_size: int, in_size: int, group: int, device: str, has_offsets: bool = False) -> ops.Int4Weight:
    """Its rows have length 1, about."""
    numbers = torch.randint(-8, 8, (out_size, in_size), generator=torch.Generator().manual_seed(3))
    scales = (randn(out_size, in_size // group, device=device, seed=4).abs() + 0.5) * in_size**-0.5 / 8
    offsets = randn(*scales.shape, device=device, seed=5) * in_size**-0.5 / 2 if has_offsets else None
    return ops.Int4Weight(codes=ops.pack_int4(numbers, group).to(device), scales=scales, offsets=offsets)


def int4_weight_with_zero_points(out_size: int, in_size: int, group: int, device: str) -> ops.Int4Weight:
    """The first group is all zeros, with a scale of 0 as padding has it."""
    weight = int4_weight(out_size, in_size, group, device)
    zeros = torch.randint(0, 16, weight.scales.shape, generator=torch.Generator().manual_seed(6)).to(device)
    weight.scales[0, 0] = 0
    return replace(weight, offsets=(8 - zeros) * weight.scales, has_zero_points=True)


def codebook4_weight(out_size: int, in_size: int, device: str) -> ops.Codebook4Weight:
    numbers = int4_weight(out_size, in_size, 64, device)
    codebook = randn(16, device=device, seed=6) * 4
    return ops.Codebook4Weight(codes=numbers.codes, scales=numbers.scales, codebook=codebook)


def mxfp4_weight(out_size: int, in_size: int, device: str) -> ops.Mxfp4Weight:
    weight = ops.Mxfp4Weight.empty((out_size, in_size), 32, torch.device(device))
    weight.randomize_(torch.Generator(device).manual_seed(0), in_size**-0.5)
    weight.scales.add_(torch.arange(out_size, device=device)[:, None] % 3)
    return weight


def lora_rows(slots: list[int], device: str, max_group: int = 16) -> ops.LoraRows:
    """Of rows with these slots, as a worker groups them; with a group that is not used at the end."""
    used = set(slots) - {ops.NO_LORA}
    by_slot = {slot: [row for row, row_slot in enumerate(slots) if row_slot == slot] for slot in used}
    rows = [row for members in by_slot.values() for row in members]
    groups, begin = [], 0
    for slot, members in by_slot.items():
        for first in range(0, len(members), max_group):
            groups.append((slot, begin + first, begin + min(first + max_group, len(members))))
        begin += len(members)
    unused = [(ops.NO_LORA, 0, 0)] if slots else []
    columns = list(zip(*groups, *unused, strict=True)) or [(), (), ()]
    rows += [0] * (len(slots) - len(rows))
    table = torch.tensor(columns, dtype=torch.int32, device=device)
    return ops.LoraRows(ints(rows, device), table, max_group)


def lora_weights(
    in_size: int, parts: tuple[int, ...], dtype: torch.dtype, device: str, *, slots: int = 3, rank: int = 16
) -> ops.LoraWeights:
    a = randn(slots, len(parts) * rank, in_size, dtype=dtype, device=device, seed=21) * in_size**-0.5
    b = randn(slots, sum(parts), rank, dtype=dtype, device=device, seed=22) * rank**-0.5
    return ops.LoraWeights(a, b, tuple(sum(parts[: i + 1]) for i in range(len(parts))))


def lora_linear_args(
    tokens: int, in_size: int, parts: tuple[int, ...], dtype: torch.dtype, device: str, *, rank: int = 16
) -> tuple[Tensor, ops.LoraLinear]:
    """With a bias. Rows use one of two adapters or none."""
    slots = [(2, ops.NO_LORA, 0)[i % 3] for i in range(tokens)]
    weight = randn(sum(parts), in_size, dtype=dtype, device=device, seed=3) * in_size**-0.5
    bias = randn(sum(parts), dtype=dtype, device=device, seed=4)
    lora = lora_weights(in_size, parts, dtype, device, rank=rank)
    layer = ops.LoraLinear(weight, bias, lora, lora_rows(slots, device))
    return randn(tokens, in_size, dtype=dtype, device=device, seed=1), layer
