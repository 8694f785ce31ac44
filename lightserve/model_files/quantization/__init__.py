"""What a model's files and the operator say about quantised weights, without torch."""

from lightserve.model_files.quantization.auto_round import AutoRoundConfig
from lightserve.model_files.quantization.awq import AwqConfig
from lightserve.model_files.quantization.bitsandbytes import Bnb4Scheme, Bnb8Scheme, BnbConfig
from lightserve.model_files.quantization.gptq import GptqConfig
from lightserve.model_files.quantization.grouped import (
    AwqScheme,
    GptqScheme,
    GptqV2Scheme,
    GroupedScheme,
    PackQuantizedScheme,
)
from lightserve.model_files.quantization.on_load import OnLoadConfig, OnLoadScheme
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, read_quant_config

__all__ = [
    "AutoRoundConfig",
    "AwqConfig",
    "AwqScheme",
    "Bnb4Scheme",
    "Bnb8Scheme",
    "BnbConfig",
    "GptqConfig",
    "GptqScheme",
    "GptqV2Scheme",
    "GroupedScheme",
    "OnLoadConfig",
    "OnLoadScheme",
    "PackQuantizedScheme",
    "QuantConfig",
    "Scheme",
    "read_quant_config",
]
