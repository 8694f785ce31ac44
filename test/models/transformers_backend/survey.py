"""Tries every decoder of transformers that has no class here, as a tiny random model.

python -m test.models.transformers_backend.survey [model_type ...]

Prints whether it is served, or why not. Sizes that a config refuses are shown as an error of the survey.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightserve.errors import LightserveError
from lightserve.models.registry import MODELS
from test.models.transformers_backend.tiny_models import load

MAX_WEIGHTS = 20_000_000
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "sliding_window": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
}


def tiny_config(model_type: str) -> Any:
    """Four layers: the first two and the last two kinds that the config has by default."""
    default = AutoConfig.for_model(model_type)
    sizes = SIZES | (LATENTS if hasattr(default, "kv_lora_rank") else {})
    fields: dict[str, Any] = {name: size for name, size in sizes.items() if hasattr(default, name)}
    kinds = getattr(default, "layer_types", None)
    if isinstance(kinds, list):
        with contextlib.suppress(Exception):  # configs that derive the kinds themselves
            return AutoConfig.for_model(model_type, **fields, layer_types=kinds[:2] + kinds[-2:])
    return AutoConfig.for_model(model_type, **fields)


def reaction(model_type: str) -> str:
    config = tiny_config(model_type)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_WEIGHTS:
        return f"not tried: {count:,} weights in spite of small sizes"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.state_dict().values():
        if weight.is_floating_point():
            weight.normal_(std=0.15)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            layers = load(Path(folder), max_len=128).layers
        except LightserveError as error:
            return f"refused: {str(error).partition('here: ')[2] or error}"
    windows = {layer.options.window for layer in layers.values()} - {None}
    return "served" + (f", windows of {windows}" if windows else "")


def main(model_types: list[str]) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODELS.keys()):
        try:
            print(f"{model_type:26} {reaction(model_type)}", flush=True)
        except Exception as error:  # configs refuse sizes in their own ways
            print(f"{model_type:26} error: {' '.join(str(error).split())[:120]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
