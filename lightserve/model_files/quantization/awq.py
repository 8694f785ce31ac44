"""``quant_method`` awq: AutoAWQ's gemm format. The others pack the same codes in another order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization.fields import check_value, group_size_of, names, number_of
from lightserve.model_files.quantization.grouped import AwqScheme
from lightserve.model_files.quantization.module_names import is_in_layer
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, parses

OLDER_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


@dataclass(frozen=True)
class AwqConfig(QuantConfig):
    scheme: AwqScheme
    not_converted: tuple[str, ...]  # parts of the names of modules

    def scheme_of(self, module: str) -> Scheme | None:
        is_converted = is_in_layer(module) and not any(fragment in module for fragment in self.not_converted)
        return self.scheme if is_converted else None

    def __str__(self) -> str:
        return f"awq, {self.scheme}"


@parses("awq")
def parse_awq(table: Mapping[str, Any]) -> AwqConfig:
    table = {OLDER_NAMES.get(name, name): value for name, value in table.items()}
    check_value({"version": str(table.get("version", "gemm")).lower()}, "version", "gemm")
    check_value(table, "backend", "autoawq", "auto")
    check_value(table, "zero_point", True)
    scheme = AwqScheme(number_of(table, "bits", 4), group_size_of(table), is_symmetric=False)
    return AwqConfig(scheme, names(table, "modules_to_not_convert"))
