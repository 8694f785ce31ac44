"""Look inside a forward pass: callbacks on named intermediate values.

=====================  ==================================================================
``embedding``          hidden states before the first layer
``layers.N.att_norm``  input of the attention or mixer
``layers.N.qkv``       queries, keys and values as the attention reads them
``layers.N.att``       output of the attention, before its projection
``layers.N.o``         what the attention adds to the residual
``layers.N.mixer``     what the mixer of a recurrent layer adds to the residual
``layers.N.ffn_norm``  input of the feed-forward
``layers.N.ffn``       what the feed-forward adds to the residual
``layers.N``           hidden states after the layer (transformers' ``hidden_states[N + 1]``)
``logits``             of the rows that the step asks for
=====================  ==================================================================

The base model and the layer templates report these values to ``model.observer``, which is None without callbacks.
Layers that fuse a norm with the linear behind it compute the two one by one while there is an observer. In half
precision this rounds differently. While there is an observer, steps are launched kernel by kernel: a captured graph
would not call back.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightserve.common.basemodel.basemodel import TpPartBaseModel
from lightserve.errors import InvalidRequestError

Callback = Callable[[str, Any], None]  # receives the name and a tensor, for qkv a pair of tensors

_LAYER_POINTS = ("att_norm", "qkv", "att", "o", "mixer", "ffn_norm", "ffn")


class HookRegistry:
    """Callbacks by name or pattern (``layers.*.ffn``), called in the order of the computation. One per model."""

    def __init__(self, model: TpPartBaseModel) -> None:
        self._model = model
        self._callbacks: list[tuple[str, Callback]] = []

    def names(self) -> list[str]:
        layers = [f"layers.{i}" for i in range(self._model.config.num_layers)]
        inner = [f"{layer}.{point}" for layer in layers for point in _LAYER_POINTS]
        return ["embedding", *inner, *layers, "logits"]

    def register(self, pattern: str, callback: Callback) -> Callable[[], None]:
        """Call back on every value whose name matches; the returned function removes the callback."""
        if not fnmatch.filter(self.names(), pattern):
            raise InvalidRequestError(f"no intermediate is named {pattern!r}; see lightserve.common.basemodel.hooks")
        entry = (pattern, callback)
        self._callbacks.append(entry)
        self._model.observer = self
        return lambda: self._remove(entry)

    def _remove(self, entry: tuple[str, Callback]) -> None:
        self._callbacks.remove(entry)
        if not self._callbacks:
            self._model.observer = None

    def observe(self, name: str, value: Any) -> None:
        for pattern, callback in self._callbacks:
            if fnmatch.fnmatchcase(name, pattern):
                callback(name, value)


def hooks_of(model: TpPartBaseModel) -> HookRegistry:
    registry: HookRegistry = vars(model).setdefault("_hook_registry", HookRegistry(model))
    return registry


@contextmanager
def recorded(model: TpPartBaseModel, pattern: str = "*") -> Iterator[dict[str, Any]]:
    """Copies of the matching values of the forward passes inside, by name; a later pass replaces an earlier one."""
    values: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        values[name] = value.clone() if isinstance(value, Tensor) else tuple(tensor.clone() for tensor in value)

    remove = hooks_of(model).register(pattern, keep)
    try:
        with torch.inference_mode():
            yield values
    finally:
        remove()
