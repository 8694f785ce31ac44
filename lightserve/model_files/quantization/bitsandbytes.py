"""``quant_method`` bitsandbytes: nf4, fp4 and LLM.int8 weights, as transformers stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization import fields
from lightserve.model_files.quantization.quant_config import PARSERS, QuantConfig, Scheme


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
    skipped: tuple[str, ...]  # parts of the names of modules; empty: the head

    def scheme_of(self, module: str) -> Scheme | None:
        is_head = fields.last_name(module) in fields.HEADS and bool(self.skipped)
        is_linear = fields.is_in_block(module) or is_head
        is_skipped = fields.contains(module, self.skipped) or fields.last_name(module) in fields.ROUTERS
        return self.scheme if is_linear and not is_skipped else None

    def __str__(self) -> str:
        return f"bitsandbytes, {self.scheme}"


def parse_bitsandbytes(table: Mapping[str, Any]) -> BnbConfig:
    skipped = fields.names(table, "llm_int8_skip_modules")
    if fields.flag(table, "load_in_8bit", False):
        return BnbConfig(Bnb8Scheme(), skipped)
    if not fields.flag(table, "load_in_4bit", False):
        raise fields.refused("load_in_4bit", table.get("load_in_4bit"), "true, or load_in_8bit true")
    quant_type = fields.choice(table, "bnb_4bit_quant_type", ("nf4", "fp4"), default="fp4")
    fields.choice(table, "bnb_4bit_quant_storage", ("uint8",), default="uint8")
    return BnbConfig(Bnb4Scheme(quant_type, fields.flag(table, "bnb_4bit_use_double_quant", False)), skipped)


PARSERS["bitsandbytes"] = parse_bitsandbytes
