"""``quant_method`` auto-round: Intel's AutoRound, which packs as AutoGPTQ or AutoAWQ does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization import fields
from lightserve.model_files.quantization.grouped import AwqScheme, GptqScheme
from lightserve.model_files.quantization.quant_config import PARSERS, QuantConfig, Scheme

PACKINGS: dict[str, type[AwqScheme] | type[GptqScheme]] = {
    "auto_round:auto_gptq": GptqScheme,
    "auto_round:gptq": GptqScheme,
    "auto_round:auto_awq": AwqScheme,
    "auto_round:awq": AwqScheme,
}
NOT_QUANTIZED_BITS = 16


@dataclass(frozen=True)
class AutoRoundConfig(QuantConfig):
    scheme: AwqScheme | GptqScheme
    blocks: tuple[str, ...]  # beginnings of the names of quantised modules; empty: all layers
    extra: Mapping[str, Scheme | None]  # by module, or by a pattern of modules

    def scheme_of(self, module: str) -> Scheme | None:
        key = next((key for key in self.extra if key == module or _matches(key, module)), None)
        if key is not None:
            return self.extra[key]
        is_in_block = module.startswith(self.blocks) if self.blocks else fields.is_in_block(module)
        return self.scheme if is_in_block and fields.last_name(module) not in fields.ROUTERS else None

    def __str__(self) -> str:
        return f"auto-round, {self.scheme}"


def _matches(key: str, module: str) -> bool:
    """Names of layers are not patterns, though they have dots."""
    return any(char in key for char in "*[(|+\\") and re.search(key, module) is not None


def parse_auto_round(table: Mapping[str, Any]) -> AutoRoundConfig:
    fields.choice(table, "data_type", ("int",), default="int")
    activation_bits = table.get("act_bits", NOT_QUANTIZED_BITS)
    if activation_bits is not None and activation_bits != NOT_QUANTIZED_BITS:
        raise fields.refused("act_bits", activation_bits, str(NOT_QUANTIZED_BITS))
    packing = PACKINGS[fields.choice(table, "packing_format", PACKINGS, default="auto_round:auto_gptq")]
    extra = fields.subtable(table, "extra_config")
    return AutoRoundConfig(_scheme(table, packing), _blocks(table), {key: _extra(key, table, packing) for key in extra})


def _scheme(table: Mapping[str, Any], packing: type[AwqScheme] | type[GptqScheme]) -> AwqScheme | GptqScheme:
    bits = fields.choice(table, "bits", (4,) if packing is AwqScheme else (4, 8))
    is_symmetric = fields.flag(table, "sym", True) and packing is GptqScheme  # AWQ words have real zero points
    return packing(bits, fields.group_size(table, default=128), is_symmetric)


def _extra(key: str, table: Mapping[str, Any], packing: type[AwqScheme] | type[GptqScheme]) -> Scheme | None:
    fields.pattern("extra_config", key)
    changes = fields.subtable(table["extra_config"], key)
    bits = changes.get("bits", table.get("bits"))
    if isinstance(bits, int) and bits >= NOT_QUANTIZED_BITS:
        return None
    return _scheme({**table, **changes}, packing)


def _blocks(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Text with commas, or a list."""
    value = table.get("block_name_to_quantize") or []
    split = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return fields.names({"block_name_to_quantize": split}, "block_name_to_quantize")


PARSERS["auto-round"] = PARSERS["intel/auto-round"] = parse_auto_round
