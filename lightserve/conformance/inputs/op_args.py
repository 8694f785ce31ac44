"""``ARGS``: arguments for every op, for a number of tokens, a dtype and a type of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.step import COUNTED, NO_SLOT
from lightserve.conformance.inputs.attention import (
    SMALL_LATENT,
    attention_args,
    context_attention_args,
    latent_args,
    latent_context_args,
    penalties_of,
    selection_args,
)
from lightserve.conformance.inputs.state import STATE_ARGS
from lightserve.conformance.inputs.tensors import ints, randn
from lightserve.conformance.inputs.weights import (
    codebook4_weight,
    eight_bit_weight,
    experts_params,
    int4_weight,
    lora_linear_args,
    lora_rows,
    lora_weights,
    mxfp4_weight,
)

EPS = 1e-5

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


def _softmax_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return *_activation_args(tokens, dtype, device), -1


def _top_k_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return *_activation_args(tokens, dtype, device), 5, -1


def _bmm_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    return (
        randn(tokens, 3, 40, dtype=dtype, device=device),
        randn(tokens, 40, 5, dtype=dtype, device=device, seed=1) / 8,
    )


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


def _lora_args(tokens: int, dtype: torch.dtype, device: str) -> Args:
    out, x = randn(tokens, 72, dtype=dtype, device=device), randn(tokens, 40, dtype=dtype, device=device, seed=1)
    slots = [(2, ops.NO_LORA, 0)[i % 3] for i in range(tokens)]
    return out, x, lora_weights(40, (40, 16, 16), dtype, device), lora_rows(slots, device)


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
    "bmm": _bmm_args,
    "log_softmax": _softmax_args,
    "softmax": _softmax_args,
    "top_k": _top_k_args,
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
