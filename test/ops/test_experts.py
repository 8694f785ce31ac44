"""The experts' computation, by every backend, and the parts of Triton's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops import ExpertsParams, GatedSilu, RouteSpec
from lightserve.common.triton_kernel.experts import _expert_pairs, _grouped_experts, experts
from lightserve.common.triton_kernel.experts._expert_linear import Config, PairBlocks, expert_linear
from lightserve.common.triton_kernel.experts._expert_pairs import SortedPairs, max_blocks, sort_pairs
from test.ops.cases import (
    FLOATS,
    NAN,
    TOLERANCE,
    assert_close,
    backends_of,
    bind,
    device_of,
    each_backend_and_dtype,
    experts_params,
    floats,
    ints,
    needs_library,
    plain_experts_params,
    randn,
    strided,
    wide,
)

CONFIGS = {
    "pairs": experts.PAIRS,
    **{f"up to {most}": config for most, config in experts.CONFIGS},
    "invariant": experts.INVARIANT,
}
LIMITS_ACTIVATED = GatedSilu(limit=1.5, limits_activated=True)
IN_INTERPRETER = FLOATS if torch.cuda.is_available() else (torch.float32, torch.float16)  # whose bfloat16 dot is wrong


def choose(tokens: int, n_experts: int, top_k: int, device: str, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Experts and weights of tokens, the last of which are padding."""
    is_padding = torch.arange(tokens, device=device) >= tokens - padding
    return ops.route(randn(tokens, n_experts, device=device, seed=5), RouteSpec(top_k), is_padding=is_padding)


def in_float32(params: ExpertsParams) -> ExpertsParams:
    b13, b2 = (None if bias is None else wide(bias) for bias in (params.b13, params.b2))
    return replace(params, w13=wide(floats(params.w13)), w2=wide(floats(params.w2)), b13=b13, b2=b2)


def test_the_definition_is_a_gated_mlp_for_each_pair() -> None:
    x, params = randn(7, 24), experts_params(5, 24, 10, torch.float32, "cpu")
    ids, weights = choose(7, 5, 3, "cpu")

    out = ops.experts(x, ids, weights, params)

    expected = torch.zeros_like(x)
    for token in range(7):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = floats(params.w13)[expert][::2] @ x[token], floats(params.w13)[expert][1::2] @ x[token]
            expected[token] += weight * (floats(params.w2)[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


def test_the_definition_with_limits_and_biases_is_that_of_gpt_oss() -> None:
    x, params = randn(4, 24) * 3, experts_params(3, 24, 10, torch.float32, "cpu", clamps=True)
    assert params.b13 is not None
    assert params.b2 is not None
    ids, weights = choose(4, 3, 1, "cpu")

    out = ops.experts(x, ids, weights, params)

    for token in range(4):
        expert = int(ids[token, 0])
        gate_up = floats(params.w13)[expert] @ x[token] + params.b13[expert]
        gate, up = gate_up[::2].clamp(max=1.5), gate_up[1::2].clamp(-1.5, 1.5)
        down = floats(params.w2)[expert] @ ((up + 1) * gate * torch.sigmoid(1.702 * gate)) + params.b2[expert]
        torch.testing.assert_close(out[token], weights[token, 0] * down, **TOLERANCE[torch.float32])


@each_backend_and_dtype(ops.experts)
@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 2, 64, 48), (1, 4, 4, 33, 17), (3, 64, 2, 48, 40), (9, 6, 3, 100, 66)])
def test_the_result_is_that_of_the_definition(
    backend: str, dtype: torch.dtype, clamps: bool, shape: tuple[int, int, int, int, int]
) -> None:
    (tokens, n_experts, top_k, hidden, width), device = shape, device_of(backend)
    x = strided(randn(tokens, hidden, dtype=dtype, device=device))
    params = experts_params(n_experts, hidden, width, dtype, device, clamps=clamps)
    ids, weights = choose(tokens, n_experts, top_k, device, padding=tokens // 4)

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(wide(x), ids, weights, in_float32(params)), dtype)


def test_a_gated_gelu_is_that_of_torch() -> None:
    gate, up = torch.linspace(-9, 9, 200), randn(200)

    torch.testing.assert_close(ops.GATED_GELU_TANH(gate, up), F.gelu(gate, approximate="tanh") * up)


