"""How the KV cache is stored: what --kv_dtype says, or what a quantised checkpoint declares."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.model_config import ModelConfig

FP8, INT8 = "fp8", "int8"
_REMEDY = "set --kv_dtype to fp8, int8 or none"


def resolve_kv_dtype(choice: str, model: ModelConfig) -> str | None:
    """``fp8``, ``int8`` or None: the dtype of the activations. ``choice`` is the value of --kv_dtype."""
    if choice == "auto":
        return _declared(model.hf.get("quantization_config") or {})
    return None if choice == "none" else choice


def _declared(table: Mapping[str, Any]) -> str | None:
    """By the quantization_config of compressed-tensors (kv_cache_scheme) or of modelopt (kv_cache_quant_algo).

    modelopt's own file, hf_quant_config.json, has its fields in a table ``quantization``.
    """
    inner = table.get("quantization")
    table = inner if isinstance(inner, dict) else table
    scheme, algo = table.get("kv_cache_scheme"), table.get("kv_cache_quant_algo")
    if scheme is not None:
        number_format = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, dict) else None
        if number_format != ("float", 8):
            raise _unknown("kv_cache_scheme", scheme, "8-bit floats")
        return FP8
    if algo is not None and algo != "FP8":
        raise _unknown("kv_cache_quant_algo", algo, "FP8")
    return None if algo is None else FP8


def _unknown(name: str, value: Any, known: str) -> ModelFilesError:
    return ModelFilesError(
        f"config.json: quantization_config.{name} is {reprlib.repr(value)}, supported is {known}; {_REMEDY}"
    )
