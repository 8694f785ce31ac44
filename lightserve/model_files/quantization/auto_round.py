"""``quant_method`` auto-round: Intel's AutoRound, which packs as AutoGPTQ or AutoAWQ does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization.fields import (
    check_value,
    choice,
    flag,
    group_size_of,
    names,
    number_of,
    subtable,
)
from lightserve.model_files.quantization.grouped import AwqScheme, GptqScheme
from lightserve.model_files.quantization.module_names import compile_pattern, is_in_layer
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, parses

PACKINGS: dict[str, type[AwqScheme] | type[GptqScheme]] = {
    "auto_round:auto_gptq": GptqScheme,
    "auto_round:gptq": GptqScheme,
    "auto_round:auto_awq": AwqScheme,
    "auto_round:awq": AwqScheme,
}
FLOAT_BITS = 16
PATTERN_CHARS = "*[(|+\\"  # names have none of them


@dataclass(frozen=True)
class AutoRoundConfig(QuantConfig):
    scheme: AwqScheme | GptqScheme
    blocks: tuple[str, ...]  # beginnings of the names of quantised modules; empty: all layers
    extra: Mapping[str, Scheme | None]  # by module, or by a pattern of modules

    def scheme_of(self, module: str) -> Scheme | None:
        if module in self.extra:
            return self.extra[module]
        for pattern, scheme in self.extra.items():
            if any(char in pattern for char in PATTERN_CHARS) and compile_pattern(pattern).search(module):
                return scheme
        is_in_block = not self.blocks or module.startswith(self.blocks)
        return self.scheme if is_in_layer(module) and is_in_block else None

    def __str__(self) -> str:
        return f"auto-round, {self.scheme}{', with other rules for some modules' if self.extra else ''}"


@parses("auto-round")
@parses("intel/auto-round")
def parse_auto_round(table: Mapping[str, Any]) -> AutoRoundConfig:
    check_value(table, "data_type", "int")
    check_value(table, "act_bits", FLOAT_BITS)
    packing = choice(table, "packing_format", PACKINGS, default="auto_round:auto_gptq")
    extra = {key: _extra(key, table, packing) for key in subtable(table, "extra_config")}
    return AutoRoundConfig(_scheme(table, packing), _blocks(table), extra)


def _scheme(table: Mapping[str, Any], packing: type[AwqScheme] | type[GptqScheme]) -> AwqScheme | GptqScheme:
    bits = number_of(table, "bits", 4) if packing is AwqScheme else number_of(table, "bits", 4, 8)
    is_symmetric = flag(table, "sym", True) and packing is GptqScheme  # AWQ files have any zero points
    return packing(bits, group_size_of(table), is_symmetric)


def _extra(key: str, table: Mapping[str, Any], packing: type[AwqScheme] | type[GptqScheme]) -> Scheme | None:
    compile_pattern(key)
    changes = subtable(table["extra_config"], key)
    bits = changes.get("bits")
    if isinstance(bits, int) and bits >= FLOAT_BITS:
        return None
    return _scheme({**table, **changes}, packing)


def _blocks(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Text with commas, or a list."""
    field = "block_name_to_quantize"
    value = table.get(field) or []
    return names({field: value.replace(" ", "").split(",") if isinstance(value, str) else value}, field)
