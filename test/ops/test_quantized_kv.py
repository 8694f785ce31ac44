"""KV caches in 8 bits: every backend writes and reads what the definition does, close to the numbers themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.registry import Op
from lightserve.common.triton_kernel.attention._kv_codes import permute_bytes
from test.ops.cases import (
    ARGS,
    alibi_slopes,
    assert_close,
    attention_args,
    backends_of,
    context_attention_args,
    device_of,
    randn,
    share_prefixes,
    wide,
    with_options,
)
from test.ops.quantized import CODES, FLOAT8, FLOAT8_NAN, INT8, dequantized, empty_cache, quantized

# of one number, relative to itself or to the largest of its head: e4m3 has 3 bits behind the first, int8 127 steps
ROUNDING = {FLOAT8: 2**-4, INT8: 0.5 / 127}
BATCH_INVARIANT = [ops.batch_invariant("cpu"), ops.batch_invariant("triton")]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi, sinks": {"alibi_slopes": alibi_slopes(6, "cpu"), "sinks": torch.linspace(-1, 1, 6)},
    "window, softcap": {"window": 20, "softcap": 5.0},
}


def each_backend_and_code(op: Op[Any, Any]) -> pytest.MarkDecorator:
    pairs = [
        pytest.param(backend, codes, id=f"{backend}-{str(codes).removeprefix('torch.')}")
        for backend in backends_of(op)
        for codes in CODES
    ]
    return pytest.mark.parametrize(("backend", "codes"), pairs)


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    """bfloat16 is what queries have on a GPU; it is wrong in Triton's interpreter, which is also slow."""
    if not backend.startswith("triton"):
        return torch.float32, torch.float16
    return (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float16,)


def options_on(device: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in changes.items()}


@pytest.mark.parametrize("codes", CODES)
def test_a_number_read_back_is_within_one_rounding_of_itself(codes: torch.dtype) -> None:
    kv = randn(6, 4, 64) * torch.tensor([0.01, 1.0, 30.0, 1.0])[:, None]
    kv[2, 1] = 0
    slots = torch.tensor([7, 1, 0, 4, 5, 2])
    cache = empty_cache((8, 4, 64), codes, "cpu")

    cache.write(kv, slots)

    read = cache.read(slots, torch.float32)
    size = kv.abs().amax(-1, keepdim=True) if codes == INT8 else kv.abs()
    step = torch.zeros(1) if codes == INT8 else 2.0**-9 * cache.scales[:, None]  # of e4m3 around 0
    assert ((read - kv).abs() <= 1.001 * (size * ROUNDING[codes] + step)).all()
    assert read[2, 1].eq(0).all()


def test_a_number_beyond_the_range_of_float8_becomes_its_largest_and_not_nan() -> None:
    cache = empty_cache((1, 2, 16), FLOAT8, "cpu")

    cache.write(torch.full((1, 2, 16), 1e6), torch.tensor([0]))

    assert torch.equal(dequantized(cache), 448 * cache.scales[None, :, None].expand(1, 2, 16))


@pytest.mark.parametrize("name", ["write_kv", "rotary_write_kv", "norm_rotary_write_kv"])
@pytest.mark.parametrize("codes", CODES)
def test_a_kernel_quantises_what_it_writes_in_the_same_launch(name: str, codes: torch.dtype) -> None:
    for dtype in dtypes_of("triton"):
        device = device_of("triton")
        *args, slots, _ = ARGS[name](5, dtype, device)
        *same_args, _, _ = ARGS[name](5, dtype, device)
        args[-1 if name == "write_kv" else 1].mul_(20)  # past the first power of two
        same_args[-1 if name == "write_kv" else 1].mul_(20)
        cache, expected = (empty_cache((6, 4, 64), codes, device) for _ in range(2))

        ops.OPS[name].impls["triton"](*args, slots, cache)

        ops.OPS[name](*same_args, slots, expected)
        largest = dequantized(expected)[:5].abs().amax(-1, keepdim=True)
        # a rounding of the norm or of the rotation may choose the next code
        off = (dequantized(cache)[:5] - dequantized(expected)[:5]).abs()
        assert (off <= 2 * ROUNDING[codes] * largest).all()
        assert off.gt(0).float().mean() < 0.02
        assert cache.codes[5].view(torch.uint8).eq(0 if codes == INT8 else FLOAT8_NAN).all()  # no other slot
        for got, wanted in zip(args[:2], same_args[:2], strict=True):  # q and kv are rotated in place as ever
            if isinstance(got, Tensor):
                assert_close(got, wide(wanted), dtype)


@pytest.mark.parametrize("half", [32, 10])
def test_the_scale_of_a_key_covers_elements_that_do_not_rotate(half: int) -> None:
    device = device_of("triton")
    q, kv, cos, sin, slots, _ = ARGS["rotary_write_kv"](3, torch.float32, device)
    kv[:, :, -1] = 50.0
    cache = empty_cache((4, 4, 64), INT8, device)

    ops.rotary_write_kv.impls["triton"](q, kv, cos[:, :half].contiguous(), sin[:, :half].contiguous(), slots, cache)

    torch.testing.assert_close(dequantized(cache)[:3], kv, rtol=0, atol=0.6 * kv.abs().max().item() / 127)


