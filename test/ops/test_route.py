"""The choice of experts, by the definition and by every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import RouteSpec
from test.ops.cases import NAN, TOLERANCE, device_of, each_backend, randn, strided

CLOSE = TOLERANCE[torch.float32]
V3 = RouteSpec(4, "sigmoid", groups=8, top_groups=3, group_score="top2", renormalize=True, scale=2.5)
SPECS = {
    "mixtral": (8, RouteSpec(2, renormalize=True)),
    "olmoe": (64, RouteSpec(8)),
    "one": (5, RouteSpec(1)),
    "all": (6, RouteSpec(6, renormalize=True)),
    "v2": (40, RouteSpec(6, groups=8, top_groups=3, scale=16.0)),
    "v3": (32, V3),
    "groups of one": (8, replace(V3, top_k=2)),
    "minimax": (48, RouteSpec(4, "sigmoid", renormalize=True)),
    "shared": (16, RouteSpec(3, renormalize=True, scale=2.0, num_shared=2)),
    "shared with a gate": (16, RouteSpec(3, renormalize=True, num_shared=1, gates_shared=True)),
    "two shared with a gate": (9, RouteSpec(2, "sigmoid", scale=1.5, num_shared=2, gates_shared=True)),
    "many": (512, RouteSpec(8, renormalize=True)),
}
each_spec = pytest.mark.parametrize(("experts", "spec"), SPECS.values(), ids=SPECS)


def route_by_lists(logits: Tensor, spec: RouteSpec, bias: Tensor | None) -> list[tuple[list[int], list[float]]]:
    """By sorted lists, a token at a time."""
    gates = [1.0] * len(logits)
    if spec.gates_shared:
        logits, last = logits[:, :-1], logits[:, -1]
        gates = last.double().sigmoid().tolist()
    scores = logits.double().softmax(-1) if spec.score == "softmax" else logits.double().sigmoid()
    size = logits.shape[1] // spec.groups
    routed = []
    for row, gate in zip(scores.tolist(), gates, strict=True):
        choice = [score + (0.0 if bias is None else float(bias[i])) for i, score in enumerate(row)]
        groups = [sorted(choice[first : first + size], reverse=True) for first in range(0, len(row), size)]
        counted = 2 if spec.group_score == "top2" else 1
        best = sorted(range(spec.groups), key=lambda i: -sum(groups[i][:counted]))[: spec.top_groups]
        experts = sorted((i for i in range(len(row)) if i // size in best), key=lambda i: -choice[i])[: spec.top_k]
        total = sum(row[i] for i in experts) if spec.renormalize else 1.0
        shared = list(range(len(row), len(row) + spec.num_shared))
        routed.append((experts + shared, [row[i] / total * spec.scale for i in experts] + [gate] * len(shared)))
    return routed


@each_spec
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_definition_chooses_as_sorted_lists_do(experts: int, spec: RouteSpec, has_bias: bool) -> None:
    logits = randn(9, experts + spec.gates_shared)
    bias = randn(experts, seed=1) if has_bias else None

    ids, weights = ops.route(logits, spec, bias)

    expected = route_by_lists(logits, spec, bias)
    assert ids.tolist() == [row for row, _ in expected]
    torch.testing.assert_close(weights, torch.tensor([row for _, row in expected]), **CLOSE)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_softmax_over_the_chosen_logits_is_softmax_renormalized(top_k: int) -> None:
    logits = randn(20, 16) * 3
    chosen, expected_ids = logits.topk(top_k)

    ids, weights = ops.route(logits, RouteSpec(top_k, renormalize=True))

    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, chosen.softmax(-1), **CLOSE)


@each_backend(ops.route)
@each_spec
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_weights_are_those_of_the_definition(
    backend: str, experts: int, spec: RouteSpec, has_bias: bool, dtype: torch.dtype
) -> None:
    device = device_of(backend)
    logits = strided(randn(5, experts + spec.gates_shared, dtype=dtype, device=device) * 2)
    bias = randn(experts, device=device, seed=1) * 0.1 if has_bias else None
    is_padding = torch.tensor([False, True, False, False, True], device=device)
    expected_ids, expected_weights = ops.route(logits, spec, bias, is_padding)

    ids, weights = ops.route.impls[backend](logits, spec, bias, is_padding)

    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, **CLOSE)
    assert (ids[is_padding] == ops.NO_EXPERT).all()
    assert not weights[is_padding].any()


@pytest.mark.parametrize("backend", [ops.REFERENCE, "triton"])
@pytest.mark.parametrize("spec", [RouteSpec(3), replace(V3, top_k=3, groups=4, top_groups=2)])
def test_of_equal_experts_the_lowest_ids_are_chosen(backend: str, spec: RouteSpec) -> None:
    logits = torch.zeros(2, 16, device=device_of(backend))

    ids, _ = ops.route.impls[backend](logits, spec)

    assert ids.tolist() == [[0, 1, 2]] * 2


@each_backend(ops.route)
def test_a_token_of_nan_chooses_experts_that_exist(backend: str) -> None:
    logits = randn(3, 20, device=device_of(backend))
    logits[1] = NAN

    ids, _ = ops.route.impls[backend](logits, RouteSpec(4))

    assert ((ids >= 0) & (ids < 20)).all()
    assert torch.equal(ids[::2], ops.route(logits[::2], RouteSpec(4))[0])


@pytest.mark.parametrize("backend", [ops.REFERENCE, "triton"])
@pytest.mark.parametrize(
    ("experts", "spec", "message"),
    [
        (8, RouteSpec(9), "top_k is 9; it must be from 1 to 8"),
        (8, RouteSpec(3, groups=4, top_groups=1), "top_k is 3; it must be from 1 to 2"),
        (10, RouteSpec(1, groups=4), "10 experts in 4 groups, 1 of them chosen"),
        (8, RouteSpec(1, groups=4, top_groups=5), "8 experts in 4 groups, 5 of them chosen"),
        (513, RouteSpec(1), "513 experts; the limit is 512"),
    ],
)
def test_an_impossible_choice_is_refused(backend: str, experts: int, spec: RouteSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.route.impls[backend](torch.zeros(1, experts, device=device_of(backend)), spec)
