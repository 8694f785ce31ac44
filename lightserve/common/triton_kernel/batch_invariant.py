"""Matmul and attention whose result for a row does not depend on the rows beside it.

Tiles have the same size in every batch, and one program sums along a whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.attention.context_attention import attend_in_order
from lightserve.common.triton_kernel.latent import _mla_batch_invariant
from lightserve.common.triton_kernel.latent.latent_token_attention import check as check_latents
from lightserve.common.triton_kernel.linear import _int4_tiles, linear as few_rows, linear_int4 as int4
from lightserve.common.triton_kernel.linear.dequantize import linear_dequantized

BACKEND = ops.batch_invariant("triton")
LINEAR = few_rows.Config(block_n=64, block_bytes=256, num_warps=4, num_stages=4)
LINEAR_ROWS = 64  # of the input for each program


@ops.linear.impl(BACKEND)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return few_rows.multiply(rows, weight, bias, LINEAR, LINEAR_ROWS).view(*x.shape[:-1], len(weight))


@ops.linear_float32.impl(BACKEND)
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    return few_rows.multiply(x, weight, None, LINEAR, LINEAR_ROWS, out_dtype=torch.float32)


@ops.linear_int4.impl(BACKEND)
def linear_int4(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows) or weight.group_size // 2 < int4.MIN_HALF:
        return linear_dequantized(x, weight, bias, _product)
    out = _int4_tiles.multiply(rows, weight, bias, _int4_tiles.invariant_config(x.dtype))
    return out.view(*x.shape[:-1], weight.shape[-2])


@ops.linear_codebook4.impl(BACKEND)
def linear_codebook4(x: Tensor, weight: ops.Codebook4Weight, bias: Tensor | None = None) -> Tensor:
    return linear_dequantized(x, weight, bias, _product)


@ops.linear_mxfp4.impl(BACKEND)
def linear_mxfp4(x: Tensor, weight: ops.Mxfp4Weight, bias: Tensor | None = None) -> Tensor:
    return linear_dequantized(x, weight, bias, _product)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(few_rows.multiply(x, weight, bias, LINEAR, LINEAR_ROWS))


# Their definitions call the norm, which is computed row by row, the matmul above, and add_lora.
for _name in ("add_rms_norm_linear", "add_rms_norm_gate_up", "lora_linear", "add_rms_norm_lora_linear"):
    _op = ops.OPS[_name]
    _op.impl(BACKEND)(_op.impls[ops.REFERENCE])


@ops.context_attention.impl(BACKEND)
def context_attention(
    q: Tensor, kv: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, options: ops.AttnOptions
) -> Tensor:
    return attend_in_order(q, kv_cache, batch, options)


@ops.token_attention.impl(BACKEND)
def token_attention(q: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    return attend_in_order(q, kv_cache, batch, options)


@ops.latent_context_attention.impl(BACKEND)
def latent_context_attention(
    q: Tensor,
    latent: Tensor,
    latent_cache: ops.LatentCache,
    kv_b: Tensor,
    batch: ops.AttnBatch,
    options: ops.AttnOptions,
) -> Tensor:
    sizes = check_latents("latent_context_attention", q, latent_cache, kv_b, options)
    return _mla_batch_invariant.attend_in_order(q, latent_cache, kv_b, batch, options.scale, sizes)


@ops.latent_token_attention.impl(BACKEND)
def latent_token_attention(
    q: Tensor, latent_cache: ops.LatentCache, kv_b: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions
) -> Tensor:
    sizes = check_latents("latent_token_attention", q, latent_cache, kv_b, options)
    return _mla_batch_invariant.attend_in_order(q, latent_cache, kv_b, batch, options.scale, sizes)
