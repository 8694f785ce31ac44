"""Experts in four steps: sort pairs by expert, gate and up with the activation, down, sum over the pairs of a token.

The rows between these kernels are pairs, sorted by expert. How many tokens choose an expert on average decides which
tiles a product takes; above ``GROUPED`` torch's grouped matmul is faster. For few pairs no two of which are likely to
choose the same expert, each pair is a block of its own, and nothing is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import ExpertActivation, ExpertsParams, QuantizedWeight
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import fits
from lightserve.common.triton_kernel.experts import _grouped_experts as grouped
from lightserve.common.triton_kernel.experts._expert_linear import Config, PairBlocks, expert_linear
from lightserve.common.triton_kernel.experts._expert_pairs import SortedPairs, sort_pairs
from lightserve.common.triton_kernel.experts._quantized_expert_linear import quantized_expert_linear

# us of gate and up, then of down, on an H200 in bfloat16, for Qwen3-30B-A3B (128 experts, 8 for each token) and
# DeepSeek-V2-Lite (64, 6). All configurations of a few pairs are in docs/log.md.
PAIRS = Config(block_m=8, block_n=64, block_bytes=512, num_warps=4, num_stages=3)  # 1 token: 15.1 8.6; 18.8 10.8
# By the most pairs that an expert has on average.
CONFIGS = (
    (5, PAIRS),  # 64 tokens of the first, 4 pairs: 180 94; 16 pairs in a block 182 96
    (10, Config(block_m=16, block_n=128, block_bytes=256, num_warps=4, num_stages=4)),  # second, 6: 170 89; 8: 174 90
    (26, Config(block_m=32, block_n=128, block_bytes=256, num_warps=4, num_stages=4)),  # 16: 192 102; 24: 179 95
    (88, Config(block_m=64, block_n=128, block_bytes=128, num_warps=4, num_stages=4)),  # 32: 197 106; 64: 230 127
    (1 << 30, Config(block_m=128, block_n=256, block_bytes=128, num_warps=8, num_stages=3)),  # 256: 470 262
)
INVARIANT = Config(block_m=32, block_n=64, block_bytes=256, num_warps=4, num_stages=4)
UNSORTED = 8  # experts for each pair, at least: then a product reads hardly any expert twice
# Pairs of an expert on average. Gate and up by the grouped matmul need two more kernels, which move rows of pairs: with
# 512 pairs they take 1,007 us and 192 more, the kernel 953. Down with 384 pairs takes 304 us and 345.
GROUPED_GATE_UP = 768
GROUPED_DOWN = 320
SUM_BLOCK = 512
FLOAT32_BYTES = 4


@triton.jit
def _sum_pairs_kernel(
    pairs_ptr, ids_ptr, weights_ptr, rows_ptr, bias_ptr, out_ptr, n_cols, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for k_idx in tl.static_range(TOP_K):
        pair = token * TOP_K + k_idx
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        row = pair
        if rows_ptr is not None:
            row = tl.load(rows_ptr + pair).to(tl.int64)
        mask = (cols < n_cols) & (expert >= 0)
        value = tl.load(pairs_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + expert * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        acc += value * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * n_cols + cols, acc, mask=cols < n_cols)


def config_of(n_pairs: int, n_experts: int) -> Config:
    """The tiles of sorted pairs. A card with little shared memory has no room for the results of the largest."""
    config = next(config for most, config in CONFIGS if n_pairs <= most * n_experts)
    result_bytes = config.block_m * config.block_n * FLOAT32_BYTES
    return config if fits(0, 1, resident_bytes=result_bytes) else CONFIGS[-2][1]


def is_sorted(tokens: int, n_pairs: int, n_experts: int) -> bool:
    """Whether the pairs have to be sorted. The experts of one token differ."""
    return tokens > 1 and n_pairs * UNSORTED > n_experts


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product of each kind is computed, for one choice of experts."""

    ids: Tensor  # [tokens, top_k]
    config: Config
    pairs: SortedPairs | None  # None: pairs are not sorted
    groups_gate_up: bool = False  # by the grouped matmul
    groups_down: bool = False

    def gate_up(self, x: Tensor, params: ExpertsParams) -> Tensor:
        """The activation of gate and up, or of up alone; a row for each pair."""
        if not self.groups_gate_up or self.pairs is None:
            return self._multiply(x, params.w13, params.b13, params.activation)
        gathered = grouped.gather_tokens(x, self.pairs.pairs, self.ids.shape[1])
        gate_up = grouped.grouped_mm(gathered, _floats(params.w13), self.pairs.ends)
        return grouped.activate_pairs(gate_up, params.b13, self.ids, self.pairs.pairs, params.activation)

    def down(self, gated: Tensor, params: ExpertsParams) -> Tensor:
        """Without the bias."""
        if self.groups_down and self.pairs is not None:
            return grouped.grouped_mm(gated, _floats(params.w2), self.pairs.ends)
        return self._multiply(gated, params.w2)

    def sum(self, computed: Tensor, weights: Tensor, params: ExpertsParams) -> Tensor:
        """For each token the sum of its pairs, in the order of its ids."""
        (tokens, top_k), n_cols = self.ids.shape, computed.shape[1]
        out = computed.new_empty((tokens, n_cols))
        rows = None if self.pairs is None else self.pairs.rows
        grid = (tokens, cdiv(n_cols, SUM_BLOCK))
        _sum_pairs_kernel[grid](computed, self.ids, weights, rows, params.b2, out, n_cols, TOP_K=top_k, BLOCK=SUM_BLOCK)
        return out

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        activation: ExpertActivation | None = None,
    ) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            return quantized_expert_linear(x, weight, self._blocks(), self.config.block_m, bias, activation)
        return expert_linear(x, weight, self._blocks(), self.config, bias, activation)

    def _blocks(self) -> PairBlocks:
        if self.pairs is None:
            return PairBlocks(self.ids, None, self.ids.shape[1])
        return PairBlocks(self.pairs.blocks, self.pairs.pairs, self.ids.shape[1])


