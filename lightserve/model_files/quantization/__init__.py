"""What a model's files and the operator say about quantised weights, without torch."""

from lightserve.model_files.quantization import compressed_tensors, fp8, modelopt  # each registers its parsers
from lightserve.model_files.quantization.eight_bit import EightBitScheme
from lightserve.model_files.quantization.mxfp4 import Mxfp4Scheme
from lightserve.model_files.quantization.on_load import OnLoadConfig, OnLoadScheme, read_on_load_config
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, read_quant_config

__all__ = [
    "EightBitScheme",
    "Mxfp4Scheme",
    "OnLoadConfig",
    "OnLoadScheme",
    "QuantConfig",
    "Scheme",
    "compressed_tensors",
    "fp8",
    "modelopt",
    "read_on_load_config",
    "read_quant_config",
]
