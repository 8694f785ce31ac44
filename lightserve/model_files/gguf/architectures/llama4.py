"""Llama 4. Files do not have its chunks, nor the scale of queries in layers without positions: llama.cpp fixes them."""

from __future__ import annotations

from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, Names
from lightserve.model_files.gguf.architectures.experts import SHARED_LINEARS, expert_fields
from lightserve.model_files.gguf.architectures.llama_like import rotary_decoder_fields
from lightserve.model_files.gguf.fields import count
from lightserve.model_files.gguf.header import GgufHeader

CHUNK = 8192
WITHOUT_QK_NORM = 128  # experts: Maverick


def llama4_fields(header: GgufHeader) -> dict[str, Any]:
    fields, experts = rotary_decoder_fields(header), expert_fields(header)
    return {
        **fields,
        **experts,
        "intermediate_size": experts["moe_intermediate_size"],
        "intermediate_size_mlp": count(header, "feed_forward_length"),
        "interleave_moe_layer_step": count(header, "interleave_moe_layer_step"),
        "use_qk_norm": experts["num_experts"] != WITHOUT_QK_NORM,
        "attention_chunk_size": CHUNK,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": CHUNK,
        "attn_scale": 0.1,
    }


_FFN: Names = {name.replace("_shexp", ""): f"feed_forward.{linear}" for name, linear in SHARED_LINEARS.items()}
_TENSORS: Names = {
    **names.LLAMA,
    **_FFN,
    "ffn_gate_inp": "feed_forward.router",
    **{name.replace("_shexp", "_exps"): f"feed_forward.experts.*.{linear}" for name, linear in SHARED_LINEARS.items()},
    **{name: f"feed_forward.shared_expert.{linear}" for name, linear in SHARED_LINEARS.items()},
}

ARCHITECTURES = {
    "llama4": (
        GgufArchitecture(
            "llama4_text",
            "Llama4ForCausalLM",
            llama4_fields,
            names.LAYERS,
            _TENSORS,
            options=frozenset({"expert_count"}),
        ),
    )
}
