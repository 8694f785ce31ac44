"""The calls that ``aten.py`` measures: operators of aten and fused ones, at the shapes of an 8B model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.bench.kernel_cases import InputFactory
from lightserve.common import ops

FEW_ROWS = 64  # of a decode step: more are those of a prompt
FUSED = torch.ops.lightserve


class Sizes(NamedTuple):
    rows: tuple[int, ...]
    hidden: int
    width: int
    vocab: int
    heads: int
    kv_heads: int
    experts: int
    context: int  # tokens of each request of a decode step
    layers: int
    prompt: int


GPU = Sizes((1, 8, 64, 2048), 4096, 14336, 32000, heads=32, kv_heads=8, experts=128, context=2048, layers=4, prompt=512)
TRIED = Sizes((1, 3), 64, 96, 128, heads=4, kv_heads=2, experts=8, context=9, layers=2, prompt=9)

Inputs = Callable[[InputFactory], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    inputs: Inputs
    by_torch: Callable[..., object]
    ours: Callable[..., object] | None = None  # of a fused op; None: the same call, with aten replaced


def cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.rows:
        yield from _replaced(rows, sizes)
        yield from _fused(rows, sizes)
        if rows <= FEW_ROWS:
            yield _sample(rows, sizes)
            yield _decode(rows, sizes)
        if rows == max(sizes.rows):
            yield _prompt(rows, sizes)
            yield _attention(rows, sizes)


def _replaced(rows: int, sizes: Sizes) -> Iterator[Case]:
    hidden, width = sizes.hidden, sizes.width
    x = (rows, hidden)
    yield Case("silu", rows, _randn((rows, width)), F.silu)
    yield Case("gelu", rows, _randn((rows, width)), F.gelu)
    yield Case("relu", rows, _randn((rows, width)), F.relu)
    yield Case("layer_norm", rows, _randn(x, (hidden,), (hidden,)), lambda x, w, b: F.layer_norm(x, w.shape, w, b))
    yield Case("rms_norm", rows, _randn(x, (hidden,)), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5))
    yield Case("mm", rows, _randn(x, (width, hidden)), F.linear)
    yield Case("addmm", rows, _randn(x, (hidden, hidden), (hidden,)), F.linear)
    yield Case("embedding", rows, lambda new: (new.below(sizes.vocab, rows), new.table(sizes.vocab, hidden)), _embed)
    yield Case("softmax", rows, _randn((rows, sizes.vocab)), lambda x: x.softmax(-1))
    yield Case("log_softmax", rows, _randn((rows, sizes.vocab)), lambda x: F.log_softmax(x, -1))
    yield Case("topk", rows, _randn((rows, sizes.vocab)), lambda x: x.topk(50))
    yield Case("topk_of_experts", rows, _randn((rows, sizes.experts)), lambda x: x.topk(8))
    dim = hidden // sizes.heads
    yield Case("bmm", rows, _randn((sizes.heads, rows, dim), (sizes.heads, dim, sizes.context)), torch.bmm)


def _attention(rows: int, sizes: Sizes) -> Case:
    """Of a prompt, with keys and values in tensors of their own. Those of fewer rows are decode steps, and torch's."""
    dim = sizes.hidden // sizes.heads
    inputs = _randn((1, sizes.heads, rows, dim), *[(1, sizes.kv_heads, rows, dim)] * 2)
    return Case("attention", rows, inputs, partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True))


def _fused(rows: int, sizes: Sizes) -> Iterator[Case]:
    x, dim = (rows, sizes.hidden), sizes.hidden // sizes.heads
    add_norm = partial(FUSED.add_rms_norm, eps=1e-5)
    yield Case("add_rms_norm", rows, _randn(x, x, (sizes.hidden,)), _add_norm, add_norm)
    yield Case("silu_and_mul", rows, _randn((rows, 2 * sizes.width)), _silu_and_mul, FUSED.silu_and_mul)

    def rotated(new: InputFactory) -> tuple[Any, ...]:
        angles = new.randn(rows, dim // 2, dtype=torch.float32)
        return new.randn(rows, sizes.heads, dim), new.randn(rows, sizes.kv_heads, dim), angles.cos(), angles.sin()

    yield Case("rotary", rows, rotated, ops.rotary.impls[ops.REFERENCE], FUSED.rotary)
    top_k = min(8, sizes.experts // 2)
    yield Case(
        "route",
        rows,
        _randn((rows, sizes.experts)),
        lambda logits: logits.float().softmax(-1).topk(top_k),
        lambda logits: FUSED.route(logits, top_k),
    )


def _sample(rows: int, sizes: Sizes) -> Case:
    def inputs(new: InputFactory) -> tuple[Any, ...]:
        seeds, positions = new.below(2**31, rows), new.below(1000, rows, dtype=torch.int32)
        return new.randn(rows, sizes.vocab, dtype=torch.float32), new.full(0.7, rows), seeds, positions

    return Case("sample", rows, inputs, _sample_by_torch, FUSED.sample)


def _decode(rows: int, sizes: Sizes) -> Case:
    """One query row for each request, whose tokens are side by side, as torch needs them."""
    dim = sizes.hidden // sizes.heads

    def inputs(new: InputFactory) -> tuple[Any, ...]:
        tokens = rows * sizes.context
        slots = new.ints(range(tokens)).view(rows, sizes.context)
        cache = new.randn(tokens, 2 * sizes.kv_heads, dim)
        return new.randn(rows, sizes.heads, dim), cache, slots, new.ints([sizes.context] * rows)

    def by_torch(q: Tensor, cache: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        k, v = cache.view(*slots.shape, *cache.shape[1:]).transpose(1, 2).chunk(2, 1)
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    return Case("token_attention", rows, inputs, by_torch, partial(FUSED.token_attention, scale=dim**-0.5))


def _prompt(rows: int, sizes: Sizes) -> Case:
    dim = sizes.hidden // sizes.heads

    def inputs(new: InputFactory) -> tuple[Any, ...]:
        return new.randn(rows, sizes.heads, dim), new.randn(rows, 2 * sizes.kv_heads, dim), new.ints([0, rows])

    def by_torch(q: Tensor, kv: Tensor, starts: Tensor) -> Tensor:
        k, v = kv.transpose(0, 1)[None].chunk(2, 1)
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True)

    ours = partial(FUSED.context_attention, max_len=rows, scale=dim**-0.5)
    return Case("context_attention", rows, inputs, by_torch, ours)


def _randn(*shapes: tuple[int, ...]) -> Inputs:
    return lambda new: tuple(new.randn(*shape) for shape in shapes)


def _embed(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(residual.add_(x), weight.shape, weight, 1e-5)


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _sample_by_torch(logits: Tensor, temperature: Tensor, *_: Tensor) -> Tensor:
    """``torch.multinomial`` waits for the device, which no graph can hold."""
    probs = (logits / temperature[:, None]).softmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)
