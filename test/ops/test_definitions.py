"""The definitions themselves, against PyTorch's own functions, plain Python and statistics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops import sampling, watermark
from test.ops.cases import EPS, TOLERANCE, context_attention_args, ints, penalties_of, randn

CLOSE = TOLERANCE[torch.float32]
INF = float("inf")


def test_rms_norm_is_pytorchs() -> None:
    x, weight = randn(5, 48), randn(48, seed=1)

    torch.testing.assert_close(ops.rms_norm(x, weight, EPS), F.rms_norm(x, (48,), weight, EPS), **CLOSE)


def test_layer_norm_centres_and_scales() -> None:
    x, weight, bias = randn(5, 48), randn(48, seed=1), randn(48, seed=2)

    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, EPS), normed * weight + bias, **CLOSE)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_divides_powers_by_their_sum(dim: int) -> None:
    x = randn(3, 5, 7)
    powers = x.double().exp()
    shares = powers / powers.sum(dim, keepdim=True)

    torch.testing.assert_close(ops.softmax(x.half(), dim, torch.float32), shares.float(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(ops.log_softmax(x, dim), shares.log().float(), **CLOSE)


def test_top_k_is_a_sorted_list_with_nan_first() -> None:
    row = [3.0, -1.0, 3.0, float("nan"), INF, 0.0, -INF]
    x = torch.tensor([row, row])

    assert ops.top_k(x.T, 4, 0)[1].T.tolist() == [[3, 4, 0, 2]] * 2
    assert ops.top_k(x, 4, -1, largest=False)[1].tolist() == [[6, 1, 5, 0]] * 2
    assert ops.top_k(x, 4, -1, largest=False)[0].tolist() == [[-INF, -1.0, 0.0, 3.0]] * 2


def test_bmm_is_a_product_for_each_batch() -> None:
    x, y = randn(3, 4, 5), randn(3, 5, 6, seed=1)

    torch.testing.assert_close(ops.bmm(x, y), torch.einsum("bij,bjk->bik", x.double(), y.double()).float(), **CLOSE)


def test_gates_come_first() -> None:
    gate, up = randn(3, 8), randn(3, 8, seed=1)
    gate_up = torch.cat((gate, up), -1)

    torch.testing.assert_close(ops.silu_and_mul(gate_up), gate * gate.sigmoid() * up, **CLOSE)
    torch.testing.assert_close(ops.gelu_and_mul(gate_up), gate * (1 + (gate / 2**0.5).erf()) / 2 * up, **CLOSE)
    tanh = (0.7978845608 * (gate + 0.044715 * gate**3)).tanh()
    torch.testing.assert_close(ops.gelu_tanh_and_mul(gate_up), gate * (1 + tanh) / 2 * up, **CLOSE)
    torch.testing.assert_close(ops.relu2_and_mul(gate_up), gate.clamp(min=0) ** 2 * up, **CLOSE)


def test_rotary_turns_pairs_as_complex_numbers() -> None:
    q, k, angle = randn(3, 2, 10), randn(3, 1, 10, seed=1), randn(3, 4, seed=2)
    expected = torch.complex(q[..., :4], q[..., 4:8]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    tail = q[..., 8:].clone()

    ops.rotary(q, k, angle.cos(), angle.sin())

    torch.testing.assert_close(torch.complex(q[..., :4], q[..., 4:8]), expected, **CLOSE)
    assert torch.equal(q[..., 8:], tail)


@pytest.mark.parametrize("has_alibi", [False, True])
def test_context_attention_is_pytorchs_over_the_gathered_cache(has_alibi: bool) -> None:
    lens = [(0, 7), (5, 1), (4, 3)]
    q, kv, cache, batch, options = context_attention_args(lens, (4, 2), 64, torch.float32, "cpu")
    options = replace(options, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]) if has_alibi else None)

    out = ops.context_attention(q, kv, cache, batch, options)

    rows = q.split_with_sizes([new for _, new in lens])
    for i, (actual, part) in enumerate(zip(out.split_with_sizes([new for _, new in lens]), rows, strict=True)):
        seq_len = sum(lens[i])
        k, v = cache[batch.req_to_token[batch.b_req_idx[i], :seq_len]].chunk(2, dim=1)
        expected = pytorch_attention(part, k, v, options.alibi_slopes)
        torch.testing.assert_close(actual, expected, **CLOSE)


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Tensor:
    positions = torch.arange(k.shape[0])
    distance = positions - positions[-q.shape[0] :, None]
    bias = torch.zeros(()) if slopes is None else slopes[:, None, None] * distance
    mask = torch.where(distance > 0, -INF, bias).expand(q.shape[1], *distance.shape)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)


def test_penalties_follow_their_formula() -> None:
    logits = randn(3, 20)
    entries = [(0, 3, 0), (1, 0, 2), (1, 19, 1), (2, 7, 0), (2, 8, 5)]
    penalties = penalties_of(entries, (3, 20), "cpu")
    expected = logits.clone()
    for row, token, count in entries:
        value, repetition = float(logits[row, token]), float(penalties.b_repetition[row])
        value = value / repetition if value > 0 else value * repetition
        value -= float(penalties.b_frequency[row]) * count
        value -= float(penalties.b_presence[row]) if count else 0.0
        expected[row, token] = value

    ops.apply_penalties(logits, penalties)

    torch.testing.assert_close(logits, expected, **CLOSE)


def kept_by_brute_force(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
    best = max(logits)
    weights = [math.exp(value - best) if value >= kth else 0.0 for value in logits]

    def is_kept(value: float) -> bool:
        above = sum(weight for weight, other in zip(weights, logits, strict=True) if other > value)
        is_in_nucleus = top_p >= 1 or above / sum(weights) < top_p
        return value >= kth and is_in_nucleus and math.exp(value - best) >= min_p

    return [is_kept(value) for value in logits]


@pytest.mark.parametrize("top_k", [1, 3, 10, 40, 99])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.6, 0.0), (0.95, 0.0), (1.0, 0.2), (0.9, 0.05)])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_top_k_top_p_min_p_keeps_what_brute_force_keeps(top_k: int, top_p: float, min_p: float, step: float) -> None:
    logits = randn(4, 40) * 2
    if step:
        logits = (logits / step).round() * step  # many equals
    expected = [kept_by_brute_force(values, top_k, top_p, min_p) for values in logits.tolist()]

    ops.top_k_top_p_min_p(logits, ints([top_k] * 4, "cpu"), torch.full((4,), top_p), torch.full((4,), min_p))

    assert logits.isfinite().tolist() == expected


def test_sample_takes_tokens_as_often_as_softmax_says() -> None:
    samples = 40_000
    logits = torch.tensor([0.0, 1.0, -1.0, 3.0, -INF, 2.0, -4.0])
    seeds = torch.arange(samples) // 100  # 400 requests of 100 tokens each
    positions = (torch.arange(samples) % 100).int()

    tokens = ops.sample(logits.expand(samples, -1), torch.ones(samples), seeds, positions)

    probs = logits.softmax(-1)
    error = tokens.bincount(minlength=7) / samples - probs
    assert (error.abs() <= 4 * (probs * (1 - probs) / samples).sqrt()).all()


def test_uniforms_fill_their_range_evenly() -> None:
    counters = torch.arange(100_000)

    uniform = sampling.counter_uniform(torch.tensor(5), torch.tensor(6), counters)

    counts = (uniform * 10).long().bincount(minlength=10)
    assert ((counts - 10_000).abs() < 4 * 95).all()  # a binomial of 100,000 at 0.1 has a deviation of 95


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_uniforms_lie_strictly_between_zero_and_one(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(sampling, "hash32", lambda x: torch.full_like(x, bits))

    uniform = sampling.counter_uniform(torch.tensor(1), torch.tensor(2), torch.arange(3))

    assert ((uniform > 0) & (uniform < 1)).all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_uniforms_depend_on_seed_position_and_token(which: int) -> None:
    counters = [torch.tensor(value) for value in (3, 4, 5)]
    other = [counter + (i == which) for i, counter in enumerate(counters)]

    assert sampling.counter_uniform(*counters) != sampling.counter_uniform(*other)


def test_a_seeds_upper_half_counts() -> None:
    position, token = torch.tensor(1), torch.tensor(2)

    low, high = (sampling.counter_uniform(torch.tensor(seed), position, token) for seed in (7, 7 + (1 << 40)))

    assert low != high


def test_mask_logits_forbids_the_tokens_of_a_row_whose_bit_is_0() -> None:
    logits = torch.zeros(3, 70)
    bitmask = torch.zeros(2, 4, dtype=torch.int32)  # a word more than there are tokens
    bitmask[0, 0] = 0b101
    bitmask[0, 1] = -(2**31)
    bitmask[1, 2] = 1 << 5

    ops.mask_logits(logits, torch.tensor([2, 0], dtype=torch.int32), bitmask)

    allowed = [(row == 0).nonzero()[:, 0].tolist() for row in logits]
    assert allowed == [[69], list(range(70)), [0, 2, 63]]


def test_a_watermark_favours_about_half_of_the_tokens_another_half_after_every_token() -> None:
    b_last = torch.arange(50) * 977
    logits = torch.zeros(51, 20_000)

    ops.add_watermark(logits, torch.arange(50, dtype=torch.int32), b_last)

    is_green = logits[:50] > 0
    torch.testing.assert_close(logits[:50], is_green * watermark.GREEN_BIAS)
    assert not logits[50].any()
    share = is_green.float().mean(-1)
    assert ((share - watermark.GREEN_SHARE).abs() < 4 * (0.25 / 20_000) ** 0.5).all()
    both = (is_green[0] == is_green[1:]).float().mean(-1)  # two lists agree on as many tokens as chance has it
    assert ((both - 0.5).abs() < 5 * (0.25 / 20_000) ** 0.5).all()
