"""Reads what the config.json of a DFlash drafter says: a few layers that draft all tokens of a block at once.

It comes in two formats, as that of an EAGLE-3 head does. The original one is the config of a Qwen3 model with the field
``dflash_config``. The ``speculators`` format has the layers in ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.draft_head import LAYER_TYPES, SPECULATORS_TYPE, check_target, head_error
from lightserve.model_files.folder import read_json

KINDS = ("DFlashDraftModel", "dflash")  # the architecture of the original format, and the type of the other one
NOT_SUPPORTED = ("sample_from_anchor", "causal", "use_swa")  # in dflash_config or beside it


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    layers: ModelConfig
    aux_layers: tuple[int, ...]  # it reads the hidden states after so many layers of the model
    target_hidden_size: int
    draft_vocab_size: int
    mask_token_id: int
    block_size: int  # tokens of a block; the first one is no draft

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> DFlashConfig:
        """Raises an OptionError if the drafter is not for a model like ``target``."""
        hf = read_json(folder / "config.json")
        fields = {**hf, **(hf.get("dflash_config") or {})}
        layers = _layers(folder, hf)
        for name in NOT_SUPPORTED:
            if fields.get(name):
                raise head_error(folder, f"{name} is not supported yet; use another drafter")
        target_hidden = int(hf.get("target_hidden_size") or layers.hidden_size)
        check_target(folder, layers, target_hidden, target)
        return cls(
            layers,
            _aux_layers(folder, fields, layers.num_layers, target.num_layers),
            target_hidden,
            int(hf.get("draft_vocab_size") or layers.vocab_size),
            _number(folder, fields, "mask_token_id", 0, layers.vocab_size - 1),
            _number(folder, fields, "block_size", 2),
        )


def _layers(folder: Path, hf: Mapping[str, Any]) -> ModelConfig:
    is_original = SPECULATORS_TYPE not in hf
    kind = (hf.get("architectures") or [""])[0] if is_original else hf[SPECULATORS_TYPE]
    if kind not in KINDS:
        problem = f"config.json is of {kind or 'no architecture'!r}, not of DFlash"
        raise head_error(folder, f"{problem}; use a DFlash drafter")
    layers = dict(hf) if is_original else dict(hf.get("transformer_layer_config") or {})
    if layers.get("model_type") not in LAYER_TYPES:
        wanted = " or ".join(LAYER_TYPES)
        raise head_error(folder, f"its layers are of model_type {layers.get('model_type')!r}, wanted {wanted}")
    if "sliding_attention" in (layers.get("layer_types") or hf.get("layer_types") or ()):
        raise head_error(folder, "layers with a sliding window are not supported yet; use another drafter")
    if layers.get("quantization_config"):
        raise head_error(folder, "it is quantised; use the drafter in bfloat16")
    try:
        return ModelConfig.from_hf(layers)
    except ModelFilesError as error:
        raise head_error(folder, str(error)) from error


def _aux_layers(folder: Path, fields: Mapping[str, Any], count: int, target_layers: int) -> tuple[int, ...]:
    """The files count layers from 0: 2 are the hidden states after three layers."""
    ids = fields.get("target_layer_ids") or fields.get("aux_hidden_state_layer_ids") or _spread(target_layers, count)
    if not all(isinstance(layer, int) and 0 <= layer < target_layers for layer in ids):
        problem = f"it reads the hidden states of the layers {list(ids)}, and the model has {target_layers}"
        raise head_error(folder, f"{problem}; use the drafter that was trained for this model")
    return tuple(layer + 1 for layer in ids)


def _spread(target_layers: int, count: int) -> list[int]:
    """So many layers from the second to the last but two, as in training if the file names none."""
    if count == 1:
        return [target_layers // 2]
    return [round(1 + number * (target_layers - 4) / (count - 1)) for number in range(count)]


def _number(folder: Path, fields: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise head_error(folder, f"{name} is {value!r}, wanted a number {bounds}")
    return value
