"""``mxfp4``, the format of gpt-oss: the experts are 4-bit floats, all other weights are plain ones."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization.quant_config import PARSERS, QuantConfig, Scheme

NOT_CONVERTED = "modules_to_not_convert"


@dataclass(frozen=True)
class Mxfp4Scheme(Scheme):
    pass


@dataclass(frozen=True)
class Mxfp4Config(QuantConfig):
    not_converted: tuple[re.Pattern[str], ...]  # from the start of a module's name to the end of one of its parts

    def scheme_of(self, module: str) -> Scheme | None:
        is_of_experts = module.rpartition(".")[0].endswith(".experts")
        return Mxfp4Scheme() if is_of_experts and not self._is_excepted(module) else None

    def _is_excepted(self, module: str) -> bool:
        return any(pattern.match(module) for pattern in self.not_converted)

    def __str__(self) -> str:
        return "mxfp4, 4-bit floats in groups of 32"


def read_mxfp4(table: Mapping[str, Any]) -> Mxfp4Config:
    names = table.get(NOT_CONVERTED) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelFilesError(
            f"config.json: {NOT_CONVERTED} is {reprlib.repr(names)}, wanted a list of names; correct it"
        )
    try:
        return Mxfp4Config(tuple(re.compile(rf"(?:.*\.)?(?:{name})(?:\.|$)") for name in names))
    except re.error as error:
        raise ModelFilesError(f"config.json: {NOT_CONVERTED}: {error} in {reprlib.repr(names)}; correct it") from error


PARSERS["mxfp4"] = read_mxfp4
