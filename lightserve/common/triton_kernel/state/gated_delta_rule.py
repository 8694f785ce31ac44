from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.norm.activation import activate
from lightserve.common.triton_kernel.state._linear_scan import run

BLOCK = 512  # columns of a program


@triton.jit
def _delta_gates_kernel(
    a_ptr,
    b_ptr,
    rates_ptr,
    dt_bias_ptr,
    log_decay_ptr,
    beta_ptr,
    a_row_stride,
    b_row_stride,
    heads,
    n_cols,
    MIN_LOG_DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, is_head = cols < n_cols, cols < heads

    a = tl.load(a_ptr + token * a_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    a += tl.load(dt_bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rates = tl.load(rates_ptr + cols // (n_cols // heads), mask=mask, other=0.0).to(tl.float32)
    log_decay = (
        rates * activate(a, "softplus") if MIN_LOG_DECAY is None else MIN_LOG_DECAY * activate(-rates * a, "gate")
    )
    tl.store(log_decay_ptr + token * n_cols + cols, log_decay, mask=mask)
    b = tl.load(b_ptr + token * b_row_stride + cols, mask=is_head, other=0.0).to(tl.float32)
    tl.store(beta_ptr + token * heads + cols, activate(b, "gate"), mask=is_head)


@ops.delta_gates.impl("triton")
def delta_gates(
    a: Tensor, b: Tensor, rates: Tensor, dt_bias: Tensor, min_log_decay: float | None = None
) -> tuple[Tensor, Tensor]:
    check_last_contiguous("delta_gates", a=a, b=b, rates=rates, dt_bias=dt_bias)
    log_decay, beta = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (a, b))
    tokens, n_cols = a.shape
    if a.numel():
        _delta_gates_kernel[(tokens, cdiv(n_cols, BLOCK))](
            a, b, rates, dt_bias, log_decay, beta, a.stride(0), b.stride(0), len(rates), n_cols, min_log_decay, BLOCK
        )
    return log_decay, beta


@ops.gated_delta_rule.impl("triton")
def gated_delta_rule(inputs: ops.DeltaInputs, states: Tensor, batch: ops.StateBatch) -> Tensor:
    return run("gated_delta_rule", inputs.scan(), states, batch)
