"""Tiny random models that transformers computes, as folders. nanochat has no class here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lightserve.common.basemodel import ModelArgs
from lightserve.common.parallel import Parallel
from lightserve.model_files.source import resolve
from lightserve.model_files.transformers_config import read_transformers_config
from lightserve.models.transformers_backend.model import TransformersTpPartModel
from test.models.architectures.case import MAX_LEN, SMALL, Case, build
from test.small_text import EOS, small_backend

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = {
    "nanochat": Case("nanochat", {**SMALL, "final_logit_softcapping": 3.0}),
    "helium": Case("helium", {**SMALL, "head_dim": 8}),
    "ernie4_5_moe": Case("ernie4_5_moe", {**SMALL, **EXPERTS, "moe_num_experts": 4, "moe_k": 2, "head_dim": 16}),
    # keys of 20 numbers, values of 10
    "minicpm3": Case("minicpm3", {**SMALL, **LATENTS}),
    # windows, softcap, a scale of its own
    "vaultgemma": Case(
        "vaultgemma",
        {
            **SMALL,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 21,
            "layer_types": TYPES,
        },
    ),
    # sinks, windows, and heads that differ from layer to layer
    "mimo_v2_flash": Case(
        "mimo_v2_flash",
        {
            **SMALL,
            **EXPERTS,
            "num_attention_heads": 8,
            "head_dim": 16,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 21,
            "layer_types": TYPES,
        },
    ),
}


def save(case: Case, folder: Path) -> Any:
    """Write the folder of a model, and return transformers' model."""
    hf = build(case).hf
    hf.save_pretrained(folder)
    return hf


def load(folder: Path, max_len: int = MAX_LEN, trusts_code: bool = False) -> TransformersTpPartModel:
    source = resolve(str(folder), trusts_code=trusts_code)
    config = read_transformers_config(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TransformersTpPartModel(
        ModelArgs(config, torch.float32, device, Parallel(), iter(()), 640, 8, max_len, source=source)
    )


def save_with_tokenizer(case: Case, folder: Path) -> Any:
    """Like ``save``, with the tokenizer of small_text and a chat template."""
    hf = save(case, folder)
    backend = small_backend()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": template}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": backend.token_to_id(EOS)}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return hf
