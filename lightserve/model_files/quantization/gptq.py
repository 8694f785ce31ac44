"""``quant_method`` gptq: the files of AutoGPTQ and GPTQModel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.model_files.quantization.fields import (
    check_value,
    choice,
    flag,
    group_size_of,
    names,
    number_of,
    refused,
    subtable,
)
from lightserve.model_files.quantization.grouped import GptqScheme, GptqV2Scheme
from lightserve.model_files.quantization.module_names import compile_pattern, is_head, is_in_layer
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, parses

FORMATS: dict[str, type[GptqScheme] | type[GptqV2Scheme]] = {"gptq": GptqScheme, "gptq_v2": GptqV2Scheme}


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
    only: tuple[str, ...]  # modules of a layer that are quantised; empty: all

    def scheme_of(self, module: str) -> Scheme | None:
        if not self._is_converted(module):
            return None
        return next((rule.scheme for rule in self.rules if rule.pattern.match(module)), self.scheme)

    def _is_converted(self, module: str) -> bool:
        if is_in_layer(module):
            return not self.only or module.endswith(self.only)
        return self.has_quantized_head and is_head(module)

    def __str__(self) -> str:
        return f"gptq, {self.scheme}{', with other rules for some modules' if self.rules else ''}"


@parses("gptq")
def parse_gptq(table: Mapping[str, Any]) -> GptqConfig:
    check_value(table, "is_marlin_format", False)
    field = "checkpoint_format" if table.get("checkpoint_format") else "format"
    kind = choice({field: table.get(field) or "gptq"}, field, FORMATS)
    rules = tuple(_rule(key, table, kind) for key in subtable(table, "dynamic"))
    return GptqConfig(_scheme(table, kind), flag(table, "lm_head", False), rules, _only(table))


def _scheme(table: Mapping[str, Any], kind: type[GptqScheme] | type[GptqV2Scheme]) -> GptqScheme | GptqV2Scheme:
    group = group_size_of(table)
    is_act_order = flag(table, "desc_act", False) and group is not None  # one group has no order
    return kind(number_of(table, "bits", 4, 8), group, flag(table, "sym", True), is_act_order)


def _rule(key: str, table: Mapping[str, Any], kind: type[GptqScheme] | type[GptqV2Scheme]) -> Rule:
    """``-:PATTERN`` keeps modules as floats; ``+:PATTERN`` or ``PATTERN`` has other values for them."""
    pattern = compile_pattern(key.removeprefix("-:").removeprefix("+:"))
    if key.startswith("-:"):
        return Rule(pattern, None)
    return Rule(pattern, _scheme({**table, **subtable(table["dynamic"], key)}, kind))


def _only(table: Mapping[str, Any]) -> tuple[str, ...]:
    """``modules_in_block_to_quantize``: lists of names, one for each step of the quantiser."""
    field = "modules_in_block_to_quantize"
    steps = table.get(field) or []
    if not isinstance(steps, list):
        raise refused(field, steps, "lists of module names", "correct it")
    step_names = [names({field: step if isinstance(step, list) else [step]}, field) for step in steps]
    return tuple(f".{name}" for step in step_names for name in step)
