"""``quant_method`` fp8 (DeepSeek, Qwen3, Ministral, AutoFP8) and fbgemm_fp8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization.eight_bit import BLOCK, EightBitScheme
from lightserve.model_files.quantization.fields import check_value, names
from lightserve.model_files.quantization.module_names import is_head, is_linear, is_listed
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, parses

# transformers and DeepSeek call the scales after what the weight was divided by
_ALIASES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
# DeepSeek V3.2 stores the weights of heads in its choice of tokens as floats, and does not list them
FLOATS = ".indexer.weights_proj"


@dataclass(frozen=True)
class Fp8Config(QuantConfig):
    """All linears are stored in one scheme, except ``ignored`` ones."""

    name: str
    scheme: EightBitScheme
    ignored: tuple[str, ...]
    has_float_head: bool = True  # also if it is not ignored

    def scheme_of(self, module: str) -> Scheme | None:
        is_float = not is_linear(module) or module.endswith(FLOATS) or (self.has_float_head and is_head(module))
        return None if is_float or is_listed(module, self.ignored) else self.scheme

    def tensor_name(self, name: str) -> str:
        prefix, _, suffix = name.rpartition(".")
        return f"{prefix}.{_ALIASES[suffix]}" if suffix in _ALIASES else name

    def __str__(self) -> str:
        return f"{self.name}: {self.scheme}"


@parses("fp8")
def read_fp8(table: Mapping[str, Any]) -> Fp8Config:
    check_value(table, "fmt", "e4m3", "float8_e4m3fn")
    check_value(table, "scale_fmt", "float", "ue8m0")
    check_value(table, "expert_dtype", "fp8")
    check_value(table, "weight_block_size", [BLOCK, BLOCK])
    check_value(table, "modules_to_convert", [])
    has_blocks = table.get("weight_block_size") is not None
    check_value(table, "activation_scheme", "dynamic", *(() if has_blocks else ("static",)))
    is_static = table.get("activation_scheme") == "static"
    if has_blocks:
        scheme = EightBitScheme("fp8", "block", "group")
    else:
        scheme = EightBitScheme("fp8", "row", "static" if is_static else "token")
    return Fp8Config("fp8", scheme, names(table, "modules_to_not_convert", "ignored_layers"))


@parses("fbgemm_fp8")
def read_fbgemm_fp8(table: Mapping[str, Any]) -> Fp8Config:
    """``activation_scale_ub`` clips inputs far outside the range that occurs. It is not used: clipping is an error."""
    return Fp8Config("fbgemm_fp8", EightBitScheme("fp8", "row", "token"), names(table, "modules_to_not_convert"))
