"""Encoders: BERT, as which XLM-RoBERTa's files come too, and Nomic BERT. They are small: no weight stays packed."""

from __future__ import annotations

from typing import Any

from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, Names
from lightserve.model_files.gguf.fields import LAYER_EPS, bad_value, has_tensor, number, unsupported
from lightserve.model_files.gguf.header import GgufHeader

CAUSAL = "attention.causal"
POOLING_TYPES = {1: "mean", 2: "cls", 3: "last"}
RANK = 4


def gguf_pooling(header: GgufHeader) -> str | None:
    """How a model that was trained for embeddings pools; None: the file does not say it."""
    pooling: str | None = POOLING_TYPES.get(header.metadata.get(f"{header.architecture}.pooling_type", 0))
    return pooling


def encoder_fields(header: GgufHeader) -> dict[str, Any]:
    if header.metadata.get(f"{header.architecture}.pooling_type") == RANK or "cls.output.weight" in header.tensors:
        raise unsupported(header, "rerankers are not read from GGUF files; use the folder of the model")
    if header.metadata.get(f"{header.architecture}.{CAUSAL}", False):
        raise bad_value(header, CAUSAL, True, "False")
    types = header.tensors.get("token_types.weight")
    return {
        "rms_norm_eps": number(header, LAYER_EPS),
        "type_vocab_size": 0 if types is None else int(types.shape[0]),
        "tie_word_embeddings": True,
    }


def bert_fields(header: GgufHeader) -> dict[str, Any]:
    positions = header.tensors.get("position_embd.weight")
    if positions is None:
        raise unsupported(header, "tensor position_embd.weight is missing; convert the model again")
    return {**encoder_fields(header), "hidden_act": "gelu", "max_position_embeddings": int(positions.shape[0])}


def nomic_bert_fields(header: GgufHeader) -> dict[str, Any]:
    return {
        **encoder_fields(header),
        "hidden_act": "silu",
        "rope_theta": number(header, "rope.freq_base", 1000.0),
        "qkv_proj_bias": has_tensor(header, "attn_qkv.bias"),
        "mlp_fc1_bias": has_tensor(header, "ffn_up.bias"),
        "mlp_fc2_bias": has_tensor(header, "ffn_down.bias"),
    }


_OUTSIDE: Names = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}
_BERT: Names = {
    **_OUTSIDE,
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_NOMIC_BERT: Names = {
    **_OUTSIDE,
    "token_embd_norm": "emb_ln",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
_OPTIONS = frozenset({CAUSAL})
ARCHITECTURES = {
    "bert": (
        GgufArchitecture(
            "bert", "BertModel", bert_fields, "encoder.layer", _BERT, expanded=frozenset(_BERT), options=_OPTIONS
        ),
    ),
    "nomic-bert": (
        GgufArchitecture(
            "nomic_bert",
            "NomicBertModel",
            nomic_bert_fields,
            "encoder.layers",
            _NOMIC_BERT,
            expanded=frozenset(_NOMIC_BERT),
            options=_OPTIONS,
        ),
    ),
}
