from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TypicalLogitsWarper

from lightserve.common import ops
from lightserve.common.triton_kernel.sampling import top_k_top_p_min_p as kernel
from test.ops.cases import (
    ARGS,
    TOLERANCE,
    backends_of,
    device_of,
    each_backend,
    each_backend_and_dtype,
    ints,
    penalties_of,
    randn,
    strided,
)

INF = float("inf")
VOCABS = [1, 33, 300, 5000]  # the last is more than one block of a kernel's walk


def row(values: list[float], device: str) -> Tensor:
    return torch.tensor([values], device=device)


@each_backend(ops.mask_logits)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_mask_changes_only_its_rows_and_as_defined(backend: str, vocab: int) -> None:
    device = device_of(backend)
    logits = strided(randn(4, vocab, device=device))
    words = vocab // 32 + 2  # more than needed
    bits = torch.randint(-(2**31), 2**31, (2, words), generator=torch.Generator().manual_seed(0))
    bitmask, rows = bits.to(device, torch.int32), ints([3, 1], device)
    expected = logits.clone()
    ops.mask_logits(expected, rows, bitmask)

    ops.mask_logits.impls[backend](logits, rows, bitmask)

    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert logits[[0, 2]].isfinite().all()


def test_triton_refuses_a_mask_that_is_too_short() -> None:
    logits, rows, bitmask = ARGS["mask_logits"](3, torch.float32, device_of("triton"))
    short = bitmask[:, :9].contiguous()
    temperature, seed, position = ARGS["sample"](3, torch.float32, device_of("triton"))[1:4]

    with pytest.raises(ValueError, match="mask_logits: a bitmask of 9 words has no bit for each of 300 tokens"):
        ops.mask_logits.impls["triton"](logits, rows, short)
    with pytest.raises(ValueError, match="sample: a bitmask of 9 words has no bit for each of 300 tokens"):
        ops.sample.impls["triton"](logits, temperature, seed, position, ops.TokenMasks(rows, short))


@each_backend(ops.add_watermark)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_watermark_raises_the_same_tokens_on_every_device(backend: str, vocab: int) -> None:
    device = device_of(backend)
    logits = strided(randn(4, vocab, device=device))
    rows, b_last = ints([3, 1], device), ints([151_000, 0], device, torch.int64)
    expected = logits.clone()
    ops.add_watermark(expected, rows, b_last)

    ops.add_watermark.impls[backend](logits, rows, b_last)

    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@each_backend(ops.apply_penalties)
def test_penalties_change_their_entries_as_defined_and_no_others(backend: str) -> None:
    logits = strided(randn(3, 300, device=device_of(backend)))
    entries = [(0, 5, 0), (0, 299, 2), (1, 0, 1), (2, 150, 7), (2, 151, 0)]
    penalties = penalties_of(entries, (3, 300), device_of(backend))
    expected, before = logits.clone(), logits.clone()
    ops.apply_penalties(expected, penalties)

    ops.apply_penalties.impls[backend](logits, penalties)

    torch.testing.assert_close(logits, expected, **TOLERANCE[torch.float32])
    changed = (logits != before).nonzero().tolist()
    assert changed == [[0, 299], [1, 0], [2, 150], [2, 151]]  # row 0 has no repetition penalty: its unused 5 stays


@each_backend(ops.apply_penalties)
def test_penalties_of_more_tokens_than_a_block_all_fall(backend: str) -> None:
    logits = randn(2, 5000, device=device_of(backend))
    penalties = penalties_of([(i % 2, i, i % 3) for i in range(5000)], (2, 5000), device_of(backend))
    expected = logits.clone()
    ops.apply_penalties(expected, penalties)

    ops.apply_penalties.impls[backend](logits, penalties)

    torch.testing.assert_close(logits, expected, **TOLERANCE[torch.float32])


