"""How a linear stores its weight and computes with it: one ``LinearMethod`` per format."""

from lightserve.common.quantization.linear_method import LinearMethod, LinearPart, LinearSpec, RmsNorm
from lightserve.common.quantization.registry import LinearMethodFactory, linear_method_factory
from lightserve.common.quantization.unquantized import UnquantizedLinear

__all__ = [
    "LinearMethod",
    "LinearMethodFactory",
    "LinearPart",
    "LinearSpec",
    "RmsNorm",
    "UnquantizedLinear",
    "linear_method_factory",
]
