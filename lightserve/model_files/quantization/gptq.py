"""``quant_method`` gptq: the files of AutoGPTQ and GPTQModel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization import fields
from lightserve.model_files.quantization.grouped import GptqScheme, GptqV2Scheme
from lightserve.model_files.quantization.quant_config import PARSERS, QuantConfig, Scheme

BITS = (4, 8)
FORMATS = {"gptq": GptqScheme, "gptq_v2": GptqV2Scheme}


@dataclass(frozen=True)
class Rule:
    """GPTQModel's ``dynamic``: the scheme of modules whose names begin with a pattern."""

    pattern: re.Pattern[str]
    scheme: Scheme | None


@dataclass(frozen=True)
class GptqConfig(QuantConfig):
    scheme: GptqScheme | GptqV2Scheme
    has_quantized_head: bool
    rules: tuple[Rule, ...]  # the first one that matches counts
    only: tuple[str, ...]  # modules of a block that are quantised; empty: all

    def scheme_of(self, module: str) -> Scheme | None:
        if not self._is_converted(module):
            return None
        return next((rule.scheme for rule in self.rules if rule.pattern.match(module)), self.scheme)

    def _is_converted(self, module: str) -> bool:
        name = fields.last_name(module)
        if not fields.is_in_block(module):
            return self.has_quantized_head and name in fields.HEADS
        return name not in fields.ROUTERS and (not self.only or module.endswith(self.only))

    def __str__(self) -> str:
        return f"gptq, {self.scheme}{', with other rules for some modules' if self.rules else ''}"


def parse_gptq(table: Mapping[str, Any]) -> GptqConfig:
    if fields.flag(table, "is_marlin_format", False):
        raise fields.refused("is_marlin_format", True, "false")
    version = fields.choice(table, "checkpoint_format" if "checkpoint_format" in table else "format", FORMATS, "gptq")
    dynamic = fields.subtable(table, "dynamic")
    return GptqConfig(
        _scheme(table, version),
        fields.flag(table, "lm_head", False),
        tuple(_rule(key, table, version) for key in dynamic),
        _only(table),
    )


def _scheme(table: Mapping[str, Any], version: str) -> GptqScheme | GptqV2Scheme:
    bits = fields.choice(table, "bits", BITS)
    group = fields.group_size(table, default=128)
    # With one group the order of its inputs does not matter.
    is_act_order = fields.flag(table, "desc_act", False) and group is not None
    return FORMATS[version](bits, group, fields.flag(table, "sym", True), is_act_order)


def _rule(key: str, table: Mapping[str, Any], version: str) -> Rule:
    """ "-:PATTERN" keeps modules as floats; "+:PATTERN" or "PATTERN" has other values for them."""
    pattern = fields.pattern("dynamic", key.removeprefix("-:").removeprefix("+:"))
    if key.startswith("-:"):
        return Rule(pattern, None)
    return Rule(pattern, _scheme({**table, **fields.subtable(table["dynamic"], key)}, version))


def _only(table: Mapping[str, Any]) -> tuple[str, ...]:
    """``modules_in_block_to_quantize``: lists of names, one for each step of the quantiser."""
    steps = table.get("modules_in_block_to_quantize") or []
    if not isinstance(steps, list):
        raise fields.refused("modules_in_block_to_quantize", steps, "a list of lists of names")
    step_names = [fields.names({"step": step if isinstance(step, list) else [step]}, "step") for step in steps]
    return tuple(f".{name}" for step in step_names for name in step)


PARSERS["gptq"] = parse_gptq
