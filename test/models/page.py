"""Writes docs/models.md: every model that is served, from the registry, the models' files and the parity cases.

python -m test.models.page
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from lightserve.common.basemodel import LayerSpec, ModelArgs, TpPartBaseModel
from lightserve.common.parallel import Parallel
from lightserve.model_files.gguf.architectures import ARCHITECTURES
from lightserve.model_files.pooling.config import ENCODERS
from lightserve.models.registry import MODELS, get_model_class, read_model_config
from test.models.architectures.case import Json, build
from test.models.architectures.cases import CASES

FAMILIES = {
    "Yi": "Yi",
    "afmoe": "Trinity Nano, Mini, Large",
    "apertus": "Apertus",
    "aquila": "Aquila 2",
    "arcee": "Arcee AFM",
    "axk1": "A.X K1",
    "aya_vision": "Aya Vision, with images",
    "baichuan": "Baichuan 1 and 2",
    "bailing_hybrid": "Ling 3",
    "bailing_moe": "Ling 1, 1.5, Ring",
    "bailing_moe_v2": "Ling 2, Ring 2",
    "bamba": "Bamba",
    "bert": "BERT, MiniLM, bge, e5",
    "bitnet": "BitNet without quantization_config",
    "bloom": "BLOOM, BLOOMZ",
    "camembert": "CamemBERT",
    "chatglm": "ChatGLM 2 and 3, GLM-4-9B",
    "cohere": "Command R, R+, Aya",
    "cohere2": "Command R7B, Command A",
    "cohere2_vision": "Command A Vision, with images",
    "cwm": "CWM",
    "deci": "DeciLM",
    "deepseek_v2": "DeepSeek V2, V2-Lite",
    "deepseek_v3": "DeepSeek V3, R1",
    "deepseek_v32": "DeepSeek V3.2",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "falcon": "Falcon, Falcon 2",
    "falcon_h1": "Falcon-H1",
    "flex_olmo": "FlexOlmo",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, with images",
    "gemma3_text": "Gemma 3 270M, 1B",
    "gemma4": "Gemma 4 E2B, E4B, 26B-A4B, 31B, with images",
    "gemma4_text": "language model of Gemma 4",
    "gemma4_unified": "Gemma 4 12B, with images",
    "gemma4_unified_text": "language model of Gemma 4 12B",
    "glm": "GLM-4-9B, GLM-Edge",
    "glm4": "GLM-4-0414, GLM-Z1",
    "glm46v": "GLM-4.6V, with images",
    "glm4_moe": "GLM-4.5, 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm4v": "GLM-4.1V, with images",
    "glm4v_moe": "GLM-4.5V, with images",
    "glm_moe_dsa": "GLM-5",
    "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "gpt_neox": "Pythia, GPT-NeoX",
    "gpt_oss": "gpt-oss, MXFP4 or bfloat16",
    "gptj": "GPT-J",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "granite_swa": "Granite SWA",
    "granitemoe_swa": "Granite SWA MoE",
    "granitemoehybrid": "Granite 4",
    "granitemoeshared": "Granite MoE Shared",
    "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "hy_v3": "Hy3",
    "hyperclovax": "HyperCLOVA X SEED Think",
    "idefics3": "Idefics 3, first SmolVLM, with images",
    "internlm": "InternLM",
    "internlm2": "InternLM 2, 2.5",
    "internlm3": "InternLM 3",
    "internvl": "InternVL 2.5, 3 (transformers' format), with images",
    "jais2": "Jais 2",
    "kimi_k2": "Kimi K2",
    "kimi_k25": "Kimi K2.5, K2.6, with images",
    "kimi_linear": "Kimi Linear",
    "lfm2": "LFM 2, 2.5",
    "lfm2_vl": "LFM 2 VL, 2.5 VL, with images",
    "lfm2_moe": "LFM 2 8B-A1B",
    "llama": "Llama 1 to 3, SmolLM 2",
    "llama4": "Llama 4 Scout, Maverick, with images",
    "llama4_text": "language model of Llama 4",
    "llava": "LLaVA 1.5, Pixtral 12B, with images",
    "llava_next": "LLaVA-Next (1.6), with images",
    "llava_onevision": "LLaVA-OneVision, with images",
    "mellum": "Mellum 2",
    "mimo_v2": "MiMo-V2.5, text only",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minicpm": "MiniCPM 1, 2, 4 up to its dense_len",
    "minicpm3": "MiniCPM 3",
    "minimax": "MiniMax-Text-01 in transformers' format",
    "minimax_m1": "MiniMax M1",
    "minimax_m2": "MiniMax M2",
    "minimax_text_01": "MiniMax-Text-01",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3",
    "mistral": "Mistral, Mistral Nemo",
    "mistral3": "Mistral Small 3.1 and 4, Ministral 3, with images",
    "mistral4": "Mistral Small 4",
    "mixtral": "Mixtral",
    "modernbert": "ModernBERT, gte-modernbert",
    "mpt": "MPT",
    "nemotron": "Nemotron 3, 4, Minitron",
    "nemotron-nas": "Llama-Nemotron",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2, Nemotron 3",
    "nomic_bert": "nomic-embed-text 1 and 1.5",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo Hybrid",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "paligemma": "PaliGemma 1, 2, with images",
    "phi": "Phi 1, 1.5, 2",
    "phi3": "Phi 3, 3.5, 4",
    "qwen": "Qwen 1",
    "qwen2": "Qwen 1.5, 2, 2.5, QwQ",
    "qwen2_5_vl": "Qwen 2.5 VL, with images",
    "qwen2_audio": "Qwen2-Audio, with sounds",
    "qwen2_moe": "Qwen 1.5 MoE, 2 MoE",
    "qwen2_vl": "Qwen 2 VL, with images",
    "qwen3": "Qwen 3",
    "qwen3_5": "Qwen 3.5, 3.6, 3.8, with images",
    "qwen3_5_moe": "Qwen 3.5 MoE, 3.6 MoE, with images",
    "qwen3_5_moe_text": "Qwen 3.5 MoE without the vision part",
    "qwen3_5_text": "Qwen 3.5 without the vision part",
    "qwen3_moe": "Qwen 3 MoE",
    "qwen3_next": "Qwen 3 Next, Qwen 3 Coder Next",
    "qwen3_vl": "Qwen 3 VL, with images",
    "qwen3_vl_moe": "Qwen 3 VL MoE, with images",
    "roberta": "RoBERTa",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM 3",
    "smolvlm": "SmolVLM, SmolVLM 2, with images",
    "solar_open": "Solar Open",
    "stablelm": "StableLM 2, 3B, 12B",
    "starcoder2": "StarCoder 2",
    "step3p5": "Step 3.5",
    "step3p7": "Step 3.7, text only",
    "vaultgemma": "VaultGemma",
    "xlm-roberta": "XLM-RoBERTa, bge-m3, multilingual-e5",
    "xverse": "XVERSE",
    "youtu": "Youtu-LLM",
}
# models that are served as another one when they come from a GGUF file
GGUF_NAMES = {
    "Yi": "llama",
    "deci": "deci",
    "gemma3": "gemma3",
    "glm4_moe_lite": "deepseek2",
    "internlm2": "internlm2",
    "internlm3": "llama",
    "kimi_k2": "deepseek2",
    "llama": "llama",
    "nemotron-nas": "deci",
    "xverse": "xverse",
}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
INTRODUCTION = """\
# Models

