"""Latents in 8 bits: every backend writes and reads what the definition does, close to the numbers themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.kv_cache import read_latents
from lightserve.common.triton_kernel.latent import _latent_prefix
from test.ops.cases import (
    EPS,
    NAN,
    SMALL_LATENT,
    TOLERANCE,
    LatentShape,
    device_of,
    ints,
    latent_args,
    latent_context_args,
    randn,
    wide,
)
from test.ops.quantized import CODES, FLOAT8, INT8, empty_latents, quantized_latents
from test.ops.test_quantized_kv import BATCH_INVARIANT, dtypes_of, each_backend_and_code

SHAPES: list[LatentShape] = [(6, 32, 16, 32, 64), (5, 24, 8, 40, 72)]
MIXED = [(0, 1), (0, 37), (5, 1), (70, 13), (0, 0), (140, 70)]
DECODE = [(length - 1, 1) for length in (1, 8, 129, 400)]
# of one number: e4m3 has 3 bits behind the first, int8 127 steps up to the largest of its token
ROUNDING = {FLOAT8: 2**-4, INT8: 0.5 / 127}


def assert_near(out: Tensor, expected: Tensor) -> None:
    tolerance = 2 * TOLERANCE[out.dtype]["rtol"]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def defined(
    q: Tensor, cache: ops.QuantizedLatents, kv_b: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions
) -> Tensor:
    return ops.latent_token_attention.impls[ops.REFERENCE](wide(q), cache, wide(kv_b), batch, options)


@each_backend_and_code(ops.latent_token_attention)
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_over_codes_match_the_definition(backend: str, codes: torch.dtype, shape: LatentShape) -> None:
    for dtype in dtypes_of(backend):
        q, cache, kv_b, batch, options = latent_args(DECODE, shape, dtype, device_of(backend))
        coded = quantized_latents(cache, shape[-1], codes)

        out = ops.latent_token_attention.impls[backend](q, coded, kv_b, batch, options)

        assert_near(out, defined(q, coded, kv_b, batch, options))


@each_backend_and_code(ops.latent_context_attention)
@pytest.mark.parametrize("has_decodes", [False, True])
def test_prompts_over_codes_match_the_definition(backend: str, codes: torch.dtype, has_decodes: bool) -> None:
    """The step's own latents are those that the codes stand for: a backend may read either."""
    shape = SHAPES[0]
    for dtype in dtypes_of(backend):
        q, latent, cache, kv_b, batch, options = latent_context_args(MIXED, shape, dtype, device_of(backend))
        coded = quantized_latents(cache, shape[-1], codes)
        batch, row = replace(batch, has_decodes=has_decodes), 0
        for req, (ready, new) in zip(batch.b_req_idx.tolist(), MIXED, strict=True):
            slots = batch.req_to_token[req, ready : ready + new].long()
            latent[row : row + new] = read_latents(coded, slots, dtype)
            row += new

        out = ops.latent_context_attention.impls[backend](q, latent, coded, kv_b, batch, options)

        expected = ops.latent_context_attention.impls[ops.REFERENCE](
            wide(q), wide(latent), coded, wide(kv_b), batch, options
        )
        assert_near(out, expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("rows", [1, 75])
def test_codes_of_prefixes_that_the_buffer_has_no_room_for_are_expanded_by_the_attention(
    monkeypatch: pytest.MonkeyPatch, rows: int, codes: torch.dtype
) -> None:
    heads, nope, _, value, rank = SMALL_LATENT
    monkeypatch.setattr(_latent_prefix, "BUFFER_BYTES", rows * heads * (nope + value) * 4)
    lens = [(70, 13), (9, 1), (130, 70)]
    q, _, cache, kv_b, batch, options = latent_context_args(lens, SMALL_LATENT, torch.float32, device_of("triton"))
    coded = quantized_latents(cache, rank, codes)
    requests = zip(batch.b_req_idx.tolist(), lens, strict=True)
    new_slots = torch.cat([batch.req_to_token[req, ready : ready + new] for req, (ready, new) in requests])
    latent = read_latents(coded, new_slots.long(), torch.float32)

    out = ops.latent_context_attention.impls["triton"](q, latent, coded, kv_b, batch, options)

    assert_near(out, ops.latent_context_attention.impls[ops.REFERENCE](q, latent, coded, kv_b, batch, options))


@pytest.mark.parametrize("backend", BATCH_INVARIANT)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_batch_invariant_backend_reads_the_codes_of_new_tokens_too(backend: str, codes: torch.dtype) -> None:
    args = latent_context_args(MIXED, SHAPES[0], torch.float32, device_of(backend))
    q, latent, cache, kv_b, batch, options = args
    coded = quantized_latents(cache, SHAPES[0][-1], codes)

    nans = torch.full_like(latent, NAN)
    out = ops.latent_context_attention.impls[backend](q, nans, coded, kv_b, batch, options)

    assert_near(out, defined(q, coded, kv_b, batch, options))


@each_backend_and_code(ops.write_latent)
@pytest.mark.parametrize("has_positions", [True, False])
def test_a_written_latent_is_its_codes_times_its_scale_beside_its_key_part(
    backend: str, codes: torch.dtype, has_positions: bool
) -> None:
    heads, nope, rope, rank = 3, 24, 16, 72
    for dtype in dtypes_of(backend):
        device = device_of(backend)
        q, latent = (
            randn(*shape, dtype=dtype, device=device, seed=len(shape))
            for shape in ((4, heads, nope + rope), (4, rank + rope))
        )
        norm = ops.LatentNorm(randn(rank, dtype=dtype, device=device, seed=4), EPS)
        cos, sin = (randn(4, rope // 2, device=device, seed=seed) for seed in (5, 6))
        angles = ops.RotaryAngles(cos, sin) if has_positions else None
        cache, slots = empty_latents((9, rank, rope), codes, dtype, device), ints([7, 0, 3, 8], device)

        ops.write_latent.impls[backend](q, latent, norm, angles, slots, cache)

        found, whole = read_latents(cache, slots.long(), torch.float32), latent.float()
        limit = whole[:, :rank].abs().amax(1, keepdim=True) if codes == INT8 else whole[:, :rank].abs()
        smallest = whole[:, :rank].abs().amax(1, keepdim=True) / 448 * 2**-9  # e4m3 has fixed steps near 0
        assert ((found - whole)[:, :rank].abs() <= limit * ROUNDING[codes] * 1.01 + smallest).all()
        assert torch.equal(found[:, rank:], whole[:, rank:])
        untouched = [slot for slot in range(9) if slot not in slots.tolist()]
        assert cache.scales[untouched].isnan().all()
        assert cache.key_parts[untouched].isnan().all()
        assert not cache.codes[untouched].view(torch.uint8).any()


@each_backend_and_code(ops.write_latent)
def test_a_latent_of_zeros_is_read_as_zeros(backend: str, codes: torch.dtype) -> None:
    device = device_of(backend)
    norm = ops.LatentNorm(torch.ones(16, device=device), EPS)
    cache = empty_latents((2, 16, 8), codes, torch.float32, device)
    q, latent = torch.zeros(1, 2, 24, device=device), torch.zeros(1, 24, device=device)

    ops.write_latent.impls[backend](q, latent, norm, None, ints([1], device), cache)

    assert not read_latents(cache, torch.tensor([1], device=device), torch.float32).any()


def test_scales_of_other_sizes_are_refused() -> None:
    codes, key_parts = torch.zeros(3, 1, 16, dtype=torch.int8), torch.zeros(3, 1, 8)

    with pytest.raises(ValueError, match=r"latents of \(3, 1, 16\) in torch.int8 cannot have scales of \(2, 1\)"):
        ops.QuantizedLatents(codes, torch.zeros(2, 1), key_parts)
