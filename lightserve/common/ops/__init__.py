"""The operators that models call. Backends implement them."""

from lightserve.common.ops.activation import (
    add_gated,
    gate,
    gelu,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    log_softmax,
    relu,
    relu2,
    relu2_and_mul,
    silu,
    silu_and_mul,
    softmax,
    xielu,
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
from lightserve.common.ops.experts import (
    GATED_GELU_TANH,
    MAX_EXPERTS,
    NO_EXPERT,
    ExpertActivation,
    ExpertsParams,
    GatedSilu,
    Relu2,
    RouteSpec,
    experts,
    route,
)
from lightserve.common.ops.kv_cache import KvCache, LatentCache, QuantizedKv, QuantizedLatents, read_kv
from lightserve.common.ops.latent_attention import (
    LatentNorm,
    LatentSizes,
    best_tokens,
    latent_context_attention,
    latent_token_attention,
    select_tokens,
    write_latent,
)
from lightserve.common.ops.linear import bmm, linear, linear_float32
from lightserve.common.ops.lora import (
    MIN_LORA_RANK,
    NO_LORA,
    LoraLinear,
    LoraRows,
    LoraWeights,
    add_lora,
    add_rms_norm_lora_linear,
    lora_group_rows,
    lora_linear,
    max_lora_groups,
)
from lightserve.common.ops.norm import (
    GatedNorm,
    add_layer_norm,
    add_rms_norm,
    gated_rms_norm,
    layer_norm,
    rms_norm,
)
from lightserve.common.ops.norm_linear import add_rms_norm_gate_up, add_rms_norm_linear
from lightserve.common.ops.quantized_linear import (
    linear_codebook4,
    linear_fp8,
    linear_int4,
    linear_int8,
    linear_mxfp4,
    round_input,
)
from lightserve.common.ops.quantized_rows import (
    QuantizedRows,
    RowQuant,
    add_rms_norm_quantize,
    linear_quantized_rows,
    quantize_rows,
    row_quant_of,
    silu_and_mul_quantize,
)
from lightserve.common.ops.quantized_weight import (
    FP8_MAX,
    INT4_GROUPS,
    SCALE_BYTES,
    Codebook4Weight,
    Fp8Weight,
    InputQuant,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    group_of_columns,
    in_groups,
    pack_int4,
)
from lightserve.common.ops.registry import (
    OPS,
    REFERENCE,
    Repeater,
    batch_invariant,
    has_backend,
    import_implementations,
    new_repeater,
    register_repeater,
    use_backend,
)
from lightserve.common.ops.repack import FusesNorm, allocates_for, empty_packed, empty_weight, packs_for
from lightserve.common.ops.rotary import HeadNorms, RotaryAngles, norm_rotary_write_kv, rotary, rotary_write_kv
from lightserve.common.ops.sampling import (
    MAX_TOP_K,
    MAX_TOP_K_LENGTH,
    NO_TOKEN,
    Penalties,
    TokenMasks,
    apply_penalties,
    best_of_parts,
    mask_logits,
    sample,
    sample_part,
    top_k,
    top_k_top_p_min_p,
    typical_p,
)
from lightserve.common.ops.state.batch import NO_ROW, Snapshots, StateBatch
from lightserve.common.ops.state.causal_conv1d import ConvParams, causal_conv1d
from lightserve.common.ops.state.gated_delta_rule import DeltaInputs, delta_gates, gated_delta_rule
from lightserve.common.ops.state.mamba_scan import MambaInputs, MambaParams, mamba_scan
from lightserve.common.ops.step import (
    DraftTexts,
    LocatedTokens,
    NgramSizes,
    StepReqs,
    StepTokens,
    locate_tokens,
    ngram_drafts,
    place_tokens,
    vocab_embedding,
)
from lightserve.common.ops.traits import DeviceTraits, active_traits, use_traits
from lightserve.common.ops.watermark import add_watermark
