"""``adapter_config.json``: rank and scale of each module. What changes the result and is not implemented is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightserve.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
# Fields that say how the adapter was trained, or that other checks cover.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
# Initialisations that change the weights of the base model: an adapter that was not converted is wrong without them.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
REASONS = {
    "use_dora": "DoRA adapters are not supported; merge it into the model with PEFT",
    "modules_to_save": "whole modules beside the adapter are not supported; merge it into the model with PEFT",
    "bias": 'only adapters with bias "none" are supported; merge it into the model with PEFT',
    "lora_bias": "adapters with a bias are not supported; merge it into the model with PEFT",
}


@dataclass(frozen=True, slots=True)
class LoraConfig:
    path: Path
    rank: int
    alpha: float
    uses_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    targets: tuple[str, ...] = ()  # names that modules end with; empty: a pattern, or all linears
    covers_all_layers: bool = True

    def rank_of(self, module: str) -> int:
        return int(_value_for(module, self.rank_pattern, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of ``B @ A``."""
        rank, alpha = self.rank_of(module), float(_value_for(module, self.alpha_pattern, self.alpha))
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def read_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG_FILE
    fields = _read_object(path)
    _refuse_unsupported(path, fields)
    targets = fields.get("target_modules")
    return LoraConfig(
        path,
        rank=_positive_int(path, "r", fields.get("r", 8)),
        alpha=_number(path, "lora_alpha", fields.get("lora_alpha", 8)),
        uses_rslora=_flag(path, "use_rslora", fields.get("use_rslora")),
        rank_pattern={
            key: _positive_int(path, "rank_pattern", value) for key, value in _patterns(path, fields, "rank_pattern")
        },
        alpha_pattern={
            key: _number(path, "alpha_pattern", value) for key, value in _patterns(path, fields, "alpha_pattern")
        },
        targets=tuple(map(str, targets)) if isinstance(targets, list) else (),
        covers_all_layers=not any(fields.get(name) for name in ("layers_to_transform", "exclude_modules")),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes; save the adapter again with PEFT")
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read ({error.strerror}); name a folder that PEFT has saved") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not JSON; save the adapter again with PEFT") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{path}: not a JSON object; save the adapter again with PEFT")
    return fields


def _refuse_unsupported(path: Path, fields: dict[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type {kind!r} is not supported; supported: LORA")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights {start!r} changes the base model; convert the adapter to plain LoRA with PEFT"
        )
    for name, value in fields.items():
        is_unused = name in HARMLESS or name in READ or not value or (name == "bias" and value == "none")
        if not is_unused:
            reason = REASONS.get(name, "this field is not supported; merge the adapter into the model with PEFT")
            raise AdapterError(f"{path}: {name} {_short(value)}: {reason}")


def _value_for(module: str, patterns: dict[str, Any], default: Any) -> Any:
    """The first pattern that matches the end of the module's name counts, as in PEFT."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _patterns(path: Path, fields: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{path}: {name} {_short(patterns)}: must be an object")
    for key in patterns:
        try:
            re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            raise AdapterError(f"{path}: {name}: {_short(key)} is no regular expression ({error})") from error
    return list(patterns.items())


def _positive_int(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{path}: {name} {_short(value)}: must be an integer of at least 1")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{path}: {name} {_short(value)}: must be a number")
    return float(value)


def _flag(path: Path, name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{path}: {name} {_short(value)}: must be true or false")
    return bool(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
