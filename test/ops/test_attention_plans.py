"""What the layers of a step share: attention derives it once for layers of one shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightserve.common import ops
from test.ops.cases import (
    alibi_slopes,
    assert_close,
    attention_args,
    context_attention_args,
    device_of,
    each_backend,
    each_backend_and_dtype,
    wide,
)

# (query heads, kv heads), head_dim; each shape has tiles of its own
LAYERS = [((4, 2), 64), ((16, 1), 64), ((6, 6), 128), ((4, 2), 256), ((4, 2), 64)]
LENS = [(140, 1), (5, 1), (0, 37), (70, 13)]


@each_backend_and_dtype(ops.context_attention)
def test_layers_of_different_head_shapes_in_one_mixed_step_match_the_definition(
    backend: str, dtype: torch.dtype
) -> None:
    args = [context_attention_args(LENS, heads, dim, dtype, device_of(backend)) for heads, dim in LAYERS]
    step = replace(args[0][3], has_decodes=True)  # all layers have the same table of slots

    outs = [ops.context_attention.impls[backend](q, kv, cache, step, options) for q, kv, cache, _, options in args]

    for out, (q, kv, cache, batch, options) in zip(outs, args, strict=True):
        assert_close(out, ops.context_attention(wide(q), wide(kv), wide(cache), batch, options), dtype)


@each_backend_and_dtype(ops.token_attention)
def test_layers_of_different_head_shapes_in_one_decode_step_match_the_definition(
    backend: str, dtype: torch.dtype
) -> None:
    lens = [(length - 1, 1) for length in (140, 5, 300)]
    args = [attention_args(lens, heads, dim, dtype, device_of(backend)) for heads, dim in LAYERS]
    step = args[0][2]

    outs = [ops.token_attention.impls[backend](q, cache, step, options) for q, cache, _, options in args]

    for out, (q, cache, batch, options) in zip(outs, args, strict=True):
        assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@each_backend(ops.token_attention)
def test_layers_with_and_without_alibi_in_one_step_match_the_definition(backend: str) -> None:
    q, cache, batch, options = attention_args([(139, 1), (6, 1)], (4, 2), 64, torch.float32, device_of(backend))
    both = [options, replace(options, alibi_slopes=alibi_slopes(4, device_of(backend)), scale=0.3), options]

    outs = [ops.token_attention.impls[backend](q, cache, batch, layer) for layer in both]

    for out, layer in zip(outs, both, strict=True):
        assert_close(out, ops.token_attention(q, cache, batch, layer), torch.float32)
