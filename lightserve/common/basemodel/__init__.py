"""The parts that a model is made of. To add a model, import only this and ``lightserve.common.ops``."""

from lightserve.common.basemodel.basemodel import HiddenStates, ModelArgs, TpPartBaseModel
from lightserve.common.basemodel.infer_struct import InferStateInfo, LogitRows, ModelInput, Observer
from lightserve.common.basemodel.layer_infer.base_layer_infer import (
    BaseLayerInfer,
    PostLayerInfer,
    PreLayerInfer,
    TransformerLayerInfer,
)
from lightserve.common.basemodel.layer_infer.template.post_layer_infer_template import PostLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.pre_layer_infer_template import PreLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.rotary_decoder_template import (
    RotaryDecoderLayerInferTpl,
    RotaryDecoderLayerWeight,
)
from lightserve.common.basemodel.layer_infer.template.transformer_layer_infer_template import (
    TransformerLayerInferTpl,
)
from lightserve.common.basemodel.layer_weights.layer_weight import PreAndPostLayerWeight, TransformerLayerWeight
from lightserve.common.basemodel.layer_weights.weights import (
    Block,
    ColumnWeight,
    LayerNormWeight,
    LinearWeight,
    NormWeight,
    RmsNormWeight,
    RowWeight,
    VocabWeight,
    Weight,
    WeightContext,
)
from lightserve.common.basemodel.rotary import RotaryInferStateInfo, RotaryModel
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.kv.layout import KvGroup, KvLayout
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.common.quantization import LinearMethod, LinearSpec, UnquantizedLinear
from lightserve.model_files.model_config import ModelConfig

__all__ = [
    "BaseLayerInfer",
    "Block",
    "CheckpointTensor",
    "ColumnWeight",
    "HiddenStates",
    "InferStateInfo",
    "KvGroup",
    "KvLayout",
    "LayerNormWeight",
    "LinearMethod",
    "LinearSpec",
    "LinearWeight",
    "LogitRows",
    "ModelArgs",
    "ModelConfig",
    "ModelInput",
    "NormWeight",
    "Observer",
    "Parallel",
    "Piece",
    "PostLayerInfer",
    "PostLayerInferTpl",
    "PreAndPostLayerWeight",
    "PreLayerInfer",
    "PreLayerInferTpl",
    "RankGroup",
    "RmsNormWeight",
    "RotaryDecoderLayerInferTpl",
    "RotaryDecoderLayerWeight",
    "RotaryInferStateInfo",
    "RotaryModel",
    "RowWeight",
    "TpPartBaseModel",
    "TransformerLayerInfer",
    "TransformerLayerInferTpl",
    "TransformerLayerWeight",
    "UnquantizedLinear",
    "VocabWeight",
    "Weight",
    "WeightContext",
]
