"""``quant_method`` awq: AutoAWQ's gemm format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization import fields
from lightserve.model_files.quantization.grouped import AwqScheme
from lightserve.model_files.quantization.quant_config import PARSERS, QuantConfig, Scheme


@dataclass(frozen=True)
class AwqConfig(QuantConfig):
    scheme: AwqScheme
    not_converted: tuple[str, ...]  # parts of the names of modules

    def scheme_of(self, module: str) -> Scheme | None:
        is_kept = any(part in module for part in self.not_converted) or fields.last_name(module) in fields.ROUTERS
        return None if is_kept or not fields.is_in_block(module) else self.scheme

    def __str__(self) -> str:
        return f"awq, {self.scheme}"


def parse_awq(table: Mapping[str, Any]) -> AwqConfig:
    """Other versions than gemm pack the same codes in another order."""
    fields.choice(table, "version", ("gemm",), default="gemm")
    fields.choice(table, "backend", ("autoawq", "auto"), default="autoawq")
    fields.choice(table, "zero_point", (True,), default=True)
    bits = fields.choice(table, "bits" if "bits" in table else "w_bit", (4,), default=4)
    group = fields.group_size(table, "group_size" if "group_size" in table else "q_group_size", default=128)
    return AwqConfig(AwqScheme(bits, group, False), fields.names(table, "modules_to_not_convert"))


PARSERS["awq"] = parse_awq