@each_backend(ops.apply_penalties)
def test_penalties_fall_on_their_rows_of_the_logits_alone(backend: str) -> None:
    logits = randn(3, 300, device=device_of(backend))
    of_two = penalties_of([(0, 7, 2), (1, 8, 1)], (2, 300), device_of(backend))
    before = logits.clone()

    ops.apply_penalties.impls[backend](logits, replace(of_two, rows=ints([2, 0], device_of(backend))))

    assert (logits != before).nonzero().tolist() == [[0, 8], [2, 7]]


@each_backend(ops.apply_penalties)
def test_a_masked_token_stays_masked_under_any_penalty(backend: str) -> None:
    logits = torch.full((3, 33), -INF, device=device_of(backend))
    entries = [(row, token, token % 3) for row in range(3) for token in range(33)]

    ops.apply_penalties.impls[backend](logits, penalties_of(entries, (3, 33), device_of(backend)))

    assert torch.equal(logits, torch.full_like(logits, -INF))


def keep_top(backend: str, logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    device = str(logits.device)
    top_k_top_p_min_p = logits.clone(memory_format=torch.preserve_format)
    b_top_p, b_min_p = (torch.tensor(values, device=device) for values in (top_p, min_p))
    ops.top_k_top_p_min_p.impls[backend](top_k_top_p_min_p, ints(top_k, device), b_top_p, b_min_p)
    return top_k_top_p_min_p


@each_backend(ops.top_k_top_p_min_p)
@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_top_p_min_p_matches_its_definition(backend: str, vocab: int) -> None:
    logits = randn(6, vocab, device=device_of(backend)) * 3
    top_k = [vocab, 1, 7, vocab + 9, 50, vocab]
    top_p = [1.0, 1.0, 1.0, 0.8, 0.95, 0.3]
    min_p = [0.0, 0.0, 0.0, 0.0, 0.02, 0.1]

    out = keep_top(backend, logits, top_k, top_p, min_p)

    assert torch.equal(out, keep_top(ops.REFERENCE, logits, top_k, top_p, min_p))


MANY = 10_000  # tokens: more than lie near a threshold, so that a kernel has reason to look there first
TOKENS = torch.arange(MANY)
SHAPES = {
    "flat": randn(2, MANY),
    "steep": randn(2, MANY) * 4,
    "cold": randn(2, MANY) * 100,
    "nearly equal": randn(2, MANY) * 1e-4,
    "rounded": (randn(2, MANY) * 2).bfloat16().float(),
    "one above a plain": torch.cat((torch.full((2, 1), 12.0), randn(2, MANY - 1)), dim=1),
    "half masked": randn(2, MANY).masked_fill(TOKENS % 2 == 0, -INF),
    "nearly all masked": randn(2, MANY).masked_fill(TOKENS % 300 != 0, -INF),
    "one far below": torch.cat((torch.full((2, 1), -1e38), randn(2, MANY - 1)), dim=1),
    "unlike a sample": randn(2, MANY) * 0.1 - (TOKENS % 8 == TOKENS // 8 * 5 % 8) * 8.0,  # what the kernel counts
}


@each_backend(ops.top_k_top_p_min_p)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("top_k", "top_p"), [([MANY, 900], [0.9, 0.95]), ([40, 7000], [1.0, 0.999])])
def test_top_k_top_p_of_many_tokens_matches_its_definition(
    backend: str, shape: str, top_k: list[int], top_p: list[float]
) -> None:
    logits = SHAPES[shape].to(device_of(backend))

    out = keep_top(backend, logits, top_k, top_p, [0.0, 0.0])

    expected = keep_top(
        ops.REFERENCE, logits.double(), top_k, top_p, [0.0, 0.0]
    )  # its cumsum in float32 is off by a token
    assert torch.equal(out, expected.float())


@pytest.mark.parametrize("shape", ["flat", "steep", "cold", "half masked", "nearly all masked"])
def test_triton_finds_both_thresholds_among_few_tokens(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    logits = SHAPES[shape].to(device_of("triton"))
    scratch = kernel.Scratch.of(logits, 1 + MANY // kernel.BLOCK)
    monkeypatch.setattr(kernel.Scratch, "of", lambda *_: scratch)

    kept = keep_top("triton", logits, [MANY, 900], [0.9, 0.95], [0.0, 0.0]).isfinite().sum(-1)

    above, _, _, gathered = scratch.sums.unbind(-1)
    assert ((above < kept) & (kept <= above + gathered)).all()
    assert (gathered < MANY / 2).all()


@each_backend(ops.top_k_top_p_min_p)
def test_top_k_top_p_keeps_more_equals_than_a_kernel_gathers(backend: str) -> None:
    equals = 18_000
    logits = row([1.0] * 900 + [0.0] * equals + [-1.0] * 900, device_of(backend))
    two_rows = torch.cat((logits, logits + 7))  # the second row would change the first one if it were read too

    out = keep_top(backend, two_rows, [1200, logits.shape[1]], [1.0, 0.13], [0.0, 0.0])

    assert out.isfinite().sum(-1).tolist() == [900 + equals] * 2


@each_backend(ops.top_k_top_p_min_p)
def test_top_k_top_p_of_infinite_logits_matches_its_definition(backend: str) -> None:
    logits = torch.full((3, 5000), -INF, device=device_of(backend))
    logits[1:, 2500] = INF
    logits[2, 100:200] = 1.0
    limits = [3, 5000, 2], [0.5, 0.9, 0.9], [0.1, 0.0, 0.0]

    assert torch.equal(keep_top(backend, logits, *limits), keep_top(ops.REFERENCE, logits, *limits))


@each_backend(ops.top_k_top_p_min_p)
def test_top_k_top_p_min_p_writes_nothing_beside_its_rows(backend: str) -> None:
    buffer = randn(3, 200, device=device_of(backend))
    before = buffer.clone()

    b_top_p, b_min_p = torch.ones(3, device=buffer.device), torch.zeros(3, device=buffer.device)
    ops.top_k_top_p_min_p.impls[backend](buffer[:, 50:150], ints([1] * 3, device_of(backend)), b_top_p, b_min_p)

    assert torch.equal(buffer[:, :50], before[:, :50])
    assert torch.equal(buffer[:, 150:], before[:, 150:])
    assert buffer[:, 50:150].isfinite().sum(-1).tolist() == [1, 1, 1]


@each_backend(ops.top_k_top_p_min_p)
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (1, 1.0, 2),  # two share the top
        (3, 1.0, 5),  # three share the third place
        (6, 1.0, 6),
        (9, 0.4, 2),  # the top two hold 0.64
        (9, 0.7, 5),
        (3, 0.9, 5),
    ],
)
def test_top_k_top_p_keeps_or_drops_equals_together(backend: str, top_k: int, top_p: float, kept: int) -> None:
    logits = row([1.0, 3.0, 2.0, 2.0, -1.0, 3.0, 2.0, -2.0], device_of(backend))

    out = keep_top(backend, logits, [top_k], [top_p], [0.0])

    assert int(out.isfinite().sum()) == kept
    assert torch.equal(out, keep_top(ops.REFERENCE, logits, [top_k], [top_p], [0.0]))


@each_backend(ops.top_k_top_p_min_p)
def test_top_k_treats_both_zeros_as_equal(backend: str) -> None:
    logits = row([-0.0, 0.0, -1.0], device_of(backend))

    assert keep_top(backend, logits, [1], [1.0], [0.0]).isfinite().tolist() == [[True, True, False]]


@each_backend(ops.top_k_top_p_min_p)
@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
@pytest.mark.parametrize("top_p", [0.5, 0.99, 1.0])
def test_top_k_top_p_ignores_masked_logits(backend: str, top_k: int, top_p: float) -> None:
    logits = row([-INF, 2.0, -INF, 1.0, -3.0, -INF], device_of(backend))

    out = keep_top(backend, logits, [top_k], [top_p], [0.0])

    assert torch.equal(out, keep_top(ops.REFERENCE, logits, [top_k], [top_p], [0.0]))


@each_backend(ops.top_k_top_p_min_p)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_top_k_orders_tiny_and_huge_logits(backend: str, scale: float) -> None:
    logits = row([-2.0, 1.0, -1.0, 3.0, 2.0], device_of(backend)) * scale

    out = keep_top(backend, logits, [4], [1.0], [0.0])

    assert out.isfinite().tolist() == [[False, True, True, True, True]]


TEMPERATURES = [0.0, 0.3, 1.0, 0.0, 2.5, 1.0]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0]


