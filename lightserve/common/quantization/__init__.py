"""How a linear stores its weight and computes with it: one ``LinearMethod`` per format, and one for experts."""

from lightserve.common.quantization.bitsandbytes import Bnb4Format, Bnb8Format
from lightserve.common.quantization.eight_bit import EightBitFormat
from lightserve.common.quantization.experts_method import ExpertNames, ExpertsLayout, ExpertsMethod, ExpertsSpec
from lightserve.common.quantization.gguf_format import GgufFormat
from lightserve.common.quantization.grouped import GroupedFormat
from lightserve.common.quantization.linear_method import LinearMethod, LinearPart, LinearSpec, RmsNorm
from lightserve.common.quantization.mxfp4 import Mxfp4Format
from lightserve.common.quantization.mxfp4_pack import Mxfp4PackFormat
from lightserve.common.quantization.on_load import OnLoadFormat
from lightserve.common.quantization.quantized_experts import ExpertsFormats, QuantizedExperts
from lightserve.common.quantization.quantized_linear import QuantizedLinear, StackedLinear
from lightserve.common.quantization.registry import (
    ExpertsMethodFactory,
    LinearMethodFactory,
    are_alike,
    experts_method_factory,
    float_method_factory,
    linear_method_factory,
)
from lightserve.common.quantization.unquantized import UnquantizedLinear
from lightserve.common.quantization.unquantized_experts import UnquantizedExperts

__all__ = [
    "Bnb4Format",
    "Bnb8Format",
    "EightBitFormat",
    "ExpertNames",
    "ExpertsFormats",
    "ExpertsLayout",
    "ExpertsMethod",
    "ExpertsMethodFactory",
    "ExpertsSpec",
    "GgufFormat",
    "GroupedFormat",
    "LinearMethod",
    "LinearMethodFactory",
    "LinearPart",
    "LinearSpec",
    "Mxfp4Format",
    "Mxfp4PackFormat",
    "OnLoadFormat",
    "QuantizedExperts",
    "QuantizedLinear",
    "RmsNorm",
    "StackedLinear",
    "UnquantizedExperts",
    "UnquantizedLinear",
    "are_alike",
    "experts_method_factory",
    "float_method_factory",
    "linear_method_factory",
]
