"""The ``quantization_config`` of older folders, which have it in a file beside config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightserve.model_files.folder import read_json_if_exists

# by quant_method: files of AutoGPTQ and of AutoAWQ
FILES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}


def with_quantization_file(config_json: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``config_json`` with what another file says, unless it has a ``quantization_config`` itself."""
    if config_json.get("quantization_config"):
        return config_json
    for method, name in FILES.items():
        table = read_json_if_exists(folder / name)
        if table:
            return {**config_json, "quantization_config": {"quant_method": method, **table}}
    return config_json
