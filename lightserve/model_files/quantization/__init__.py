"""What a model's files and the operator say about quantised weights, without torch."""

from lightserve.model_files.quantization import (  # each registers its parsers
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    pack_quantized,
)
from lightserve.model_files.quantization.eight_bit import EightBitScheme
from lightserve.model_files.quantization.gguf import PACKED_TYPES, GgufQuantConfig, GgufScheme, PackedType
from lightserve.model_files.quantization.mxfp4 import Mxfp4Scheme
from lightserve.model_files.quantization.on_load import OnLoadConfig, OnLoadScheme, read_on_load_config
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, read_quant_config

__all__ = [
    "PACKED_TYPES",
    "EightBitScheme",
    "GgufQuantConfig",
    "GgufScheme",
    "Mxfp4Scheme",
    "OnLoadConfig",
    "OnLoadScheme",
    "PackedType",
    "QuantConfig",
    "Scheme",
    "auto_round",
    "awq",
    "bitsandbytes",
    "compressed_tensors",
    "fp8",
    "gptq",
    "modelopt",
    "pack_quantized",
    "read_on_load_config",
    "read_quant_config",
]