@each_backend_and_code(ops.token_attention)
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS.keys())
def test_token_attention_reads_codes_with_their_scales(
    backend: str, codes: torch.dtype, changes: dict[str, Any]
) -> None:
    for dtype in dtypes_of(backend):
        device = device_of(backend)
        args = attention_args([(9, 1), (80, 1), (33, 1)], (6, 2), 80, dtype, device)
        q, cache, batch, options = with_options(args, **options_on(device, changes))
        codes_of_cache = quantized(cache, codes)

        out = ops.token_attention.impls[backend](q, codes_of_cache, batch, options)

        assert_close(out, ops.token_attention(wide(q), dequantized(codes_of_cache), batch, options), dtype)


@each_backend_and_code(ops.context_attention)
@pytest.mark.parametrize(
    ("changes", "has_decodes"), [(OPTIONS["plain"], True), *((changes, False) for changes in OPTIONS.values())]
)
def test_context_attention_reads_codes_of_the_prefix(
    backend: str, codes: torch.dtype, changes: dict[str, Any], has_decodes: bool
) -> None:
    """The Triton kernel reads the step's own tokens before they are quantised, except those of decodes."""
    for dtype in dtypes_of(backend):
        device, lens = device_of(backend), [(9, 1), (0, 7), (77, 5)]
        args = context_attention_args(lens, (6, 2), 80, dtype, device)
        q, kv, cache, batch, options = with_options(args, **options_on(device, changes))
        batch = replace(batch, has_decodes=has_decodes)
        codes_of_cache = quantized(cache, codes)
        numbers = dequantized(codes_of_cache)
        if backend == "triton":
            for req, (ready, new) in list(zip(batch.b_req_idx.tolist(), lens, strict=True))[int(has_decodes) :]:
                own = batch.req_to_token[req, ready : ready + new].long()
                numbers[own] = cache[own].float()

        out = ops.context_attention.impls[backend](q, kv, codes_of_cache, batch, options)

        assert_close(out, ops.token_attention(wide(q), numbers, batch, options), dtype)


@pytest.mark.parametrize("codes", CODES)
def test_a_shared_prefix_of_codes_is_read_once_for_all(codes: torch.dtype) -> None:
    for dtype in dtypes_of("triton"):
        q, cache, batch, options = attention_args([(149, 1)] * 3, (8, 2), 64, dtype, device_of("triton"))
        batch = share_prefixes(cache, batch, [(0, 3, 140)])
        codes_of_cache = quantized(cache, codes)

        out = ops.token_attention.impls["triton"](q, codes_of_cache, batch, options)

        assert_close(out, ops.token_attention(wide(q), dequantized(codes_of_cache), batch, options), dtype)


@pytest.mark.parametrize("backend", BATCH_INVARIANT)
@pytest.mark.parametrize("codes", CODES)
def test_chunks_of_a_prompt_change_no_bit_of_a_batch_invariant_backend(backend: str, codes: torch.dtype) -> None:
    device = device_of(backend)
    q, kv, cache, batch, options = context_attention_args([(0, 40)], (4, 2), 64, torch.float32, device)
    codes_of_cache = quantized(cache, codes)
    attend = ops.context_attention.impls[backend]
    whole = attend(q, kv, codes_of_cache, batch, options)
    for first, end in ((0, 16), (16, 17), (17, 40)):
        part = replace(
            batch,
            b_seq_len=torch.full_like(batch.b_seq_len, end),
            b_ready_cache_len=torch.full_like(batch.b_seq_len, first),
            plans={},
        )

        out = attend(q[first:end], kv[first:end], codes_of_cache, part, options)

        assert torch.equal(out, whole[first:end])


@pytest.mark.parametrize("codes", CODES)
def test_attention_over_codes_is_close_to_that_over_the_numbers(codes: torch.dtype) -> None:
    q, cache, batch, options = attention_args([(200, 1)] * 2, (4, 2), 128, torch.float32, "cpu")

    out = ops.token_attention.impls["cpu"](q, quantized(cache, codes), batch, options)

    expected = ops.token_attention(q, cache, batch, options)
    error = (out - expected).norm() / expected.norm()
    assert error < (0.05 if codes == FLOAT8 else 0.015)


def test_scales_of_another_shape_are_refused() -> None:
    codes = torch.zeros(5, 4, 16, dtype=torch.int8)

    with pytest.raises(ValueError, match=r"cannot have scales of \(4,\)"):
        ops.QuantizedKv(codes, torch.ones(4))


@triton.jit
def _permute_kernel(codes_ptr, out_ptr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, permute_bytes(tl.load(codes_ptr + at)))


@pytest.mark.gpu
def test_byte_permutations_convert_every_int8_code_as_a_cast_does() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8, device="cuda")
    out = torch.empty(256, dtype=torch.float16, device="cuda")

    _permute_kernel[(1,)](codes, out)

    assert torch.equal(out, codes.to(torch.float16))
