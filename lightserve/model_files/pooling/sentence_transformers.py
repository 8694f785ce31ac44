"""The files that sentence-transformers adds to a model's folder.

``modules.json`` lists what follows the transformer: pooling, dense layers and a normalisation, each with a folder of
its own. ``config_sentence_transformers.json`` has prompts, ``sentence_bert_config.json`` the longest text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json, read_json_if_exists
from lightserve.model_files.pooling.head import HeadLayer
from lightserve.model_files.pooling.late_interaction import METADATA, LateInteraction, read_pylate

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
FILES = (MODULES, SETTINGS, "sentence_bert_config.json", "[0-9]_*/config.json", METADATA)
DENSE_WEIGHTS = ("[0-9]_Dense/model.safetensors", "[0-9]_Dense/pytorch_model.bin")

# the flag of 1_Pooling/config.json: our name
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
POOLING_NAMES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}  # newer files: pooling_mode
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    pooling: str
    dense: tuple[HeadLayer, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_len: int | None = None  # tokens
    late: LateInteraction | None = None  # the vectors of tokens are not pooled


def read_sentence_transformer(folder: Path) -> SentenceTransformer | None:
    """None if the folder has no ``modules.json``."""
    path = folder / MODULES
    if not path.is_file():
        return None
    pooling: str | None = None
    dense: list[HeadLayer] = []
    for kind, name in _modules(path):
        if kind == "Pooling":
            pooling = _pooling(folder / name / "config.json")
        elif kind == "Dense":
            dense.append(_dense(folder / name / "config.json", name))
        elif kind not in ("Transformer", "Normalize", "Dropout"):
            raise ModelFilesError(
                f"{path}: the module {kind} is not supported; supported: Transformer, Pooling, Dense, Normalize"
            )
    settings = read_json_if_exists(folder / SETTINGS)
    prompts, default = _prompts(folder / SETTINGS, settings)
    if pooling is None and (settings.get("similarity_fn_name") == "MaxSim" or "query_prefix" in settings):
        late = read_pylate(folder / SETTINGS, settings)
        longest = max(late.query_length, late.document_length)
        return SentenceTransformer("tokens", tuple(dense), prompts, default, longest, late)
    if pooling is None:
        raise ModelFilesError(f"{path}: it has no Pooling module; add one, or set --pooling")
    return SentenceTransformer(pooling, tuple(dense), prompts, default, _max_len(folder))


def _modules(path: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [(str(module["type"]).rpartition(".")[2], _folder_name(path, module["path"])) for module in modules]
    except (ValueError, OSError, TypeError, KeyError, RecursionError) as error:
        raise ModelFilesError(f"{path}: not readable as a list of modules ({error}); download it again") from error


def _folder_name(path: Path, name: Any) -> str:
    """The folder of a module is inside the model's folder."""
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelFilesError(f"{path}: the path {str(name)[:100]!r} is not inside the model's folder; correct it")
    return name


def _pooling(path: Path) -> str:
    config = read_json(path)
    modes = [name for flag, name in POOLING_MODES.items() if config.get(flag) is True]
    enabled = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value is True]
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes, enabled = [POOLING_NAMES[named]] if named in POOLING_NAMES else [], [named]
    if len(modes) != 1 or len(enabled) != 1:
        given = ", ".join(enabled) or "none"
        raise ModelFilesError(f"{path}: pooling {given}; supported is exactly one of {', '.join(POOLING_NAMES)}")
    if config.get("include_prompt", True) is not True and modes[0] != "last":
        raise ModelFilesError(f"{path}: include_prompt false is not supported; the prompt is always pooled too")
    return modes[0]


def _dense(path: Path, name: str) -> HeadLayer:
    config = read_json(path)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelFilesError(
            f"{path}: activation_function {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    if config.get("use_residual") is True:
        raise ModelFilesError(f"{path}: use_residual true is not supported; supported: false")
    in_size, out_size = (_size(path, config, key) for key in ("in_features", "out_features"))
    has_bias = config.get("bias", True) is True
    return HeadLayer(f"{name}.linear", in_size, out_size, has_bias, ACTIVATIONS[activation])


def _size(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 2**20:
        raise ModelFilesError(f"{path}: {key} is {value!r}, wanted a positive integer; correct it")
    return value


def _prompts(path: Path, config: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelFilesError(f"{path}: prompts is not an object of texts; correct it")
    if default is not None and default not in prompts:
        raise ModelFilesError(f"{path}: default_prompt_name {default!r} is not one of {', '.join(prompts) or 'none'}")
    return prompts, default


def _max_len(folder: Path) -> int | None:
    value = read_json_if_exists(folder / "sentence_bert_config.json").get("max_seq_length")
    return value if isinstance(value, int) and value > 0 else None
