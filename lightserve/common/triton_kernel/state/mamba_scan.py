"""Mamba2's scan: a kernel for the step sizes, then a linear scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.state._linear_scan import run

SOFTPLUS_LIMIT = tl.constexpr(20.0)  # as torch has it: from here on it is the identity


@triton.jit
def _mamba_steps_kernel(
    dt_ptr, dt_bias_ptr, a_ptr, step_ptr, log_decay_ptr, dt_row_stride, heads, least, most, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < heads

    x = tl.load(dt_ptr + token * dt_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    softplus = tl.where(x > SOFTPLUS_LIMIT, x, tl.log(1 + tl.exp(tl.minimum(x, SOFTPLUS_LIMIT))))
    step = tl.minimum(tl.maximum(softplus, least), most)
    a = tl.load(a_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(step_ptr + token * heads + cols, step, mask=mask)
    tl.store(log_decay_ptr + token * heads + cols, step * a, mask=mask)


@ops.mamba_scan.impl("triton")
def mamba_scan(inputs: ops.MambaInputs, params: ops.MambaParams, states: Tensor, batch: ops.StateBatch) -> Tensor:
    check_last_contiguous("mamba_scan", dt=inputs.dt)
    tokens, heads = inputs.dt.shape
    step, log_decay = (torch.empty(tokens, heads, dtype=torch.float32, device=inputs.dt.device) for _ in range(2))
    if tokens:
        _mamba_steps_kernel[(tokens,)](
            inputs.dt,
            params.dt_bias,
            params.a,
            step,
            log_decay,
            inputs.dt.stride(0),
            heads,
            *params.dt_limits,
            BLOCK=next_power_of_2(heads),
        )
    return run("mamba_scan", inputs.scan(step, log_decay, params.d), states, batch)
