"""What the tests of all ops share: backends, dtypes, tolerances, and the inputs of the conformance suite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypedDict, TypeVarTuple, cast

import pytest
import torch
from torch import Tensor

import lightserve.common.cpu_kernel
import lightserve.common.triton_kernel  # noqa: F401  both register what they implement
from lightserve.common import ops
from lightserve.common.cpu_kernel._library import has_kernel, library
from lightserve.common.ops.registry import Op
from lightserve.conformance.inputs.attention import (
    MAX_GROUPS as MAX_GROUPS,
    SMALL_LATENT as SMALL_LATENT,
    Groups as Groups,
    LatentShape as LatentShape,
    attention_args as attention_args,
    batch_of as batch_of,
    context_attention_args as context_attention_args,
    latent_args as latent_args,
    latent_context_args as latent_context_args,
    penalties_of as penalties_of,
    selection_args as selection_args,
    share_prefixes as share_prefixes,
)
from lightserve.conformance.inputs.op_args import (
    ARGS as ARGS,
    EPS as EPS,
    ROW_QUANT as ROW_QUANT,
    Args as Args,
)
from lightserve.conformance.inputs.tensors import (
    NAN as NAN,
    ints as ints,
    randn as randn,
    strided as strided,
    wide as wide,
)
from lightserve.conformance.inputs.weights import (
    codebook4_weight as codebook4_weight,
    eight_bit_weight as eight_bit_weight,
    experts_params as experts_params,
    floats as floats,
    int4_weight as int4_weight,
    int4_weight_with_zero_points as int4_weight_with_zero_points,
    lora_linear_args as lora_linear_args,
    lora_rows as lora_rows,
    lora_weights as lora_weights,
    mxfp4_weight as mxfp4_weight,
    plain_experts_params as plain_experts_params,
)
from test.ops.packages import TORCH_TYPES

Ts = TypeVarTuple("Ts")


class Tolerance(TypedDict):
    rtol: float
    atol: float


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE: dict[
    torch.dtype, Tolerance
] = {  # against an oracle in float32 on the same rounded inputs: a few roundings of the dtype
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
HEAD_DIMS = [64, 80, 96, 128, 256, 320, 512]


def backends_of(op: Op[Any, Any]) -> list[str]:
    return [backend for backend in op.impls if backend != ops.REFERENCE]


def each_backend(op: Op[Any, Any]) -> pytest.MarkDecorator:
    """For ops on float32 and integers alone."""
    return pytest.mark.parametrize("backend", backends_of(op))


def each_backend_and_dtype(op: Op[Any, Any]) -> pytest.MarkDecorator:
    pairs = [pytest.param(*pair, id=_id(*pair)) for pair in _pairs(op)]
    return pytest.mark.parametrize(("backend", "dtype"), pairs)


def each_dtype(backend: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if _runs(backend, dtype)], ids=_id)


def each_op_backend_and_dtype(*names: str) -> pytest.MarkDecorator:
    """For a family of ops that one test can call alike."""
    triples = [pytest.param(name, *pair, id=_id(name, *pair)) for name in names for pair in _pairs(ops.OPS[name])]
    return pytest.mark.parametrize(("name", "backend", "dtype"), triples)


def _pairs(op: Op[Any, Any]) -> list[tuple[str, torch.dtype]]:
    return [(backend, dtype) for backend in backends_of(op) for dtype in FLOATS if _runs(backend, dtype)]


def _id(*params: object) -> str:
    return "-".join(str(param).removeprefix("torch.") for param in params)


def _runs(backend: str, dtype: torch.dtype) -> bool:
    if torch.cuda.is_available() or not backend.startswith("triton"):
        return True
    # The interpreter's dot is wrong in bfloat16, and it is slow: one dtype for what shares its parts with others.
    return dtype == torch.float32 or (dtype == torch.float16 and backend == "triton")


needs_library = pytest.mark.skipif(library is None, reason="the C library was not built")
needs_bf16 = pytest.mark.skipif(not has_kernel("ls_linear_bf16"), reason="the C library was not built, or is older")
# A row of their results does not depend on the rows beside it.
BATCH_INVARIANT = [
    ops.batch_invariant("cpu"),
    pytest.param("cpu_native", marks=needs_library),
    ops.batch_invariant("triton"),
]


def bind(backend: str) -> None:
    """As a device does it: the plain backend is behind it."""
    if backend in TORCH_TYPES:
        ops.use_backend(backend)
        return
    ops.use_backend(backend, "cpu" if backend.startswith("cpu") else "triton")


def device_of(backend: str) -> str:
    if backend in TORCH_TYPES:
        return TORCH_TYPES[backend]
    return "cuda" if torch.cuda.is_available() and not backend.startswith("cpu") else "cpu"


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, **TOLERANCE[dtype])


def with_alibi(args: tuple[*Ts, ops.AttnOptions], slopes: Tensor | None) -> tuple[*Ts, ops.AttnOptions]:
    """Arguments of an attention op with these slopes."""
    return with_options(args, alibi_slopes=slopes)


def with_options(args: tuple[*Ts, ops.AttnOptions], **changes: Any) -> tuple[*Ts, ops.AttnOptions]:
    """Arguments of an attention op, whose last one is its options, with these options."""
    *others, options = args
    return cast("tuple[*Ts, ops.AttnOptions]", (*others, replace(options, **changes)))


def alibi_slopes(heads: int, device: str) -> Tensor:
    return torch.tensor([2.0 ** -(1 + i % 8) for i in range(heads)], device=device)
