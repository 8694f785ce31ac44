"""The weights of one layer, and the weights before the first and after the last layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.linears import RowWeight, VocabWeight
from lightserve.common.basemodel.layer_weights.norms import NormWeight, SplitNormWeight
from lightserve.common.basemodel.layer_weights.pooling_head import PoolingHeadWeight
from lightserve.common.basemodel.layer_weights.weight import WeightContext, WeightGroup
from lightserve.common.basemodel.mixers.mixer import MixerWeight
from lightserve.common.basemodel.spec import LayerSpec, ModelSpec


class LayerWeight(WeightGroup):
    """The weights of one layer."""


class PreAndPostLayerWeight(LayerWeight, ABC):
    """The weights that the templates read. A model creates them and adds its own."""

    embedding: VocabWeight
    final_norm: NormWeight | None  # None: the last layer ends with a norm
    lm_head: VocabWeight  # absent if the model computes no logits
    pooling_head: PoolingHeadWeight

    @abstractmethod
    def __init__(self, spec: ModelSpec, context: WeightContext) -> None: ...


class TransformerLayerWeight(LayerWeight, ABC):
    """The weights that the templates read. A model creates them and adds its own."""

    att_norm: NormWeight | None  # before the attention or mixer; None: it reads the hidden states as they are
    mixer: MixerWeight  # absent if the layer has none
    attn_options: ops.AttnOptions
    kv_scales: Tensor | None = None  # [2 * kv_heads] float32, of an fp8 cache
    largest_key_factor: float = 1.0  # by which keys were divided: see key_scaling.py
    o_norm: SplitNormWeight | None  # of the input of o_proj
    o_proj: RowWeight
    att_post_norm: NormWeight | None
    ffn_norm: NormWeight | None
    ffn_post_norm: NormWeight | None

    @abstractmethod
    def __init__(self, spec: LayerSpec, context: WeightContext) -> None: ...
