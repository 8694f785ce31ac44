"""What a model's files and the operator say about quantised weights, without torch."""

from lightserve.model_files.quantization.on_load import OnLoadConfig, OnLoadScheme
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme, read_quant_config

__all__ = ["OnLoadConfig", "OnLoadScheme", "QuantConfig", "Scheme", "read_quant_config"]
