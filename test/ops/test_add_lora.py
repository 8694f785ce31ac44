"""What adapters add to a linear, by every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.lora import add_lora as kernels
from test.ops.cases import (
    BATCH_INVARIANT,
    TOLERANCE,
    assert_close,
    bind,
    device_of,
    each_backend_and_dtype,
    lora_rows,
    lora_weights,
    randn,
    strided,
    wide,
)

BATCHES = {
    "one row": [1],
    "no adapter": [ops.NO_LORA] * 5,
    "mixed": [2, 0, ops.NO_LORA, 2, 2, 1, ops.NO_LORA, 0, 0],
    "more rows than a group": [0] * 37 + [ops.NO_LORA] + [1] * 16,
}


def oracle(out: Tensor, x: Tensor, weights: ops.LoraWeights, slots: list[int]) -> Tensor:
    """Row by row with the matrix B @ A of its adapter, in float32."""
    expected, rank = out.float().clone(), weights.rank
    for row, slot in enumerate(slots):
        for part, columns in enumerate(weights.parts() if slot != ops.NO_LORA else []):
            delta = weights.b[slot, columns].float() @ weights.a[slot, part * rank : (part + 1) * rank].float()
            expected[row, columns] += delta @ x[row].float()
    return expected


@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES.keys())
def test_the_definition_is_the_product_with_b_a(slots: list[int]) -> None:
    out, x = randn(len(slots), 24), randn(len(slots), 20, seed=1)
    weights = lora_weights(20, (16, 8), torch.float32, "cpu")
    expected = oracle(out, x, weights, slots)

    ops.add_lora(out, x, weights, lora_rows(slots, "cpu"))

    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


@each_backend_and_dtype(ops.add_lora)
@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("in_size", "parts"), [(600, (72, 24, 24)), (33, (70,)), (1024, (80, 80))])
def test_each_row_gets_what_its_adapter_adds(
    backend: str, dtype: torch.dtype, slots: list[int], in_size: int, parts: tuple[int, ...]
) -> None:
    device = device_of(backend)
    out = strided(randn(len(slots), sum(parts), dtype=dtype, device=device))
    x = strided(randn(len(slots), in_size, dtype=dtype, device=device, seed=1))
    weights = lora_weights(in_size, parts, dtype, device, rank=32)
    expected = wide(out)
    ops.add_lora.impls[ops.REFERENCE](expected, wide(x), _wide(weights), lora_rows(slots, device))

    ops.add_lora.impls[backend](out, x, weights, lora_rows(slots, device))

    assert_close(out, expected, dtype)


def _wide(weights: ops.LoraWeights) -> ops.LoraWeights:
    return ops.LoraWeights(wide(weights.a), wide(weights.b), weights.part_ends)


@pytest.mark.parametrize("backend", BATCH_INVARIANT)
def test_a_row_has_the_same_bits_whatever_is_beside_it(backend: str) -> None:
    device, slots = device_of(backend), [0, 1, 0, 2, ops.NO_LORA, 1, 1] * 6
    x, weights = randn(len(slots), 600, device=device, seed=1), lora_weights(600, (40, 24), torch.float32, device)
    whole = torch.zeros(len(slots), 64, device=device)
    bind(backend)
    ops.add_lora(whole, x, weights, lora_rows(slots, device))

    for begin, end in [(0, 1), (3, 12), (5, 42)]:
        part = torch.zeros(end - begin, 64, device=device)
        ops.add_lora(part, x[begin:end], weights, lora_rows(slots[begin:end], device))
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_the_splits_of_the_sums_give_the_same_result(splits: int) -> None:
    device, slots = device_of("triton"), BATCHES["mixed"]
    out, x = randn(9, 48, device=device), randn(9, 1100, device=device, seed=1)
    weights = lora_weights(1100, (32, 16), torch.float32, device)
    expected = oracle(out, x, weights, slots)

    kernels.add(out, x, weights, lora_rows(slots, device, max_group=32), splits, block_m=16)

    assert_close(out, expected, torch.float32)


def test_few_groups_are_split_until_every_multiprocessor_has_its_programs() -> None:
    assert [kernels.splits_of(groups, 3, 4096) for groups in (1, 2, 64)] == [16, 8, 1]  # 4 on each of 12
    assert kernels.splits_of(1, 1, 128) == 1


def test_groups_of_other_sizes_suffice_for_any_batch() -> None:
    for tokens, slots in [(1, 8), (8, 8), (64, 8), (64, 200), (700, 2)]:
        size = ops.lora_group_rows(tokens)
        counts = [tokens // slots + (i < tokens % slots) for i in range(slots)]
        needed = sum(-(-count // size) for count in counts)
        assert needed <= ops.max_lora_groups(tokens, slots, size)
