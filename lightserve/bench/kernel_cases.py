"""The ops of a step at the shapes of a model: inputs, minimal cost, and the same computation by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from lightserve.common import ops

EPS = 1e-5
LOGIT_BYTES = 4  # float32
FEW_ROWS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and the loads of the measurement."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    batches: tuple[int, ...]  # requests of a decode step
    context: tuple[int, int]  # tokens of each, of its prompt and of its output so far
    prompts: tuple[tuple[int, int], ...]  # new tokens of a prompt, and tokens cached before them
    shared: tuple[int, int, int]  # requests of a decode step that share a prefix, tokens of the prefix, and behind it


LLAMA3_8B = Shape(
    hidden=4096,
    ffn=14336,
    heads=32,
    kv_heads=8,
    dim=128,
    vocab=128256,
    batches=(1, 8, 64, 256),
    context=(1024, 126),
    prompts=((128, 0), (512, 0), (2048, 0), (8000, 0), (512, 8000)),
    shared=(64, 2048, 128),
)
TINY = Shape(
    hidden=64,
    ffn=96,
    heads=4,
    kv_heads=2,
    dim=16,
    vocab=131,
    batches=(1, 3),
    context=(8, 3),
    prompts=((5, 0), (3, 7)),
    shared=(3, 9, 2),
)


class InputFactory:
    """Makes new inputs at every call."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self._table: Tensor | None = None

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def below(self, end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(end, shape, generator=self._generator, device=self.device, dtype=dtype)

    def full(self, value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, value, device=self.device, dtype=dtype)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=torch.int32)

    def table(self, vocab: int, hidden: int) -> Tensor:
        """The same table at every call: only a small part of it is read."""
        if self._table is None:
            self._table = self.randn(vocab, hidden)
        return self._table


