"""Attention of transformers' modules over the KV cache: functions that transformers calls by the name BACKEND.

A model's masks and keyword arguments are recorded once, while it is loaded. What is no causal attention or a sliding
window is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightserve.common import ops
from lightserve.common.basemodel import InferStateInfo
from lightserve.errors import ModelFilesError

BACKEND = "lightserve"
HEAD_MULTIPLE = 16  # heads in the cache are padded to a multiple of this, which every kernel takes
NUM_POSITIONS = 64  # of queries, at which a mask is compared with a causal one
# keyword arguments that do not change what the attention computes
HARMLESS = frozenset({
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
})  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """What the attention of one layer computes."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    options: ops.AttnOptions

    @property
    def cache_size(self) -> int:
        """Numbers of a head in the cache: keys and values are padded to the same size."""
        return -(-max(self.key_size, self.value_size) // HEAD_MULTIPLE) * HEAD_MULTIPLE


class Attention(Protocol):
    """What happens when the model calls its attention."""

    def mask(self, mask_function: Callable[..., Tensor]) -> Tensor: ...

    def attend(self, call: AttentionCall) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """A call of the attention function by a module of transformers."""

    module: torch.nn.Module
    query: Tensor  # [1, heads, tokens, dim]
    key: Tensor  # [1, kv_heads, tokens, dim]
    value: Tensor  # [1, kv_heads, tokens, dim]
    mask: Tensor | None
    scale: float | None
    options: dict[str, Any]

    @property
    def layer_num(self) -> int:
        layer_num = getattr(self.module, "layer_idx", None)
        if not isinstance(layer_num, int):
            raise ModelFilesError(f"{type(self.module).__name__} has no layer_idx: its KV has no place in the cache")
        return layer_num


_current: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Let the modules that run inside use this attention."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Make the functions known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(BACKEND, _attention_function)
    AttentionMaskInterface.register(BACKEND, _mask_function)


def _attention_function(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    scale = options.pop("scaling", None)
    call = AttentionCall(module, query, key, value, attention_mask, scale, options)
    return _current.get().attend(call), None


def _mask_function(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
    return _current.get().mask(mask_function)


class CausalMask(Tensor):
    """What layers get as their mask while they are recorded; a layer that changes it passes another type."""

    window: int | None


@dataclass(slots=True)
class Recorder:
    """Records what each layer attends to. Its results mean nothing."""

    max_len: int
    layers: dict[int, LayerAttention] = field(default_factory=dict)

    def mask(self, mask_function: Callable[..., Tensor]) -> Tensor:
        mask = torch.zeros(1, 1, 1, 1).as_subclass(CausalMask)
        mask.window = window_of(mask_function, self.max_len)
        return mask

    def attend(self, call: AttentionCall) -> Tensor:
        if call.layer_num in self.layers:
            raise ModelFilesError(f"layer {call.layer_num} computes more than one attention, but has one KV cache")
        self.layers[call.layer_num] = self._layer(call)
        return call.value.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])

    def _layer(self, call: AttentionCall) -> LayerAttention:
        options = {name: value for name, value in call.options.items() if value is not None}
        window = self._window(call, options.pop("sliding_window", None))
        softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
        if unknown := sorted(options.keys() - HARMLESS):
            raise ModelFilesError(f"its attention takes {unknown[0]}, which the attention of LightServe does not have")
        key_size = call.query.shape[-1]
        return LayerAttention(
            call.query.shape[1],
            call.key.shape[1],
            key_size,
            call.value.shape[-1],
            ops.AttnOptions(
                scale=key_size**-0.5 if call.scale is None else float(call.scale),
                window=window,
                softcap=None if softcap is None else float(softcap),
                sinks=None if sinks is None else sinks.detach().float().reshape(-1).contiguous(),
            ),
        )

    def _window(self, call: AttentionCall, named: int | None) -> int | None:
        """That of the mask. The keyword argument must agree."""
        window = None
        if isinstance(call.mask, CausalMask):
            window = getattr(call.mask, "window", -1)
            if window == -1:
                raise ModelFilesError("its attention changes the mask of the model")
        elif call.mask is not None:
            raise ModelFilesError("its attention gets a mask that is not made by transformers' masking functions")
        elif call.options.get("is_causal", getattr(call.module, "is_causal", True)) is False:
            raise ModelFilesError("its attention is not causal")
        if named is not None and named != window and min(named, window or named) < self.max_len:
            raise ModelFilesError(
                f"its mask has a sliding window of {window or 'all'} tokens, its attention of {named}"
            )
        return window


def window_of(mask_function: Callable[..., Tensor], max_len: int) -> int | None:
    """The sliding window of a causal mask; None: all tokens. Another mask raises a ModelFilesError."""
    last, keys = max_len - 1, torch.arange(max_len)
    window = int(_row(mask_function, last, keys).sum())
    spread = range(0, last, max(last // NUM_POSITIONS, 1))
    for query in {*range(min(max_len, NUM_POSITIONS)), *spread, window - 1, window, last}:
        if 0 <= query < max_len and not torch.equal(_row(mask_function, query, keys), _causal(query, keys, window)):
            raise ModelFilesError("its attention mask is neither causal nor a sliding window")
    return None if window >= max_len else window


def _row(mask_function: Callable[..., Tensor], query: int, keys: Tensor) -> Tensor:
    zero = keys.new_zeros(())
    return mask_function(zero, zero, keys.new_full((), query), keys).expand(len(keys))


def _causal(query: int, keys: Tensor, window: int) -> Tensor:
    return (keys <= query) & (query - keys < window)


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Computes the attention of a step over the KV cache."""

    infer_state: InferStateInfo
    layers: dict[int, LayerAttention]
    dtype: torch.dtype  # of the cache

    def mask(self, mask_function: Callable[..., Tensor]) -> Tensor:
        """Each layer knows its own."""
        return torch.zeros(1, 1, 1, 1)

    def attend(self, call: AttentionCall) -> Tensor:
        layer, step = self.layers[call.layer_num], self.infer_state.step
        q, k, v = (
            pad(x[0].transpose(0, 1), (0, layer.cache_size - x.shape[-1])).to(self.dtype)
            for x in (call.query, call.key, call.value)
        )
        kv = torch.cat([k, v], dim=1)
        cache = self.infer_state.mem_manager.layer(call.layer_num)
        ops.write_kv(kv, step.mem_index, cache)
        if step.is_prefill:
            out = ops.context_attention(q.contiguous(), kv, cache, step.attn, layer.options)
        else:
            out = ops.token_attention(q.contiguous(), cache, step.attn, layer.options)
        return out[None, ..., : layer.value_size].to(call.value.dtype)
