"""The short convolution before a recurrent layer: each channel sees the last few tokens of its request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.ops.activation import sigmoid
from lightserve.common.ops.registry import op
from lightserve.common.ops.state.batch import StateBatch, read_state, write_state


class ConvParams(NamedTuple):
    weight: Tensor  # [channels, width]; the last column is the factor of the token itself
    bias: Tensor | None = None  # [channels]
    has_silu: bool = True

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def finish(self, sums: Tensor) -> Tensor:
        """``sums`` ``[tokens, channels]`` in float32, with the bias and the activation."""
        if self.bias is not None:
            sums = sums + self.bias.float()
        return sums * sigmoid(sums) if self.has_silu else sums


@op
def causal_conv1d(x: Tensor, params: ConvParams, states: Tensor, batch: StateBatch) -> Tensor:
    """Convolve each channel of ``x`` ``[tokens, channels]`` over the tokens of its request.

    ``states`` ``[rows, width - 1, channels]``: the last inputs of a request, the oldest first.
    """
    out = x.new_empty(x.shape)
    for tokens, read, write in batch.requests():
        inputs = torch.cat((read_state(states, read).to(x.dtype), x[tokens]))
        windows = inputs.float().unfold(0, params.width, 1)
        out[tokens] = params.finish((windows * params.weight.float()).sum(-1)).to(x.dtype)
        write_state(states, write, inputs[len(inputs) - params.width + 1 :])
    return out
