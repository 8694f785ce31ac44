from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from test.ops.cases import NAN, assert_close, device_of, each_backend_and_dtype, ints, randn, strided, wide


def angles(tokens: int, half: int, device: str) -> tuple[Tensor, Tensor]:
    angle = randn(tokens, half, device=device, seed=9) * 3
    return angle.cos(), angle.sin()


@each_backend_and_dtype(ops.rotary)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (3, 1), (3, 0)])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 40), (80, 10), (2, 1), (96, 24)])
def test_rotary_turns_queries_and_keys_and_leaves_the_tail(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, half: int
) -> None:
    q, k = (randn(3, n, dim, dtype=dtype, device=device_of(backend), seed=n) for n in heads)
    cos, sin = angles(3, half, device_of(backend))
    q_expected, k_expected, q_before, k_before = wide(q), wide(k), q.clone(), k.clone()
    ops.rotary(q_expected, k_expected, cos, sin)

    ops.rotary.impls[backend](q, k, cos, sin)

    assert_close(q, q_expected, dtype)
    assert_close(k, k_expected, dtype)
    assert torch.equal(q[..., 2 * half :], q_before[..., 2 * half :])
    assert torch.equal(k[..., 2 * half :], k_before[..., 2 * half :])


@each_backend_and_dtype(ops.rotary)
def test_rotary_turns_its_part_of_a_fused_qkv_and_nothing_else(backend: str, dtype: torch.dtype) -> None:
    qkv = randn(5, 4 + 2 + 2, 80, dtype=dtype, device=device_of(backend))
    cos, sin = (strided(table) for table in angles(5, 40, device_of(backend)))
    expected, values_before = wide(qkv), qkv[:, 6:].clone()
    ops.rotary(expected[:, :4], expected[:, 4:6], cos, sin)

    ops.rotary.impls[backend](qkv[:, :4], qkv[:, 4:6], cos, sin)

    assert_close(qkv, expected, dtype)
    assert torch.equal(qkv[:, 6:], values_before)


def test_more_angles_than_a_head_has_pairs_are_refused() -> None:
    q = randn(2, 1, 8, device=device_of("triton"))

    with pytest.raises(ValueError, match="rotary: 5 angles, heads of q of 8 and of k of 8 do not match"):
        ops.rotary.impls["triton"](q, q, *angles(2, 5, device_of("triton")))


@each_backend_and_dtype(ops.rotary_write_kv)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (3, 1), (5, 5)])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 40), (80, 10), (2, 1), (96, 24)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_rotary_write_kv_turns_in_place_and_fills_its_slots_and_no_others(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, half: int, slot_dtype: torch.dtype
) -> None:
    device, (q_heads, kv_heads) = device_of(backend), heads
    qkv = randn(4, q_heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    cos, sin = (strided(table) for table in angles(4, half, device))
    slots = ints([7, 0, 3, 8], device, slot_dtype)
    layers = torch.full((9, 3, 2 * kv_heads, dim), NAN, dtype=dtype, device=device)
    expected, values_before = wide(qkv), qkv[:, q_heads + kv_heads :].clone()
    ops.rotary(expected[:, :q_heads], expected[:, q_heads : q_heads + kv_heads], cos, sin)

    ops.rotary_write_kv.impls[backend](qkv[:, :q_heads], qkv[:, q_heads:], cos, sin, slots, layers[:, 1])

    assert_close(qkv, expected, dtype)
    assert torch.equal(qkv[:, q_heads + kv_heads :], values_before)
    assert torch.equal(layers[slots.long(), 1], qkv[:, q_heads:])
    assert int(layers.isnan().sum()) == layers.numel() - qkv[:, q_heads:].numel()


@each_backend_and_dtype(ops.rotary_write_kv)
def test_rotary_write_kv_rounds_to_the_dtype_of_the_cache(backend: str, dtype: torch.dtype) -> None:
    device = device_of(backend)
    q, kv = randn(2, 2, 64, device=device), randn(2, 2, 64, device=device, seed=1)
    cache = torch.zeros(3, 2, 64, dtype=dtype, device=device)

    ops.rotary_write_kv.impls[backend](q, kv, *angles(2, 32, device), ints([2, 0], device), cache)

    assert torch.equal(cache[[2, 0]], kv.to(dtype))


@each_backend_and_dtype(ops.norm_rotary_write_kv)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 5)])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 40), (80, 10), (96, 24)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_norm_rotary_write_kv_normalises_each_head_first(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, half: int, weight_dtype: torch.dtype | None
) -> None:
    device, (q_heads, kv_heads) = device_of(backend), heads
    qkv = randn(4, q_heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    q_weight, k_weight = (randn(dim, dtype=weight_dtype or dtype, device=device, seed=seed) for seed in (5, 6))
    cos, sin = angles(4, half, device)
    slots = ints([7, 0, 3, 8], device)
    cache = torch.full((9, 2 * kv_heads, dim), NAN, dtype=dtype, device=device)
    expected, values_before = wide(qkv), qkv[:, q_heads + kv_heads :].clone()
    q, k = expected[:, :q_heads], expected[:, q_heads : q_heads + kv_heads]
    for x, weight in ((q, q_weight), (k, k_weight)):
        x.copy_(ops.rms_norm(x, wide(weight), 1e-5))
    ops.rotary(q, k, cos, sin)

    ops.norm_rotary_write_kv.impls[backend](
        qkv[:, :q_heads],
        qkv[:, q_heads:],
        ops.HeadNorms(q_weight, k_weight, 1e-5),
        ops.RotaryAngles(cos, sin),
        slots,
        cache,
    )

    assert_close(qkv, expected, dtype)
    assert torch.equal(qkv[:, q_heads + kv_heads :], values_before)
    assert torch.equal(cache[slots.long()], qkv[:, q_heads:])
