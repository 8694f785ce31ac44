"""With a batch-invariant backend the result of a row has the same bits, whatever is computed beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from test.ops.cases import (
    SMALL_LATENT,
    attention_args,
    bind,
    context_attention_args,
    device_of,
    ints,
    latent_args,
    latent_context_args,
    randn,
)

PAIRS = [
    (ops.batch_invariant("cpu"), torch.float32),
    (ops.batch_invariant("cpu"), torch.bfloat16),
    (ops.batch_invariant("triton"), torch.float32),
    pytest.param(ops.batch_invariant("triton"), torch.float16, marks=pytest.mark.gpu),
    pytest.param(ops.batch_invariant("triton"), torch.bfloat16, marks=pytest.mark.gpu),
]
ALIKE = ("gelu", "relu", "silu")
ACTIVATIONS = ["gate", *(name for name in ops.OPS if name.startswith(ALIKE) and not name.endswith("quantize"))]
each_backend = pytest.mark.parametrize(("backend", "dtype"), PAIRS)


@each_backend
@pytest.mark.parametrize(("wide_in", "wide_out"), [(96, 40), (1000, 300), (576, 1536)])
def test_a_product_does_not_depend_on_the_other_rows(
    backend: str, dtype: torch.dtype, wide_in: int, wide_out: int
) -> None:
    x = randn(150, wide_in, dtype=dtype, device=device_of(backend))
    weight = randn(wide_out, wide_in, dtype=dtype, device=device_of(backend), seed=1) * wide_in**-0.5
    linear = ops.linear.impls[backend]

    whole = linear(x, weight)

    for begin, end in [(0, 1), (77, 78), (149, 150), (3, 35), (3, 36), (20, 91), (64, 128), (1, 150)]:
        assert torch.equal(linear(x[begin:end], weight), whole[begin:end])


@each_backend
@pytest.mark.parametrize("has_alibi", [False, True])
def test_attention_does_not_depend_on_what_was_cached(backend: str, dtype: torch.dtype, has_alibi: bool) -> None:
    length, heads, device = 150, (6, 2), device_of(backend)
    q, kv, cache, batch, options = context_attention_args([(0, length)], heads, 64, dtype, device)
    options = replace(
        options, alibi_slopes=torch.tensor([2.0**-i for i in range(6)], device=device) if has_alibi else None
    )

    def attend(ready: int, end: int) -> Tensor:
        part = ops.AttnBatch(
            batch.req_to_token, batch.b_req_idx, batch.b_start_loc, ints([end], device), ints([ready], device)
        )
        if end - ready == 1:
            return ops.token_attention.impls[backend](q[ready:end], cache, part, options)
        return ops.context_attention.impls[backend](q[ready:end], kv[ready:end], cache, part, options)

    whole = attend(0, length)

    for ready, end in [(0, 64), (64, 128), (128, 150), (1, 150), (37, 99), (149, 150), (63, 64), (7, 9)]:
        assert torch.equal(attend(ready, end), whole[ready:end])


@each_backend
def test_a_decode_does_not_depend_on_the_other_requests(backend: str, dtype: torch.dtype) -> None:
    lens = [(5, 1), (200, 1), (64, 1), (0, 1), (33, 1)]
    q, cache, batch, options = attention_args(lens, (4, 2), 64, dtype, device_of(backend))
    attend = ops.token_attention.impls[backend]

    together = attend(q, cache, batch, options)

    for i in range(len(lens)):
        columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
        req_idx, _, seq_len, ready = (column[i : i + 1] for column in columns)
        alone = ops.AttnBatch(batch.req_to_token, req_idx, torch.zeros_like(req_idx), seq_len, ready)
        assert torch.equal(attend(q[i : i + 1], cache, alone, options), together[i : i + 1])


@each_backend
def test_latent_attention_does_not_depend_on_what_was_cached(backend: str, dtype: torch.dtype) -> None:
    length, device = 70, device_of(backend)
    q, latent, cache, kv_b, batch, options = latent_context_args([(0, length)], SMALL_LATENT, dtype, device)

    def attend(ready: int, end: int) -> Tensor:
        part = replace(batch, b_seq_len=ints([end], device), b_ready_cache_len=ints([ready], device), plans={})
        if end - ready == 1:
            return ops.latent_token_attention.impls[backend](q[ready:end], cache, kv_b, part, options)
        own = (q[ready:end], latent[ready:end], cache, kv_b)
        return ops.latent_context_attention.impls[backend](*own, part, options)

    whole = attend(0, length)

    for ready, end in [(0, 64), (64, 70), (1, 70), (37, 59), (69, 70), (63, 64), (7, 9)]:
        assert torch.equal(attend(ready, end), whole[ready:end])


@each_backend
def test_a_latent_decode_does_not_depend_on_the_other_requests(backend: str, dtype: torch.dtype) -> None:
    lens = [(5, 1), (100, 1), (64, 1), (0, 1), (33, 1)]
    q, cache, kv_b, batch, options = latent_args(lens, SMALL_LATENT, dtype, device_of(backend))
    attend = ops.latent_token_attention.impls[backend]

    together = attend(q, cache, kv_b, batch, options)

    for i in range(len(lens)):
        columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
        req_idx, _, seq_len, ready = (column[i : i + 1] for column in columns)
        alone = ops.AttnBatch(batch.req_to_token, req_idx, torch.zeros_like(req_idx), seq_len, ready)
        assert torch.equal(attend(q[i : i + 1], cache, kv_b, alone, options), together[i : i + 1])


@each_backend
@pytest.mark.parametrize("width", [28, 33, 128])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_does_not_depend_on_the_other_rows(
    name: str, width: int, backend: str, dtype: torch.dtype
) -> None:
    x = randn(40, 2 * width, dtype=dtype, device=device_of(backend))
    activation = getattr(ops, name)
    bind(backend)

    whole = activation(x)

    for begin, end in [(0, 1), (39, 40), (3, 12), (7, 40)]:
        assert torch.equal(activation(x[begin:end]), whole[begin:end])


@each_backend
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_experts_of_a_token_do_not_depend_on_the_other_tokens(
    score: Literal["softmax", "sigmoid"], backend: str, dtype: torch.dtype
) -> None:
    logits = randn(40, 13, dtype=dtype, device=device_of(backend))
    spec = ops.RouteSpec(top_k=3, score=score)
    bind(backend)

    ids, weights = ops.route(logits, spec)

    for begin, end in [(0, 1), (39, 40), (3, 12), (7, 40)]:
        own_ids, own_weights = ops.route(logits[begin:end], spec)
        assert torch.equal(own_ids, ids[begin:end])
        assert torch.equal(own_weights, weights[begin:end])
