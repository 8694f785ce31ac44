"""Experts whose weights are in the layout of the C library, against the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND, library
from lightserve.common.cpu_kernel.packed_experts import PackedExperts
from lightserve.common.ops import ExpertsParams, Int4Weight, Int8Weight, Mxfp4Weight, QuantizedWeight, Relu2
from test.ops.cases import randn

pytestmark = pytest.mark.skipif(library is None, reason="the C library was not built")

CPU, META = torch.device("cpu"), torch.device("meta")
NUM_EXPERTS, WIDTH, HIDDEN, TOKENS, TOP_K = 5, 32, 64, 9, 2
KINDS = [(Int4Weight, 32, True), (Int4Weight, 16, False), (Int8Weight, 32, False), (Mxfp4Weight, 32, False)]


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    ops.use_backend(BACKEND, "cpu")
    yield
    ops.use_backend(ops.REFERENCE)


def quantized(kind: type[QuantizedWeight], shape: tuple[int, ...], group: int, has_offsets: bool) -> QuantizedWeight:
    weight = kind.empty(shape, group, CPU, has_offsets=has_offsets)
    weight.randomize_(torch.Generator().manual_seed(shape[-1]), shape[-1] ** -0.5)
    if weight.offsets is not None:
        weight.offsets.copy_(randn(*weight.offsets.shape, seed=3) * 0.05)
    return weight


def pack(weight: QuantizedWeight, input_bits: int = 15) -> PackedExperts:
    has_offsets = weight.offsets is not None
    meta = type(weight).empty(weight.shape, weight.group_size, META, has_offsets=has_offsets)
    packed = ops.empty_packed(meta, CPU, input_bits)
    assert isinstance(packed, PackedExperts)
    packed.store_(weight)
    return packed


def choice() -> tuple[Tensor, Tensor]:
    ids = randn(TOKENS, NUM_EXPERTS, seed=7).topk(TOP_K).indices.int()
    ids[3] = ops.NO_EXPERT
    return ids, randn(TOKENS, TOP_K, seed=8).softmax(-1)


@pytest.mark.parametrize(("kind", "group", "has_offsets"), KINDS)
@pytest.mark.parametrize("has_gate", [True, False])
def test_experts_are_those_of_the_definition(
    kind: type[QuantizedWeight], group: int, has_offsets: bool, has_gate: bool
) -> None:
    rows = 2 * WIDTH if has_gate else WIDTH
    w13 = quantized(kind, (NUM_EXPERTS, rows, HIDDEN), group, has_offsets)
    w2 = quantized(kind, (NUM_EXPERTS, HIDDEN, WIDTH), group, has_offsets)
    activation = ops.GatedSilu() if has_gate else Relu2()
    biases = randn(NUM_EXPERTS, rows, seed=5), randn(NUM_EXPERTS, HIDDEN, seed=6)
    x = randn(TOKENS, HIDDEN)

    out = ops.experts(x, *choice(), ExpertsParams(pack(w13), pack(w2), *biases, activation))

    expected = ops.experts.impls[ops.REFERENCE](x, *choice(), ExpertsParams(w13, w2, *biases, activation))
    assert (out - expected).norm() < 2e-3 * expected.norm()
    assert not out[3].any()


def test_the_experts_of_a_token_do_not_depend_on_the_tokens_beside_it() -> None:
    w13 = pack(quantized(Int4Weight, (NUM_EXPERTS, 2 * WIDTH, HIDDEN), 32, True), input_bits=8)
    w2 = pack(quantized(Int8Weight, (NUM_EXPERTS, HIDDEN, WIDTH), 32, False), input_bits=8)
    x, (ids, weights), params = randn(TOKENS, HIDDEN), choice(), ExpertsParams(w13, w2)

    together = ops.experts(x, ids, weights, params)

    alone = [ops.experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], params) for i in range(TOKENS)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(("kind", "group", "has_offsets"), KINDS)
def test_packed_experts_have_the_values_and_the_shape_of_the_weight(
    kind: type[QuantizedWeight], group: int, has_offsets: bool
) -> None:
    weight = quantized(kind, (NUM_EXPERTS, WIDTH, HIDDEN), group, has_offsets)

    packed = pack(weight)

    assert packed.shape == weight.shape
    torch.testing.assert_close(packed.dequantize(), weight.dequantize(), rtol=1e-3, atol=1e-3)
    assert packed.nbytes < 4 * weight.dequantize().nbytes / 9


def test_other_experts_are_packed_into_the_same_memory() -> None:
    first, second = (quantized(Int4Weight, (NUM_EXPERTS, rows, HIDDEN), 32, True) for rows in (WIDTH, WIDTH))
    second.scales.mul_(2)
    packed = pack(first)
    addresses = [expert.codes.data_ptr() for expert in packed.experts]

    packed.store_(second)

    torch.testing.assert_close(packed.dequantize(), second.dequantize(), rtol=1e-3, atol=1e-3)
    assert [expert.codes.data_ptr() for expert in packed.experts] == addresses


def test_experts_that_the_library_cannot_read_keep_their_layout() -> None:
    assert ops.empty_packed(Int8Weight.empty((2, 8, 40), 40, META), CPU) is None
    assert ops.empty_packed(ops.Fp8Weight.empty((2, 8, 64), 64, META), CPU) is None
