from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.triton_kernel.latent import _latent_prefix
from lightserve.common.triton_kernel.latent.latent_token_attention import MERGED_AT_ONCE
from test.ops.cases import (
    EPS,
    NAN,
    SMALL_LATENT,
    TOLERANCE,
    LatentShape,
    assert_close,
    device_of,
    each_backend,
    each_backend_and_dtype,
    ints,
    latent_args,
    latent_context_args,
    randn,
    strided,
    wide,
)

# heads, nope, rope, value, rank: DeepSeek's proportions, odd heads, sizes that are no powers of two
SHAPES: list[LatentShape] = [(6, 32, 16, 32, 64), (5, 24, 8, 40, 72), (1, 16, 16, 16, 16)]
PUBLISHED: list[LatentShape] = [(2, 128, 64, 128, 512), (2, 192, 64, 256, 512), (2, 64, 64, 128, 256)]
MANY_HEADS: LatentShape = (40, 16, 8, 16, 32)  # more than a program of a decode holds
DECODE = [(length - 1, 1) for length in (1, 7, 8, 129, 400)]
MIXED = [(0, 1), (0, 37), (5, 1), (70, 13), (0, 0), (200, 1), (140, 70)]
Lens = list[tuple[int, int]]
ContextArgs = tuple[Tensor, Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]


def with_decodes(args: ContextArgs, has_decodes: bool) -> ContextArgs:
    q, latent, cache, kv_b, batch, options = args
    return q, latent, cache, kv_b, replace(batch, has_decodes=has_decodes), options


