"""Find layers of a checkpoint that a model does not use, although it could."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_LAYER_TENSOR = re.compile(r"(?P<stem>(?:[^.]+\.)*?)(?P<layer>\d+)\.(?P<rest>.+)")


class _Layer(NamedTuple):
    stem: str  # "model.layers."
    number: int


def whole_unused_layers(unused: Iterable[str], used: Iterable[str], num_layers: int) -> list[str]:
    """The unused tensors that form complete layers like the model's own, numbered ``num_layers`` or higher.

    A layer with tensors that no layer of the model has is of another kind: DeepSeek and GLM store their multi-token
    prediction there.
    """
    used_layers, unused_layers = _by_layer(used), _by_layer(unused)
    known: dict[str, set[str]] = defaultdict(set)
    for layer, tensors in (*used_layers.items(), *unused_layers.items()):
        if layer.number < num_layers:
            known[layer.stem] |= tensors
    names: list[str] = []
    for layer, tensors in sorted(unused_layers.items()):
        complete = any(
            layer.stem == used_layer.stem and used_tensors <= tensors
            for used_layer, used_tensors in used_layers.items()
        )
        if layer.number >= num_layers and complete and tensors <= known[layer.stem]:
            names += sorted(f"{layer.stem}{layer.number}.{rest}" for rest in tensors)
    return names


def number_of_layer(name: str) -> int:
    """Of a tensor that belongs to a layer."""
    match = _LAYER_TENSOR.fullmatch(name)
    assert match is not None
    return int(match["layer"])


def _by_layer(names: Iterable[str]) -> dict[_Layer, set[str]]:
    layers: dict[_Layer, set[str]] = defaultdict(set)
    for match in map(_LAYER_TENSOR.fullmatch, names):
        if match is not None:
            layers[_Layer(match["stem"], int(match["layer"]))].add(match["rest"])
    return layers
