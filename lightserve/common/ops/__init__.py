"""The operators that models call. Backends implement them."""

from lightserve.common.ops.activation import (
    gelu,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    relu,
    relu2,
    relu2_and_mul,
    silu,
    silu_and_mul,
)
from lightserve.common.ops.attention import (
    WINDOW_MARGIN,
    AttnBatch,
    AttnOptions,
    attention_weights,
    context_attention,
    token_attention,
    write_kv,
)
from lightserve.common.ops.embedding import vocab_embedding
from lightserve.common.ops.experts import (
    MAX_EXPERTS,
    NO_EXPERT,
    ExpertsParams,
    GatedSilu,
    RouteSpec,
    experts,
    route,
)
from lightserve.common.ops.latent_attention import (
    LatentNorm,
    LatentSizes,
    latent_context_attention,
    latent_token_attention,
    write_latent,
)
from lightserve.common.ops.linear import linear, linear_float32
from lightserve.common.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from lightserve.common.ops.norm_linear import add_rms_norm_gate_up, add_rms_norm_linear
from lightserve.common.ops.registry import OPS, REFERENCE, batch_invariant, use_backend
from lightserve.common.ops.rotary import HeadNorms, RotaryAngles, norm_rotary_write_kv, rotary, rotary_write_kv
from lightserve.common.ops.sampling import (
    NO_TOKEN,
    Penalties,
    TokenMasks,
    apply_penalties,
    mask_logits,
    sample,
    top_k_top_p_min_p,
    typical_p,
)
from lightserve.common.ops.step import StepTokens, place_tokens
from lightserve.common.ops.watermark import add_watermark

__all__ = [
    "MAX_EXPERTS",
    "NO_EXPERT",
    "NO_TOKEN",
    "OPS",
    "REFERENCE",
    "WINDOW_MARGIN",
    "AttnBatch",
    "AttnOptions",
    "ExpertsParams",
    "GatedSilu",
    "HeadNorms",
    "LatentNorm",
    "LatentSizes",
    "Penalties",
    "RotaryAngles",
    "RouteSpec",
    "StepTokens",
    "TokenMasks",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_gate_up",
    "add_rms_norm_linear",
    "add_watermark",
    "apply_penalties",
    "attention_weights",
    "batch_invariant",
    "context_attention",
    "experts",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "latent_context_attention",
    "latent_token_attention",
    "layer_norm",
    "linear",
    "linear_float32",
    "mask_logits",
    "norm_rotary_write_kv",
    "place_tokens",
    "relu",
    "relu2",
    "relu2_and_mul",
    "rms_norm",
    "rotary",
    "rotary_write_kv",
    "route",
    "sample",
    "silu",
    "silu_and_mul",
    "token_attention",
    "top_k_top_p_min_p",
    "typical_p",
    "use_backend",
    "vocab_embedding",
    "write_kv",
    "write_latent",
]
