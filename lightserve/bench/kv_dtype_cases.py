"""Attention over, and writes to, KV caches in 8 bits: the cases of the kernel benchmark for --kv_dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightserve.bench.kernel_cases import Case, InputFactory, Inputs, Shape, attention_cases, elementwise_cases
from lightserve.common import ops

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_BYTES = {"fp8": 0, "int8": 4}  # of a token and head


def kv_dtype_cases(shape: Shape, item: int) -> Iterator[Case]:
    """The floor and torch are those of the unquantised case, but for the bytes of the cache that attention reads."""
    for kv_dtype in CODES:
        kv_item = 1 + SCALE_BYTES[kv_dtype] / shape.dim
        for case in (*attention_cases(shape, item, kv_item), *elementwise_cases(shape, item)):
            if case.op in ("token_attention", "rotary_write_kv") or "behind" in case.load:
                inputs = partial(_quantized, kv_dtype, case.inputs)
                twin = case.torch_inputs or case.inputs
                yield replace(case, op=f"{case.op} {kv_dtype}", inputs=inputs, torch_inputs=twin)


def _quantized(kv_dtype: str, inputs: Inputs, factory: InputFactory) -> tuple[Any, ...]:
    """The same inputs with a cache of codes, which is the longest tensor."""
    args = inputs(factory)
    cache = max((arg for arg in args if isinstance(arg, Tensor) and arg.ndim == 3), key=len)
    return tuple(quantize_cache(arg, kv_dtype) if arg is cache else arg for arg in args)


def quantize_cache(cache: Tensor, kv_dtype: str) -> ops.QuantizedKv:
    """Of ``[slots, 2 * kv_heads, dim]``."""
    heads = cache.shape[1]
    scales = torch.ones((len(cache), heads) if kv_dtype == "int8" else heads, device=cache.device)
    quantized = ops.QuantizedKv(torch.empty_like(cache, dtype=CODES[kv_dtype]), scales)
    quantized.write(cache, torch.arange(len(cache), device=cache.device))
    return quantized
