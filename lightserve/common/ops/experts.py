"""Mixture of experts: choose experts for each token, and sum what they compute.

A pair is a token and one of its experts. A pair whose expert is ``NO_EXPERT`` is computed by no one and adds nothing:
the pairs of padding rows, and pairs of experts that another rank holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.activation import sigmoid
from lightserve.common.ops.quantized_weight import QuantizedWeight
from lightserve.common.ops.registry import op

NO_EXPERT = -1
MAX_EXPERTS = 512
MIN_SUM = 1e-20  # DeepSeek adds it before it divides by the sum of the weights


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """How a model chooses the experts of a token.

    Softmax over the chosen logits alone (Mixtral, Granite, gpt-oss) equals ``softmax`` with ``renormalize``.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1  # of equally many experts; experts are chosen from the best groups only
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best score, or the sum of its two best
    renormalize: bool = False  # the weights of a token are divided by their sum
    scale: float = 1.0  # of the weights, after that
    num_shared: int = 0  # experts behind the others that every token uses, with weight 1
    gates_shared: bool = False  # with the sigmoid of a logit behind those of the others instead

    @property
    def experts_per_token(self) -> int:
        return self.top_k + self.num_shared

    def check(self, num_experts: int) -> None:
        """Raise if experts cannot be chosen like this."""
        if not 1 <= self.top_groups <= self.groups or num_experts % self.groups:
            raise ValueError(f"{num_experts} experts in {self.groups} groups, {self.top_groups} of them chosen")
        available = num_experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= available:
            raise ValueError(f"top_k is {self.top_k}; it must be from 1 to {available}")
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"{num_experts} experts; the limit is {MAX_EXPERTS}")


@dataclass(frozen=True, slots=True)
class GatedSilu:
    """``(up + up_offset) * gate * sigmoid(alpha * (gate + cubic * gate**3))``.

    Gate is at most ``limit`` and up within ``+-limit``. The defaults are the usual gated SiLU. gpt-oss has alpha 1.702,
    limit 7 and offset 1. In Step 3.5 the limit is that of the activated gate (``limits_activated``). The tanh form of
    GELU (``GATED_GELU_TANH``) is this with a cubic term.
    """

    rows_per_unit: ClassVar[int] = 2  # of w13: gate and up
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    cubic: float = 0.0
    limits_activated: bool = False  # the limit of the gate is that of ``gate * sigmoid(...)``

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
            gate = gate if self.limits_activated else gate.clamp(max=self.limit)
        argument = gate + self.cubic * gate**3 if self.cubic else gate
        activated = gate * sigmoid(self.alpha * argument)
        if self.limits_activated:
            activated = activated.clamp(max=self.limit)
        return (up + self.up_offset) * activated

    def of_rows(self, rows: Tensor) -> Tensor:
        """Of what ``w13`` computes, ``[tokens, 2 * width]``."""
        return self(rows[:, ::2], rows[:, 1::2])


@dataclass(frozen=True, slots=True)
class Relu2:
    """The square of ReLU, in experts without a gate."""

    rows_per_unit: ClassVar[int] = 1

    def of_rows(self, rows: Tensor) -> Tensor:
        return F.relu(rows).square()


ExpertActivation = GatedSilu | Relu2


# 0.5 * (1 + tanh(x)) is sigmoid(2 * x)
GATED_GELU_TANH = GatedSilu(alpha=2 * math.sqrt(2 / math.pi), cubic=0.044715)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsParams:
    """The weights of a layer's experts. Rows ``2 * i`` and ``2 * i + 1`` of ``w13`` are gate and up of unit ``i``.

    With gate and up side by side one program computes both, and applies the activation before it writes anything.
    Experts without a gate (``Relu2``) have one row for each unit: ``w13`` is ``[experts, width, hidden]``.
    Products with quantised weights do not round their inputs, whatever ``input_quant`` says, unless a backend's layout
    (``empty_packed``) does.
    """

    w13: Tensor | QuantizedWeight  # [experts, 2 * width, hidden]
    w2: Tensor | QuantizedWeight  # [experts, hidden, width]
    b13: Tensor | None = None  # [experts, 2 * width]
    b2: Tensor | None = None  # [experts, hidden]
    activation: ExpertActivation = GatedSilu()

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]


def weight_of_expert(weight: Tensor | QuantizedWeight, expert: int) -> Tensor:
    """``[out, in]``; in float32 if it is quantised."""
    return weight.expert(expert).dequantize() if isinstance(weight, QuantizedWeight) else weight[expert]


@op
def route(
    logits: Tensor, spec: RouteSpec, bias: Tensor | None = None, is_padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights; of equal experts the one with the lowest id.

    ``logits`` ``[tokens, experts]``, with ``gates_shared`` one more column; ``bias`` ``[experts]`` is added to the
    scores for the choice, not to the weights.
    Returns ids ``[tokens, experts_per_token]`` int32, which are ``NO_EXPERT`` where ``is_padding`` ``[tokens]``, and
    weights ``[tokens, experts_per_token]`` float32. The ids of shared experts follow those of the others.
    """
    logits, gate = logits.float().split_with_sizes([logits.shape[1] - spec.gates_shared, int(spec.gates_shared)], dim=1)
    spec.check(logits.shape[1])
    scores = logits.softmax(-1) if spec.score == "softmax" else sigmoid(logits)
    choice = scores if bias is None else scores + bias.float()
    if spec.groups > 1:
        choice = _within_best_groups(choice, spec)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
    weights = weights * spec.scale
    if spec.num_shared:
        shared = torch.arange(spec.num_shared, device=ids.device) + logits.shape[1]
        ids = torch.cat((ids, shared.expand(len(ids), -1)), dim=1)
        of_shared = sigmoid(gate) if spec.gates_shared else weights.new_ones(len(ids), 1)
        weights = torch.cat((weights, of_shared.expand(-1, spec.num_shared)), dim=1)
    if is_padding is not None:
        ids = ids.masked_fill(is_padding[:, None], NO_EXPERT)
        weights = weights.masked_fill(is_padding[:, None], 0.0)
    return ids.int(), weights


def _within_best_groups(choice: Tensor, spec: RouteSpec) -> Tensor:
    """The scores, with those outside of the best groups at -inf."""
    by_group = choice.view(len(choice), spec.groups, choice.shape[1] // spec.groups)
    counted = min(2, by_group.shape[2]) if spec.group_score == "top2" else 1
    group_scores = by_group.topk(counted, dim=-1).values.sum(-1)
    best = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~is_best[:, :, None], float("-inf")).view_as(choice)


@op
def experts(x: Tensor, ids: Tensor, weights: Tensor, params: ExpertsParams) -> Tensor:
    """``x`` ``[tokens, hidden]`` through the experts ``ids`` of each token, summed with ``weights``.

    ``ids`` and ``weights`` are as ``route`` returns them. A row whose ids are all ``NO_EXPERT`` becomes 0.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(params.num_experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens].float() @ weight_of_expert(params.w13, expert).float().T
        if params.b13 is not None:
            rows += params.b13[expert]
        computed = params.activation.of_rows(rows) @ weight_of_expert(params.w2, expert).float().T
        if params.b2 is not None:
            computed += params.b2[expert]
        out.index_add_(0, tokens, computed * weights[tokens, places, None])
    return out.to(x.dtype)