def test_the_definition_without_a_gate_squares_the_relu_of_up() -> None:
    x, params = randn(7, 24), plain_experts_params(5, 24, 11, torch.float32, "cpu", has_bias=True)
    assert params.b13 is not None
    assert params.b2 is not None
    ids, weights = choose(7, 5, 1, "cpu")

    out = ops.experts(x, ids, weights, params)

    for token in range(7):
        expert = int(ids[token, 0])
        up = F.linear(x[token], floats(params.w13)[expert], params.b13[expert])
        down = F.linear(F.relu(up) ** 2, floats(params.w2)[expert], params.b2[expert])
        torch.testing.assert_close(out[token], weights[token, 0] * down, **TOLERANCE[torch.float32])


@each_backend_and_dtype(ops.experts)
@pytest.mark.parametrize("shape", [(1, 8, 2, 64, 48), (1, 4, 4, 33, 17), (3, 64, 2, 48, 40), (9, 6, 3, 100, 67)])
def test_experts_without_a_gate_give_the_result_of_the_definition(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    (tokens, n_experts, top_k, hidden, width), device = shape, device_of(backend)
    x = strided(randn(tokens, hidden, dtype=dtype, device=device))
    params = plain_experts_params(n_experts, hidden, width, dtype, device, has_bias=tokens == 9)
    ids, weights = choose(tokens, n_experts, top_k, device, padding=tokens // 4)

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(wide(x), ids, weights, in_float32(params)), dtype)


def test_a_limit_of_the_activated_gate_is_that_of_step() -> None:
    gate, up = torch.linspace(-9, 9, 200), randn(200) * 3

    out = LIMITS_ACTIVATED(gate, up)

    assert (F.silu(gate) > 1.5).any()
    torch.testing.assert_close(out, F.silu(gate).clamp(max=1.5) * up.clamp(-1.5, 1.5))


@each_backend_and_dtype(ops.experts)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("activation", [ops.GATED_GELU_TANH, LIMITS_ACTIVATED], ids=["gelu", "limit"])
def test_experts_with_another_activation_give_the_result_of_the_definition(
    backend: str, dtype: torch.dtype, activation: GatedSilu, tokens: int
) -> None:
    device = device_of(backend)
    x = randn(tokens, 48, dtype=dtype, device=device) * 2
    params = replace(experts_params(6, 48, 40, dtype, device), activation=activation)
    ids, weights = choose(tokens, 6, 2, device)

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(wide(x), ids, weights, in_float32(params)), dtype)


@pytest.mark.parametrize("activation", [ops.GATED_GELU_TANH, LIMITS_ACTIVATED, ops.Relu2()])
def test_the_activation_of_grouped_products_is_that_of_the_others(activation: ops.ExpertActivation) -> None:
    device = device_of("triton")
    gate_up, ids = randn(6, 140, device=device) * 3, torch.tensor([[0], [1], [2], [0], [1], [2]], device=device)
    pairs = torch.arange(6, device=device)

    out = _grouped_experts.activate_pairs(gate_up, None, ids.int(), pairs.int(), activation)

    torch.testing.assert_close(out, activation.of_rows(gate_up))


@pytest.mark.parametrize("backend", [ops.REFERENCE, *backends_of(ops.experts)])
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_padding_is_routed_nowhere_and_becomes_0(backend: str, tokens: int) -> None:
    device = device_of(backend)
    x = torch.full((tokens, 48), NAN, device=device)
    params = experts_params(16, 48, 40, torch.float32, device, clamps=True)
    params = replace(params, w13=torch.full_like(floats(params.w13), NAN))
    ids, weights = choose(tokens, 16, 2, device, padding=tokens)

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert not out.any()


@pytest.mark.parametrize("backend", backends_of(ops.experts))
def test_all_tokens_may_choose_the_same_expert(backend: str) -> None:
    device = device_of(backend)
    x, params = randn(70, 48, device=device), experts_params(16, 48, 40, torch.float32, device)
    ids = torch.tensor([[3, 11]] * 70, dtype=torch.int32, device=device)
    weights = randn(70, 2, device=device, seed=2).abs()

    out = ops.experts.impls[backend](x, ids, weights, params)

    assert_close(out, ops.experts(x, ids, weights, params), torch.float32)


