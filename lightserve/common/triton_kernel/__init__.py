"""Triton implementations of the ops; importing this package registers them as backend "triton".

``linear`` is not here: PyTorch calls cuBLAS for it.
"""

from lightserve.common.triton_kernel import (
    activation,
    apply_penalties,
    argmax,
    context_attention,
    cut_atypical,
    cut_logits,
    layer_norm,
    rms_norm,
    rotary,
    sample,
    token_attention,
    vocab_embedding,
    write_kv,
)

__all__ = [
    "activation",
    "apply_penalties",
    "argmax",
    "context_attention",
    "cut_atypical",
    "cut_logits",
    "layer_norm",
    "rms_norm",
    "rotary",
    "sample",
    "token_attention",
    "vocab_embedding",
    "write_kv",
]
