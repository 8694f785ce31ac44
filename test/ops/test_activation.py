from __future__ import annotations

import pytest
import torch

from lightserve.common import ops
from test.ops.cases import (
    assert_close,
    device_of,
    each_backend_and_dtype,
    each_op_backend_and_dtype,
    randn,
    strided,
    wide,
)

PLAIN = ["gate", "gelu", "gelu_tanh", "relu", "relu2", "silu"]
GATED = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "relu2_and_mul"]
SHAPES = [(1, 2), (3, 66), (2, 2 * 1100), (2, 3, 10)]
NUMBERS = [0.7, 1.2, 0.4, -0.3]  # of xielu


@each_op_backend_and_dtype(*PLAIN)
@pytest.mark.parametrize("shape", SHAPES)
def test_activation_matches_its_definition(name: str, backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=dtype, device=device_of(backend)) * 4

    out = ops.OPS[name].impls[backend](x)

    assert_close(out, ops.OPS[name](wide(x)), dtype)


@each_op_backend_and_dtype(*GATED)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_activation_matches_its_definition(
    name: str, backend: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    gate_up = randn(*shape, dtype=dtype, device=device_of(backend)) * 2

    out = ops.OPS[name].impls[backend](gate_up)

    assert_close(out, ops.OPS[name](wide(gate_up)), dtype)


@each_op_backend_and_dtype(*PLAIN, *GATED)
def test_activation_reads_a_part_of_a_wider_row(name: str, backend: str, dtype: torch.dtype) -> None:
    x = strided(randn(3, 34, dtype=dtype, device=device_of(backend)))

    out = ops.OPS[name].impls[backend](x)

    assert_close(out, ops.OPS[name](wide(x)), dtype)


@each_op_backend_and_dtype("gelu", "gelu_tanh", "relu", "silu")  # the squares of relu2 exceed half precision
def test_activation_saturates_without_nan(name: str, backend: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[-30000.0, -200.0, 0.0, 200.0, 30000.0]], dtype=dtype, device=device_of(backend))

    out = ops.OPS[name].impls[backend](x)

    assert_close(out, wide(x).clamp(min=0), dtype)


@each_op_backend_and_dtype("xielu")
@pytest.mark.parametrize("shape", SHAPES)
def test_xielu_joins_a_square_and_an_exponential(
    name: str, backend: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = randn(*shape, dtype=dtype, device=device_of(backend)) * 4

    out = ops.OPS[name].impls[backend](x, torch.tensor(NUMBERS, device=x.device))

    square, exponential, linear, largest = NUMBERS
    wanted = linear * wide(x) + torch.where(
        x > 0, square * wide(x) ** 2, exponential * (wide(x).clamp(max=largest).exp() - 1 - wide(x))
    )
    assert_close(out, wanted, dtype)


@each_backend_and_dtype(ops.add_gated)
@pytest.mark.parametrize("shape", [(1, 3), (5, 1100)])
def test_gated_values_are_added_to_a_part_of_a_wider_row(
    backend: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    device = device_of(backend)
    out, values = (strided(randn(*shape, dtype=dtype, device=device, seed=seed)) for seed in (0, 1))
    gates = randn(len(out), 1, dtype=dtype, device=device, seed=2) * 3
    wanted = wide(out) + wide(values) * wide(gates).sigmoid()

    ops.add_gated.impls[backend](out, values, gates)

    assert_close(out, wanted, dtype)


@each_op_backend_and_dtype("gate")
def test_a_gate_saturates_without_nan(name: str, backend: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[-30000.0, -200.0, -9.0, 0.0, 200.0, 30000.0]], dtype=dtype, device=device_of(backend))

    out = ops.OPS[name].impls[backend](x)

    assert_close(out, torch.sigmoid(wide(x)), dtype)
