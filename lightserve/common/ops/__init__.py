"""What a model may compute. Models call these; backends implement them."""

from lightserve.common.ops.activation import gelu, gelu_and_mul, gelu_tanh, gelu_tanh_and_mul, silu_and_mul
from lightserve.common.ops.attention import AttnBatch, context_attention, token_attention, write_kv
from lightserve.common.ops.embedding import vocab_embedding
from lightserve.common.ops.linear import linear
from lightserve.common.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from lightserve.common.ops.registry import OPS, REFERENCE, use_backend
from lightserve.common.ops.rotary import rotary
from lightserve.common.ops.sampling import Penalties, apply_penalties, argmax, cut_atypical, cut_logits, sample

__all__ = [
    "OPS",
    "REFERENCE",
    "AttnBatch",
    "Penalties",
    "add_layer_norm",
    "add_rms_norm",
    "apply_penalties",
    "argmax",
    "context_attention",
    "cut_atypical",
    "cut_logits",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "layer_norm",
    "linear",
    "rms_norm",
    "rotary",
    "sample",
    "silu_and_mul",
    "token_attention",
    "use_backend",
    "vocab_embedding",
    "write_kv",
]
