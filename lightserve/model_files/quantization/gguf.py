"""Weights of GGUF files whose blocks stay packed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightserve.errors import ModelFilesError
from lightserve.model_files.gguf.header import ENCODINGS, Encoding
from lightserve.model_files.quantization.quant_config import PARSERS, QuantConfig, Scheme

OPTIONAL_PREFIXES = ("", "transformer.", "gpt_neox.")  # of names in transformers, which the models leave out
_OF_EXPERT = re.compile(r"\.\d+(?=\.\w+$)")  # its number in the name of a linear


class PackedType(NamedTuple):
    """How the numbers of a ggml type are kept in memory."""

    code_bits: int
    group_size: int
    has_offsets: bool = False
    scale_bits: int = 32  # of a scale and of an offset; 8: an exponent, for codes that are floats

    @property
    def bits(self) -> float:
        """Of a weight."""
        return self.code_bits + (1 + self.has_offsets) * self.scale_bits / self.group_size


PACKED_TYPES = {
    "Q4_0": PackedType(4, 32),
    "Q4_1": PackedType(4, 32, has_offsets=True),
    "Q5_0": PackedType(8, 32),
    "Q5_1": PackedType(8, 32, has_offsets=True),
    "Q8_0": PackedType(8, 32),
    "Q2_K": PackedType(4, 16, has_offsets=True),
    "Q3_K": PackedType(4, 16),
    "Q4_K": PackedType(4, 32, has_offsets=True),
    "Q5_K": PackedType(8, 32, has_offsets=True),
    "Q6_K": PackedType(8, 16),
    "IQ4_NL": PackedType(8, 32),
    "IQ4_XS": PackedType(8, 32),
    "MXFP4": PackedType(4, 32, scale_bits=8),
}


@dataclass(frozen=True)
class GgufScheme(Scheme):
    encoding: Encoding
    column_tiles: tuple[int, int] = (1, 1)  # of heads, whose columns change places: tiles, and heads in each


class GgufModule(NamedTuple):
    """A linear or an embedding whose blocks stay packed, or that linear of all experts of a layer."""

    type: str
    num_weights: int
    column_tiles: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class GgufQuantConfig(QuantConfig):
    modules: Mapping[str, GgufModule]  # by name in transformers; * stands for the number of each expert

    def scheme_of(self, module: str) -> Scheme | None:
        names = (f"{prefix}{name}" for prefix in OPTIONAL_PREFIXES for name in (module, _OF_EXPERT.sub(".*", module)))
        packed_module = next((self.modules[name] for name in names if name in self.modules), None)
        if packed_module is None:
            return None
        return GgufScheme(_ENCODINGS[packed_module.type], packed_module.column_tiles)

    def __str__(self) -> str:
        types = sorted({module.type for module in self.modules.values()})
        in_file = self._bits({name: 8 * encoding.n_bytes / encoding.block for name, encoding in _ENCODINGS.items()})
        in_memory = self._bits({name: packed_type.bits for name, packed_type in PACKED_TYPES.items()})
        return f"GGUF {', '.join(types)}, packed: {in_file:.1f} bits a weight in the file, {in_memory:.1f} in memory"

    def _bits(self, bits_of: Mapping[str, float]) -> float:
        total = sum(module.num_weights for module in self.modules.values())
        return sum(bits_of[module.type] * module.num_weights for module in self.modules.values()) / total


_ENCODINGS = {encoding.name: encoding for encoding in ENCODINGS.values()}


def _parse(table: Mapping[str, Any]) -> QuantConfig:
    """``modules`` comes from the header of a GGUF file; no config.json has it."""
    modules = table.get("modules")
    if not modules:
        raise ModelFilesError("config.json: quant_method gguf needs a .gguf file; set --model_dir to it")
    return GgufQuantConfig(modules)


PARSERS["gguf"] = _parse
