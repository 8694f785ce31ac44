"""Look inside a forward pass: callbacks on named intermediates, at no cost to a model without any.

=====================  ==================================================================
``embedding``          hidden states before the first layer
``layers.N.att_norm``  input of the attention
``layers.N.qkv``       queries, keys and values as the attention reads them
``layers.N.att``       output of the attention, before its projection
``layers.N.o``         what the attention adds to the residual
``layers.N.ffn_norm``  input of the feed-forward
``layers.N.ffn``       what the feed-forward adds to the residual
``layers.N``           hidden states after the layer (transformers' ``hidden_states[N + 1]``)
``logits``             of the rows asked for
=====================  ==================================================================

Some models compute a norm and the product behind it in one op. With a callback they compute them apart, which in half
precision rounds otherwise.
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

Callback = Callable[[str, Any], None]  # the name, and a tensor (for qkv a pair)

_LAYER_METHODS = {
    "att_norm": ("_att_norm",),
    "qkv": ("_cached_qkv",),
    "att": ("_context_attention_kernel", "_token_attention_kernel"),
    "o": ("_get_o",),
    "ffn_norm": ("_ffn_norm",),
    "ffn": ("_ffn",),
}
_FORWARDS = ("context_forward", "token_forward")


class HookRegistry:
    """Callbacks by name or pattern (``layers.*.ffn``), called in the order of the computation. One a model."""

    def __init__(self, model: TpPartBaseModel) -> None:
        self._model = model
        self._callbacks: list[tuple[str, Callback]] = []
        self._wrapped: list[tuple[Any, str]] = []

    def names(self) -> list[str]:
        layers = [f"layers.{i}" for i in range(self._model.config.num_layers)]
        inner = [f"{layer}.{point}" for layer in layers for point in _LAYER_METHODS]
        return ["embedding", *inner, *layers, "logits"]

    def register(self, pattern: str, callback: Callback) -> Callable[[], None]:
        """Call back on every intermediate that matches; the function returned ends that."""
        if not fnmatch.filter(self.names(), pattern):
            raise InvalidRequestError(f"no intermediate is named {pattern!r}; see lightserve.common.basemodel.hooks")
        if not self._callbacks:
            self._wrap_model()
        entry = (pattern, callback)
        self._callbacks.append(entry)
        return lambda: self._remove(entry)

    def _remove(self, entry: tuple[str, Callback]) -> None:
        """Without callbacks the model has its own methods back."""
        self._callbacks.remove(entry)
        if not self._callbacks:
            for owner, method in self._wrapped:
                delattr(owner, method)
            self._wrapped.clear()

    def _wrap_model(self) -> None:
        model = self._model
        for forward in _FORWARDS:
            self._wrap(model.pre_infer, forward, "embedding")
            self._wrap(model.post_infer, forward, "logits")
        for i, layer in enumerate(model.layers_infer):
            for point, methods in _LAYER_METHODS.items():
                for method in methods:
                    self._wrap(layer, method, f"layers.{i}.{point}")
            for forward in _FORWARDS:
                self._wrap(layer, forward, f"layers.{i}", after_layer)

    def _wrap(self, owner: Any, method: str, name: str, view: Callable[[Any, Any], Any] | None = None) -> None:
        """Shadow a method of one layer by one that also tells the callbacks what it returned."""
        original = getattr(owner, method)

        def told(*args: Any) -> Any:
            out = original(*args)
            self._tell(name, view(out, args[1]) if view else out)
            return out

        setattr(owner, method, told)
        self._wrapped.append((owner, method))

    def _tell(self, name: str, value: Any) -> None:
        for pattern, callback in self._callbacks:
            if fnmatch.fnmatchcase(name, pattern):
                callback(name, value)


def hooks_of(model: TpPartBaseModel) -> HookRegistry:
    registry: HookRegistry = vars(model).setdefault("_hook_registry", HookRegistry(model))
    return registry


def after_layer(added: Tensor, infer_state: Any) -> Tensor:
    """The hidden states once what the layer returned is added, which the next norm does."""
    residual: Tensor = infer_state.residual
    return residual + added


@contextmanager
def recorded(model: TpPartBaseModel, pattern: str = "*") -> Iterator[dict[str, Any]]:
    """Copies of the matching intermediates of the forward passes inside, by name; the last pass wins."""
    values: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        values[name] = value.clone() if isinstance(value, Tensor) else tuple(part.clone() for part in value)

    remove = hooks_of(model).register(pattern, keep)
    try:
        with torch.inference_mode():
            yield values
    finally:
        remove()
