"""In which dtypes a worker stores weights and computes."""

from __future__ import annotations

import torch

from lightserve.common import ops
from lightserve.common.basemodel import ModelConfig
from lightserve.common.device import Device
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.errors import ServerError

OF_TRANSFORMERS = "by the modules of transformers: slow, without fused kernels and graphs"


def dtype_of(config: WorkerConfig, model: ModelConfig, platform: Device) -> torch.dtype:
    """Of the weights."""
    if config.data_type == "auto":
        return platform.dtype_for(model.hf.get("dtype") or model.hf.get("torch_dtype"))
    dtype: torch.dtype = getattr(torch, config.data_type)
    if not platform.has_dtype(dtype):
        raise ServerError(f"this GPU does not support the data_type {config.data_type}; use float16")
    return dtype


def activation_dtype(dtype: torch.dtype, model: ModelConfig) -> torch.dtype:
    """In which the model computes between products with weights in ``dtype``, and stores keys and values."""
    is_mixed = dtype is torch.bfloat16 and ops.active_traits().has_mixed_mm and not model.is_of_transformers
    return torch.float32 if is_mixed else dtype


def precision_summary(dtype: torch.dtype, model: ModelConfig, kv_dtype: str | None, state_dtype: str) -> str:
    """For the operator: "in bfloat16 (fp8, quantised while loading; KV in int8)"."""
    details = [] if model.quantization is None else [str(model.quantization)]
    if activation_dtype(dtype, model) != dtype:
        has_mm = ops.active_traits().has_bf16_mm
        details.append("float32 between products" if has_mm else "computed in float32: this CPU has no AMX")
    if kv_dtype is not None:
        details.append(f"KV in {kv_dtype}")
    if state_dtype != "float32":
        details.append(f"states in {state_dtype}")
    if model.is_of_transformers:
        details.append(OF_TRANSFORMERS)
    return f"in {str(dtype).removeprefix('torch.')}" + (f" ({'; '.join(details)})" if details else "")


def ranks_summary(parallel: Parallel) -> str:
    """For the operator; empty: there is one rank."""
    ranks = f", {parallel.num_ranks} ranks" if parallel.num_ranks > 1 else ""
    return ranks + (f" in {parallel.dp.size} attention groups" if parallel.dp.size > 1 else "")
