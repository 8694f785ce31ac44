"""``quant_method`` modelopt: NVIDIA's Model Optimizer. Older files have hf_quant_config.json instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightserve.model_files.quantization.eight_bit import EightBitScheme
from lightserve.model_files.quantization.fields import choice, names, subtable
from lightserve.model_files.quantization.fp8 import Fp8Config
from lightserve.model_files.quantization.quant_config import parses

_ALGORITHMS = {
    "FP8": EightBitScheme("fp8", "row", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": EightBitScheme("fp8", "row", "token"),
    "FP8_PB_WO": EightBitScheme("fp8", "block", "none"),
}


@parses("modelopt")
def read_modelopt(table: Mapping[str, Any]) -> Fp8Config:
    """From config.json, or from ``quantization`` of hf_quant_config.json."""
    table = subtable(table, "quantization") or table
    scheme = choice(table, "quant_algo", _ALGORITHMS)
    ignored = names(table, "exclude_modules", "ignore")
    return Fp8Config(f"modelopt {table['quant_algo']}", scheme, ignored, has_float_head=False)
