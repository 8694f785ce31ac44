"""``mxfp4``, the format of gpt-oss: the experts are 4-bit floats, all other weights are plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization.fields import names
from lightserve.model_files.quantization.module_names import is_listed
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, parses


@dataclass(frozen=True)
class Mxfp4Scheme(Scheme):
    pass


@dataclass(frozen=True)
class Mxfp4Config(QuantConfig):
    not_converted: tuple[str, ...]

    def scheme_of(self, module: str) -> Scheme | None:
        experts = module.rpartition(".")[0]
        is_excepted = is_listed(module, self.not_converted) or is_listed(experts, self.not_converted)
        return Mxfp4Scheme() if experts.endswith(".experts") and not is_excepted else None

    def __str__(self) -> str:
        return "mxfp4, 4-bit floats in groups of 32"


@parses("mxfp4")
def read_mxfp4(table: Mapping[str, Any]) -> Mxfp4Config:
    return Mxfp4Config(names(table, "modules_to_not_convert"))