@pytest.mark.parametrize("dtype", IN_INTERPRETER)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("hidden", "width"), [(100, 66), (320, 130)])
def test_the_product_reads_every_tile_and_writes_the_rows_of_its_pairs(
    dtype: torch.dtype, config: Config, hidden: int, width: int
) -> None:
    device, activation = device_of("triton"), GatedSilu(1.702, 0.5, 1.0)
    x = strided(randn(9, hidden, dtype=dtype, device=device))
    params = experts_params(4, hidden, width, dtype, device, clamps=True)
    ids, _ = choose(9, 4, 2, device, padding=2)
    pairs = sort_pairs(ids, 4, config.block_m)

    out = expert_linear(x, floats(params.w13), PairBlocks(pairs.blocks, pairs.pairs, 2), config, params.b13, activation)

    assert params.b13 is not None
    for row in range(int(pairs.ends[-1])):
        token, expert = int(pairs.pairs[row]) // 2, int(ids.flatten()[pairs.pairs[row]])
        gate_up = wide(floats(params.w13)[expert]) @ wide(x[token]) + wide(params.b13[expert])
        assert_close(out[row], activation(gate_up[::2], gate_up[1::2]), dtype)


ID_LISTS = {
    "one pair": [[0]],
    "no expert": [[-1, -1], [-1, -1]],
    "mixed": [[2, 0], [-1, -1], [2, 1], [2, 4], [-1, -1], [0, 2]],
    "all the same": [[3]] * 300,
    "others' experts": [[7, 1], [2, 9]],
    "fewer than experts": [[3, 1], [1, -1]],
    "none of the last": [[0, 1], [1, 0], [0, 2]] * 20,
    "no expert but one": [[-1, -1]] * 30 + [[2, -1]],
    "many tiles": [[(i * i // 3) % 7 - 1, (5 * i) % 6] for i in range(1200)],
}


@pytest.mark.parametrize("ids", ID_LISTS.values(), ids=ID_LISTS)
@pytest.mark.parametrize("block_m", [8, 32])
def test_pairs_are_sorted_by_expert_and_cut_into_blocks_of_one_expert(ids: list[list[int]], block_m: int) -> None:
    n_experts = 5
    flat = [expert if expert < n_experts else -1 for row in ids for expert in row]

    found = sort_pairs(ints2d(ids), n_experts, block_m)

    order = sorted(range(len(flat)), key=lambda pair: flat[pair] if flat[pair] >= 0 else n_experts)
    assert found.pairs.tolist() == order
    assert [order[row] for row in found.rows.tolist()] == list(range(len(flat)))
    ends = [sum(0 <= expert <= last for expert in flat) for last in range(n_experts)]
    assert found.ends.tolist() == ends
    expected = []
    for expert, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected += [(expert, begin, min(begin + block_m, end)) for begin in range(first, end, block_m)]
    blocks = list(zip(*found.blocks.tolist(), strict=True))
    assert [block for block in blocks if block[0] != ops.NO_EXPERT] == expected


def ints2d(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device_of("triton"))


@pytest.mark.parametrize("tiles", _expert_pairs.TILES)
def test_pairs_are_sorted_in_tiles_of_each_size(monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, int, int]) -> None:
    monkeypatch.setattr(_expert_pairs, "TILES", [(1 << 30, *tiles[1:])])
    ids = torch.randint(7, (1300, 2), generator=torch.Generator().manual_seed(0)).int().to(device_of("triton"))

    found = sort_pairs(ids, 7, 64)

    assert torch.equal(found.pairs.long(), ids.flatten().argsort(stable=True))


@pytest.mark.parametrize(("n_pairs", "n_experts"), [(1, 8), (8, 8), (100, 8), (5, 64)])
def test_there_are_as_many_blocks_as_the_worst_choice_needs(n_pairs: int, n_experts: int) -> None:
    """One pair for each expert but one, and all others for that one."""
    used = min(n_pairs, n_experts)
    counts = [1] * (used - 1) + [n_pairs - used + 1]

    assert max_blocks(n_pairs, n_experts, 16) >= sum(-(-count // 16) for count in counts)


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
def test_products_by_the_grouped_matmul_are_those_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, clamps: bool, is_gated: bool
) -> None:
    device = device_of("triton")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    x = randn(50, 64, dtype=dtype, device=device)
    plain = plain_experts_params(3, 64, 48, dtype, device, has_bias=clamps)
    params = experts_params(3, 64, 48, dtype, device, clamps=clamps) if is_gated else plain
    ids, weights = choose(50, 3, 2, device, padding=5)
    monkeypatch.setattr(experts, "GROUPED_GATE_UP", 1)
    monkeypatch.setattr(experts, "GROUPED_DOWN", 1)
    if not torch.cuda.is_available():
        monkeypatch.setattr(_grouped_experts, "is_usable", lambda x, weight: True)
        monkeypatch.setattr(_grouped_experts, "grouped_mm", grouped_mm_by_expert)

    out = ops.experts.impls["triton"](x, ids, weights, params)

    assert_close(out, ops.experts(wide(x), ids, weights, in_float32(params)), dtype)


def grouped_mm_by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """What torch's grouped matmul computes. Rows behind the last end are NaN."""
    out = x.new_full((len(x), weight.shape[1]), NAN)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        out[begin:end] = F.linear(x[begin:end], weight[expert])
        begin = end
    return out


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 8], [1, 2, 1]])
def test_the_grouped_matmul_takes_experts_without_rows_and_rows_without_experts(counts: list[int]) -> None:
    device = device_of("triton")
    x, weight = (randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((9, 64), (3, 32, 64)))
    ends = ints(counts, device).cumsum(0).int()

    out = _grouped_experts.grouped_mm(x, weight, ends)

    used = sum(counts)
    expected = grouped_mm_by_expert(wide(x), wide(weight) / 8, ends)[:used]
    assert_close(out[:used] / 8, expected, torch.bfloat16)