def sample(
    backend: str, logits: Tensor, temperatures: list[float], seeds: list[int], masks: ops.TokenMasks | None = None
) -> list[int]:
    device = str(logits.device)
    b_temperature = torch.tensor(temperatures, device=device)
    b_position = ints([i * 1000 for i in range(len(seeds))], device)
    out = ops.sample.impls[backend](logits, b_temperature, ints(seeds, device, torch.int64), b_position, masks)
    assert out.dtype == torch.int64
    return out.tolist()


@each_backend_and_dtype(ops.sample)
@pytest.mark.parametrize("vocab", [*VOCABS, 20_000])
def test_sample_matches_its_definition(backend: str, dtype: torch.dtype, vocab: int) -> None:
    logits = strided(randn(6, vocab, dtype=dtype, device=device_of(backend)), poison=INF)

    out = sample(backend, logits, TEMPERATURES, SEEDS)

    assert out == sample(ops.REFERENCE, logits, TEMPERATURES, SEEDS)


def sample_in_parts(backend: str, logits: Tensor, temperatures: list[float], seeds: list[int], parts: int) -> list[int]:
    device = str(logits.device)
    rows = (torch.tensor(temperatures, device=device), ints(seeds, device, torch.int64))
    b_position = ints([i * 1000 for i in range(len(seeds))], device)
    width = -(-logits.shape[1] // parts)
    best = [
        ops.sample_part.impls[backend](logits[:, first : first + width], *rows, b_position, first)
        for first in range(0, width * parts, width)
    ]
    return ops.best_of_parts(torch.stack(best, dim=1)).tolist()


@each_backend_and_dtype(ops.sample_part)
@pytest.mark.parametrize(("vocab", "parts"), [(20_000, 2), (5000, 3), (33, 4), (3, 4)])
def test_the_best_of_all_parts_is_the_sample_of_the_vocabulary(
    backend: str, dtype: torch.dtype, vocab: int, parts: int
) -> None:
    logits = strided(randn(6, vocab, dtype=dtype, device=device_of(backend)), poison=INF)
    logits[0, [1, vocab - 1]] = 9.0  # the first of equals, in different parts

    out = sample_in_parts(backend, logits, TEMPERATURES, SEEDS, parts)

    assert out == sample(ops.REFERENCE, logits, TEMPERATURES, SEEDS)


@pytest.mark.parametrize("backend", [ops.REFERENCE, *backends_of(ops.sample_part)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_part_of_minus_infinity_is_no_error_but_nan_in_any_part_is(backend: str, temperature: float) -> None:
    logits = randn(5, 60, device=device_of(backend))
    logits[0, :30] = -INF
    logits[1, 45] = float("nan")
    logits[2, 3] = INF
    logits[3] = -INF
    seeds = list(range(5))

    out = sample_in_parts(backend, logits, [temperature] * 5, seeds, 2)

    assert out == sample(ops.REFERENCE, logits, [temperature] * 5, seeds)
    assert out[1:4] == [ops.NO_TOKEN] * 3
    assert out[0] >= 30


CHOOSE_BACKENDS = pytest.mark.parametrize("backend", [ops.REFERENCE, *backends_of(ops.sample)])


@CHOOSE_BACKENDS
@pytest.mark.parametrize("vocab", VOCABS)
def test_sample_at_temperature_zero_takes_the_largest(backend: str, vocab: int) -> None:
    logits = randn(3, vocab, device=device_of(backend))

    assert sample(backend, logits, [0.0] * 3, [1, 2, 3]) == logits.argmax(-1).tolist()


@CHOOSE_BACKENDS
@pytest.mark.parametrize("ties", [[0, 299], [7, 2048, 4999], [4100, 4101]])
def test_sample_takes_the_first_of_equals(backend: str, ties: list[int]) -> None:
    logits = randn(1, 5000, device=device_of(backend)).clamp(max=3)
    logits[0, ties] = 9.0

    assert sample(backend, logits, [0.0], [1]) == [ties[0]]


@CHOOSE_BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sample_never_takes_a_masked_token(backend: str, temperature: float) -> None:
    logits = torch.full((3, 5000), -INF, device=device_of(backend))
    logits[0, 1700] = -50.0
    logits[1, 0] = -1e30
    logits[2, 4999] = 1e30

    assert sample(backend, logits, [temperature] * 3, [1, 2, 3]) == [1700, 0, 4999]


@CHOOSE_BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sample_takes_no_token_if_logits_are_not_finite(backend: str, dtype: torch.dtype, temperature: float) -> None:
    nan = float("nan")
    logits = randn(8, 5000, dtype=dtype, device=device_of(backend))
    logits[0, 3] = nan
    logits[1] = nan
    logits[2, 4999] = INF
    logits[3] = -INF
    logits[4, [0, 4500]] = torch.tensor([nan, INF], dtype=dtype, device=logits.device)
    logits[5, 1:] = -INF  # one number is enough
    broken = [ops.NO_TOKEN] * 5

    out = sample(backend, logits, [temperature] * 8, list(range(8)))

    assert out[:6] == [*broken, 0]
    whole = logits.clone()
    whole[:5] = 0.0
    assert out[6:] == sample(ops.REFERENCE, whole, [temperature] * 8, list(range(8)))[6:], "others do not notice"


@CHOOSE_BACKENDS
def test_sample_can_take_every_token_that_is_not_masked(backend: str) -> None:
    logits = torch.full((64, 3000), -INF, device=device_of(backend))
    logits[:, [17, 2999]] = 0.0

    assert set(sample(backend, logits, [1.0] * 64, list(range(64)))) == {17, 2999}


def masks_of(allowed: list[list[int] | None], vocab: int, device: str) -> ops.TokenMasks:
    """Each row's tokens, None for all; the masks are in another order than the rows, and longer than needed."""
    masked = [row for row, tokens in enumerate(allowed) if tokens is not None][::-1]
    bits = np.zeros((len(masked), 32 * (vocab // 32 + 2)), dtype=np.uint8)
    for mask, row in enumerate(masked):
        bits[mask, allowed[row]] = 1
        bits[mask, vocab:] = 1
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    b_row = ints([masked.index(row) if row in masked else -1 for row in range(len(allowed))], device)
    return ops.TokenMasks(b_row, words.to(device))


@each_backend_and_dtype(ops.sample)
@pytest.mark.parametrize("vocab", [33, 5000, 20_000])
def test_sample_with_masks_matches_its_definition(backend: str, dtype: torch.dtype, vocab: int) -> None:
    logits = strided(randn(6, vocab, dtype=dtype, device=device_of(backend)), poison=INF)
    dense = list(range(0, vocab, 2))
    allowed = [[5, vocab - 1], [7], None, dense, dense, [vocab - 1, *range(20)]]
    masks = masks_of(allowed, vocab, device_of(backend))

    out = sample(backend, logits, TEMPERATURES, SEEDS, masks)

    assert out == sample(ops.REFERENCE, logits, TEMPERATURES, SEEDS, masks)
    assert all(tokens is None or token in tokens for token, tokens in zip(out, allowed, strict=True))


@CHOOSE_BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_mask_that_allows_nothing_does_not_change_other_rows(backend: str, temperature: float) -> None:
    logits = randn(4, 3000, device=device_of(backend))
    logits[2, [1, 2]] = -INF
    masks = masks_of([[17], [], [1, 2], [2999]], 3000, device_of(backend))

    assert sample(backend, logits, [temperature] * 4, [1, 2, 3, 4], masks) == [17, 0, 0, 2999]


@CHOOSE_BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_sample_takes_no_token_if_an_allowed_logit_is_not_finite(
    backend: str, temperature: float, value: float
) -> None:
    logits = randn(3, 3000, device=device_of(backend))
    logits[:, 7] = value
    masks = masks_of([[7, 2000], list(range(3000)), [8, 9]], 3000, device_of(backend))

    first, second, third = sample(backend, logits, [temperature] * 3, [1, 2, 3], masks)

    assert (first, second) == (ops.NO_TOKEN, ops.NO_TOKEN)
    assert third in (8, 9)


@CHOOSE_BACKENDS
def test_sample_takes_the_first_of_equals_that_a_mask_allows(backend: str) -> None:
    logits = torch.zeros(2, 3000, device=device_of(backend))
    masks = masks_of([[2999, 40, 41], list(range(7, 3000))], 3000, device_of(backend))

    assert sample(backend, logits, [0.0, 0.0], [1, 2], masks) == [40, 7]


@each_backend(ops.sample)
def test_sample_for_a_request_does_not_depend_on_its_batch(backend: str) -> None:
    logits = randn(20, 3000, device=device_of(backend))
    b_seed = torch.arange(20, device=logits.device)
    b_temperature = torch.full((20,), 0.8, device=logits.device)

    together = ops.sample.impls[backend](logits, b_temperature, b_seed, b_seed.int())
    alone = [
        ops.sample.impls[backend](logits[row], b_temperature[row], b_seed[row], b_seed.int()[row])
        for row in (slice(1), slice(19, 20))
    ]

    assert [int(token) for token in alone] == [int(together[0]), int(together[19])]


def typical(backend: str, logits: Tensor, typical_p: list[float]) -> Tensor:
    top_k_top_p_min_p = logits.clone(memory_format=torch.preserve_format)
    ops.typical_p.impls[backend](top_k_top_p_min_p, torch.tensor(typical_p, device=logits.device))
    return top_k_top_p_min_p


TYPICAL_BACKENDS = pytest.mark.parametrize("backend", [ops.REFERENCE, *backends_of(ops.typical_p)])


@TYPICAL_BACKENDS
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_typical_p_keeps_what_transformers_keeps(backend: str, vocab: int, scale: float) -> None:
    logits = randn(5, vocab, device=device_of(backend)) * scale
    masses = [0.05, 0.2, 0.5, 0.9, 0.99]

    out = typical(backend, logits, masses)

    for row, mass in enumerate(masses):
        expected = TypicalLogitsWarper(mass)(None, logits[row : row + 1].double())  # its float32 is off by 1e-6
        assert torch.equal(out[row : row + 1], expected.float()), mass


@TYPICAL_BACKENDS
def test_typical_p_of_masked_logits_weighs_the_rest(backend: str) -> None:
    logits = row([-INF, 2.0, -INF, 1.0, -3.0, 0.5, -INF], device_of(backend))

    for mass in (0.1, 0.4, 0.8, 0.999):
        assert torch.equal(typical(backend, logits, [mass]), TypicalLogitsWarper(mass)(None, logits)), mass


@TYPICAL_BACKENDS
def test_typical_p_of_one_keeps_everything(backend: str) -> None:
    logits = randn(2, 5000, device=device_of(backend)) * 9

    out = typical(backend, logits, [1.0, 0.5])

    assert torch.equal(out[0], logits[0])
    assert int(out[1].isfinite().sum()) < 5000


@TYPICAL_BACKENDS
def test_typical_p_may_drop_the_most_likely_token_and_keeps_equals_together(backend: str) -> None:
    logits = row([3.0, *[1.0] * 40], device_of(backend))  # the mean logit is 1.67: the forty are nearer to it

    out = typical(backend, logits, [0.1])

    assert out.isfinite().tolist() == [[False] + [True] * 40]


@TYPICAL_BACKENDS
def test_typical_p_writes_nothing_beside_its_rows(backend: str) -> None:
    buffer = randn(3, 200, device=device_of(backend))
    before = buffer.clone()

    ops.typical_p.impls[backend](buffer[:, 50:150], torch.full((3,), 0.2, device=buffer.device))

    assert torch.equal(buffer[:, :50], before[:, :50])
    assert torch.equal(buffer[:, 150:], before[:, 150:])
    assert buffer[:, 50:150].isneginf().any(-1).all()
