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
    "aquila": "lightserve.models.llama.model:LlamaTpPartModel",
    "baichuan": "lightserve.models.baichuan.model:BaichuanTpPartModel",
    "bloom": "lightserve.models.bloom.model:BloomTpPartModel",
    "chatglm": "lightserve.models.chatglm.model:ChatGlmTpPartModel",
    "deci": "lightserve.models.llama.model:LlamaTpPartModel",
    "exaone4": "lightserve.models.exaone4.model:Exaone4TpPartModel",
    "glm": "lightserve.models.glm.model:GlmTpPartModel",
    "glm4": "lightserve.models.glm4.model:Glm4TpPartModel",
    "granite": "lightserve.models.granite.model:GraniteTpPartModel",
    "internlm": "lightserve.models.internlm.model:InternLmTpPartModel",
    "internlm2": "lightserve.models.internlm2.model:InternLm2TpPartModel",
    "internlm3": "lightserve.models.internlm.model:InternLm3TpPartModel",
    "llama": "lightserve.models.llama.model:LlamaTpPartModel",
    "minicpm": "lightserve.models.minicpm.model:MiniCpmTpPartModel",
    "ministral": "lightserve.models.mistral.model:MistralTpPartModel",
    "mistral": "lightserve.models.mistral.model:MistralTpPartModel",
    "nemotron-nas": "lightserve.models.llama.model:LlamaTpPartModel",
    "olmo": "lightserve.models.olmo.model:OlmoTpPartModel",
    "olmo2": "lightserve.models.olmo2.model:Olmo2TpPartModel",
    "olmo3": "lightserve.models.olmo3.model:Olmo3TpPartModel",
    "qwen": "lightserve.models.qwen.model:QwenTpPartModel",
    "qwen2": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen3": "lightserve.models.qwen3.model:Qwen3TpPartModel",
    "seed_oss": "lightserve.models.seed_oss.model:SeedOssTpPartModel",
    "smollm3": "lightserve.models.smollm3.model:SmolLM3TpPartModel",
    "xverse": "lightserve.models.llama.model:LlamaTpPartModel",
    "Yi": "lightserve.models.llama.model:LlamaTpPartModel",
}


def check_supported(model_type: str) -> None:
    if model_type not in MODELS:
        raise ModelFilesError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(MODELS))}")


def get_model_class(model_type: str) -> type[TpPartBaseModel]:
    check_supported(model_type)
    module, name = MODELS[model_type].split(":")
    model_class: type[TpPartBaseModel] = getattr(import_module(module), name)
    return model_class
