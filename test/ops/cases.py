"""What the tests of all ops share: backends, dtypes, tolerances, and inputs that make a wrong read show.

``ARGS`` holds arguments for every op; an op without an entry fails ``test_every_op``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypedDict, TypeVarTuple, cast

import pytest
import torch
from torch import Tensor

import lightserve.common.cpu_kernel
import lightserve.common.triton_kernel  # noqa: F401  both register what they implement
from lightserve.common import ops
from lightserve.common.cpu_kernel._library import library
from lightserve.common.ops.registry import Op
from lightserve.common.ops.step import COUNTED, NO_SLOT
from test.ops.state.cases import STATE_ARGS
from test.ops.tensors import NAN as NAN, ints as ints, randn as randn, strided as strided, wide as wide

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
EPS = 1e-5
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
# A row of their results does not depend on the rows beside it.
BATCH_INVARIANT = [
    ops.batch_invariant("cpu"),
    pytest.param("cpu_native", marks=needs_library),
    ops.batch_invariant("triton"),
]


def bind(backend: str) -> None:
    """As a device does it: the plain backend is behind it."""
    ops.use_backend(backend, "cpu" if backend.startswith("cpu") else "triton")


def device_of(backend: str) -> str:
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


def attention_args(
    lens: list[tuple[int, int]], heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """``lens``: (tokens in the cache, new tokens) of each request; ``heads``: of queries, of keys.

    The queries are a part of a fused qkv, the cache a layer of a bigger one, the slots scattered. All else is NaN, and
    the table's entries past a request's end name a slot of NaN.
    """
    q_heads, kv_heads = heads
    seq_lens = [ready + new for ready, new in lens]
    used, tokens = sum(seq_lens), sum(new for _, new in lens)
    cache = torch.full((used + 3, 2, 2 * kv_heads, dim), NAN, dtype=dtype, device=device)[:, 1]
    order = torch.randperm(used + 3, generator=torch.Generator().manual_seed(used)).tolist()
    slots, nan_slot = order[:used], order[used]
    cache[slots] = randn(used, 2 * kv_heads, dim, dtype=dtype, device=device, seed=1)

    table = torch.full((len(lens) + 2, max(seq_lens, default=0) + 2), nan_slot, dtype=torch.int32, device=device)
    req_idx = list(range(len(lens) + 1, 1, -1))
    for row, seq_len in zip(req_idx, seq_lens, strict=True):
        table[row, :seq_len] = ints([slots.pop() for _ in range(seq_len)], device)

    fused = torch.full((tokens, q_heads + 2 * kv_heads, dim), NAN, dtype=dtype, device=device)
    q = fused[:, :q_heads]
    q.copy_(randn(tokens, q_heads, dim, dtype=dtype, device=device, seed=2))
    return q, cache, batch_of(lens, table, req_idx), ops.AttnOptions(dim**-0.5)


def batch_of(lens: list[tuple[int, int]], table: Tensor, req_idx: list[int]) -> ops.AttnBatch:
    """``lens``: (tokens in the cache, new tokens) of each request, whose row of the table is in ``req_idx``."""
    return ops.AttnBatch(
        req_to_token=table,
        b_req_idx=ints(req_idx, table.device.type),
        b_start_loc=ints([sum(new for _, new in lens[:i]) for i in range(len(lens))], table.device.type),
        b_seq_len=ints([ready + new for ready, new in lens], table.device.type),
        b_ready_cache_len=ints([ready for ready, _ in lens], table.device.type),
    )


Groups = list[tuple[int, int, int]]  # of shared prefixes: first request, requests, shared tokens
MAX_GROUPS = 4


def share_prefixes(cache: Tensor, batch: ops.AttnBatch, groups: Groups) -> ops.AttnBatch:
    """``batch`` with requests that share prefixes; the slots that they had instead are NaN."""
    rows = batch.b_req_idx.long()
    for first, count, shared in groups:
        table = batch.req_to_token
        cache[table[rows[first + 1 : first + count], :shared].long()] = NAN
        table[rows[first + 1 : first + count], :shared] = table[rows[first], :shared]
    listed = [[*group, 0] for group in groups] + [[0] * 4] * (MAX_GROUPS - len(groups))
    return replace(batch, shared_prefixes=torch.tensor(listed, dtype=torch.int32, device=cache.device))


def context_attention_args(
    lens: list[tuple[int, int]], heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """As attention_args, with the keys and values of the step's own tokens beside its queries."""
    q, cache, batch, options = attention_args(lens, heads, dim, dtype, device)
    fused = torch.cat((q, q.new_empty(len(q), cache.shape[1], dim)), dim=1)
    kv = fused[:, q.shape[1] :]
    row = 0
    for req_idx, (ready, new) in zip(batch.b_req_idx.tolist(), lens, strict=True):
        kv[row : row + new] = cache[batch.req_to_token[req_idx, ready : ready + new].long()]
        row += new
    return fused[:, : q.shape[1]], kv, cache, batch, options


