"""Ops of the C library in float32: fewer calls and passes over memory than torch needs.

Backend "cpu_native" exists if the library was built. It is bound first; what the library does not know is computed by
the backend behind it. A row of its results has the same bits whatever is computed beside it.
"""

from __future__ import annotations

import ctypes
from typing import TypeGuard

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND, AttentionBatch, has_kernel, library
from lightserve.common.cpu_kernel.batch_invariant import used_slots
from lightserve.common.ops import AttnBatch, AttnOptions, KvCache, read_kv
from lightserve.common.ops.registry import Op

# of products with inputs in float32
WEIGHT_DTYPES = (torch.float32, torch.bfloat16) if has_kernel("ls_linear_bf16") else (torch.float32,)
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # the enum of kernels.h


def _register(lib: ctypes.CDLL) -> None:
    lib.ls_set_threads(torch.get_num_threads())
    for define in (_define_products, _define_norms, _define_activations, _define_rotary, _define_attention):
        define(lib)


def _define_products(lib: ctypes.CDLL) -> None:
    @ops.linear.impl(BACKEND)
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _is_fit(x, weight):
            return ops.linear.after(BACKEND)(x, weight, bias)
        count, rows = x.shape[0], weight.shape[0]  # len() of a tensor takes microseconds
        out = x.new_empty(count, rows)
        multiply = lib.ls_linear_bf16 if weight.dtype is torch.bfloat16 else lib.ls_linear_float
        multiply(
            weight.data_ptr(), rows, weight.shape[1], x.data_ptr(), count, x.stride(0), _address(bias), out.data_ptr()
        )
        return out

    @ops.linear_float32.impl(BACKEND)
    def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x.float(), weight.float())

    @ops.add_rms_norm_linear.impl(BACKEND)
    def add_rms_norm_linear(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not _is_fit(x, weight) or not _are_rows(residual, norm_weight):
            return ops.add_rms_norm_linear.after(BACKEND)(x, residual, norm_weight, eps, weight, bias)
        return fused(x, residual, norm_weight, eps, weight, bias), residual

    @ops.add_rms_norm_gate_up.impl(BACKEND)
    def add_rms_norm_gate_up(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not _is_fit(x, weight) or not _are_rows(residual, norm_weight):
            return ops.add_rms_norm_gate_up.after(BACKEND)(x, residual, norm_weight, eps, weight, bias)
        return fused(x, residual, norm_weight, eps, weight, bias, gated=True), residual

    def fused(  # noqa: PLR0913  as the ops
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        gated: bool = False,
    ) -> Tensor:
        count, (rows, columns) = x.shape[0], weight.shape
        out = x.new_empty(count, rows // 2 if gated else rows)
        multiply = lib.ls_add_norm_linear_bf16 if weight.dtype is torch.bfloat16 else lib.ls_add_norm_linear_float
        multiply(
            weight.data_ptr(),
            rows,
            columns,
            x.data_ptr(),
            count,
            x.stride(0),
            _address(bias),
            out.data_ptr(),
            residual.data_ptr(),
            norm_weight.data_ptr(),
            eps,
            gated,
        )
        return out


def _is_fit(x: Tensor, weight: Tensor) -> bool:
    is_float = x.dtype is torch.float32 and weight.dtype in WEIGHT_DTYPES
    return is_float and x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous()


def _are_rows(*tensors: Tensor) -> bool:
    """Whether all are float32 without gaps."""
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _define_norms(lib: ctypes.CDLL) -> None:
    @ops.rms_norm.impl(BACKEND)
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            return ops.rms_norm.after(BACKEND)(x, weight, eps)
        return normed(x.contiguous(), None, weight.contiguous(), eps)

    @ops.add_rms_norm.impl(BACKEND)
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _are_rows(x, residual, weight):
            return ops.add_rms_norm.after(BACKEND)(x, residual, weight, eps)
        return normed(x, residual, weight, eps)

    def normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        columns, out = x.shape[-1], torch.empty_like(x)
        count = x.numel() // columns
        lib.ls_rms_norm(
            x.data_ptr(), count, columns, columns, weight.data_ptr(), eps, _address(residual), out.data_ptr()
        )
        return out


def _define_activations(lib: ctypes.CDLL) -> None:
    def define(op: Op[[Tensor], Tensor], activation: int, gated: bool) -> None:
        @op.impl(BACKEND)
        def activate(x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                return op.after(BACKEND)(x)
            x = x.contiguous()
            width = x.shape[-1]
            columns = width // 2 if gated else width
            out = x.new_empty(*x.shape[:-1], columns)
            count = out.numel() // columns
            lib.ls_activate(x.data_ptr(), count, width, columns, activation, gated, out.data_ptr())
            return out

    for name, activation in ACTIVATIONS.items():
        define(ops.OPS[name], activation, gated=False)
        define(ops.OPS[f"{name}_and_mul"], activation, gated=True)


def _define_rotary(lib: ctypes.CDLL) -> None:
    @ops.rotary_write_kv.impl(BACKEND)
    def rotary_write_kv(q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: KvCache) -> None:
        is_fit = _has_heads(q) and _has_heads(kv) and _are_rows(cos, sin)
        if not _has_heads(kv_cache) or not is_fit or slots.dtype != torch.int32 or not slots.is_contiguous():
            ops.rotary_write_kv.after(BACKEND)(q, kv, cos, sin, slots, kv_cache)
            return
        lib.ls_rotary_write_kv(
            q.data_ptr(),
            q.stride(0),
            q.shape[1],
            kv.data_ptr(),
            kv.stride(0),
            q.shape[0],
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            slots.data_ptr(),
            kv_cache.data_ptr(),
            kv_cache.stride(0),
            kv.shape[1] // 2,
            q.shape[2],
        )


def _define_attention(lib: ctypes.CDLL) -> None:
    @ops.context_attention.impl(BACKEND)
    def context_attention(q: Tensor, kv: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
        if not _has_heads(q) or q.shape[2] % 8 or _limits_keys(batch):
            return ops.context_attention.after(BACKEND)(q, kv, kv_cache, batch, options)
        return attend(q, kv_cache, batch, options)

    @ops.token_attention.impl(BACKEND)
    def token_attention(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
        if not _has_heads(q) or q.shape[2] % 8:
            return ops.token_attention.after(BACKEND)(q, kv_cache, batch, options)
        return attend(q, kv_cache, batch, options)

    def attend(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
        if not _has_heads(kv_cache):
            slots, batch = _slots_in_order(batch)
            kv_cache = read_kv(kv_cache, slots, torch.float32)
        count, heads, dim = q.shape
        out = q.new_empty(count, heads, dim)
        lib.ls_attention(
            q.data_ptr(),
            q.stride(0),
            heads,
            kv_cache.data_ptr(),
            kv_cache.stride(0),
            kv_cache.shape[1] // 2,
            dim,
            _described(batch),
            options.scale,
            options.softcap or 0.0,
            options.window or 0,
            options.causal,
            _address(options.alibi_slopes),
            _address(options.sinks),
            out.data_ptr(),
        )
        return out


def _limits_keys(batch: AttnBatch) -> bool:
    return batch.see_until is not None or batch.b_num_keys is not None


def _slots_in_order(batch: AttnBatch) -> tuple[Tensor, AttnBatch]:
    """The slots of all tokens, and the batch for a cache that has only these, in this order."""
    plan: tuple[Tensor, AttnBatch] | None = batch.plans.get("slots in order")
    if plan is None:  # once a step
        plan = batch.plans["slots in order"] = used_slots(batch)
    return plan


def _described(batch: AttnBatch) -> AttentionBatch:
    plan: AttentionBatch | None = batch.plans.get(BACKEND)
    if plan is None:  # once a step
        columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
        if any(column.dtype != torch.int32 or not column.is_contiguous() for column in columns):
            raise ValueError("attention: the columns of a batch must be int32 without gaps")
        table = batch.req_to_token
        addresses = (column.data_ptr() for column in columns)
        plan = AttentionBatch(table.data_ptr(), table.stride(0), *addresses, len(columns[0]))
        batch.plans[BACKEND] = plan
    return plan


def _has_heads(x: KvCache) -> TypeGuard[Tensor]:
    """Whether ``x`` ``[tokens, heads, dim]`` is float32 and the heads of a token have no gaps."""
    return isinstance(x, Tensor) and x.dtype is torch.float32 and x.stride()[1:] == (x.shape[2], 1)


if library is not None:
    _register(library)
