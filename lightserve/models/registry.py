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
    "arcee": "lightserve.models.arcee.model:ArceeTpPartModel",
    "bloom": "lightserve.models.bloom.model:BloomTpPartModel",
    "cohere": "lightserve.models.cohere.model:CohereTpPartModel",
    "cohere2": "lightserve.models.cohere2.model:Cohere2TpPartModel",
    "falcon": "lightserve.models.falcon.model:FalconTpPartModel",
    "gemma": "lightserve.models.gemma.model:GemmaTpPartModel",
    "gemma2": "lightserve.models.gemma2.model:Gemma2TpPartModel",
    "gemma3": "lightserve.models.gemma3.model:Gemma3TpPartModel",
    "gemma3_text": "lightserve.models.gemma3.model:Gemma3TextTpPartModel",
    "gpt2": "lightserve.models.gpt2.model:Gpt2TpPartModel",
    "gpt_bigcode": "lightserve.models.gpt_bigcode.model:GptBigCodeTpPartModel",
    "gpt_neox": "lightserve.models.gpt_neox.model:GptNeoxTpPartModel",
    "gptj": "lightserve.models.gptj.model:GptJTpPartModel",
    "llama": "lightserve.models.llama.model:LlamaTpPartModel",
    "mpt": "lightserve.models.mpt.model:MptTpPartModel",
    "nemotron": "lightserve.models.nemotron.model:NemotronTpPartModel",
    "opt": "lightserve.models.opt.model:OptTpPartModel",
    "phi": "lightserve.models.phi.model:PhiTpPartModel",
    "phi3": "lightserve.models.phi3.model:Phi3TpPartModel",
    "qwen2": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen3": "lightserve.models.qwen3.model:Qwen3TpPartModel",
    "stablelm": "lightserve.models.stablelm.model:StableLmTpPartModel",
    "starcoder2": "lightserve.models.starcoder2.model:Starcoder2TpPartModel",
}


def check_supported(model_type: str) -> None:
    if model_type not in MODELS:
        raise ModelFilesError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(MODELS))}")


def get_model_class(model_type: str) -> type[TpPartBaseModel]:
    check_supported(model_type)
    module, name = MODELS[model_type].split(":")
    model_class: type[TpPartBaseModel] = getattr(import_module(module), name)
    return model_class
