"""What holds for every op alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from test.ops.cases import ARGS, EPS, backends_of, device_of, randn

EVERY_OP_AND_BACKEND = [(name, backend) for name, op in ops.OPS.items() for backend in backends_of(op)]


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def every_other(x: Tensor) -> Tensor:
    """The same values, one element apart."""
    return x.repeat_interleave(2, -1)[..., ::2]


def test_every_op_has_arguments_to_be_tested_with() -> None:
    assert ARGS.keys() == ops.OPS.keys()


def test_triton_implements_every_op() -> None:
    assert [name for name, op in ops.OPS.items() if "triton" not in op.impls] == []


@pytest.mark.parametrize(("name", "backend"), EVERY_OP_AND_BACKEND)
def test_an_op_returns_the_dtype_shape_and_device_of_its_definition(name: str, backend: str) -> None:
    args = ARGS[name](3, torch.float16, device_of(backend))
    expected = ops.OPS[name](*ARGS[name](3, torch.float16, device_of(backend)))

    out = ops.OPS[name].impls[backend](*args)

    for got, wanted in zip(tensors_in(out), tensors_in(expected), strict=True):
        assert (got.dtype, got.shape, got.device) == (wanted.dtype, wanted.shape, wanted.device)


@pytest.mark.parametrize(("name", "backend"), EVERY_OP_AND_BACKEND)
def test_an_empty_batch_passes(name: str, backend: str) -> None:
    args = ARGS[name](0, torch.float16, device_of(backend))

    out = ops.OPS[name].impls[backend](*args)

    assert all(len(tensor) == 0 for tensor in tensors_in(out))


@pytest.mark.parametrize(("name", "backend"), EVERY_OP_AND_BACKEND)
def test_an_op_leaves_what_it_only_reads(name: str, backend: str) -> None:
    args, expected = (ARGS[name](3, torch.float16, device_of(backend)) for _ in range(2))
    ops.OPS[name](*expected)

    ops.OPS[name].impls[backend](*args)

    for after, wanted in zip(tensors_in(args), tensors_in(expected), strict=True):
        error = 0.0 if after.element_size() == 1 else 2e-3  # codes are read only
        torch.testing.assert_close(after, wanted, rtol=error, atol=error, equal_nan=True)


OF_ANY_STRIDES = {"bmm", "log_softmax", "softmax", "top_k"}  # as those of aten, which they replace
WITH_TENSORS = [
    pair
    for pair in EVERY_OP_AND_BACKEND
    if pair[1] == "triton" and pair[0] not in {"ngram_drafts", *OF_ANY_STRIDES}  # a table of drafts is in a struct
]


@pytest.mark.parametrize(("name", "backend"), WITH_TENSORS)
def test_triton_refuses_a_strided_last_dimension(name: str, backend: str) -> None:
    args = ARGS[name](3, torch.float32, device_of(backend))
    big = next(i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dim() > 1)
    args = (*args[:big], every_other(args[big]), *args[big + 1 :])

    with pytest.raises(ValueError, match=f"{name}: the last dimension of .* must be contiguous, found stride 2"):
        ops.OPS[name].impls[backend](*args)


@pytest.mark.parametrize("position", [1, 2, 3])
def test_triton_refuses_a_strided_sampling_parameter(position: int) -> None:
    args = list(ARGS["top_k_top_p_min_p"](3, torch.float32, device_of("triton")))
    args[position] = every_other(args[position])

    with pytest.raises(
        ValueError, match=r"top_k_top_p_min_p: the last dimension of b_.* must be contiguous, found stride 2"
    ):
        ops.top_k_top_p_min_p.impls["triton"](*args)


@pytest.mark.parametrize("field", ["b_req_idx", "b_start_loc", "b_seq_len", "b_ready_cache_len", "req_to_token"])
@pytest.mark.parametrize(
    "name", ["context_attention", "latent_context_attention", "latent_token_attention", "token_attention"]
)
def test_triton_refuses_a_strided_index_of_a_batch(name: str, field: str) -> None:
    *tensors, batch, options = ARGS[name](3, torch.float32, device_of("triton"))
    batch = replace(batch, **{field: every_other(getattr(batch, field))})

    with pytest.raises(ValueError, match=f"{name}: the last dimension of {field} must be contiguous"):
        ops.OPS[name].impls["triton"](*tensors, batch, options)


def test_triton_refuses_a_residual_it_cannot_write_in_place() -> None:
    x = randn(2, 3, 8, device=device_of("triton"))
    residual = randn(2, 4, 8, device=device_of("triton"))[:, :3]

    with pytest.raises(ValueError, match="residual is written in place"):
        ops.add_rms_norm.impls["triton"](x, residual, x[0, 0], EPS)
