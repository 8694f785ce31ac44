"""The class of every supported ``model_type``. Its module is imported only when the model is served.

The launcher reads the names, so there is no torch here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightserve.errors import ModelFilesError

if TYPE_CHECKING:
    from lightserve.common.basemodel import TpPartBaseModel

MODELS = {
    "bloom": "lightserve.models.bloom.model:BloomTpPartModel",
    "deepseek_v2": "lightserve.models.deepseek.model:DeepseekTpPartModel",
    "deepseek_v3": "lightserve.models.deepseek.model:DeepseekTpPartModel",
    "kimi_k2": "lightserve.models.deepseek.model:DeepseekTpPartModel",
    "llama": "lightserve.models.llama.model:LlamaTpPartModel",
    "qwen2": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen3": "lightserve.models.qwen3.model:Qwen3TpPartModel",
}


def check_supported(model_type: str) -> None:
    if model_type not in MODELS:
        raise ModelFilesError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(MODELS))}")


def get_model_class(model_type: str) -> type[TpPartBaseModel]:
    check_supported(model_type)
    module, name = MODELS[model_type].split(":")
    model_class: type[TpPartBaseModel] = getattr(import_module(module), name)
    return model_class
