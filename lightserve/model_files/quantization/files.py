"""Files of a model folder in which tools store the quantisation instead of in config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightserve.model_files.folder import read_json_if_exists

# to their quant_method; the others are files of older versions of AutoGPTQ and AutoAWQ
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def with_quantization_files(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with a ``quantization_config`` from one of these files, if it has none itself."""
    if config.get("quantization_config"):
        return config
    for name, method in FILES.items():
        if table := read_json_if_exists(folder / name):
            return {**config, "quantization_config": {"quant_method": method, **table}}
    return config
