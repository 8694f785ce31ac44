"""Checkpoints with 8 bits per weight, written from the formulas of each format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightserve.common.basemodel import CheckpointTensor
from test.models.tiny import checkpoint_of

FP8_MAX = 448.0
Tensors = dict[str, Tensor]  # of a linear, by what follows its name


def fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _input_scale(shape: tuple[int, ...] = ()) -> Tensor:
    return torch.full(shape, 0.05)


def fp8_tensor(weight: Tensor) -> Tensors:
    scale = weight.abs().max() / FP8_MAX
    return {"weight": fp8(weight, scale), "weight_scale": scale, "input_scale": _input_scale()}


def fp8_transformers_tensor(weight: Tensor) -> Tensors:
    packed = fp8_tensor(weight)
    return {
        "weight": packed["weight"],
        "weight_scale_inv": packed["weight_scale"],
        "activation_scale": packed["input_scale"],
    }


def fp8_channel(weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    return {"weight": fp8(weight, scale), "weight_scale": scale}


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for each block of 128 x 128; the last blocks may have fewer rows and columns."""
    out_size, in_size = weight.shape
    rows, columns = -(-out_size // 128), -(-in_size // 128)
    scale = torch.empty(rows, columns)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scale[row, column] = weight[block].abs().max() / FP8_MAX
            codes[block] = fp8(weight[block], scale[row, column])
    return codes, scale


def fp8_block(weight: Tensor) -> Tensors:
    codes, scale = _blocks(weight)
    return {"weight": codes, "weight_scale_inv": scale}


def ct_fp8_block(weight: Tensor) -> Tensors:
    codes, scale = _blocks(weight)
    return {"weight": codes, "weight_scale": scale.bfloat16()}


def modelopt_block(weight: Tensor) -> Tensors:
    codes, scale = _blocks(weight)
    return {"weight": codes, "weight_scale": scale[:, None, :, None]}


def int8_channel(weight: Tensor) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def int8_static(weight: Tensor) -> Tensors:
    scale = (weight.abs().max() / 127).reshape(1)
    codes = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale, "input_scale": _input_scale((1,))}


def int8_zero_points(weight: Tensor) -> Tensors:
    low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().to(torch.int8)
    codes = (weight / scale + zero).round().clamp(-128, 127).to(torch.int8)
    inputs = {"input_scale": _input_scale((1,)), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
    return {"weight": codes, "weight_scale": scale, "weight_zero_point": zero} | inputs


def int8_groups(weight: Tensor) -> Tensors:
    grouped = weight.view(len(weight), -1, 32)
    scale = grouped.abs().amax(-1) / 127
    codes = (grouped / scale[..., None]).round().to(torch.int8).flatten(1)
    return {"weight": codes, "weight_scale": scale}


def _weights(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def compressed(file_format: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


def _inputs(kind: str, strategy: str, is_dynamic: bool, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": is_dynamic, "symmetric": symmetric}


@dataclass(frozen=True)
class FileFormat:
    config: dict[str, Any]
    pack: Callable[[Tensor], Tensors]


BLOCKS = {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
FILES = {
    "fp8-static": FileFormat({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8-transformers": FileFormat({"quant_method": "fp8", "activation_scheme": "static"}, fp8_transformers_tensor),
    "fp8-channel": FileFormat({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_channel),
    "fp8-block": FileFormat({"quant_method": "fp8", **BLOCKS}, fp8_block),
    "fbgemm": FileFormat({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_channel),
    "modelopt": FileFormat({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8_tensor),
    "modelopt-block": FileFormat(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_*"]}},
        modelopt_block,
    ),
    "ct-fp8": FileFormat(
        compressed("float-quantized", _weights("float", "channel"), _inputs("float", "token", True)), fp8_channel
    ),
    "ct-fp8-block": FileFormat(
        compressed(
            "float-quantized",
            _weights("float", "block", block_structure=[128, 128]),
            _inputs("float", "group", True) | {"group_size": 128},
        ),
        ct_fp8_block,
    ),
    "ct-int8": FileFormat(
        compressed("int-quantized", _weights("int", "channel"), _inputs("int", "token", True)), int8_channel
    ),
    "ct-int8-static": FileFormat(
        compressed("int-quantized", _weights("int", "tensor"), _inputs("int", "tensor", False)), int8_static
    ),
    "ct-int8-zero-points": FileFormat(
        compressed(
            "int-quantized",
            _weights("int", "channel") | {"symmetric": False},
            _inputs("int", "tensor", False, symmetric=False),
        ),
        int8_zero_points,
    ),
    "ct-naive-frozen": FileFormat(
        compressed(
            "naive-quantized",
            _weights("float", "tensor"),
            _inputs("float", "tensor", False),
            quantization_status="frozen",
        ),
        fp8_tensor,
    ),
    "ct-naive-groups": FileFormat(
        compressed("naive-quantized", _weights("int", "group", group_size=32), None), int8_groups
    ),
}


def unpack(tensors: Tensors) -> Tensor:
    """The weight that the tensors of a linear stand for."""
    codes = tensors["weight"].float()
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    assert scale is not None
    zero = tensors.get("weight_zero_point")
    return (codes - (0 if zero is None else _wide(zero, codes))) * _wide(scale, codes)


def _wide(scale: Tensor, codes: Tensor) -> Tensor:
    """The number for every element of the weight."""
    scale = scale.float()
    if scale.ndim == 4:
        scale = scale[:, 0, :, 0]
    if scale.numel() == 1 or scale.shape == (len(codes), 1):
        return scale.reshape(-1, 1)
    per_row, per_column = (1, 32) if len(scale) == len(codes) else (128, 128)
    by_row = scale.repeat_interleave(per_row, 0)[: len(codes)]
    return by_row.repeat_interleave(per_column, 1)[:, : codes.shape[1]]


def is_quantized(name: str, tensor: Tensor) -> bool:
    return ".layers." in name and tensor.ndim == 2


def quantized(
    hf: Any, pack: Callable[[Tensor], Tensors], chosen: Callable[[str, Tensor], bool] = is_quantized
) -> list[CheckpointTensor]:
    """The checkpoint of ``hf`` with packed weights; the weights of ``hf`` become those that the codes stand for."""
    tensors: list[CheckpointTensor] = []
    for name, tensor, file in checkpoint_of(hf):
        if not chosen(name, tensor):
            tensors.append(CheckpointTensor(name, tensor, file))
            continue
        packed = pack(tensor)
        tensor.copy_(unpack(packed))
        prefix = name.removesuffix(".weight")
        tensors += [CheckpointTensor(f"{prefix}.{suffix}", value, file) for suffix, value in packed.items()]
    return tensors