LatentShape = tuple[int, int, int, int, int]  # heads, nope, rope, value, rank
SMALL_LATENT: LatentShape = (4, 32, 16, 48, 64)


def latent_args(
    lens: list[tuple[int, int]], shape: LatentShape, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """Arguments of latent_token_attention, as in attention_args."""
    heads, nope, rope, value, rank = shape
    cached, cache, batch, _ = attention_args(lens, (1, 1), rank + rope, dtype, device)
    wide_q = torch.full((len(cached), heads * (nope + rope) + 8), NAN, dtype=dtype, device=device)
    q = wide_q[:, 8:].view(len(cached), heads, nope + rope)
    q.copy_(randn(*q.shape, dtype=dtype, device=device, seed=3))
    kv_b = randn(heads, nope + value, rank, device=device, seed=4) * rank**-0.5
    return q, cache[:, :1], kv_b.to(dtype), batch, ops.AttnOptions((nope + rope) ** -0.5)


def latent_context_args(
    lens: list[tuple[int, int]], shape: LatentShape, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """As latent_args, with the latents of the step's own tokens in a part of a wider tensor."""
    q, cache, kv_b, batch, options = latent_args(lens, shape, dtype, device)
    latent = torch.full((len(q), cache.shape[2] + 8), NAN, dtype=dtype, device=device)[:, :-8]
    row = 0
    for req_idx, (ready, new) in zip(batch.b_req_idx.tolist(), lens, strict=True):
        latent[row : row + new] = cache[batch.req_to_token[req_idx, ready : ready + new].long(), 0]
        row += new
    return q, latent, cache, kv_b, batch, options


def selection_args(
    lens: list[tuple[int, int]], shape: tuple[int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, ops.AttnBatch, int]:
    """Arguments of select_tokens, as in attention_args. ``shape``: heads, and numbers of each."""
    q, cache, batch, _ = attention_args(lens, (shape[0], 1), shape[1], dtype, device)
    weights = torch.full((len(q), shape[0] + 3), NAN, device=device)[:, :-3]
    weights.copy_(randn(*weights.shape, device=device, seed=5))
    return q, weights, cache[:, :1], batch, 4


def penalties_of(entries: list[tuple[int, int, int]], shape: tuple[int, int], device: str) -> ops.Penalties:
    """Penalties of every row of logits of this shape; ``entries``: (row, token, count in the output).

    A token of an odd id is in the prompt too, one that the output lacks is in the prompt alone. What requests saw is in
    another order than the rows of the logits, between rows of a request that saw everything.
    """
    batch, vocab = shape
    seen = torch.full((2 * batch + 1, vocab), 3, dtype=torch.int32, device=device)
    seen_rows = [2 * (batch - row) - 1 for row in range(batch)]
    seen[seen_rows] = 0
    for row, token, count in entries:
        seen[seen_rows[row], token] = 2 * count + (token % 2 or count == 0)
    return ops.Penalties(
        rows=ints(list(range(batch)), device),
        b_repetition=torch.linspace(1.0, 1.5, batch, device=device),
        b_presence=torch.linspace(0.3, 0.0, batch, device=device),
        b_frequency=torch.linspace(-0.1, 0.2, batch, device=device),
        b_seen_row=ints(seen_rows, device),
        seen=seen,
    )


def floats(weight: Tensor | ops.QuantizedWeight) -> Tensor:
    """A weight that is not quantised."""
    assert isinstance(weight, Tensor)
    return weight


def experts_params(
    experts: int, hidden: int, width: int, dtype: torch.dtype, device: str, *, clamps: bool = False
) -> ops.ExpertsParams:
    """Random experts with a gate; ``clamps``: with biases and the activation of gpt-oss."""

    def weight(*shape: int, seed: int) -> Tensor:
        return randn(*shape, dtype=dtype, device=device, seed=seed).mul_(shape[-1] ** -0.5)

    w13, w2 = weight(experts, 2 * width, hidden, seed=11), weight(experts, hidden, width, seed=12)
    if not clamps:
        return ops.ExpertsParams(w13, w2)
    b13, b2 = (randn(*w.shape[:2], dtype=dtype, device=device, seed=13) for w in (w13, w2))
    return ops.ExpertsParams(w13, w2, b13, b2, ops.GatedSilu(alpha=1.702, limit=1.5, up_offset=1.0))


def plain_experts_params(
    experts: int, hidden: int, width: int, dtype: torch.dtype, device: str, *, has_bias: bool = False
) -> ops.ExpertsParams:
    """Random experts without a gate. What they square is about as large as what a gate multiplies."""
    gated = experts_params(experts, hidden, width, dtype, device, clamps=has_bias)
    b13 = None if gated.b13 is None else gated.b13[:, :width] * 0.5
    return replace(gated, w13=floats(gated.w13)[:, :width] * 0.5, b13=b13, activation=ops.Relu2())


def eight_bit_weight(out_size: int, in_size: int, dtype: torch.dtype, device: str, **more: Any) -> Any:
    """An Int8Weight or, for the dtype float8_e4m3fn, an Fp8Weight, with random codes.

    ``group``: inputs with the same scale; ``has_offsets``.
    """
    group = more.pop("group", in_size)
    codes = randn(out_size, in_size, seed=5) * 60
    codes = codes.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else codes.clamp(-448, 448).to(dtype)
    scales = torch.rand(out_size, in_size // group, generator=torch.Generator().manual_seed(6)) * in_size**-0.5 / 60
    if more.pop("has_offsets", False):
        more["offsets"] = (scales * 7).to(device)
    kind = ops.Int8Weight if dtype == torch.int8 else ops.Fp8Weight
    return kind(codes=codes.to(device), scales=scales.to(device), **more)


Args = tuple[Any, ...]


def _norm_args(*names: str) -> Callable[[int, torch.dtype, str], Args]:
    shapes = {"rows": (48,), "param": (48,)}

    def args(tokens: int, dtype: torch.dtype, device: str) -> Args:
        tensors = [
            randn(*((tokens,) if name == "rows" else ()), *shapes[name], dtype=dtype, device=device, seed=seed)
            for seed, name in enumerate(names)
        ]
        return (*tensors, EPS)

    return args


def _gated_norm_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    x, gate = (randn(tokens, 2, 24, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    return x, gate, randn(24, dtype=dtype, device=device, seed=2), EPS, ops.GatedNorm()


def _activation_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return (randn(tokens, 70, dtype=dtype, device=device),)


def _add_gated_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    out, values = (randn(tokens, 70, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    return out, values, randn(tokens, 1, dtype=dtype, device=device, seed=2)


def _xielu_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return *_activation_args(tokens, dtype, device), torch.tensor([0.7, 1.2, 0.4, -0.3], device=device)


def _embedding_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return torch.arange(tokens, device=device), randn(50, 48, dtype=dtype, device=device), 2


def _linear_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return randn(tokens, 48, dtype=dtype, device=device), randn(40, 48, dtype=dtype, device=device, seed=1)


def _linear_int8_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    x = randn(tokens, 48, dtype=dtype, device=device)
    return x, eight_bit_weight(40, 48, torch.int8, device), randn(40, dtype=dtype, device=device, seed=1)


def _linear_fp8_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return randn(tokens, 48, dtype=dtype, device=device), eight_bit_weight(40, 48, torch.float8_e4m3fn, device)


ROW_QUANT = ops.RowQuant(torch.int8)


def _quantize_rows_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return randn(tokens, 70, dtype=dtype, device=device), ROW_QUANT


def _norm_quantize_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return (*_norm_args("rows", "rows", "param")(tokens, dtype, device), ROW_QUANT)


def _linear_quantized_rows_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    x, weight, bias = _linear_int8_args(tokens, dtype, device)
    return (*ops.quantize_rows.impls[ops.REFERENCE](x, ROW_QUANT), weight, bias, dtype)


def int4_weight(out_size: int, in_size: int, group: int, device: str, has_offsets: bool = False) -> ops.Int4Weight:
    """Its rows have length 1, about."""
    numbers = torch.randint(-8, 8, (out_size, in_size), generator=torch.Generator().manual_seed(3))
    scales = (randn(out_size, in_size // group, device=device, seed=4).abs() + 0.5) * in_size**-0.5 / 8
    offsets = randn(*scales.shape, device=device, seed=5) * in_size**-0.5 / 2 if has_offsets else None
    return ops.Int4Weight(codes=ops.pack_int4(numbers, group).to(device), scales=scales, offsets=offsets)


def int4_weight_with_zero_points(out_size: int, in_size: int, group: int, device: str) -> ops.Int4Weight:
    """The first group is all zeros, with a scale of 0 as padding has it."""
    weight = int4_weight(out_size, in_size, group, device)
    zeros = torch.randint(0, 16, weight.scales.shape, generator=torch.Generator().manual_seed(6)).to(device)
    weight.scales[0, 0] = 0
    return replace(weight, offsets=(8 - zeros) * weight.scales, has_zero_points=True)


def codebook4_weight(out_size: int, in_size: int, device: str) -> ops.Codebook4Weight:
    numbers = int4_weight(out_size, in_size, 64, device)
    codebook = randn(16, device=device, seed=6) * 4
    return ops.Codebook4Weight(codes=numbers.codes, scales=numbers.scales, codebook=codebook)


def mxfp4_weight(out_size: int, in_size: int, device: str) -> ops.Mxfp4Weight:
    weight = ops.Mxfp4Weight.empty((out_size, in_size), 32, torch.device(device))
    weight.randomize_(torch.Generator(device).manual_seed(0), in_size**-0.5)
    weight.scales.add_(torch.arange(out_size, device=device)[:, None] % 3)
    return weight


def _linear_mxfp4_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return randn(tokens, 64, dtype=dtype, device=device), mxfp4_weight(40, 64, device)


def _linear_int4_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return randn(tokens, 64, dtype=dtype, device=device), int4_weight(40, 64, 32, device, has_offsets=True)


def _linear_codebook4_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return randn(tokens, 64, dtype=dtype, device=device), codebook4_weight(40, 64, device)


def _norm_linear_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    x, residual = (randn(tokens, 48, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    norm_weight, weight = (
        randn(48, dtype=dtype, device=device, seed=2),
        randn(40, 48, dtype=dtype, device=device, seed=3),
    )
    return x, residual, norm_weight, EPS, weight


def _rotary_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    qk = [randn(tokens, heads, 64, dtype=dtype, device=device) for heads in (4, 2)]
    return (*qk, randn(tokens, 32, device=device, seed=1), randn(tokens, 32, device=device, seed=2))


def _rotary_write_kv_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    q, _, cos, sin = _rotary_args(tokens, dtype, device)
    kv, slots, cache = _write_kv_args(tokens, dtype, device)
    return q, kv, cos, sin, slots, cache


def _norm_rotary_write_kv_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    q, kv, cos, sin, slots, cache = _rotary_write_kv_args(tokens, dtype, device)
    q_weight, k_weight = (randn(64, dtype=dtype, device=device, seed=seed) for seed in (3, 4))
    return q, kv, ops.HeadNorms(q_weight, k_weight, EPS), ops.RotaryAngles(cos, sin), slots, cache


def _write_kv_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    kv = randn(tokens, 4, 64, dtype=dtype, device=device)
    return kv, ints(list(range(tokens)), device), torch.zeros(tokens + 1, 4, 64, dtype=dtype, device=device)


def _attention_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return attention_args([(9, 1)] * tokens, (4, 2), 64, dtype, device)


def _context_attention_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return context_attention_args([(9, 1)] * tokens, (4, 2), 64, dtype, device)


def _latent_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return latent_args([(9, 1)] * tokens, SMALL_LATENT, dtype, device)


def _latent_context_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return latent_context_args([(9, 1)] * tokens, SMALL_LATENT, dtype, device)


def _selection_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return selection_args([(9, 1)] * tokens, (4, 64), dtype, device)


def _write_latent_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    heads, nope, rope, _, rank = SMALL_LATENT
    q = randn(tokens, heads, nope + rope, dtype=dtype, device=device)
    latent = randn(tokens, rank + rope, dtype=dtype, device=device, seed=1)
    norm = ops.LatentNorm(randn(rank, dtype=dtype, device=device, seed=2), EPS)
    angles = ops.RotaryAngles(*(randn(tokens, rope // 2, device=device, seed=seed) for seed in (3, 4)))
    cache = torch.zeros(tokens + 1, 1, rank + rope, dtype=dtype, device=device)
    return q, latent, norm, angles, ints(list(range(tokens))[::-1], device), cache


def _logits(tokens: int, device: str) -> Tensor:
    return randn(tokens, 300, device=device)


def _mask_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    logits = _logits(tokens, device)
    words = -(-logits.shape[1] // 32)
    bits = torch.randint(-(2**31), 2**31, (tokens, words), generator=torch.Generator().manual_seed(1))
    return logits, ints(list(range(tokens))[::-1], device), bits.to(device, torch.int32)


def _penalties_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    logits = _logits(tokens, device)
    return logits, penalties_of([(row, row + 1, row) for row in range(tokens)], (tokens, logits.shape[1]), device)


def _top_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    b_floats = [torch.full((tokens,), value, device=device) for value in (0.9, 0.01)]
    return (_logits(tokens, device), ints([5] * tokens, device), *b_floats)


def _typical_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return _logits(tokens, device), torch.full((tokens,), 0.5, device=device)


def _sample_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    b_seed, b_position = ints([7] * tokens, device, torch.int64), ints([3] * tokens, device)
    logits, rows, bitmask = _mask_args(tokens, dtype, device)
    return logits.to(dtype), torch.arange(tokens, device=device) / 2, b_seed, b_position, ops.TokenMasks(rows, bitmask)


def _sample_part_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return (*_sample_args(tokens, dtype, device)[:4], 1000)


def _place_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    columns = ints(list(range(tokens)), device)
    table = torch.zeros(tokens + 1, 20, dtype=torch.int32, device=device)
    return (
        ops.StepTokens(columns, columns, columns, columns),
        table,
        torch.zeros(tokens + 1, dtype=torch.int64, device=device),
    )


def _locate_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    """Every request has one token, and every other one of them a slot for it."""
    columns = ints(list(range(tokens)), device)
    new_slots = torch.where(columns % 2 == 0, columns + 30, NO_SLOT)
    ready_len = torch.where(columns % 3 == 0, COUNTED, columns + 1)
    reqs = ops.StepReqs(columns, columns, ready_len, columns + 2)
    lengths = torch.full((tokens + 1,), 2, dtype=torch.int32, device=device)
    table = torch.arange((tokens + 1) * 20, dtype=torch.int32, device=device).view(tokens + 1, 20)
    return new_slots, columns, reqs, lengths, table


def _ngram_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    """The first text is the first columns, the second one more, and so on: 1, 2, 0, 1, 2, 0 ..."""
    table = (torch.arange((tokens + 1) * 30, dtype=torch.int32, device=device) % 3).view(tokens + 1, 30)
    rows = ints(list(range(tokens)), device)
    texts = ops.DraftTexts(table, rows, torch.ones_like(rows), 3 + rows % 27)
    return texts, (1, 30), ops.NgramSizes(2, 3, 5)


def _route_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    spec = ops.RouteSpec(3, "sigmoid", groups=4, top_groups=2, group_score="top2", renormalize=True, scale=2.5)
    is_padding = torch.arange(tokens, device=device) % 4 == 3
    return randn(tokens, 20, dtype=dtype, device=device), spec, randn(20, device=device, seed=1), is_padding


def _experts_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    is_padding = torch.arange(tokens, device=device) % 4 == 3
    ids, weights = ops.route.impls[ops.REFERENCE](
        randn(tokens, 6, device=device), ops.RouteSpec(3), is_padding=is_padding
    )
    x = randn(tokens, 48, dtype=dtype, device=device, seed=1)
    return x, ids, weights, experts_params(6, 48, 40, dtype, device, clamps=True)


def lora_rows(slots: list[int], device: str, max_group: int = 16) -> ops.LoraRows:
    """Of rows with these slots, as a worker groups them; with a group that is not used at the end."""
    by_slot = {slot: [row for row, own in enumerate(slots) if own == slot] for slot in set(slots) - {ops.NO_LORA}}
    rows = [row for own in by_slot.values() for row in own]
    groups, begin = [], 0
    for slot, own in by_slot.items():
        for first in range(0, len(own), max_group):
            groups.append((slot, begin + first, begin + min(first + max_group, len(own))))
        begin += len(own)
    unused = [(ops.NO_LORA, 0, 0)] if slots else []
    columns = list(zip(*groups, *unused, strict=True)) or [(), (), ()]
    rows += [0] * (len(slots) - len(rows))
    table = torch.tensor(columns, dtype=torch.int32, device=device)
    return ops.LoraRows(ints(rows, device), table, max_group)


def lora_weights(
    in_size: int, parts: tuple[int, ...], dtype: torch.dtype, device: str, *, slots: int = 3, rank: int = 16
) -> ops.LoraWeights:
    a = randn(slots, len(parts) * rank, in_size, dtype=dtype, device=device, seed=21) * in_size**-0.5
    b = randn(slots, sum(parts), rank, dtype=dtype, device=device, seed=22) * rank**-0.5
    return ops.LoraWeights(a, b, tuple(sum(parts[: i + 1]) for i in range(len(parts))))


def _lora_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    out, x = randn(tokens, 72, dtype=dtype, device=device), randn(tokens, 40, dtype=dtype, device=device, seed=1)
    slots = [(2, ops.NO_LORA, 0)[i % 3] for i in range(tokens)]
    return out, x, lora_weights(40, (40, 16, 16), dtype, device), lora_rows(slots, device)


def lora_linear_args(
    tokens: int, in_size: int, parts: tuple[int, ...], dtype: torch.dtype, device: str, *, rank: int = 16
) -> tuple[Tensor, ops.LoraLinear]:
    """With a bias. Rows use one of two adapters or none."""
    slots = [(2, ops.NO_LORA, 0)[i % 3] for i in range(tokens)]
    weight = randn(sum(parts), in_size, dtype=dtype, device=device, seed=3) * in_size**-0.5
    bias = randn(sum(parts), dtype=dtype, device=device, seed=4)
    lora = lora_weights(in_size, parts, dtype, device, rank=rank)
    layer = ops.LoraLinear(weight, bias, lora, lora_rows(slots, device))
    return randn(tokens, in_size, dtype=dtype, device=device, seed=1), layer


def _lora_linear_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return lora_linear_args(tokens, 40, (40, 16, 16), dtype, device)


def _norm_lora_linear_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    x, layer = lora_linear_args(tokens, 40, (40, 16, 16), dtype, device)
    residual, norm_weight = (randn(*shape, dtype=dtype, device=device, seed=5) for shape in ((tokens, 40), (40,)))
    return x, residual, norm_weight, EPS, layer


def _watermark_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    b_last = ints([40_000 * i for i in range(tokens)], device, torch.int64)
    return _logits(tokens, device), ints(list(range(tokens))[::-1], device), b_last


ARGS: dict[str, Callable[[int, torch.dtype, str], Args]] = {
    "add_gated": _add_gated_args,
    "add_layer_norm": _norm_args("rows", "rows", "param", "param"),
    "add_lora": _lora_args,
    "add_rms_norm": _norm_args("rows", "rows", "param"),
    "add_rms_norm_gate_up": _norm_linear_args,
    "add_rms_norm_linear": _norm_linear_args,
    "add_rms_norm_lora_linear": _norm_lora_linear_args,
    "add_rms_norm_quantize": _norm_quantize_args,
    "add_watermark": _watermark_args,
    "apply_penalties": _penalties_args,
    "sample": _sample_args,
    "sample_part": _sample_part_args,
    "context_attention": _context_attention_args,
    "experts": _experts_args,
    "typical_p": _typical_args,
    "top_k_top_p_min_p": _top_args,
    "gated_rms_norm": _gated_norm_args,
    "gate": _activation_args,
    "gelu": _activation_args,
    "gelu_and_mul": _activation_args,
    "gelu_tanh": _activation_args,
    "gelu_tanh_and_mul": _activation_args,
    "latent_context_attention": _latent_context_args,
    "latent_token_attention": _latent_args,
    "layer_norm": _norm_args("rows", "param", "param"),
    "linear": _linear_args,
    "linear_codebook4": _linear_codebook4_args,
    "linear_float32": _linear_args,
    "linear_fp8": _linear_fp8_args,
    "linear_int8": _linear_int8_args,
    "linear_mxfp4": _linear_mxfp4_args,
    "linear_quantized_rows": _linear_quantized_rows_args,
    "lora_linear": _lora_linear_args,
    "linear_int4": _linear_int4_args,
    "locate_tokens": _locate_args,
    "ngram_drafts": _ngram_args,
    "mask_logits": _mask_args,
    "norm_rotary_write_kv": _norm_rotary_write_kv_args,
    "place_tokens": _place_args,
    "quantize_rows": _quantize_rows_args,
    "relu": _activation_args,
    "relu2": _activation_args,
    "relu2_and_mul": _activation_args,
    "rms_norm": _norm_args("rows", "param"),
    "rotary": _rotary_args,
    "rotary_write_kv": _rotary_write_kv_args,
    "route": _route_args,
    "select_tokens": _selection_args,
    "silu": _activation_args,
    "silu_and_mul": _activation_args,
    "silu_and_mul_quantize": _quantize_rows_args,
    "token_attention": _attention_args,
    "vocab_embedding": _embedding_args,
    "xielu": _xielu_args,
    "write_kv": _write_kv_args,
    "write_latent": _write_latent_args,
    **STATE_ARGS,
}
