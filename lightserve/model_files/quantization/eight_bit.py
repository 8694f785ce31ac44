"""Schemes with 8 bits per weight: fp8 (e4m3) and int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightserve.model_files.quantization.quant_config import Scheme

# What has a scale of its own: the whole weight or each output row ("row"), each output row and group of inputs, or each
# block of output rows and inputs. A weight with one scale is stored like one with a scale per row, as a shorter tensor.
WeightScales = Literal["row", "group", "block"]
# How inputs are rounded on a GPU, as in ops.InputQuant. A CPU gains nothing from it and does not round.
InputScales = Literal["none", "token", "group", "static"]

BLOCK = 128
_INPUTS = {
    "none": "inputs not rounded",
    "token": "inputs rounded per token",
    "group": f"inputs rounded per token and {BLOCK}",
    "static": "inputs rounded with the checkpoint's scales",
}


@dataclass(frozen=True)
class EightBitScheme(Scheme):
    """``weight`` ``[out, in]`` and ``weight_scale``; with static inputs also ``input_scale``."""

    code: Literal["fp8", "int8"]
    scales: WeightScales
    inputs: InputScales
    group_size: int = BLOCK  # of "group"
    has_zero_points: bool = False  # weight_zero_point, of the shape of weight_scale
    stored_input: tuple[str, ...] = ()  # tensors of static inputs in the checkpoint that are not used

    def __str__(self) -> str:
        scales = {
            "row": "per row or tensor",
            "group": f"per group of {self.group_size}",
            "block": f"per block of {BLOCK} x {BLOCK}",
        }
        return f"{self.code}, scales {scales[self.scales]}, {_INPUTS[self.inputs]}"
