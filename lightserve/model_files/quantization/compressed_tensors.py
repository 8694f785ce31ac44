"""``quant_method`` compressed-tensors: groups of linears, each with a format.

A format is added to ``SCHEMES``: from the group to its scheme. A torch-free parser decides here what is supported, and
a ``WeightFormat`` in ``common/quantization`` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization.eight_bit import BLOCK, EightBitScheme, InputScales
from lightserve.model_files.quantization.fields import check_value, choice, names, refused, subtable
from lightserve.model_files.quantization.module_names import REGEX, compile_pattern, is_linear, is_listed
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, parses

LINEAR = "Linear"  # the class: a target that means all linears
# quantization_status of files that hold codes; tools of 2024 wrote "frozen". Loading refuses tensors of other types.
STORED = ("compressed", "frozen")


@dataclass(frozen=True)
class Group:
    """An entry of ``config_groups``."""

    name: str
    format: str
    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bits(self) -> int:
        bits = self.weights.get("num_bits", 8)
        if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 16:
            raise refused("weights.num_bits", bits, "a number of bits", "correct it")
        return bits

    @property
    def is_symmetric(self) -> bool:
        return self.weights.get("symmetric", True) is True

    @property
    def group_size(self) -> int:
        """Of the strategy "group"."""
        size = self.weights.get("group_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise refused("weights.group_size", size, "a positive number", "correct it")
        return size

    def rank(self, module: str) -> int:
        """How closely the group means a linear; 0: not at all."""
        if module in self.targets:
            return 3
        patterns = (target.removeprefix(REGEX) for target in self.targets if target.startswith(REGEX))
        if any(compile_pattern(pattern).match(module) for pattern in patterns):
            return 2
        return 1 if LINEAR in self.targets else 0


def eight_bit_scheme(group: Group) -> EightBitScheme:
    """int-quantized, float-quantized and naive-quantized: one number per element."""
    weights = group.weights
    check_value(weights, "num_bits", 8)
    check_value(weights, "dynamic", False)
    check_value(weights, "actorder", "weight", "static")  # these change no tensor
    code = choice(weights, "type", {"int": "int8", "float": "fp8"}, default="int")
    scales = choice(weights, "strategy", {"tensor": "row", "channel": "row", "group": "group", "block": "block"})
    if scales == "block":
        check_value(weights, "block_structure", [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
    inputs, unused = _inputs(group)
    return EightBitScheme(
        code=code,  # type: ignore[arg-type]
        scales=scales,  # type: ignore[arg-type]
        inputs=inputs,
        group_size=group.group_size if scales == "group" else BLOCK,
        has_zero_points=not group.is_symmetric,
        stored_input=unused,
    )


def _inputs(group: Group) -> tuple[InputScales, tuple[str, ...]]:
    """How inputs are rounded, and the tensors about it that are not used.

    Inputs with zero points are not rounded: the product is more exact than the checkpoint asks for.
    """
    activations = group.input_activations
    if not activations:
        return "none", ()
    check_value(activations, "num_bits", 8)
    check_value(activations, "type", group.weights.get("type", "int"))
    check_value(activations, "strategy", "tensor", "token", "group")
    is_symmetric = activations.get("symmetric", True) is True
    if activations.get("dynamic") is True:
        is_grouped = activations.get("strategy") == "group"
        if is_grouped:
            check_value(activations, "group_size", BLOCK)
        return ("group" if is_grouped else "token") if is_symmetric else "none", ()
    check_value(activations, "dynamic", False)
    check_value(activations, "strategy", "tensor")
    return ("static", ()) if is_symmetric else ("none", ("input_scale", "input_zero_point"))


# By format. pack-quantized (4 and 8 bits in int32 words) and the fp4 formats are added by the modules that read them.
SCHEMES: dict[str, Callable[[Group], Scheme]] = {
    "int-quantized": eight_bit_scheme,
    "float-quantized": eight_bit_scheme,
    "naive-quantized": eight_bit_scheme,
}


@dataclass(frozen=True)
class CompressedTensorsConfig(QuantConfig):
    schemes: tuple[tuple[Group, Scheme], ...]
    ignored: tuple[str, ...]

    def scheme_of(self, module: str) -> Scheme | None:
        if not is_linear(module) or LINEAR in self.ignored or is_listed(module, self.ignored):
            return None
        group, scheme = max(self.schemes, key=lambda entry: entry[0].rank(module))  # the first of the closest ones
        return scheme if group.rank(module) else None

    def __str__(self) -> str:
        return f"compressed-tensors: {'; '.join(dict.fromkeys(str(scheme) for _, scheme in self.schemes))}"


@parses("compressed-tensors")
def read_compressed_tensors(table: Mapping[str, Any]) -> CompressedTensorsConfig:
    check_value(table, "quantization_status", *STORED)
    check_value(subtable(table, "sparsity_config"), "format", "dense")
    if subtable(table, "transform_config").get("config_groups"):
        raise refused("transform_config", "with rotations", "none")
    groups = [_group(name, entry, table) for name, entry in subtable(table, "config_groups").items()]
    if not groups:
        raise ModelFilesError("quantization_config: config_groups is empty; fetch config.json again")
    schemes = tuple((group, _scheme(group)) for group in groups)
    return CompressedTensorsConfig(schemes, names(table, "ignore"))


def _group(name: str, entry: Any, table: Mapping[str, Any]) -> Group:
    if not isinstance(entry, dict):
        raise refused(f"config_groups.{name}", entry, "an object", "correct it")
    if entry.get("output_activations"):
        raise refused(f"config_groups.{name}.output_activations", "with a value", "null")
    file_format = entry.get("format") or table.get("format")
    targets = names(entry, "targets")
    for target in targets:
        is_class = target.isidentifier() and target[0].isupper()
        if is_class and target != LINEAR:
            raise refused(f"config_groups.{name}.targets", target, f"{LINEAR}, names and {REGEX} patterns")
        if target.startswith(REGEX):
            compile_pattern(target.removeprefix(REGEX))
    return Group(name, str(file_format), targets, subtable(entry, "weights"), subtable(entry, "input_activations"))


def _scheme(group: Group) -> Scheme:
    if not group.weights:
        raise refused(f"config_groups.{group.name}.weights", "null", "quantised weights")
    return choice({"format": group.format}, "format", SCHEMES)(group)
