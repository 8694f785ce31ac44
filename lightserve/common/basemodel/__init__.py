"""The parts that a model is made of. To add a model, import only this and ``lightserve.common.ops``."""

from lightserve.common.basemodel.alibi import alibi_slopes
from lightserve.common.basemodel.basemodel import API_VERSION, HiddenStates, TpPartBaseModel
from lightserve.common.basemodel.expert_rows import ExpertRows
from lightserve.common.basemodel.infer_struct import (
    InferStateInfo,
    KvGroupInput,
    LogitRows,
    ModelInput,
    Observer,
    StepImages,
)
from lightserve.common.basemodel.layer_infer.base_layer_infer import (
    BaseLayerInfer,
    PostLayerInfer,
    PreLayerInfer,
    TransformerLayerInfer,
)
from lightserve.common.basemodel.layer_infer.fused_hooks import replaces
from lightserve.common.basemodel.layer_infer.template.decoder_layer_infer_template import DecoderLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.post_layer_infer_template import PostLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.pre_layer_infer_template import PreLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.transformer_layer_infer_template import (
    TransformerLayerInferTpl,
)
from lightserve.common.basemodel.layer_weights.decoder import DecoderLayerWeight, DecoderPreAndPostWeight
from lightserve.common.basemodel.layer_weights.experts import ExpertsWeight, MoeFfnWeight
from lightserve.common.basemodel.layer_weights.ffn import PLAIN as PLAIN_ACTIVATIONS, FfnWeight, GatedFfnWeight
from lightserve.common.basemodel.layer_weights.layer_weight import PreAndPostLayerWeight, TransformerLayerWeight
from lightserve.common.basemodel.layer_weights.linears import (
    Block,
    ColumnWeight,
    LinearWeight,
    ReplicatedWeight,
    RowWeight,
    VocabWeight,
)
from lightserve.common.basemodel.layer_weights.norms import (
    LayerNormWeight,
    NormWeight,
    RmsNormWeight,
    SplitNormWeight,
    norm_weight,
)
from lightserve.common.basemodel.layer_weights.row_map import RowMap, in_blocks, in_kv_groups, pairs_to_halves, whole
from lightserve.common.basemodel.layer_weights.weight import Weight, WeightContext, WeightGroup
from lightserve.common.basemodel.loadable_model import LoadableModel, ModelArgs
from lightserve.common.basemodel.lora import LoraArgs, LoraPool
from lightserve.common.basemodel.mixers.gated_delta_net import GatedDeltaNames, GatedDeltaSpec, GatedDeltaWeight
from lightserve.common.basemodel.mixers.kimi_delta import KimiDeltaNames, KimiDeltaSpec, KimiDeltaWeight
from lightserve.common.basemodel.mixers.lightning import LightningNames, LightningSpec, LightningWeight
from lightserve.common.basemodel.mixers.mamba2 import Mamba2Names, Mamba2Spec, Mamba2Weight
from lightserve.common.basemodel.mixers.mixer import (
    ConvWeight,
    DecayRates,
    HeadValues,
    MixerSpec,
    MixerWeight,
    state_groups,
)
from lightserve.common.basemodel.mixers.short_conv import ShortConvNames, ShortConvSpec, ShortConvWeight
from lightserve.common.basemodel.moe import MoeNames, MoeSpec, num_experts_of, top_k_of
from lightserve.common.basemodel.pooling import Pooler
from lightserve.common.basemodel.rotary import yarn_mscale
from lightserve.common.basemodel.spec import (
    LayerNames,
    LayerSpec,
    ModelNames,
    ModelSpec,
    Norm,
    QkNorm,
    QkvLayout,
    QueryScale,
    activation_of,
)
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.checkpoint.stacked_experts import with_experts_apart
from lightserve.common.kv.layout import KvContent, KvGroup, KvLayout, StateGroup, StateTensor
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.common.quantization import (
    ExpertNames,
    ExpertsLayout,
    LinearMethod,
    LinearSpec,
    UnquantizedLinear,
    float_method_factory,
)
from lightserve.model_files.config.model_config import ModelConfig, RopeConfig

__all__ = [
    "API_VERSION",
    "PLAIN_ACTIVATIONS",
    "BaseLayerInfer",
    "Block",
    "CheckpointTensor",
    "ColumnWeight",
    "ConvWeight",
    "DecayRates",
    "DecoderLayerInferTpl",
    "DecoderLayerWeight",
    "DecoderPreAndPostWeight",
    "ExpertNames",
    "ExpertRows",
    "ExpertsLayout",
    "ExpertsWeight",
    "FfnWeight",
    "GatedDeltaNames",
    "GatedDeltaSpec",
    "GatedDeltaWeight",
    "GatedFfnWeight",
    "HeadValues",
    "HiddenStates",
    "InferStateInfo",
    "KimiDeltaNames",
    "KimiDeltaSpec",
    "KimiDeltaWeight",
    "KvContent",
    "KvGroup",
    "KvGroupInput",
    "KvLayout",
    "LayerNames",
    "LayerNormWeight",
    "LayerSpec",
    "LightningNames",
    "LightningSpec",
    "LightningWeight",
    "LinearMethod",
    "LinearSpec",
    "LinearWeight",
    "LoadableModel",
    "LogitRows",
    "LoraArgs",
    "LoraPool",
    "Mamba2Names",
    "Mamba2Spec",
    "Mamba2Weight",
    "MemoryManager",
    "MixerSpec",
    "MixerWeight",
    "ModelArgs",
    "ModelConfig",
    "ModelInput",
    "ModelNames",
    "ModelSpec",
    "MoeFfnWeight",
    "MoeNames",
    "MoeSpec",
    "Norm",
    "NormWeight",
    "Observer",
    "Parallel",
    "Piece",
    "Pooler",
    "PostLayerInfer",
    "PostLayerInferTpl",
    "PreAndPostLayerWeight",
    "PreLayerInfer",
    "PreLayerInferTpl",
    "QkNorm",
    "QkvLayout",
    "QueryScale",
    "RankGroup",
    "ReplicatedWeight",
    "RmsNormWeight",
    "RopeConfig",
    "RowMap",
    "RowWeight",
    "ShortConvNames",
    "ShortConvSpec",
    "ShortConvWeight",
    "SplitNormWeight",
    "StateGroup",
    "StateTensor",
    "StepImages",
    "TpPartBaseModel",
    "TransformerLayerInfer",
    "TransformerLayerInferTpl",
    "TransformerLayerWeight",
    "UnquantizedLinear",
    "VocabWeight",
    "Weight",
    "WeightContext",
    "WeightGroup",
    "activation_of",
    "alibi_slopes",
    "float_method_factory",
    "in_blocks",
    "in_kv_groups",
    "norm_weight",
    "num_experts_of",
    "pairs_to_halves",
    "replaces",
    "state_groups",
    "top_k_of",
    "whole",
    "with_experts_apart",
    "yarn_mscale",
]
