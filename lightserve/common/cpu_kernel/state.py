"""Ops with recurrent state: a prompt by torch's convolution, and all decodes of a step at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops.state.batch import read_state, write_state


@ops.causal_conv1d.impl("cpu")
def causal_conv1d(x: Tensor, params: ops.ConvParams, states: Tensor, batch: ops.StateBatch) -> Tensor:
    if batch.max_tokens == 1 and len(batch.b_read_row) == len(x):
        return _convolve_decodes(x, params, states, batch)
    out = x.new_empty(x.shape)
    weight = params.weight.float()[:, None]
    for tokens, read, write in batch.requests():
        inputs = torch.cat((read_state(states, read).to(x.dtype), x[tokens]))
        sums = F.conv1d(inputs.float().T[None], weight, groups=x.shape[1])[0].T
        out[tokens] = params.finish(sums).to(x.dtype)
        write_state(states, write, inputs[len(inputs) - params.width + 1 :])
    return out


def _convolve_decodes(x: Tensor, params: ops.ConvParams, states: Tensor, batch: ops.StateBatch) -> Tensor:
    inputs = torch.cat((_gather(states, batch.b_read_row).to(x.dtype), x[:, None]), dim=1)
    _scatter(states, batch.b_write_row, inputs[:, 1:])
    return params.finish((inputs.float() * params.weight.float().T).sum(1)).to(x.dtype)


def _gather(states: Tensor, rows: Tensor) -> Tensor:
    """A copy of these rows; zeros for ``NO_ROW``."""
    gathered = states[rows.clamp(min=0).long()]
    gathered[rows < 0] = 0
    return gathered


def _scatter(states: Tensor, rows: Tensor, new: Tensor) -> None:
    is_kept = rows >= 0
    states[rows[is_kept].long()] = new[is_kept].to(states.dtype)