def test_the_grouped_matmul_is_not_used_for_what_it_refuses() -> None:
    x, weight = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((9, 64), (3, 32, 64)))

    assert not _grouped_experts.is_usable(x, weight)  # on a CPU
    assert not _grouped_experts.is_usable(x.float(), weight.float())
    assert not _grouped_experts.is_usable(x[:, :60], weight[:, :, :60])


@pytest.mark.parametrize(
    ("tokens", "n_experts", "top_k", "expected"),
    [(1, 8, 2, False), (1, 4, 4, False), (2, 128, 8, False), (3, 128, 8, True), (2, 8, 2, True)],
)
def test_pairs_that_hardly_share_an_expert_are_not_sorted(
    tokens: int, n_experts: int, top_k: int, expected: bool
) -> None:
    assert experts.is_sorted(tokens, tokens * top_k, n_experts) is expected


@pytest.mark.parametrize(
    ("in_size", "block_k"), [(2048, 256), (768, 256), (1408, 128), (2880, 64), (100, 128), (10, 16)]
)
def test_a_tile_divides_the_sum_if_it_can(in_size: int, block_k: int) -> None:
    assert experts.CONFIGS[0][1].block_k(in_size, 2) == block_k


PAIRS_OF_BACKEND = [
    (ops.batch_invariant("cpu"), torch.float32),
    (ops.batch_invariant("cpu"), torch.bfloat16),
    pytest.param("cpu_native", torch.float32, marks=needs_library),
    (ops.batch_invariant("triton"), torch.float32),
    pytest.param(ops.batch_invariant("triton"), torch.bfloat16, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("backend", "dtype"), PAIRS_OF_BACKEND)
def test_a_token_does_not_depend_on_the_other_tokens(backend: str, dtype: torch.dtype) -> None:
    device = device_of(backend)
    x, params = randn(80, 96, dtype=dtype, device=device), experts_params(5, 96, 40, dtype, device)
    ids, weights = choose(80, 5, 2, device)
    bind(backend)

    whole = ops.experts(x, ids, weights, params)

    for begin, end in [(0, 1), (17, 19), (79, 80), (3, 35), (1, 80)]:
        assert torch.equal(ops.experts(x[begin:end], ids[begin:end], weights[begin:end], params), whole[begin:end])


def test_strided_ids_are_refused() -> None:
    x, params = randn(4, 48, device=device_of("triton")), experts_params(8, 48, 40, torch.float32, device_of("triton"))
    ids, weights = choose(4, 8, 4, device_of("triton"))

    with pytest.raises(ValueError, match=r"experts: ids must be contiguous, found strides \(4, 2\)"):
        ops.experts.impls["triton"](x, ids[:, ::2], weights[:, ::2], params)


def test_sorted_pairs_of_many_tokens_stay_a_permutation() -> None:
    ids, _ = choose(90, 12, 4, device_of("triton"), padding=9)

    found: SortedPairs = sort_pairs(ids, 12, 16)

    assert sorted(found.pairs.tolist()) == sorted(found.rows.tolist()) == list(range(360))
