"""From ``quantization_config`` of config.json to the scheme in which each linear is stored."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lightserve.errors import ModelFilesError


@dataclass(frozen=True)
class Scheme:
    """How one linear is stored. Equal schemes can be computed as one linear.

    There is a subclass for each format. ``common/quantization`` has a ``WeightFormat`` for it, which reads the tensors.
    """

    is_stored: ClassVar[bool] = True  # False: the checkpoint has floats, which are quantised while they are loaded


class QuantConfig(ABC):
    """The schemes of a model's linears."""

    @abstractmethod
    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a linear by its name in the checkpoint; None: its weight is stored as plain floats."""

    def scheme_of_router(self, module: str) -> Scheme | None:
        """As ``scheme_of``, for a router of experts or the gate of shared ones: no tool quantises them."""
        return None

    def scheme_of_gate(self, module: str) -> Scheme | None:
        """As ``scheme_of``, for a narrow linear that decides how much of a recurrent state stays."""
        return self.scheme_of(module)

    def check_modules(self, modules: Iterable[str]) -> None:  # noqa: B027  most formats name no modules
        """Raises ModelFilesError if the config names something that is not among the modules of the model."""

    def tensor_name(self, name: str) -> str:
        """The name of a checkpoint tensor for the ``WeightFormat`` that reads it. Some tensors have several names."""
        return name

    @abstractmethod
    def __str__(self) -> str:
        """A few words for the operator: "awq, 4 bits, groups of 128"."""


# By ``quant_method`` of config.json: from its ``quantization_config``. A parser refuses values that are not supported.
Parser = Callable[[Mapping[str, Any]], QuantConfig]
PARSERS: dict[str, Parser] = {}
P = TypeVar("P", bound=Parser)
# why a method is not supported, where the usual remedy does not help
REFUSED = {
    "bitnet": "the model rounds weights to three values and inputs to 8 bits; only a BitNet checkpoint whose "
    "config.json has no quantization_config is supported"
}


def parses(quant_method: str) -> Callable[[P], P]:
    """Register the parser of a ``quant_method``."""

    def register(parser: P) -> P:
        PARSERS[quant_method] = parser
        return parser

    return register


def read_quant_config(table: Mapping[str, Any]) -> QuantConfig:
    """Raises ModelFilesError for what is not supported."""
    method = table.get("quant_method")
    if isinstance(method, str) and method in REFUSED:
        raise ModelFilesError(f"config.json: quant_method {method!r} is not supported: {REFUSED[method]}")
    if not isinstance(method, str) or method not in PARSERS:
        supported = f"supported are {', '.join(sorted(PARSERS))}" if PARSERS else "none is supported"
        raise ModelFilesError(
            f"config.json: quant_method {reprlib.repr(method)} is not supported ({supported}); "
            "use the unquantised checkpoint or a GGUF file"
        )
    return PARSERS[method](table)
