"""The experts of each token: one program for a token, with the scores of all experts in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.experts import MIN_SUM, RouteSpec
from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous

NO_EXPERT = tl.constexpr(ops.NO_EXPERT)
LEAST_SUM = tl.constexpr(MIN_SUM)
WIDE_ROW = 256  # experts: more than one warp for rows that are longer


@triton.jit
def _best(choice):
    """The place of the largest value, the first one of equals, as a scalar."""
    return tl.argmax(choice, axis=0, tie_break_left=True)


@triton.jit
def _within_best_groups(
    choice, experts, n_experts, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUMS_TWO: tl.constexpr
):
    """The scores, with those outside of the best groups at -inf."""
    group_of = experts // (n_experts // GROUPS)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUPS)
    groups = tl.arange(0, BLOCK_G)
    group_scores = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        group_choice = tl.where(group_of == group, choice, float("-inf"))
        score = tl.max(group_choice, axis=0)
        if SUMS_TWO:
            second = tl.max(tl.where(experts == _best(group_choice), float("-inf"), group_choice), axis=0)
            score += tl.where(n_experts > GROUPS, second, 0.0)
        group_scores = tl.where(groups == group, score, group_scores)
    is_best = experts < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = _best(group_scores)
        is_best = is_best | (group_of == best)
        group_scores = tl.where(groups == best, float("-inf"), group_scores)
    return tl.where(is_best, choice, float("-inf"))


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    is_padding_ptr,
    ids_ptr,
    weights_ptr,
    logits_row_stride,
    n_experts,
    scale,
    TOP_K: tl.constexpr,
    N_SHARED: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    GATES_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    is_expert = experts < n_experts
    logits = tl.load(logits_ptr + token * logits_row_stride + experts, mask=is_expert, other=float("-inf"))
    logits = logits.to(tl.float32)
    if IS_SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    else:
        scores = tl.sigmoid(logits)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=is_expert, other=0.0).to(tl.float32)
    # NaN is chosen last, so that ids are always experts.
    choice = tl.where(is_expert & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        choice = _within_best_groups(choice, experts, n_experts, GROUPS, TOP_GROUPS, SUMS_TWO)

    places = tl.arange(0, BLOCK_K)
    ids = tl.full([BLOCK_K], NO_EXPERT, tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k_idx in tl.static_range(TOP_K):
        score, best = tl.max(choice, axis=0, return_indices=True, return_indices_tie_break_left=True)
        if bias_ptr is not None:
            score = tl.sum(tl.where(experts == best, scores, 0.0), axis=0)
        ids = tl.where(places == k_idx, best, ids)
        weights = tl.where(places == k_idx, score, weights)
        choice = tl.where(experts == best, float("-inf"), choice)
    if RENORMALIZES:
        weights /= tl.sum(weights, axis=0) + LEAST_SUM
    # The shared experts follow, in id and place.
    ids = tl.where(places < TOP_K, ids, n_experts + places - TOP_K)
    of_shared = 1.0
    if GATES_SHARED:
        of_shared = tl.sigmoid(tl.load(logits_ptr + token * logits_row_stride + n_experts).to(tl.float32))
    weights = tl.where(places < TOP_K, weights * scale, of_shared)
    if is_padding_ptr is not None:
        is_padding = tl.load(is_padding_ptr + token) != 0
        ids = tl.where(is_padding, NO_EXPERT, ids)
        weights = tl.where(is_padding, 0.0, weights)
    COUNT: tl.constexpr = TOP_K + N_SHARED
    tl.store(ids_ptr + token * COUNT + places, ids, mask=places < COUNT)
    tl.store(weights_ptr + token * COUNT + places, weights, mask=places < COUNT)


@ops.route.impl("triton")
def route(
    logits: Tensor, spec: RouteSpec, bias: Tensor | None = None, is_padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens, n_experts = len(logits), logits.shape[1] - spec.gates_shared
    spec.check(n_experts)
    others = {name: tensor for name, tensor in (("bias", bias), ("is_padding", is_padding)) if tensor is not None}
    check_last_contiguous("route", logits=logits, **others)
    shape = (tokens, spec.experts_per_token)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if not tokens:
        return ids, weights
    _route_kernel[(tokens,)](
        logits,
        bias,
        is_padding,
        ids,
        weights,
        logits.stride(0),
        n_experts,
        spec.scale,
        TOP_K=spec.top_k,
        N_SHARED=spec.num_shared,
        IS_SOFTMAX=spec.score == "softmax",
        GROUPS=spec.groups,
        TOP_GROUPS=spec.top_groups,
        SUMS_TWO=spec.group_score == "top2",
        RENORMALIZES=spec.renormalize,
        GATES_SHARED=spec.gates_shared,
        BLOCK=next_power_of_2(n_experts),
        BLOCK_K=next_power_of_2(spec.experts_per_token),
        num_warps=1 if n_experts <= WIDE_ROW else 2,
    )
    return ids, weights
