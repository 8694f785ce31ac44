"""Experts on a CPU: the pairs sorted by expert, one product for each expert that has some.

The C library multiplies with quantised weights in its layout. Others are dequantised when their expert has pairs: one
expert is in memory as floats at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel.packed_experts import PackedExperts
from lightserve.common.ops import ExpertsParams, QuantizedWeight
from lightserve.common.ops.experts import weight_of_expert


@ops.experts.impl("cpu")
def experts(x: Tensor, ids: Tensor, weights: Tensor, params: ExpertsParams) -> Tensor:
    tokens, top_k = ids.shape
    computed = x.new_zeros(tokens * top_k, x.shape[1])
    for expert, pairs in _pairs_by_expert(ids):
        rows = _linear(x[pairs // top_k], params.w13, params.b13, expert).float()
        activated = params.activation.of_rows(rows).to(x.dtype)
        computed[pairs] = _linear(activated, params.w2, params.b2, expert)
    out = torch.zeros(x.shape)
    for k_idx, by_token in enumerate(computed.view(tokens, top_k, x.shape[1]).unbind(1)):  # always in this order
        out += by_token * weights[:, k_idx, None]
    return out.to(x.dtype)


def _pairs_by_expert(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has pairs, and the numbers ``token * top_k + k_idx`` of these pairs."""
    chosen, order = ids.flatten().sort(stable=True)
    counts = Counter(chosen.tolist())  # in the order of the ids
    for expert, pairs in zip(counts, order.split_with_sizes(list(counts.values())), strict=True):
        if expert != ops.NO_EXPERT:
            yield expert, pairs


def _linear(x: Tensor, weight: Tensor | QuantizedWeight, biases: Tensor | None, expert: int) -> Tensor:
    bias = None if biases is None else biases[expert]
    if isinstance(weight, PackedExperts):
        return weight.experts[expert].mm(x, bias)
    return ops.linear(x, weight_of_expert(weight, expert), bias)
