"""Reads what the config.json of an EAGLE-3 head says.

It comes in two formats. The original one is the config of one Llama layer with fields of the head beside it. The
``speculators`` format has the layer in ``transformer_layer_config``, and names the model that the head is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError, OptionError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.folder import read_json

SPECULATORS_TYPE = "speculators_model_type"
LAYER_TYPES = ("llama", "qwen3")  # what the layer of an EAGLE-3 head may be
DEFAULT_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    layer: ModelConfig
    aux_layers: tuple[int, ...]  # the head reads the hidden states after so many layers of the model
    target_hidden_size: int
    draft_vocab_size: int
    is_original: bool  # tensors are named midlayer.*, not layers.0.*
    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> Eagle3Config:
        """Raises an OptionError if the head is not for a model like ``target``."""
        hf = read_json(folder / "config.json")
        is_original = SPECULATORS_TYPE not in hf
        layer = _layer(folder, hf, is_original)
        for name in ("fc_norm", "parallel_drafting"):
            if hf.get(name):
                raise head_error(folder, f"{name} is not supported yet; use another head")
        target_hidden = int(hf.get("target_hidden_size") or layer.hidden_size)
        check_target(folder, layer, target_hidden, target)
        return cls(
            layer,
            _aux_layers(folder, hf, target.num_layers),
            target_hidden,
            int(hf.get("draft_vocab_size") or layer.vocab_size),
            is_original,
            bool(hf.get("norm_before_residual", not is_original)),
            bool(hf.get("norm_before_fc", False)),
            bool(hf.get("norm_output", False)),
        )


def _layer(folder: Path, hf: Mapping[str, Any], is_original: bool) -> ModelConfig:
    kind = str((hf.get("architectures") or [""])[0]) if is_original else str(hf[SPECULATORS_TYPE])
    if "eagle3" not in kind.lower():
        raise head_error(
            folder, f"config.json is of {kind or 'no architecture'!r}, not of EAGLE-3; use an EAGLE-3 head"
        )
    layer = dict(hf) if is_original else dict(hf.get("transformer_layer_config") or {})
    if layer.get("model_type") not in LAYER_TYPES:
        wanted = " or ".join(LAYER_TYPES)
        raise head_error(folder, f"its layer is of model_type {layer.get('model_type')!r}, wanted {wanted}")
    layers = layer.setdefault("num_hidden_layers", 1)
    if layers != 1:
        raise head_error(folder, f"it has {layers} layers; only heads of one layer are supported")
    if layer.get("quantization_config"):
        raise head_error(folder, "it is quantised; use the head in bfloat16")
    if "target_hidden_size" not in hf and not is_original and hf.get("hidden_size"):
        layer.setdefault("hidden_size", hf["hidden_size"])
    try:
        return ModelConfig.from_hf(layer)
    except ModelFilesError as error:
        raise head_error(folder, str(error)) from error


def check_target(folder: Path, layer: ModelConfig, target_hidden: int, target: ModelConfig) -> None:
    """Whether a head in ``folder`` may be for the model. ``target_hidden``: the hidden size that it reads."""
    if layer.vocab_size != target.vocab_size:
        problem = f"its vocabulary has {layer.vocab_size} tokens, the vocabulary of the model {target.vocab_size}"
        raise head_error(folder, f"{problem}; use the head that was trained for this model")
    if target_hidden != target.hidden_size:
        problem = f"it is for a model with hidden_size {target_hidden}, and the model has {target.hidden_size}"
        raise head_error(folder, f"{problem}; use the head that was trained for this model")


def _aux_layers(folder: Path, hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    eagle = hf.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state", True) is False:
        raise head_error(folder, "use_aux_hidden_state false is not supported; use another head")
    ids = hf.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(ids) if ids else (2, num_layers // 2, num_layers - 3)
    if not all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in layers):
        problem = f"it reads the hidden states after {list(layers)} layers, and the model has {num_layers}"
        raise head_error(folder, f"{problem}; use the head that was trained for this model")
    return layers


def head_error(folder: Path, problem: str) -> OptionError:
    return OptionError(f"speculative_config: {folder}: {problem}")
