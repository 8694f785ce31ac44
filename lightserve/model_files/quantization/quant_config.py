"""From ``quantization_config`` of config.json to the scheme in which each linear is stored."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.errors import ModelFilesError


@dataclass(frozen=True)
class Scheme:
    """How one linear is stored. Equal schemes can be computed as one linear.

    There is a subclass for each format. ``common/quantization`` has a ``WeightFormat`` for it, which reads the tensors.
    """


class QuantConfig(ABC):
    """The schemes of a model's linears."""

    @abstractmethod
    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a linear by its name in the checkpoint; None: its weight is stored as plain floats."""

    @abstractmethod
    def __str__(self) -> str:
        """A few words for the operator: "awq, 4 bits, groups of 128"."""


# By ``quant_method`` of config.json: from its ``quantization_config``. A parser refuses values that are not supported.
PARSERS: dict[str, Callable[[Mapping[str, Any]], QuantConfig]] = {}


def read_quant_config(table: Mapping[str, Any]) -> QuantConfig:
    """Raises ModelFilesError for what is not supported."""
    method = table.get("quant_method")
    if not isinstance(method, str) or method not in PARSERS:
        supported = f"supported are {', '.join(sorted(PARSERS))}" if PARSERS else "none is supported"
        raise ModelFilesError(
            f"config.json: quant_method {reprlib.repr(method)} is not supported ({supported}); "
            "use the unquantised checkpoint or a GGUF file"
        )
    return PARSERS[method](table)