Inputs = Callable[[InputFactory], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """An op at one shape: the bytes and flops it needs at least, and the same computation by torch."""

    op: str
    load: str
    inputs: Inputs
    ours: Callable[..., object]
    torch: Callable[..., object] | None
    num_bytes: float
    flops: float = 0.0
    torch_inputs: Inputs | None = None  # if they differ


def linear_cases(shape: Shape, item: int) -> Iterator[Case]:
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.dim
    weights = {
        "qkv": (qkv, shape.hidden),
        "o": (shape.hidden, shape.heads * shape.dim),
        "gate_up": (2 * shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
        "head": (shape.vocab, shape.hidden),
    }
    for name, (out, into) in weights.items():
        for rows in (*shape.batches, *(() if name == "head" else _fresh(shape))):

            def inputs(
                factory: InputFactory, rows: int = rows, out: int = out, into: int = into
            ) -> tuple[Tensor, Tensor]:
                return factory.randn(rows, into), factory.randn(out, into)

            num_bytes = item * (out * into + rows * (out + into))
            yield Case(f"linear {name}", f"{rows}", inputs, ops.linear, F.linear, num_bytes, 2.0 * rows * out * into)


def norm_linear_cases(shape: Shape, item: int) -> Iterator[Case]:
    """For few rows. They are compared with our own separate ops instead of torch."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.dim
    for rows in FEW_ROWS:
        for name, ours, apart, out in (
            ("add_rms_norm_linear", _add_norm_linear, _add_norm_then_linear, qkv),
            ("add_rms_norm_gate_up", _add_norm_gate_up, _add_norm_then_gate_up, 2 * shape.ffn),
        ):
            num_bytes = item * (out * shape.hidden + rows * (out + 3 * shape.hidden))
            inputs = partial(_norm_linear_inputs, shape, rows, out)
            yield Case(name, f"{rows}", inputs, ours, apart, num_bytes, 2.0 * rows * out * shape.hidden)


def elementwise_cases(shape: Shape, item: int) -> Iterator[Case]:
    """Norms, activations, the embedding, rotary and the KV write."""
    for rows in (*shape.batches, *_fresh(shape)):
        load = f"{rows}"
        hidden = rows * shape.hidden * item
        yield Case("add_rms_norm", load, partial(_norm_inputs, shape, rows), _add_norm, _torch_add_norm, 4 * hidden)
        gate_up = partial(_randn, rows, 2 * shape.ffn)
        yield Case("silu_and_mul", load, gate_up, ops.silu_and_mul, _torch_silu_and_mul, 3 * rows * shape.ffn * item)
        table = partial(_embedding_inputs, shape, rows)
        yield Case("vocab_embedding", load, table, _embed, _torch_embed, 2 * hidden)
        kv_bytes = rows * 2 * shape.kv_heads * shape.dim * item
        qkv = partial(_rotary_inputs, shape, rows)
        moved = 2 * rows * shape.heads * shape.dim * item + 2.5 * kv_bytes  # q both ways; k and v read, k and both kept
        yield Case("rotary_write_kv", load, qkv, ops.rotary_write_kv, _torch_rotary_write_kv, moved)
        kv = partial(_write_inputs, shape, rows)
        yield Case("write_kv", load, kv, ops.write_kv, ops.write_kv.impls[ops.REFERENCE], 2 * kv_bytes)


def attention_cases(shape: Shape, item: int, kv_item: float | None = None) -> Iterator[Case]:
    """``item``: bytes of a number; ``kv_item``: of one in the cache, if others."""
    kv_token = 2 * shape.kv_heads * shape.dim * (item if kv_item is None else kv_item)
    q_token = shape.heads * shape.dim * item
    context = sum(shape.context)
    for batch in shape.batches:
        num_bytes = batch * (context * kv_token + 2 * q_token)
        flops = 4.0 * shape.heads * shape.dim * batch * context
        decode, twin = partial(_decode_inputs, shape, batch), partial(_sdpa_decode_inputs, shape, batch, context)
        load = f"{batch} x {context}"
        yield Case("token_attention", load, decode, ops.token_attention, _sdpa, num_bytes, flops, twin)
    yield from shared_prefix_cases(shape, kv_token, q_token)
    for new, cached in shape.prompts:
        num_bytes = (new + cached) * kv_token + 2 * new * q_token
        flops = 4.0 * shape.heads * shape.dim * new * (cached + new / 2)
        prompt, twin = partial(_prompt_inputs, shape, new, cached), partial(_sdpa_prompt_inputs, shape, new, cached)
        call = partial(_sdpa, is_causal=True) if cached == 0 else _sdpa_behind
        load = f"{new} behind {cached}" if cached else f"{new}"
        yield Case("context_attention", load, prompt, ops.context_attention, call, num_bytes, flops, twin)


def shared_prefix_cases(shape: Shape, kv_token: float, q_token: int) -> Iterator[Case]:
    """With and without the hint that a prefix is shared."""
    batch, prefix, suffix = shape.shared
    flops = 4.0 * shape.heads * shape.dim * batch * (prefix + suffix)
    num_bytes = (prefix + batch * suffix) * kv_token + 2 * batch * q_token
    twin = partial(_sdpa_decode_inputs, shape, batch, prefix + suffix)
    for hint, has_hint in (("", True), (", no hint", False)):
        load = f"{batch} x ({prefix}+{suffix}){hint}"
        inputs = partial(_shared_inputs, shape, has_hint)
        yield Case("token_attention", load, inputs, ops.token_attention, _sdpa, num_bytes, flops, twin)


def sampling_cases(shape: Shape, item: int) -> Iterator[Case]:
    """Sampling from the logits of the head, and ops that change float32 logits before it."""
    for batch in shape.batches:
        load = f"{batch}"
        for name, temperature, call in (("greedy", 0.0, _torch_argmax), ("random", 0.8, _torch_sample)):
            inputs = partial(_sample_inputs, shape, batch, temperature)
            yield Case(f"sample {name}", load, inputs, ops.sample, call, batch * shape.vocab * item)
        once = batch * shape.vocab * LOGIT_BYTES
        limits = partial(_limit_inputs, shape, batch)
        definition = ops.top_k_top_p_min_p.impls[ops.REFERENCE]
        yield Case("top_k_top_p_min_p", load, limits, ops.top_k_top_p_min_p, definition, 2 * once)
        seen = partial(_penalty_inputs, shape, batch)  # torch waits for the host here, which no graph can hold
        yield Case("apply_penalties", load, seen, ops.apply_penalties, None, 3 * once)


FAMILIES = (linear_cases, norm_linear_cases, attention_cases, elementwise_cases, sampling_cases)


def cases_of(shape: Shape, dtype: torch.dtype) -> list[Case]:
    return list(chain.from_iterable(family(shape, dtype.itemsize) for family in FAMILIES))


def _fresh(shape: Shape) -> list[int]:
    return [new for new, cached in shape.prompts if cached == 0]


def _randn(*shape_and_lab: Any) -> tuple[Tensor]:
    *shape, factory = shape_and_lab
    return (factory.randn(*shape),)


def _norm_inputs(shape: Shape, rows: int, factory: InputFactory) -> tuple[Tensor, Tensor, Tensor]:
    return factory.randn(rows, shape.hidden), factory.randn(rows, shape.hidden), factory.randn(shape.hidden)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return ops.add_rms_norm(x, residual, weight, EPS)


def _torch_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(residual.add_(x), weight.shape, weight, EPS)


def _norm_linear_inputs(shape: Shape, rows: int, out: int, factory: InputFactory) -> tuple[Tensor, ...]:
    return *_norm_inputs(shape, rows, factory), factory.randn(out, shape.hidden)


def _add_norm_linear(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
    return ops.add_rms_norm_linear(x, residual, norm_weight, EPS, weight)[0]


def _add_norm_then_linear(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(_add_norm(x, residual, norm_weight), weight)


def _add_norm_gate_up(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
    return ops.add_rms_norm_gate_up(x, residual, norm_weight, EPS, weight)[0]


def _add_norm_then_gate_up(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_and_mul(_add_norm_then_linear(x, residual, norm_weight, weight))


def _torch_silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _embedding_inputs(shape: Shape, rows: int, factory: InputFactory) -> tuple[Tensor, Tensor]:
    return factory.below(shape.vocab, rows), factory.table(shape.vocab, shape.hidden)


def _embed(ids: Tensor, table: Tensor) -> Tensor:
    return ops.vocab_embedding(ids, table, 0)


def _torch_embed(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _rotary_inputs(shape: Shape, rows: int, factory: InputFactory) -> tuple[Tensor, ...]:
    """q, k and v are views of one projection's output."""
    qkv = factory.randn(rows, shape.heads + 2 * shape.kv_heads, shape.dim)
    q, kv = qkv.split_with_sizes([shape.heads, 2 * shape.kv_heads], dim=1)
    cos, sin = (factory.randn(rows, shape.dim // 2, dtype=torch.float32) for _ in range(2))
    return q, kv, cos, sin, factory.ints(range(rows)), factory.randn(rows + 1, 2 * shape.kv_heads, shape.dim)


def _torch_rotary_write_kv(q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
    ops.rotary.impls[ops.REFERENCE](q, kv[:, : kv.shape[1] // 2], cos, sin)
    ops.write_kv.impls[ops.REFERENCE](kv, slots, kv_cache)


def _write_inputs(shape: Shape, rows: int, factory: InputFactory) -> tuple[Tensor, Tensor, Tensor]:
    _, kv, _, _, slots, kv_cache = _rotary_inputs(shape, rows, factory)
    return kv, slots, kv_cache


def _decode_inputs(shape: Shape, batch: int, factory: InputFactory) -> tuple[Any, ...]:
    """Slots as a scheduler assigns them: the slots of a prompt are neighbours, so are the slots of a decode step."""
    prompt, output = shape.context
    prompts = torch.arange(batch * prompt, device=factory.device).view(batch, prompt)
    outputs = torch.arange(batch * output, device=factory.device).view(output, batch).T + batch * prompt
    return _last_tokens(shape, torch.cat((prompts, outputs), dim=1), None, factory)


def _shared_inputs(shape: Shape, has_hint: bool, factory: InputFactory) -> tuple[Any, ...]:
    """The slots of a prefix are neighbours, and so are the slots of a decode step."""
    batch, prefix, suffix = shape.shared
    prefixes = torch.arange(prefix, device=factory.device).expand(batch, prefix)
    outputs = torch.arange(batch * suffix, device=factory.device).view(suffix, batch).T + prefix
    groups = factory.ints([0, batch, prefix, 0, *[0] * 28]).view(8, 4) if has_hint else None
    return _last_tokens(shape, torch.cat((prefixes, outputs), dim=1), groups, factory)


def _last_tokens(shape: Shape, slots: Tensor, shared_prefixes: Tensor | None, factory: InputFactory) -> tuple[Any, ...]:
    """Attention of the last token of each request; ``slots`` ``[batch, tokens]`` are theirs, without gaps from 0 on."""
    batch, length = slots.shape
    lengths = factory.ints([length] * batch)
    attn = ops.AttnBatch(
        req_to_token=slots.int(),
        b_req_idx=factory.ints(range(batch)),
        b_start_loc=factory.ints(range(batch)),
        b_seq_len=lengths,
        b_ready_cache_len=lengths - 1,
        shared_prefixes=shared_prefixes,
    )
    kv_cache = factory.randn(int(slots.max()) + 2, 2 * shape.kv_heads, shape.dim)
    return factory.randn(batch, shape.heads, shape.dim), kv_cache, attn, ops.AttnOptions(shape.dim**-0.5)


def _prompt_inputs(shape: Shape, new: int, cached: int, factory: InputFactory) -> tuple[Any, ...]:
    length = new + cached
    attn = ops.AttnBatch(
        req_to_token=torch.arange(length, device=factory.device, dtype=torch.int32)[None],
        b_req_idx=factory.ints([0]),
        b_start_loc=factory.ints([0]),
        b_seq_len=factory.ints([length]),
        b_ready_cache_len=factory.ints([cached]),
    )
    kv_cache = factory.randn(length + 1, 2 * shape.kv_heads, shape.dim)
    q = factory.randn(new, shape.heads, shape.dim)
    return q, kv_cache[cached:length].clone(), kv_cache, attn, ops.AttnOptions(shape.dim**-0.5)


def _sdpa_decode_inputs(shape: Shape, batch: int, length: int, factory: InputFactory) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (factory.randn(batch, shape.kv_heads, length, shape.dim) for _ in range(2))
    return factory.randn(batch, shape.heads, 1, shape.dim), k, v


def _sdpa_prompt_inputs(shape: Shape, new: int, cached: int, factory: InputFactory) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = (
        shape.heads if cached else shape.kv_heads
    )  # torch has no causal mask at the lower right with shared heads
    k, v = (factory.randn(1, kv_heads, new + cached, shape.dim) for _ in range(2))
    return factory.randn(1, shape.heads, new, shape.dim), k, v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _sdpa_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def _logits(shape: Shape, batch: int, factory: InputFactory) -> tuple[Tensor]:
    return (factory.randn(batch, shape.vocab, dtype=torch.float32),)


def _sample_inputs(shape: Shape, batch: int, temperature: float, factory: InputFactory) -> tuple[Tensor, ...]:
    seeds, positions = factory.below(2**62, batch), factory.below(10_000, batch, dtype=torch.int32)
    return factory.randn(batch, shape.vocab), factory.full(temperature, batch), seeds, positions


def _torch_argmax(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.argmax(-1)


def _torch_sample(logits: Tensor, temperature: Tensor, *_: Tensor) -> Tensor:
    probs = (logits.float() / temperature[:, None]).softmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(
        -1
    )  # as torch.multinomial, which synchronises with the host


def _limit_inputs(shape: Shape, batch: int, factory: InputFactory) -> tuple[Tensor, ...]:
    top_k = factory.full(50, batch, dtype=torch.int32)
    return *_logits(shape, batch, factory), top_k, factory.full(0.9, batch), factory.full(0.02, batch)


def _penalty_inputs(shape: Shape, batch: int, factory: InputFactory) -> tuple[Any, ...]:
    rows = factory.ints(range(batch))
    seen = factory.below(100, batch, shape.vocab, dtype=torch.int32).clamp_(min=98) - 98
    penalties = ops.Penalties(
        rows, factory.full(1.1, batch), factory.full(0.1, batch), factory.full(0.1, batch), rows, seen
    )
    return *_logits(shape, batch, factory), penalties
