"""Integer codes in groups of neighbouring inputs: AWQ, GPTQ, auto-round, and compressed-tensors' pack-quantized."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.model_files.quantization.quant_config import Scheme


@dataclass(frozen=True)
class GroupedScheme(Scheme):
    """``weight = (code - zero point) * scale``. The subclasses differ in how they pack codes into words."""

    bits: int  # 4 or 8
    group_size: int | None  # inputs with the same scale; None: all of a row
    is_symmetric: bool  # all zero points are in the middle of the codes
    is_act_order: bool = False  # the groups are not of neighbouring inputs; the tensor g_idx has the group of each

    def __str__(self) -> str:
        groups = "one group per row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.bits} bits, {groups}{', act-order' if self.is_act_order else ''}"


class AwqScheme(GroupedScheme):
    """Words of 8 outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""


class GptqScheme(GroupedScheme):
    """Words of neighbouring inputs. The file has the zero points minus 1."""


class GptqV2Scheme(GroupedScheme):
    """As GptqScheme, but with the zero points themselves."""


class PackQuantizedScheme(GroupedScheme):
    """Words of neighbouring inputs, in rows of outputs. ``pack-quantized`` of compressed-tensors."""
