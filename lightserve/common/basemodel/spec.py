"""In which ways decoders differ. The defaults are Llama's; a model declares the values in which it differs.

``LayerSpec`` describes one layer, ``ModelSpec`` what comes before the first and after the last one. Weights and layers
are built from them, and so are the KV cache and the rotary tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from lightserve.common.basemodel.moe import MoeSpec
from lightserve.errors import ModelFilesError
from lightserve.model_files.config.layer_shapes import LayerShape
from lightserve.model_files.config.model_config import ModelConfig, RopeConfig
from lightserve.model_files.pooling import PoolingConfig

if TYPE_CHECKING:
    from lightserve.common.basemodel.mixers.mixer import MixerSpec

# by the name in config.json (transformers' ACT2FN)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


class Norm(Enum):
    RMS = "rms"  # x / rms(x) * weight
    RMS_PLUS_ONE = "rms_plus_one"  # x / rms(x) * (1 + weight)
    LAYER = "layer"  # (x - mean) / std * weight + bias
    LAYER_PLUS_ONE = "layer_plus_one"  # (x - mean) / std * (1 + weight) + bias
    LAYER_NO_BIAS = "layer_no_bias"  # (x - mean) / std * weight
    LAYER_NO_WEIGHT = "layer_no_weight"  # (x - mean) / std


class QkNorm(Enum):
    """The norm of queries and keys, before their positions are applied."""

    HEAD = "head"  # the layer's RMSNorm over each head, one weight [dim] for all heads
    HEAD_NO_WEIGHT = "head_no_weight"  # RMSNorm over each head, without a weight
    PROJECTION = "projection"  # RMSNorm over all heads of a token together, a weight [heads * dim]
    EACH_HEAD = "each_head"  # LayerNorm without bias over each head, every head with a weight of its own


class QkvLayout(Enum):
    """How the rows of q, k and v lie in a checkpoint that stores them as one linear."""

    BLOCKS = "blocks"  # all rows of q, then of k, then of v
    KV_GROUPS = "kv_groups"  # for each KV head: its query heads, then its key head, then its value head


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries are multiplied by ``1 + beta * ln(1 + floor(position / length))``."""

    beta: float
    length: int
    first: int = 0  # the position of the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """The names of a layer's tensors in the checkpoint, without ``.weight`` and ``.bias``."""

    layers: str = "model.layers"  # followed by the number of the layer
    has_numbers: bool = True  # False: ``layers`` is the name of one layer
    att_norm: str | None = "input_layernorm"  # before the attention or mixer; None: it reads the hidden states
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None  # one linear instead of three
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # the tensor itself
    o_norm: str | None = None  # RMSNorm of the input of o, over all heads of a token
    output_gate: str | None = None  # with has_output_gate: a linear of its own, instead of rows of q
    head_gate: str | None = None  # a number for each head; its output is multiplied by the sigmoid before o
    o: str = "self_attn.o_proj"
    att_post_norm: str | None = None  # of what the attention or mixer adds to the hidden states
    ffn_norm: str | None = "post_attention_layernorm"  # None: as att_norm; in parallel layers: att_norm serves both
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None  # one linear instead of two: all rows of gate, then of up
    down_norm: str | None = None  # RMSNorm of the input of down; not with experts
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"  # of xielu: followed by the names of its learned numbers
    ffn_post_norm: str | None = None  # of what the feed-forward adds to the hidden states


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of a decoder."""

    config: ModelConfig
    layer_num: int
    num_heads: int  # 0: the layer has no attention
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int  # 0: the layer has no feed-forward
    names: LayerNames = field(default_factory=LayerNames)

    # norms: LayerNames says which ones there are
    norm: Norm = Norm.RMS
    norm_eps: float

    # what the two halves add to the hidden states
    is_parallel: bool = False  # attention and feed-forward both read the hidden states before the layer
    is_post_norm: bool = False  # each half reads the hidden states as they are, and its post-norm the sum behind it
    residual_scale: float = 1.0

    # positions
    rope: RopeConfig | None
    alibi_slopes: tuple[float, ...] | None = None  # of all heads

    # attention
    scale: float  # of the products of queries and keys
    query_scale: QueryScale | None = None  # a factor that grows with the position
    is_causal: bool = True  # a token sees no later one; False: the layer has no KV cache
    kv_source: int | None = None  # it has no keys, values and KV cache of its own, but reads those of this layer
    has_v_proj: bool = True  # False: the values are computed from what the projection of the keys returns
    window: int | None = None  # tokens that a query sees, its own included; not causal: on each side
    softcap: float | None = None
    has_sinks: bool = False
    qk_norm: QkNorm | None = None
    clip_qkv: float | None = None  # q, k and v are clamped to [-clip_qkv, clip_qkv]
    qkv_bias: bool = False
    o_bias: bool = False
    # o reads the attention's output times sigmoid(gate); the linear q has, for each head, its query and then its gate,
    # if the names have no output_gate
    has_output_gate: bool = False
    qkv_input_size: int | None = None  # what q, k and v read; None: hidden_size
    mixer: MixerSpec | None = None  # a recurrent mixer: instead of attention, or beside it if num_heads is not 0

    # feed-forward
    activation: str = "silu"  # a value of ACTIVATIONS
    is_gated: bool = True  # False: down(activation(up(x)))
    ffn_bias: bool = False
    ffn_limit: float | None = None  # of silu(gate), and of up on both sides; in shared experts too
    moe: MoeSpec | None = None  # experts instead of one feed-forward

    # how the checkpoint stores the linears
    qkv_layout: QkvLayout = QkvLayout.BLOCKS  # with LayerNames.qkv
    has_rope_pairs: bool = False  # neighbouring rows of q and k rotate together, instead of row i and i + dim / 2
    is_transposed: bool = False  # linears are stored [in, out]

    @property
    def prefix(self) -> str:
        return f"{self.names.layers}.{self.layer_num}" if self.names.has_numbers else self.names.layers

    @property
    def has_attention(self) -> bool:
        return self.num_heads > 0

    @property
    def has_ffn(self) -> bool:
        return self.intermediate_size > 0

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head rotate."""
        return 0 if self.rope is None else self.rope.rotary_dim(self.head_dim)

    @property
    def gate_dim(self) -> int:
        """How many numbers of the projection gate the output of one head."""
        return self.head_dim if self.has_output_gate else int(self.names.head_gate is not None)

    @property
    def num_weights(self) -> int:
        """Roughly, of all linears."""
        experts = 0 if self.moe is None else self.moe.num_weights(self.hidden_size)
        return self._mixer_weights + self._ffn_weights + experts

    @property
    def active_weights(self) -> int:
        """Those of them that one token is multiplied with."""
        experts = 0 if self.moe is None else self.moe.active_weights(self.hidden_size)
        return self._mixer_weights + self._ffn_weights + experts

    @property
    def _mixer_weights(self) -> int:
        """Of attention and mixer."""
        of_mixer = 0 if self.mixer is None else self.mixer.num_weights(self.hidden_size)
        kv_projs = 0 if self.kv_source is not None else 1 + self.has_v_proj
        heads = (3 if self.has_output_gate else 2) * self.num_heads + kv_projs * self.num_kv_heads
        return of_mixer + (heads * self.head_dim * self.hidden_size if self.has_attention else 0)

    @property
    def _ffn_weights(self) -> int:
        """Of the feed-forward that every token uses, without shared experts."""
        if self.moe is not None and not self.moe.is_beside_ffn:
            return 0
        return (3 if self.is_gated else 2) * self.intermediate_size * self.hidden_size

    def kv_heads_of_rank(self, tp_size: int) -> int:
        """KV heads on each of ``tp_size`` ranks. Ranks hold copies of a head when there are too few."""
        return max(self.num_kv_heads // tp_size, 1)

    def check_tp(self, size: int) -> None:
        """Check that ``size`` ranks can split the layer."""
        widths = () if self.moe is None else self.moe.widths
        if self.moe is None or self.moe.is_beside_ffn:
            widths += (self.intermediate_size,)
        for width in widths:
            LayerShape(self.num_heads, self.num_kv_heads, width).check_tp(size)
        if self.mixer is not None:
            self.mixer.check_tp(size)

    def check_halves(self) -> None:
        config = self.config
        if self.mixer is None and config.has_state(self.layer_num):
            raise ModelFilesError(
                f"config.json: layer type {config.layer_type(self.layer_num)} is not supported for {config.model_type}"
            )
        if self.is_parallel and not (self.has_attention and self.has_ffn):
            raise ModelFilesError(f"config.json: layer {self.layer_num} lacks a half, but the halves are parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """The names of the tensors outside the layers in the checkpoint, without ``.weight`` and ``.bias``."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    positions: str | None = None  # a learned vector for every position
    token_types: str | None = None  # a learned vector for each text of a pair
    final_norm: str | None = "model.norm"  # None: the last layer ends with a norm
    lm_head: str = "lm_head"
    optional_prefix: str = ""  # of all names; some checkpoints of a model have it and others do not


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a decoder does before its first and after its last layer."""

    config: ModelConfig
    names: ModelNames = field(default_factory=ModelNames)
    norm: Norm = Norm.RMS
    norm_eps: float
    embedding_scale: float = 1.0
    num_positions: int = 0  # with ModelNames.positions: the rows of the table that tokens may use
    position_offset: int = 0  # rows before that of position 0
    num_token_types: int = 0  # with ModelNames.token_types
    has_lm_head: bool = True  # False: the model computes no logits
    pooling: PoolingConfig | None = None  # what it computes instead of text
    is_tied: bool  # the head is the embedding
    head_bias: bool = False
    normalizes_head: bool = False  # the rows of the head are divided by their length when they are loaded
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)


def activation_of(config: ModelConfig, *keys: str) -> str:
    """The activation that config.json names under the first of ``keys`` that is there."""
    key = next((key for key in keys if config.hf.get(key) is not None), keys[0])
    name = config.hf.get(key, "silu")
    if name not in ACTIVATIONS:
        raise ModelFilesError(
            f"config.json: {key} {name!r} is not supported for {config.model_type}; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