def defined_token(q: Tensor, cache: Tensor, kv_b: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    return ops.latent_token_attention(wide(q), wide(cache), wide(kv_b), batch, options)


def defined_context(
    q: Tensor, latent: Tensor, cache: Tensor, kv_b: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions
) -> Tensor:
    return ops.latent_context_attention(wide(q), wide(latent), wide(cache), wide(kv_b), batch, options)


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Expanded keys and absorbed queries are rounded to the dtype; the definition keeps them in float32."""
    tolerance = 2 * TOLERANCE[out.dtype]["rtol"]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_latent_attention_is_pytorchs_over_expanded_keys_and_values(shape: LatentShape) -> None:
    heads, nope, _, _, rank = shape
    lens = [(0, 7), (5, 1), (4, 3)]
    q, latent, cache, kv_b, batch, options = latent_context_args(lens, shape, torch.float32, "cpu")

    out = ops.latent_context_attention(q, latent, cache, kv_b, batch, options)

    row = 0
    for i, (ready, new) in enumerate(lens):
        latents = cache[batch.req_to_token[batch.b_req_idx[i], : ready + new].long(), 0]
        kv = F.linear(latents[:, :rank], kv_b.flatten(0, 1)).view(ready + new, heads, -1)
        k = torch.cat((kv[..., :nope], latents[:, None, rank:].expand(-1, heads, -1)), dim=-1)
        seen = torch.ones(new, ready + new, dtype=torch.bool).tril(ready)
        rows, keys, values = (x.transpose(0, 1) for x in (q[row : row + new], k, kv[..., nope:]))
        expected = F.scaled_dot_product_attention(rows, keys, values, seen).transpose(0, 1)
        torch.testing.assert_close(out[row : row + new], expected, **TOLERANCE[torch.float32])
        row += new


@each_backend_and_dtype(ops.latent_token_attention)
@pytest.mark.parametrize("shape", [*SHAPES, MANY_HEADS])
def test_latent_token_attention_matches_its_definition(backend: str, dtype: torch.dtype, shape: LatentShape) -> None:
    args = latent_args(DECODE, shape, dtype, device_of(backend))

    out = ops.latent_token_attention.impls[backend](*args)

    assert_near(out, defined_token(*args))


def test_more_splits_than_are_merged_at_once_match_the_definition() -> None:
    args = latent_args([(1100, 1), (3, 1)], (2, 16, 16, 16, 32), torch.float32, device_of("triton"))

    out = ops.latent_token_attention.impls["triton"](*args)

    assert_near(out, defined_token(*args))
    ((_, found),) = args[3].plans.values()
    assert found.splits[0, 6] > 2 * MERGED_AT_ONCE.value


def test_only_decodes_of_a_mixed_step_write_the_rows_of_decodes() -> None:
    lens = [(0, 0), (5, 1), (0, 3), (9, 1)]
    args = with_decodes(latent_context_args(lens, SMALL_LATENT, torch.float32, device_of("triton")), True)

    ops.latent_context_attention.impls["triton"](*args)

    (plan,) = [plan for key, plan in args[4].plans.items() if "latent_context_attention" in str(key)]
    assert plan.b_out_row.tolist() == [5, 0, 5, 4]  # 5: behind the last row, which nobody reads


@each_backend(ops.latent_context_attention)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_decodes", [False, True])
def test_latent_context_attention_matches_its_definition(backend: str, shape: LatentShape, has_decodes: bool) -> None:
    args = with_decodes(latent_context_args(MIXED, shape, torch.float32, device_of(backend)), has_decodes)

    out = ops.latent_context_attention.impls[backend](*args)

    assert_near(out, defined_context(*args))


@each_backend(ops.latent_context_attention)
@pytest.mark.parametrize("shape", PUBLISHED)
def test_sizes_of_published_models_match_the_definition(backend: str, shape: LatentShape) -> None:
    args = with_decodes(latent_context_args([(0, 9), (20, 1), (5, 3)], shape, torch.float32, device_of(backend)), True)

    out = ops.latent_context_attention.impls[backend](*args)

    assert_near(out, defined_context(*args))


@each_backend_and_dtype(ops.latent_context_attention)
def test_latent_context_attention_matches_its_definition_in_every_dtype(backend: str, dtype: torch.dtype) -> None:
    args = with_decodes(latent_context_args(MIXED, (2, 32, 16, 32, 64), dtype, device_of(backend)), True)

    out = ops.latent_context_attention.impls[backend](*args)

    assert_near(out, defined_context(*args))


@each_backend(ops.latent_context_attention)
@pytest.mark.parametrize("lens", [[(0, 1)], [(0, 150)], [(0, 128)], [(129, 64)], [(64, 1), (0, 65)], [(300, 200)]])
def test_latent_context_attention_crosses_tiles(backend: str, lens: Lens) -> None:
    args = latent_context_args(lens, (2, 16, 16, 16, 32), torch.float32, device_of(backend))

    out = ops.latent_context_attention.impls[backend](*args)

    assert_near(out, defined_context(*args))


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 40, 75, 200])
def test_prefixes_that_the_buffer_has_no_room_for_are_expanded_by_the_attention(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    heads, nope, _, value, _ = SMALL_LATENT
    monkeypatch.setattr(_latent_prefix, "BUFFER_BYTES", rows * heads * (nope + value) * 4)
    lens = [(70, 13), (9, 1), (130, 70), (0, 4)]
    args = with_decodes(latent_context_args(lens, SMALL_LATENT, torch.float32, device_of("triton")), True)

    out = ops.latent_context_attention.impls["triton"](*args)

    assert_near(out, defined_context(*args))


def test_a_batch_of_many_requests_lists_every_prefix() -> None:
    lens = [(i % 4, i % 3) for i in range(150)]
    args = latent_context_args(lens, (1, 16, 16, 16, 16), torch.float32, device_of("triton"))

    out = ops.latent_context_attention.impls["triton"](*args)

    assert_near(out, defined_context(*args))


def test_layers_of_different_shapes_share_a_step() -> None:
    lens = [(70, 13), (5, 1), (0, 9)]
    layers = [latent_context_args(lens, shape, torch.float32, device_of("triton")) for shape in SHAPES[:2]]
    step = replace(layers[0][4], has_decodes=True)

    attend = ops.latent_context_attention.impls["triton"]

    outs = [attend(q, latent, cache, kv_b, step, options) for q, latent, cache, kv_b, _, options in layers * 2]

    for out, args in zip(outs, layers * 2, strict=True):
        assert_near(out, defined_context(*args))


def test_a_plan_of_decodes_takes_the_same_room_for_any_lengths() -> None:
    shapes = set()
    for lens in ([(0, 1)] * 3, [(3000, 1), (3, 1), (70, 1)]):
        q, cache, kv_b, batch, options = latent_args(lens, SMALL_LATENT, torch.float32, device_of("triton"))
        ops.latent_token_attention.impls["triton"](q, cache, kv_b, batch, options)
        ((_, splits),) = batch.plans.values()
        shapes.add((splits.splits.shape, splits.partials.shape))

    assert len(shapes) == 1


@each_backend(ops.latent_token_attention)
def test_latent_attention_refuses_options_that_no_model_has(backend: str) -> None:
    q, cache, kv_b, batch, options = latent_args([(3, 1)], SMALL_LATENT, torch.float32, device_of(backend))

    with pytest.raises(NotImplementedError, match="does not implement the attention option window=4; it has scale"):
        ops.latent_token_attention.impls[backend](q, cache, kv_b, batch, replace(options, window=4))


@pytest.mark.parametrize("backend", list(ops.latent_token_attention.impls))
def test_latent_attention_refuses_sizes_that_do_not_match(backend: str) -> None:
    q, cache, kv_b, batch, options = latent_args([(3, 1)], SMALL_LATENT, torch.float32, device_of(backend))

    with pytest.raises(
        ValueError, match=r"heads of q \(4, 48\), a cache of \(1, 80\) a token and kv_b .* do not match"
    ):
        ops.latent_token_attention.impls[backend](q, cache, kv_b[:2], batch, options)


@pytest.mark.parametrize("backend", list(ops.write_latent.impls))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_write_latent_norms_rotates_and_fills_its_slots(backend: str, dtype: torch.dtype, shape: LatentShape) -> None:
    heads, nope, rope, _, rank = shape
    device = device_of(backend)
    q = randn(4, heads, nope + rope, dtype=dtype, device=device)
    latent = strided(randn(4, rank + rope, dtype=dtype, device=device, seed=1))
    norm = ops.LatentNorm(randn(rank, dtype=dtype, device=device, seed=2), EPS)
    angle = randn(4, rope // 2, device=device, seed=3)
    layers = torch.full((9, 3, 1, rank + rope), NAN, dtype=dtype, device=device)
    slots = ints([7, 0, 3, 8], device)
    normed = F.rms_norm(latent[:, :rank].float(), (rank,), norm.weight.float(), EPS)
    expected_q, expected_pe = (turned(x, angle) for x in (q[..., nope:], latent[:, None, rank:]))
    expected = torch.cat((normed, expected_pe[:, 0]), dim=1)
    untouched = q[..., :nope].clone()

    ops.write_latent.impls[backend](q, latent, norm, ops.RotaryAngles(angle.cos(), angle.sin()), slots, layers[:, 1])

    assert_close(q[..., nope:], expected_q, dtype)
    assert torch.equal(q[..., :nope], untouched)
    assert_close(layers[slots.long(), 1, 0], expected, dtype)
    assert torch.equal(layers[slots.long(), 1, 0], latent)
    assert int(layers.isnan().sum()) == layers.numel() - latent.numel()


@pytest.mark.parametrize("backend", list(ops.write_latent.impls))
def test_write_latent_of_a_model_without_positions_rotates_nothing(backend: str) -> None:
    device = device_of(backend)
    q, latent = randn(4, 2, 24, device=device), strided(randn(4, 16 + 8, device=device, seed=1))
    norm = ops.LatentNorm(randn(16, device=device, seed=2), EPS)
    cache = torch.full((9, 1, 16 + 8), NAN, device=device)
    slots = ints([7, 0, 3, 8], device)
    expected_q = q.clone()
    expected = torch.cat((F.rms_norm(latent[:, :16], (16,), norm.weight, EPS), latent[:, 16:]), dim=1)

    ops.write_latent.impls[backend](q, latent, norm, None, slots, cache)

    assert torch.equal(q, expected_q)
    assert_close(cache[slots.long(), 0], expected, torch.float32)
    assert torch.equal(cache[slots.long(), 0], latent)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    pairs = torch.complex(low, high) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)
