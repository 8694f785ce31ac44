"""Writes the weights of a model in the formats of quantised checkpoints, from the formulas of their authors.

Checked against the dequantisation of AutoAWQ, compressed-tensors and bitsandbytes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightserve.common.quantization.bitsandbytes import CODEBOOKS

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word


@dataclass(frozen=True)
class Packed:
    tensors: Mapping[str, Tensor]  # by what follows the name of the linear
    weight: Tensor  # that they stand for, float32


Packer = Callable[[Tensor], Packed]


@dataclass(frozen=True)
class Codes:
    """``weight = (codes - zeros) * scales``, with a row per output."""

    codes: Tensor  # int64 [out, in]
    zeros: Tensor  # int64 [out, groups]
    scales: Tensor  # float16 [out, groups]
    g_idx: Tensor  # the group of each input
    weight: Tensor


def group_map(in_size: int, group: int, is_act_order: bool) -> Tensor:
    """The group of each input. Linears with the same number of inputs have the same one."""
    in_order = torch.arange(in_size) // group
    if not is_act_order:
        return in_order
    return in_order[torch.randperm(in_size, generator=torch.Generator().manual_seed(in_size))]


def round_to_codes(weight: Tensor, bits: int, group: int, *, sym: bool, is_act_order: bool = False) -> Codes:
    group = weight.shape[1] if group == -1 else group
    g_idx, most = group_map(weight.shape[1], group, is_act_order), 2**bits - 1
    grouped = weight.float()[:, g_idx.argsort(stable=True)].view(len(weight), -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if sym:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).clamp(min=1e-5).half()
    zeros = torch.full(low.shape, 2 ** (bits - 1)) if sym else (-low / scales.float()).round().clamp(0, most).long()
    codes = (weight / scales.float()[:, g_idx] + zeros[:, g_idx]).round().clamp(0, most).long()
    return Codes(codes, zeros, scales, g_idx, (codes - zeros[:, g_idx]) * scales.float()[:, g_idx])


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of neighbouring numbers of the last dimension; bits i * ``bits`` hold number ``order[i]``."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per_word))
    grouped = padded.reshape(*padded.shape[:-1], -1, per_word)[..., list(order or range(per_word))]
    word = (grouped << (torch.arange(per_word) * bits)).sum(-1)
    return (word - (word >= 2**31) * 2**32).to(torch.int32)


def awq(weight: Tensor, group: int = 32) -> Packed:
    found = round_to_codes(weight, 4, group, sym=False)
    tensors = {
        "qweight": words(found.codes.T, 4, AWQ_ORDER),
        "qzeros": words(found.zeros.T, 4, AWQ_ORDER),
        "scales": found.scales.T.contiguous(),
    }
    return Packed(tensors, found.weight)


def gptq(
    weight: Tensor, bits: int = 4, group: int = 32, *, sym: bool = True, version: int = 1, desc_act: bool = False
) -> Packed:
    found = round_to_codes(weight, bits, group, sym=sym, is_act_order=desc_act)
    stored_zeros = (found.zeros - (1 if version == 1 else 0)) % 2**bits
    tensors = {
        "qweight": words(found.codes, bits).T.contiguous(),
        "qzeros": words(stored_zeros.T, bits),
        "scales": found.scales.T.contiguous(),
        "g_idx": found.g_idx.int(),
    }
    return Packed(tensors, found.weight)


def pack_quantized(
    weight: Tensor, bits: int = 4, group: int = 32, *, sym: bool = True, is_act_order: bool = False
) -> Packed:
    found = round_to_codes(weight, bits, group, sym=sym, is_act_order=is_act_order)
    tensors = {
        "weight_packed": words(found.codes, bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = words(found.zeros.T, bits).T.contiguous()
    if is_act_order:
        tensors["weight_g_idx"] = found.g_idx.int()
    return Packed(tensors, found.weight)


def bnb4(weight: Tensor, quant_type: str = "nf4", *, is_nested: bool = False) -> Packed:
    codebook = torch.tensor(CODEBOOKS[quant_type])
    blocks = weight.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks / absmax[:, None]).flatten()[:, None].sub(codebook).abs().argmin(1)
    state: dict[str, Any] = {"quant_type": quant_type, "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    tensors: dict[str, Tensor] = {"weight.quant_map": codebook}
    if is_nested:
        offset = float(absmax.mean())
        nested_map = torch.linspace(-1, 1, 256)
        of_256 = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        nested_absmax = of_256.abs().amax(1)
        nested = (of_256 / nested_absmax[:, None]).flatten()[: len(absmax), None].sub(nested_map).abs().argmin(1)
        absmax = nested_map[nested] * nested_absmax.repeat_interleave(256)[: len(absmax)] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.nested_absmax": nested_absmax, "weight.nested_quant_map": nested_map}
    tensors["weight.absmax"] = nested.to(torch.uint8) if is_nested else absmax
    high, low = codes.view(-1, 2).unbind(1)
    tensors["weight"] = (high * 16 + low).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{quant_type}"] = torch.tensor(list(text), dtype=torch.uint8)
    return Packed(tensors, (codebook[codes].view(-1, 64) * absmax[:, None]).view(weight.shape))


def mxfp4(weight: Tensor) -> Packed:
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat((numbers, -numbers))
    blocks = weight.float().view(len(weight), -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    codes = (blocks / 2 ** exponents[..., None]).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    pairs = codes.view(len(weight), -1, 2)
    tensors = {
        "weight_packed": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }
    return Packed(tensors, (numbers[codes] * 2 ** exponents[..., None]).view(weight.shape))


def bnb8(weight: Tensor) -> Packed:
    largest = weight.float().abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    return Packed({"weight": codes, "SCB": largest}, codes * (largest / 127)[:, None])