def plan_of(x: Tensor, ids: Tensor, params: ExpertsParams) -> Plan:
    n_pairs, n_experts = ids.numel(), params.num_experts
    if not is_sorted(len(x), n_pairs, n_experts):
        return Plan(ids, PAIRS, None)
    config = config_of(n_pairs, n_experts)
    return Plan(
        ids,
        config,
        sort_pairs(ids, n_experts, config.block_m),
        groups_gate_up=n_pairs >= GROUPED_GATE_UP * n_experts and _can_group(x, params.w13),
        groups_down=n_pairs >= GROUPED_DOWN * n_experts and _can_group(x, params.w2),
    )


def _can_group(x: Tensor, weight: Tensor | QuantizedWeight) -> bool:
    return isinstance(weight, Tensor) and grouped.is_usable(x, weight)


def _floats(weight: Tensor | QuantizedWeight) -> Tensor:
    assert isinstance(weight, Tensor)  # ``plan_of`` groups no others
    return weight


def invariant_plan(ids: Tensor, params: ExpertsParams) -> Plan:
    """The same tiles for every number of tokens."""
    return Plan(ids, INVARIANT, sort_pairs(ids, params.num_experts, INVARIANT.block_m))


def compute(plan: Plan, x: Tensor, weights: Tensor, params: ExpertsParams) -> Tensor:
    return plan.sum(plan.down(plan.gate_up(x, params), params), weights, params)


@ops.experts.impl("triton")
def experts(x: Tensor, ids: Tensor, weights: Tensor, params: ExpertsParams) -> Tensor:
    _check(x, ids, weights, params)
    return compute(plan_of(x, ids, params), x, weights, params) if x.numel() else x.new_empty(x.shape)


@ops.experts.impl(ops.batch_invariant("triton"))
def experts_in_fixed_tiles(x: Tensor, ids: Tensor, weights: Tensor, params: ExpertsParams) -> Tensor:
    _check(x, ids, weights, params)
    return compute(invariant_plan(ids, params), x, weights, params) if x.numel() else x.new_empty(x.shape)


def _check(x: Tensor, ids: Tensor, weights: Tensor, params: ExpertsParams) -> None:
    check_last_contiguous("experts", x=x)
    contiguous = {"ids": ids, "weights": weights, "b13": params.b13, "b2": params.b2}
    for name, weight in (("w13", params.w13), ("w2", params.w2)):
        if isinstance(weight, Tensor):
            check_last_contiguous("experts", **{name: weight})
        else:
            check_last_contiguous("experts", **{f"{name}.codes": weight.codes, f"{name}.scales": weight.scales})
            contiguous[f"{name}.offsets"] = weight.offsets
    for name, tensor in contiguous.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"experts: {name} must be contiguous, found strides {tensor.stride()}")