Serve any model of this list with `--model_dir`. The column `model_type` is what the model's
`config.json` says. A model that is not in it may be [run by transformers](transformers.md), slowly. To
add one, see [adding_a_model.md](adding_a_model.md); what else is read from a model's folder or GGUF
file is in [model_files.md](model_files.md).

`python -m test.models.page` writes this page, and a test compares it. *Lines* are
those of the model's file that are not blank. *Cases* are the shapes in which the model gives the
logits of transformers, over prompts of 170 tokens in chunks, with a cached prefix, in decode steps,
in half precision and on two ranks (`test/models/test_architectures.py`). Compare a real one on your
machine with [`lightserve parity`](transformers.md#compare-a-model-with-transformers). *GGUF* names the
architectures of llama.cpp that are read. Every one of them embeds texts too, with `--task embed`.
"""
NOTES = """\

## Notes

- `phi3`: models with longrope (Phi-3 with 128 k tokens, Phi-4-mini) have two tables of factors. A
  server uses one for all requests: the long factors if its longest request is over the trained
  length, which is so by default. Short prompts then differ a little from transformers, which uses
  the short factors for them. `--max_req_total_len 4096` gives the logits of transformers.
- `minicpm`: MiniCPM 4 attends sparsely from `dense_len` tokens on (8,192 in its files). That is its
  longest request here.
- `deepseek_v32`, `glm_moe_dsa`: from `index_topk` tokens on (2,048 in their files), a query attends
  to the tokens that [an indexer chooses](kernels.md#sparse-attention). Its keys are stored in
  `--data_type` beside the latents: 128 numbers beside 576. `--max_req_total_len 2048` serves these
  models as dense ones, without those keys. A layer that shares the choice of the layer before it
  (`indexer_types`, `index_topk_freq`) cannot begin a stage of `--pp`.
- `aya_vision`, `cohere2_vision`: logits are multiplied by `logit_scale`, as those of `cohere2`, whose
  weights they have. The classes of transformers 5.22 for the whole models leave it out.
- `llama4`: layers with positions attend to chunks of 8,192 tokens: the KV cache keeps those of one
  chunk, as it does for windows. Set `--max_req_total_len`: Scout's files allow 10 million tokens.
  Files in which each token has several experts are refused.
- `gemma4`: audio and video are refused, and the tensors of audio are not loaded. Layers that share
  the keys and values of another layer (E2B, E4B) take no KV memory. These models take no `--pp`: a
  layer reads values that the first stage has computed. Their table of per-layer inputs (2.3 of the
  4.6 billion weights of E2B) is split over the ranks of `--tp`.
- `minimax`, `minimax_m1`, `minimax_text_01`: heads rotate in part if the file has `rotary_dim`, as in
  MiniMax's code; transformers rotates them whole. A running request has a state of 4 MB in each layer with
  lightning attention, 280 MB in all. Files with other factors than 1 of what a half adds are refused.
- `nemotron_h`: layers for drafts are not loaded. Steps are limited by `time_step_limit`, as in
  NVIDIA's code; transformers limits them by `time_step_min`. Files with latent projections and
  `mlp_bias` are refused.
- `bitnet`: Microsoft's checkpoints round weights and inputs in every product, which their
  `quantization_config` says. They are refused.
- Models with recurrent layers: drafts are refused together with `--deterministic`.
  A cached prefix is continued where a state was kept: see [Recurrent states](scheduling.md#recurrent-states).
- `mimo_v2_flash`: the KV cache stores values as wide as keys, 192 numbers instead of 128, which takes
  a fifth more memory.
- `mimo_v2`: images and audio are refused, and their tensors and those of layers for drafts are not
  loaded. Files with q, k and v in one tensor of fp8 have them in `--data_type` here.
- `step3p5`, `step3p7`: layers for drafts are not loaded. Images of Step 3.7 are refused, and the tensors
  of its vision part are not loaded."""
ENCODER_INTRODUCTION = """\

## Encoders

These compute embeddings and scores: see [embeddings.md](embeddings.md). `test/pooling/test_parity.py`
compares them with transformers.
"""


FORMATS_INTRODUCTION = """\

## Tool calls, reasoning, ranks and quantised files

The formats of tool calls and of reasoning are found in a model's chat template, and
`--tool_call_parser` and `--reasoning_parser` set them by name. `test/text/parsing/test_detection.py`
has the markers of {count} templates; these are some of them. Every family works with `--tp`, and from
float files as well as [quantised ones](quantization.md). The table above says which GGUF files are read.

| family | tool calls | reasoning |
|---|---|---|
"""
TEMPLATE_MARKERS = Path(__file__).parents[1] / "text" / "parsing" / "template_markers.json"
# by family: a template of it in template_markers.json
TEMPLATES = {
    "Qwen 3": "Qwen-Qwen3-0.6B",
    "Qwen 3 Coder, Qwen 3 Coder Next": "Qwen3-Coder",
    "Qwen 3.5, 3.6, 3.8": "Qwen3.5-4B",
    "GLM-4.5, 4.6": "GLM-4.6",
    "GLM-4.7-Flash": "GLM-4.7-Flash",
    "DeepSeek V3.1": "deepseek-ai-DeepSeek-V3.1",
    "DeepSeek V3.2": "deepseek-ai-DeepSeek-V3.2",
    "Kimi K2": "Kimi-K2-Instruct",
    "Kimi K2 Thinking": "Kimi-K2-Thinking",
    "Nemotron Nano 2": "NVIDIA-Nemotron-Nano-v2",
    "Nemotron 3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "LFM2": "LFM2-8B-A1B",
    "LFM2.5": "LFM2.5-8B-A1B",
    "Granite 4": "ibm-granite-granite-4.0",
    "Gemma 4": "google-gemma-4-31B-it",
    "Mistral Small 3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    "Ministral 3 Reasoning": "mistralai-Ministral-3-14B-Reasoning-2512",
    "MiniMax M2": "MiniMax-M2",
    "gpt-oss": "openai-gpt-oss-120b",
    "Seed-OSS": "ByteDance-Seed-OSS",
}


def _formats() -> str:
    known = json.loads(TEMPLATE_MARKERS.read_text())
    rows = [_format_row(family, known[template]) for family, template in TEMPLATES.items()]
    return FORMATS_INTRODUCTION.format(count=len(known)) + "\n".join(rows)


def _format_row(family: str, formats: Json) -> str:
    tools, reasoning = formats["tools"], (formats["reasoning"] or "").replace("|", "\\|")
    return f"| {family} | `{tools}` | {f'`{reasoning}`' if reasoning else ''} |"


def page() -> str:
    configs = _configs_by_type()
    decoders = sorted(MODELS.keys() - ENCODERS, key=str.lower)
    rows = [_row(model_type, configs[model_type]) for model_type in decoders]
    head = "| model_type | models | has | lines | cases | GGUF |\n|---|---|---|--:|--:|---|"
    encoders = ["| model_type | models | lines |\n|---|---|--:|", *map(_encoder_row, sorted(ENCODERS))]
    counted = f"{len(MODELS)} model types: {len(decoders)} generate text, {len(ENCODERS)} are [encoders](#encoders).\n"
    return "\n".join([INTRODUCTION, counted, head, *rows, _formats(), NOTES, ENCODER_INTRODUCTION, *encoders, ""])


def _configs_by_type() -> dict[str, list[Json]]:
    by_type: dict[str, list[Json]] = defaultdict(list)
    for case in CASES.values():
        config_json = build(case).config_json
        by_type[config_json["model_type"]].append(config_json)
    return by_type


def _encoder_row(model_type: str) -> str:
    return f"| `{model_type}` | {FAMILIES[model_type]} | {_lines(model_type)} |"


def _lines(model_type: str) -> int:
    module = MODELS[model_type].partition(":")[0]
    file = Path(__file__).parents[2] / f"{module.replace('.', '/')}.py"
    return sum(bool(line.strip()) for line in file.read_text().splitlines())


def _row(model_type: str, configs: list[Json]) -> str:
    has = ", ".join(sorted({feature for config in configs for feature in _features(config)}))
    gguf = GGUF_NAMES.get(model_type) or ", ".join(_gguf_names(model_type))
    return f"| `{model_type}` | {FAMILIES[model_type]} | {has} | {_lines(model_type)} | {len(configs)} | {gguf} |"


def _gguf_names(model_type: str) -> list[str]:
    return sorted(name for name, family in ARCHITECTURES.items() if any(one.model_type == model_type for one in family))


def _features(config_json: Json) -> Iterator[str]:
    model = _declared(config_json)
    if any(group.value_size == 0 for group in model._kv_layout().groups):
        yield "latent attention"
    if model.config.count_or_0("index_topk"):
        yield "sparse attention"
    if model.spec.names.positions:
        yield "learned positions"
    for spec in model.layer_specs:
        yield from _layer_features(spec)


def _layer_features(spec: LayerSpec) -> Iterator[str]:
    yield from (
        name
        for name, is_set in {
            "experts": spec.moe,
            "window": spec.window,
            "softcap": spec.softcap,
            "sinks": spec.has_sinks,
            "recurrent layers": spec.mixer,
            "ALiBi": spec.alibi_slopes,
            "partial rope": spec.rope and spec.rotary_dim < spec.head_dim,
            "qk norm": spec.qk_norm,
            "parallel halves": spec.is_parallel,
            "post norms": spec.names.att_post_norm,
            "shared KV": spec.kv_source is not None,
            "K = V": not spec.has_v_proj,
            "per-layer inputs": spec.config.count_or_0("hidden_size_per_layer_input"),
            "sub norms": spec.names.o_norm,
        }.items()
        if is_set
    )


def _declared(config_json: Json) -> TpPartBaseModel:
    """The model's specs, without its weights."""
    config = read_model_config(config_json, None)
    model_class = get_model_class(config.model_type)
    model = model_class.__new__(model_class)
    model._init_args(ModelArgs(config, torch.float32, torch.device("meta"), Parallel(), None, 1, 1, 1))
    return model


if __name__ == "__main__":
    PAGE.write_text(page())
