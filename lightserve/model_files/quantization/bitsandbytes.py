"""``quant_method`` bitsandbytes: nf4, fp4 and LLM.int8 weights, as transformers stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization.fields import check_value, flag, names, refused
from lightserve.model_files.quantization.module_names import is_head, is_in_layer, is_listed
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, parses


@dataclass(frozen=True)
class Bnb4Scheme(Scheme):
    quant_type: str  # nf4 or fp4
    is_nested: bool  # the scales are quantised too

    def __str__(self) -> str:
        return f"{self.quant_type}{' with quantised scales' if self.is_nested else ''}"


@dataclass(frozen=True)
class Bnb8Scheme(Scheme):
    """One scale per output row."""

    def __str__(self) -> str:
        return "int8"


@dataclass(frozen=True)
class BnbConfig(QuantConfig):
    scheme: Bnb4Scheme | Bnb8Scheme
    skipped: tuple[str, ...]  # empty: the head; else the head is skipped if it is listed

    def scheme_of(self, module: str) -> Scheme | None:
        is_converted = is_in_layer(module) or (is_head(module) and bool(self.skipped))
        return self.scheme if is_converted and not is_listed(module, self.skipped) else None

    def __str__(self) -> str:
        return f"bitsandbytes, {self.scheme}"


@parses("bitsandbytes")
def parse_bitsandbytes(table: Mapping[str, Any]) -> BnbConfig:
    skipped = names(table, "llm_int8_skip_modules")
    if flag(table, "load_in_8bit", False):
        return BnbConfig(Bnb8Scheme(), skipped)
    if not flag(table, "load_in_4bit", False):
        raise refused("load_in_4bit", table.get("load_in_4bit"), "true, or load_in_8bit true")
    check_value(table, "bnb_4bit_quant_type", "nf4", "fp4")
    check_value(table, "bnb_4bit_quant_storage", "uint8")
    is_nested = flag(table, "bnb_4bit_use_double_quant", False)
    return BnbConfig(Bnb4Scheme(table.get("bnb_4bit_quant_type") or "fp4", is_nested), skipped)
