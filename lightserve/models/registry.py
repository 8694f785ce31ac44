"""The class of every supported ``model_type``. Its module is imported only when the model is served.

Another package registers its model in its own pyproject.toml:

    [project.entry-points."lightserve.models"]
    my_model = "my_package.model:MyModelTpPartModel"

The class states by ``api_version`` which version of ``TpPartBaseModel`` it was written for: an override of a method
that has another name by now would never be called.

The launcher reads the names, so there is no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightserve.errors import ModelFilesError, UnsupportedModelTypeError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.text_part import with_text_config
from lightserve.model_files.quantization import OnLoadConfig, OnLoadScheme, read_on_load_config
from lightserve.utils.spelling import nearest

if TYPE_CHECKING:
    from lightserve.common.basemodel import TpPartBaseModel

ENTRY_POINTS = "lightserve.models"
TRANSFORMERS_BACKEND = "lightserve.models.transformers_backend.model:TransformersTpPartModel"
MODELS = {
    "Yi": "lightserve.models.llama.model:LlamaTpPartModel",
    "afmoe": "lightserve.models.afmoe.model:AfmoeTpPartModel",
    "apertus": "lightserve.models.apertus.model:ApertusTpPartModel",
    "aquila": "lightserve.models.llama.model:LlamaTpPartModel",
    "arcee": "lightserve.models.arcee.model:ArceeTpPartModel",
    "axk1": "lightserve.models.axk1.model:AXK1TpPartModel",
    "aya_vision": "lightserve.models.cohere2.model:Cohere2TpPartModel",
    "baichuan": "lightserve.models.baichuan.model:BaichuanTpPartModel",
    "bailing_hybrid": "lightserve.models.bailing_hybrid.model:BailingHybridTpPartModel",
    "bailing_moe": "lightserve.models.bailing_moe.model:BailingMoeTpPartModel",
    "bailing_moe_v2": "lightserve.models.bailing_moe.model:BailingMoeV2TpPartModel",
    "bamba": "lightserve.models.bamba.model:BambaTpPartModel",
    "bert": "lightserve.models.bert.model:BertTpPartModel",
    "bitnet": "lightserve.models.bitnet.model:BitNetTpPartModel",
    "bloom": "lightserve.models.bloom.model:BloomTpPartModel",
    "camembert": "lightserve.models.roberta.model:RobertaTpPartModel",
    "chatglm": "lightserve.models.chatglm.model:ChatGlmTpPartModel",
    "cohere": "lightserve.models.cohere.model:CohereTpPartModel",
    "cohere2": "lightserve.models.cohere2.model:Cohere2TpPartModel",
    "cohere2_vision": "lightserve.models.cohere2.model:Cohere2TpPartModel",
    "cwm": "lightserve.models.mistral.model:MistralTpPartModel",
    "deci": "lightserve.models.llama.model:LlamaTpPartModel",
    "deepseek_v2": "lightserve.models.deepseek.model:DeepseekV2TpPartModel",
    "deepseek_v3": "lightserve.models.deepseek.model:DeepseekTpPartModel",
    "deepseek_v32": "lightserve.models.deepseek_v32.model:DeepseekV32TpPartModel",
    "dots1": "lightserve.models.dots1.model:Dots1TpPartModel",
    "ernie4_5": "lightserve.models.ernie4_5.model:Ernie45TpPartModel",
    "ernie4_5_moe": "lightserve.models.ernie4_5_moe.model:Ernie45MoeTpPartModel",
    "exaone4": "lightserve.models.exaone4.model:Exaone4TpPartModel",
    "exaone_moe": "lightserve.models.exaone_moe.model:ExaoneMoeTpPartModel",
    "falcon": "lightserve.models.falcon.model:FalconTpPartModel",
    "falcon_h1": "lightserve.models.falcon_h1.model:FalconH1TpPartModel",
    "flex_olmo": "lightserve.models.flex_olmo.model:FlexOlmoTpPartModel",
    "gemma": "lightserve.models.gemma.model:GemmaTpPartModel",
    "gemma2": "lightserve.models.gemma2.model:Gemma2TpPartModel",
    "gemma3": "lightserve.models.gemma3.model:Gemma3TextTpPartModel",
    "gemma3_text": "lightserve.models.gemma3.model:Gemma3TextTpPartModel",
    "gemma4": "lightserve.models.gemma4.model:Gemma4TpPartModel",
    "gemma4_text": "lightserve.models.gemma4.model:Gemma4TpPartModel",
    "gemma4_unified": "lightserve.models.gemma4.model:Gemma4TpPartModel",
    "gemma4_unified_text": "lightserve.models.gemma4.model:Gemma4TpPartModel",
    "glm": "lightserve.models.glm.model:GlmTpPartModel",
    "glm4": "lightserve.models.glm4.model:Glm4TpPartModel",
    "glm46v": "lightserve.models.glm4.model:Glm4TpPartModel",
    "glm4_moe": "lightserve.models.glm4_moe.model:Glm4MoeTpPartModel",
    "glm4_moe_lite": "lightserve.models.glm4_moe_lite.model:Glm4MoeLiteTpPartModel",
    "glm4v": "lightserve.models.glm4.model:Glm4TpPartModel",
    "glm4v_moe": "lightserve.models.glm4_moe.model:Glm4MoeTpPartModel",
    "glm_moe_dsa": "lightserve.models.deepseek_v32.model:DeepseekV32TpPartModel",
    "gpt2": "lightserve.models.gpt2.model:Gpt2TpPartModel",
    "gpt_bigcode": "lightserve.models.gpt_bigcode.model:GptBigCodeTpPartModel",
    "gpt_neox": "lightserve.models.gpt_neox.model:GptNeoxTpPartModel",
    "gpt_oss": "lightserve.models.gpt_oss.model:GptOssTpPartModel",
    "gptj": "lightserve.models.gptj.model:GptJTpPartModel",
    "granite": "lightserve.models.granite.model:GraniteTpPartModel",
    "granite_swa": "lightserve.models.granite_swa.model:GraniteSwaTpPartModel",
    "granitemoe": "lightserve.models.granitemoe.model:GraniteMoeTpPartModel",
    "granitemoe_swa": "lightserve.models.granitemoe_swa.model:GraniteMoeSwaTpPartModel",
    "granitemoehybrid": "lightserve.models.granitemoehybrid.model:GraniteMoeHybridTpPartModel",
    "granitemoeshared": "lightserve.models.granitemoeshared.model:GraniteMoeSharedTpPartModel",
    "helium": "lightserve.models.helium.model:HeliumTpPartModel",
    "hunyuan_v1_dense": "lightserve.models.hunyuan_v1_dense.model:HunyuanTpPartModel",
    "hunyuan_v1_moe": "lightserve.models.hunyuan_v1_moe.model:HunyuanMoeTpPartModel",
    "hy_v3": "lightserve.models.hy_v3.model:HyV3TpPartModel",
    "hyperclovax": "lightserve.models.hyperclovax.model:HyperClovaXTpPartModel",
    "idefics3": "lightserve.models.llama.model:LlamaTpPartModel",
    "internlm": "lightserve.models.internlm.model:InternLmTpPartModel",
    "internlm2": "lightserve.models.internlm2.model:InternLm2TpPartModel",
    "internlm3": "lightserve.models.internlm.model:InternLm3TpPartModel",
    "internvl": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "jais2": "lightserve.models.jais2.model:Jais2TpPartModel",
    "kimi_k2": "lightserve.models.deepseek.model:DeepseekTpPartModel",
    "kimi_k25": "lightserve.models.deepseek.model:DeepseekTpPartModel",
    "kimi_linear": "lightserve.models.kimi_linear.model:KimiLinearTpPartModel",
    "lfm2": "lightserve.models.lfm2.model:Lfm2TpPartModel",
    "lfm2_vl": "lightserve.models.lfm2.model:Lfm2TpPartModel",
    "lfm2_moe": "lightserve.models.lfm2_moe.model:Lfm2MoeTpPartModel",
    "llama": "lightserve.models.llama.model:LlamaTpPartModel",
    "llama4": "lightserve.models.llama4.model:Llama4TpPartModel",
    "llama4_text": "lightserve.models.llama4.model:Llama4TpPartModel",
    "llava": "lightserve.models.llama.model:LlamaTpPartModel",
    "llava_next": "lightserve.models.llama.model:LlamaTpPartModel",
    "llava_onevision": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "mellum": "lightserve.models.mellum.model:MellumTpPartModel",
    "mimo_v2": "lightserve.models.mimo_v2_flash.model:MiMoV2TpPartModel",
    "mimo_v2_flash": "lightserve.models.mimo_v2_flash.model:MiMoV2FlashTpPartModel",
    "minicpm": "lightserve.models.minicpm.model:MiniCpmTpPartModel",
    "minicpm3": "lightserve.models.minicpm3.model:MiniCpm3TpPartModel",
    "minimax": "lightserve.models.minimax.model:MiniMaxTpPartModel",
    "minimax_m1": "lightserve.models.minimax.model:MiniMaxTpPartModel",
    "minimax_m2": "lightserve.models.minimax_m2.model:MiniMaxM2TpPartModel",
    "minimax_text_01": "lightserve.models.minimax.model:MiniMaxTpPartModel",
    "ministral": "lightserve.models.mistral.model:MistralTpPartModel",
    "ministral3": "lightserve.models.mistral.model:Ministral3TpPartModel",
    "mistral": "lightserve.models.mistral.model:MistralTpPartModel",
    "mistral3": "lightserve.models.mistral.model:MistralTpPartModel",
    "mistral4": "lightserve.models.mistral4.model:Mistral4TpPartModel",
    "mixtral": "lightserve.models.mixtral.model:MixtralTpPartModel",
    "modernbert": "lightserve.models.modernbert.model:ModernBertTpPartModel",
    "mpt": "lightserve.models.mpt.model:MptTpPartModel",
    "nemotron": "lightserve.models.nemotron.model:NemotronTpPartModel",
    "nemotron-nas": "lightserve.models.llama.model:LlamaTpPartModel",
    "nemotron_h": "lightserve.models.nemotron_h.model:NemotronHTpPartModel",
    "nomic_bert": "lightserve.models.nomic_bert.model:NomicBertTpPartModel",
    "olmo": "lightserve.models.olmo.model:OlmoTpPartModel",
    "olmo2": "lightserve.models.olmo2.model:Olmo2TpPartModel",
    "olmo3": "lightserve.models.olmo3.model:Olmo3TpPartModel",
    "olmo_hybrid": "lightserve.models.olmo_hybrid.model:OlmoHybridTpPartModel",
    "olmoe": "lightserve.models.olmoe.model:OlmoeTpPartModel",
    "opt": "lightserve.models.opt.model:OptTpPartModel",
    "paligemma": "lightserve.models.gemma.model:GemmaTpPartModel",
    "phi": "lightserve.models.phi.model:PhiTpPartModel",
    "phi3": "lightserve.models.phi3.model:Phi3TpPartModel",
    "qwen": "lightserve.models.qwen.model:QwenTpPartModel",
    "qwen2": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen2_5_vl": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen2_audio": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen2_moe": "lightserve.models.qwen2_moe.model:Qwen2MoeTpPartModel",
    "qwen2_vl": "lightserve.models.qwen2.model:Qwen2TpPartModel",
    "qwen3": "lightserve.models.qwen3.model:Qwen3TpPartModel",
    "qwen3_5": "lightserve.models.qwen3_5.model:Qwen35TpPartModel",
    "qwen3_5_moe": "lightserve.models.qwen3_5_moe.model:Qwen35MoeTpPartModel",
    "qwen3_5_moe_text": "lightserve.models.qwen3_5_moe.model:Qwen35MoeTpPartModel",
    "qwen3_5_text": "lightserve.models.qwen3_5.model:Qwen35TpPartModel",
    "qwen3_moe": "lightserve.models.qwen3_moe.model:Qwen3MoeTpPartModel",
    "qwen3_next": "lightserve.models.qwen3_next.model:Qwen3NextTpPartModel",
    "qwen3_vl": "lightserve.models.qwen3.model:Qwen3TpPartModel",
    "qwen3_vl_moe": "lightserve.models.qwen3_vl_moe.model:Qwen3VlMoeTpPartModel",
    "roberta": "lightserve.models.roberta.model:RobertaTpPartModel",
    "seed_oss": "lightserve.models.seed_oss.model:SeedOssTpPartModel",
    "smollm3": "lightserve.models.smollm3.model:SmolLM3TpPartModel",
    "smolvlm": "lightserve.models.llama.model:LlamaTpPartModel",
    "solar_open": "lightserve.models.solar_open.model:SolarOpenTpPartModel",
    "stablelm": "lightserve.models.stablelm.model:StableLmTpPartModel",
    "starcoder2": "lightserve.models.starcoder2.model:Starcoder2TpPartModel",
    "step3p5": "lightserve.models.step3p5.model:Step3p5TpPartModel",
    "step3p7": "lightserve.models.step3p5.model:Step3p5TpPartModel",
    "vaultgemma": "lightserve.models.vaultgemma.model:VaultGemmaTpPartModel",
    "xlm-roberta": "lightserve.models.roberta.model:RobertaTpPartModel",
    "xverse": "lightserve.models.llama.model:LlamaTpPartModel",
    "youtu": "lightserve.models.youtu.model:YoutuTpPartModel",
}


def supported_models() -> dict[str, str]:
    """By model_type: the built-in classes and those of other packages, which come first."""
    return MODELS | _of_packages()


def _of_packages() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}


def check_supported(model_type: str) -> None:
    _class_path(model_type)


def _class_path(model_type: str) -> str:
    supported = supported_models()
    if model_type not in supported:
        near = nearest(model_type, supported)
        meant = "" if near is None else f"did you mean {near}? "
        others = f"{meant}`lightserve models` lists the {len(supported)} that are"
        raise UnsupportedModelTypeError(f"model_type {model_type!r} is not supported; {others}")
    return supported[model_type]


def read_model_config(
    config_json: Mapping[str, Any],
    model_type: str | None,
    quantization: str | None = None,
    quantization_config: str | None = None,
) -> ModelConfig:
    """``model_type`` replaces that of config.json, if it is set. ``quantization`` is done while loading.

    ``gguf`` and ``none`` are up to the source: see ``model_files.source.stored_as``. ``quantization_config`` is a file
    with a choice for each module.
    """
    hf = with_text_config({**config_json, "model_type": model_type} if model_type else config_json)
    check_supported(str(hf.get("model_type"))[:100])  # before the shape: other models name its fields differently
    config = ModelConfig.from_hf(hf)
    is_kept = quantization in (None, "gguf") or (quantization == "none" and config.quantization is None)
    if is_kept and quantization_config is None:
        return config
    if config.quantization is not None:
        raise ModelFilesError(
            f"--quantization {quantization or quantization_config}: the checkpoint is quantised already "
            f"({config.quantization}); leave it out"
        )
    if quantization is not None:
        return replace(config, quantization=OnLoadConfig(OnLoadScheme(quantization)))
    return replace(config, quantization=read_on_load_config(Path(quantization_config or "")))


def get_model_class(model_type: str, is_of_transformers: bool = False) -> type[TpPartBaseModel]:
    """``is_of_transformers``: transformers' modules compute the model, whatever it is."""
    path = TRANSFORMERS_BACKEND if is_of_transformers else _class_path(model_type)
    module, _, name = path.partition(":")
    try:
        model_class: type[TpPartBaseModel] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelFilesError(f"model_type {model_type!r}: {path} cannot be imported ({error})") from error
    if path in _of_packages().values():
        _check_version(model_type, path, model_class)
    return model_class


def _check_version(model_type: str, path: str, model_class: type[TpPartBaseModel]) -> None:
    from lightserve.common.basemodel import API_VERSION  # imports torch

    version = getattr(model_class, "api_version", None)
    if version != API_VERSION:
        raise ModelFilesError(
            f"model_type {model_type!r}: {path} was written for version {version} of lightserve.common.basemodel, and "
            f"this is version {API_VERSION}; install a release of its package for it, which sets api_version"
        )
