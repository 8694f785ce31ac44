"""Ops of the C library in float32: fewer calls and passes over memory than torch needs.

Backend "cpu_native" exists if the library was built. It is chosen before "cpu", whose implementation computes what the
library does not know.
"""

from __future__ import annotations

import ctypes
import platform
from typing import TypeGuard

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND, DecodeBatch, library
from lightserve.common.ops import AttnBatch, AttnOptions, KvCache

# Rows up to which the library's float32 product is used. On x86 oneDNN's packed weights were measured to be fast.
MAX_ROWS = 64 if platform.machine() in ("aarch64", "arm64") else 0


def _register(lib: ctypes.CDLL) -> None:
    lib.ls_set_threads(torch.get_num_threads())
    for define in (_define_products, _define_norms, _define_attention):
        define(lib)


def _define_products(lib: ctypes.CDLL) -> None:
    @ops.linear.impl(BACKEND)
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _is_fit(x, weight):
            return ops.linear.impls["cpu"](x, weight, bias)
        count, rows = x.shape[0], weight.shape[0]  # len() of a tensor takes microseconds
        out = x.new_empty(count, rows)
        lib.ls_linear_float(
            weight.data_ptr(), rows, weight.shape[1], x.data_ptr(), count, x.stride(0), _address(bias), out.data_ptr()
        )
        return out

    @ops.add_rms_norm_linear.impl(BACKEND)
    def add_rms_norm_linear(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not _is_fit(x, weight) or not _are_rows(residual, norm_weight):
            return ops.add_rms_norm_linear.impls[ops.REFERENCE](x, residual, norm_weight, eps, weight, bias)
        return fused(x, residual, norm_weight, eps, weight, bias), residual

    @ops.add_rms_norm_gate_up.impl(BACKEND)
    def add_rms_norm_gate_up(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not _is_fit(x, weight) or not _are_rows(residual, norm_weight):
            return ops.add_rms_norm_gate_up.impls[ops.REFERENCE](x, residual, norm_weight, eps, weight, bias)
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
        lib.ls_add_norm_linear_float(
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
    is_float = x.dtype == weight.dtype == torch.float32
    return is_float and x.dim() == 2 and x.shape[0] <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous()


def _are_rows(*tensors: Tensor) -> bool:
    """Whether all are float32 without gaps."""
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _define_norms(lib: ctypes.CDLL) -> None:
    @ops.rms_norm.impl(BACKEND)
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or not x.is_contiguous() or weight.dtype != torch.float32:
            return ops.rms_norm.impls["cpu"](x, weight, eps)
        return normed(x, None, weight, eps)

    @ops.add_rms_norm.impl(BACKEND)
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _are_rows(x, residual, weight):
            return ops.add_rms_norm.impls[ops.REFERENCE](x, residual, weight, eps)
        return normed(x, residual, weight, eps)

    def normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        columns, out = x.shape[-1], torch.empty_like(x)
        count = x.numel() // columns
        lib.ls_rms_norm(
            x.data_ptr(), count, columns, columns, weight.data_ptr(), eps, _address(residual), out.data_ptr()
        )
        return out

    @ops.silu_and_mul.impl(BACKEND)
    def silu_and_mul(gate_up: Tensor) -> Tensor:
        if gate_up.dtype != torch.float32 or not gate_up.is_contiguous():
            return ops.silu_and_mul.impls["cpu"](gate_up)
        both = gate_up.shape[-1]
        out = gate_up.new_empty(*gate_up.shape[:-1], both // 2)
        lib.ls_silu_and_mul(gate_up.data_ptr(), gate_up.numel() // both, both, both // 2, out.data_ptr())
        return out


def _define_attention(lib: ctypes.CDLL) -> None:
    @ops.rotary_write_kv.impl(BACKEND)
    def rotary_write_kv(q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: KvCache) -> None:
        is_fit = _has_heads(q) and _has_heads(kv) and _are_rows(cos, sin)
        if not _has_heads(kv_cache) or not is_fit or slots.dtype != torch.int32 or not slots.is_contiguous():
            ops.rotary_write_kv.impls[ops.REFERENCE](q, kv, cos, sin, slots, kv_cache)
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

    @ops.token_attention.impl(BACKEND)
    def token_attention(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
        described = batch.plans.get(BACKEND)
        if described is None:  # once a step
            described = batch.plans[BACKEND] = _describe(batch)
        count, heads, dim = q.shape
        is_fit = described.count >= 0 and _has_heads(q) and dim % 8 == 0 and _is_plain(options)
        if not _has_heads(kv_cache) or not is_fit:
            return ops.token_attention.impls["cpu"](q, kv_cache, batch, options)
        out = q.new_empty(count, heads, dim)
        lib.ls_token_attention(
            q.data_ptr(),
            q.stride(0),
            heads,
            kv_cache.data_ptr(),
            kv_cache.stride(0),
            kv_cache.shape[1] // 2,
            dim,
            ctypes.addressof(described),
            options.window or 0,
            options.scale,
            out.data_ptr(),
        )
        return out


def _describe(batch: AttnBatch) -> DecodeBatch:
    """A count of -1: the library cannot read this batch."""
    fields = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len)
    is_fit = all(field.dtype == torch.int32 and field.is_contiguous() for field in fields)
    table = batch.req_to_token
    addresses = (field.data_ptr() for field in fields)
    return DecodeBatch(table.data_ptr(), table.stride(0), *addresses, len(fields[0]) if is_fit else -1)


def _has_heads(x: KvCache) -> TypeGuard[Tensor]:
    """Whether ``x`` ``[tokens, heads, dim]`` is float32 and the heads of a token have no gaps."""
    return isinstance(x, Tensor) and x.dtype is torch.float32 and x.stride()[1:] == (x.shape[2], 1)


def _is_plain(options: AttnOptions) -> bool:
    return options.alibi_slopes is None and options.softcap is None and options.sinks is None


if library is not None:
    _register(library)
