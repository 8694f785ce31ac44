"""Experts over quantised weights, by every backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import ExpertsParams, Fp8Weight, GatedSilu, Int4Weight, Int8Weight, Mxfp4Weight, RouteSpec
from lightserve.common.triton_kernel.experts._expert_linear import PairBlocks
from lightserve.common.triton_kernel.experts._expert_pairs import sort_pairs
from lightserve.common.triton_kernel.experts._quantized_expert_linear import TILES, block_k_of, quantized_expert_linear
from test.ops.cases import BATCH_INVARIANT, NAN, assert_close, backends_of, bind, device_of, randn, strided, wide

HALF_DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's bfloat16 dot is wrong


@dataclass(frozen=True)
class Kind:
    weight: type[ops.QuantizedWeight]
    group: int | None = None  # None: a scale per row
    has_offsets: bool = False

    def make(self, *shape: int, device: str) -> ops.QuantizedWeight:
        group = self.group or shape[-1]
        weight = self.weight.empty(shape, group, torch.device("cpu"), has_offsets=self.has_offsets)
        weight.randomize_(torch.Generator().manual_seed(shape[-1]), shape[-1] ** -0.5)
        if self.weight is Mxfp4Weight:
            weight.scales.sub_(torch.arange(weight.scales.numel()).view(weight.scales.shape).to(torch.uint8) % 4)
        else:
            weight.scales.mul_(1 + randn(*weight.scales.shape).abs())
        if weight.offsets is not None:
            weight.offsets.copy_(randn(*weight.scales.shape) * 0.1)
        return on_device(weight, device)


def on_device(weight: ops.QuantizedWeight, device: str) -> ops.QuantizedWeight:
    if device == "cpu":
        return weight
    moved = type(weight).empty(
        weight.shape, weight.group_size, torch.device(device), has_offsets=weight.offsets is not None
    )
    moved.copy_(weight)
    return moved


KINDS = {
    "int8": Kind(Int8Weight),
    "int8 in groups": Kind(Int8Weight, 32),
    "int8 in small groups with offsets": Kind(Int8Weight, 16, has_offsets=True),
    "fp8": Kind(Fp8Weight),
    "fp8 in groups": Kind(Fp8Weight, 64),
    "int4": Kind(Int4Weight, 64),
    "int4 in small groups with offsets": Kind(Int4Weight, 16, has_offsets=True),
    "int4 in large groups with offsets": Kind(Int4Weight, 128, has_offsets=True),
    "mxfp4": Kind(Mxfp4Weight, 32),
    "mxfp4 in small groups": Kind(Mxfp4Weight, 16),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def params_of(kind: Kind, experts: int, hidden: int, width: int, device: str, *, clamps: bool = False) -> ExpertsParams:
    w13, w2 = (kind.make(*shape, device=device) for shape in ((experts, 2 * width, hidden), (experts, hidden, width)))
    if not clamps:
        return ExpertsParams(w13, w2)
    b13, b2 = (randn(experts, size, device=device, seed=13) for size in (2 * width, hidden))
    return ExpertsParams(w13, w2, b13, b2, GatedSilu(alpha=1.702, limit=1.5, up_offset=1.0))


def choose(tokens: int, n_experts: int, top_k: int, device: str, padding: int = 0) -> tuple[Tensor, Tensor]:
    is_padding = torch.arange(tokens, device=device) >= tokens - padding
    return ops.route(randn(tokens, n_experts, device=device, seed=5), RouteSpec(top_k), is_padding=is_padding)


@each_kind
def test_the_definition_is_that_of_dequantised_weights(kind: Kind) -> None:
    params = params_of(kind, 3, 128, 128, "cpu", clamps=True)
    assert isinstance(params.w13, ops.QuantizedWeight)
    assert isinstance(params.w2, ops.QuantizedWeight)
    x, (ids, weights) = randn(5, 128), choose(5, 3, 2, "cpu", padding=1)

    out = ops.experts(x, ids, weights, params)

    plain = replace(params, w13=params.w13.dequantize(), w2=params.w2.dequantize())
    assert torch.equal(out, ops.experts(x, ids, weights, plain))


@each_kind
@pytest.mark.parametrize("backend", backends_of(ops.experts))
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_result_is_that_of_the_definition(kind: Kind, backend: str, tokens: int) -> None:
    device = device_of(backend)
    x = strided(randn(tokens, 128, device=device))
    params = params_of(kind, 4, 128, 128, device, clamps=tokens == 1)
    ids, weights = choose(tokens, 4, 2, device, padding=tokens // 4)

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(x, ids, weights, params), torch.float32)


@pytest.mark.parametrize("backend", backends_of(ops.experts))
def test_a_gated_gelu_gives_the_result_of_the_definition(backend: str) -> None:
    device = device_of(backend)
    x, (ids, weights) = randn(9, 128, device=device), choose(9, 4, 2, device)
    params = replace(params_of(KINDS["fp8"], 4, 128, 128, device), activation=ops.GATED_GELU_TANH)

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(x, ids, weights, params), torch.float32)


@each_kind
@pytest.mark.parametrize("backend", backends_of(ops.experts))
def test_experts_without_a_gate_give_the_result_of_the_definition(kind: Kind, backend: str) -> None:
    device = device_of(backend)
    x, (ids, weights) = randn(9, 128, device=device) * 0.3, choose(9, 4, 2, device)  # the squares are rounded too
    weight = params_of(kind, 4, 128, 128, device).w2
    params = ExpertsParams(weight, weight, activation=ops.Relu2())

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(x, ids, weights, params), torch.float32)


@each_kind
@pytest.mark.parametrize("backend", ["triton"])
def test_half_precision_stays_within_its_tolerance(kind: Kind, backend: str) -> None:
    device = device_of(backend)
    x, params = randn(9, 128, dtype=HALF_DTYPE, device=device) * 0.3, params_of(kind, 4, 128, 128, device)
    ids, weights = choose(9, 4, 2, device)

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(wide(x), ids, weights, params), HALF_DTYPE)


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("block_m", TILES)
@pytest.mark.parametrize(
    ("kind", "hidden"), [(KINDS["fp8"], 100), (KINDS["int4 in large groups with offsets"], 384), (KINDS["mxfp4"], 352)]
)
@pytest.mark.parametrize("limits_activated", [False, True])
def test_the_product_reads_every_tile_and_writes_the_rows_of_its_pairs(
    kind: Kind, hidden: int, limits_activated: bool, block_m: int, backend: str
) -> None:
    device, activation = device_of(backend), GatedSilu(1.702, 0.5, 1.0, limits_activated=limits_activated)
    x, weight = randn(9, hidden, device=device), kind.make(3, 140, hidden, device=device)
    bias = randn(3, 140, device=device, seed=4)
    ids, _ = choose(9, 3, 2, device, padding=2)
    pairs = sort_pairs(ids, 3, block_m)

    out = quantized_expert_linear(x, weight, PairBlocks(pairs.blocks, pairs.pairs, 2), block_m, bias, activation)

    used = int(pairs.ends[-1])
    experts = ids.flatten()[pairs.pairs[:used].long()].long()
    gate_up = (
        torch.einsum("poi,pi->po", weight.dequantize()[experts], x[pairs.pairs[:used].long() // 2]) + bias[experts]
    )
    assert_close(out[:used], activation(gate_up[:, ::2], gate_up[:, 1::2]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
@pytest.mark.parametrize("kind", [Int4Weight, Int8Weight, Fp8Weight, Mxfp4Weight])
def test_every_code_is_converted_exactly(kind: type[ops.QuantizedWeight], dtype: torch.dtype) -> None:
    """The inputs are unit vectors, so each result is one number of the weight."""
    device = device_of("triton")
    weight = kind.empty((1, 8, 32 * kind.codes_per_byte), 32, torch.device("cpu"))
    codes = torch.arange(256, dtype=torch.uint8).view(weight.codes.shape)
    weight.codes.copy_((codes & 0x7E if kind is Fp8Weight else codes).view(weight.codes.dtype))  # without NaN
    if kind is Mxfp4Weight:
        weight.scales.copy_(torch.arange(119, 135).view(weight.scales.shape))
    else:
        weight.scales.fill_(0.5)
    weight = on_device(weight, device)
    in_size = weight.shape[-1]
    ids = torch.zeros(in_size, 1, dtype=torch.int32, device=device)
    pairs = sort_pairs(ids, 1, 16)

    out = quantized_expert_linear(
        torch.eye(in_size, dtype=dtype, device=device), weight, PairBlocks(pairs.blocks, pairs.pairs, 1), 16
    )

    assert torch.equal(wide(out), weight.dequantize()[0].T)


@pytest.mark.parametrize("backend", backends_of(ops.experts))
@pytest.mark.parametrize("tokens", [1, 9])
def test_padding_is_routed_nowhere_and_becomes_0(backend: str, tokens: int) -> None:
    device = device_of(backend)
    params = params_of(KINDS["int4"], 4, 64, 64, device, clamps=True)
    assert isinstance(params.w13, ops.QuantizedWeight)
    params.w13.scales.fill_(NAN)
    ids, weights = choose(tokens, 4, 2, device, padding=tokens)

    out = ops.experts.impls[backend](torch.full((tokens, 64), NAN, device=device), ids, weights, params)

    assert not out.any()


@pytest.mark.parametrize("backend", BATCH_INVARIANT)
@pytest.mark.parametrize("kind", [KINDS["fp8"], KINDS["int4"], KINDS["mxfp4"]])
def test_a_token_does_not_depend_on_the_other_tokens(backend: str, kind: Kind) -> None:
    device = device_of(backend)
    x, params = randn(40, 64, device=device), params_of(kind, 3, 64, 64, device)
    ids, weights = choose(40, 3, 2, device)
    bind(backend)

    whole = ops.experts(x, ids, weights, params)

    for begin, end in [(0, 1), (17, 19), (3, 35)]:
        assert torch.equal(ops.experts(x[begin:end], ids[begin:end], weights[begin:end], params), whole[begin:end])


@pytest.mark.parametrize(
    ("kind", "in_size", "block_k"),
    [
        (Kind(Fp8Weight), 2048, 256),
        (Kind(Fp8Weight), 2880, 256),
        (Kind(Fp8Weight), 1408, 128),
        (Kind(Fp8Weight, 128), 2048, 128),
        (Kind(Int8Weight, 32), 2048, 256),
        (Kind(Int8Weight, 96), 768, 32),
        (Kind(Int4Weight, 128), 2048, 128),
        (Kind(Int4Weight, 32), 2880, 256),
        (Kind(Int4Weight, 16), 16, 32),
        (Kind(Mxfp4Weight, 32), 2880, 256),
    ],
)
def test_a_tile_is_within_a_group_or_has_whole_groups(kind: Kind, in_size: int, block_k: int) -> None:
    weight = kind.weight.empty((1, 4, in_size), kind.group or in_size, torch.device("meta"))

    assert block_k_of(weight, 256) == block_k


def test_groups_without_tiles_are_refused() -> None:
    weight = Int8Weight.empty((1, 4, 48), 24, torch.device("meta"))

    with pytest.raises(ValueError, match=r"groups of 24 numbers have no tiles; supported are multiples of 32"):
        block_k_of(weight, 256)
