"""``model_type`` of config.json -> where the model's class is. A model's module is imported only when it is served."""

from __future__ import annotations

from importlib import import_module

from lightserve.common.basemodel import TpPartBaseModel
from lightserve.errors import ModelFilesError

MODELS = {
    "bloom": "lightserve.models.bloom.model:BloomTpPartModel",
    "llama": "lightserve.models.llama.model:LlamaTpPartModel",
    "qwen2": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen3": "lightserve.models.qwen3.model:Qwen3TpPartModel",
}


def get_model_class(model_type: str) -> type[TpPartBaseModel]:
    if model_type not in MODELS:
        raise ModelFilesError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(MODELS))}")
    module, name = MODELS[model_type].split(":")
    model_class: type[TpPartBaseModel] = getattr(import_module(module), name)
    return model_class
