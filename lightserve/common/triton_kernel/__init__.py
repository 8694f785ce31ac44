"""Triton implementations of the ops; importing this package registers them as backend "triton"."""

from lightserve.common.triton_kernel import (
    activation,
    apply_penalties,
    choose,
    context_attention,
    cut_atypical,
    cut_logits,
    fixed_order,
    layer_norm,
    linear,
    mask_logits,
    place_tokens,
    rms_norm,
    rotary_write_kv,
    token_attention,
    vocab_embedding,
    write_kv,
)

__all__ = [
    "activation",
    "apply_penalties",
    "choose",
    "context_attention",
    "cut_atypical",
    "cut_logits",
    "fixed_order",
    "layer_norm",
    "linear",
    "mask_logits",
    "place_tokens",
    "rms_norm",
    "rotary_write_kv",
    "token_attention",
    "vocab_embedding",
    "write_kv",
]
