"""What tokens and requests store in each layer. A model declares it; memory and pool sizes follow from it.

A token stores keys and values. A request stores the state of a recurrent layer, which has one size however many tokens
the request has.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

import torch


class KvContent(Enum):
    """What layers store in a group. All but ``KV`` is stored besides, for layers that are in a group of KV too."""

    KV = "KV"
    INDEX_KEYS = "index keys"  # by which the layers choose tokens
    KEY_PARTS = "key parts"  # of quantised latents, which are not quantised


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose caches have the same shape, on one rank."""

    layers: tuple[int, ...]
    num_heads: int  # KV heads; 1 for a latent
    key_size: int  # numbers per head
    value_size: int  # numbers per head; 0: a latent from which keys and values are both computed
    dtype: torch.dtype
    scale_dtype: torch.dtype | None = None  # of one scale per token and head, keys and values apart; None: no scales
    window: int | None = None  # tokens that a query attends to, itself included; None: all before it
    extra_slots: int = 0  # behind those of the pool and of padding: of tokens that are drafted, until they are computed
    content: KvContent = KvContent.KV

    def __post_init__(self) -> None:
        if min(self.num_heads, self.key_size) < 1 or self.value_size < 0 or not self.layers:
            raise ValueError(f"a KV group needs layers, heads and a key size: {self}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1")

    @property
    def token_shape(self) -> tuple[int, int]:
        """One token of one layer: ``(rows, numbers per row)``.

        Equal keys and values: a row per key head, then a row per value head. Unequal ones: a row per head, its key and
        then its value. A latent: a row per head.
        """
        if self.key_size == self.value_size:
            return 2 * self.num_heads, self.key_size
        return self.num_heads, self.key_size + self.value_size

    @property
    def num_scales(self) -> int:
        """Per token and layer."""
        if self.scale_dtype is None:
            return 0
        return self.num_heads * (2 if self.value_size else 1)

    @property
    def bytes_per_token(self) -> int:
        """In all layers of the group."""
        numbers = math.prod(self.token_shape) * self.dtype.itemsize
        scales = 0 if self.scale_dtype is None else self.num_scales * self.scale_dtype.itemsize
        return len(self.layers) * (numbers + scales)

    @property
    def plan_key(self) -> Hashable:
        """Equal for layers whose attention launches the same kernels and can share one plan of a step."""
        return self.num_heads, self.key_size, self.value_size, self.dtype, self.scale_dtype, self.window


def kv_storage(kv_dtype: str | None, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype | None]:
    """``KvGroup.dtype`` and ``KvGroup.scale_dtype`` of keys and values that are computed in ``dtype``.

    fp8 has fixed scales, which are weights of the layer and no part of the cache.
    """
    if kv_dtype is None:
        return dtype, None
    return {"fp8": (torch.float8_e4m3fn, None), "int8": (torch.int8, torch.float32)}[kv_dtype]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of what a request stores in a recurrent layer, on one rank: a row."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sum: bool = False  # over all tokens, such as the matrix of a linear scan: --state_dtype says how it is stored

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"a state needs a shape of positive sizes; it is {self.shape}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Recurrent layers whose states have the same shapes."""

    layers: tuple[int, ...]
    tensors: tuple[StateTensor, ...]  # such as the last inputs of a convolution, and a matrix

    def __post_init__(self) -> None:
        if not self.layers or not self.tensors:
            raise ValueError(f"a state group needs layers and tensors: {self}")

    @property
    def bytes_per_row(self) -> int:
        """In all layers of the group."""
        return len(self.layers) * sum(tensor.num_bytes for tensor in self.tensors)


_Group = TypeVar("_Group", KvGroup, StateGroup)


def _check_layers(groups: Sequence[KvGroup | StateGroup], kind: str) -> None:
    layers = [layer for group in groups for layer in group.layers]
    if len(set(layers)) != len(layers):
        raise ValueError(f"a layer is in one {kind} group only; the groups contain the layers {sorted(layers)}")


def _parts(groups: Iterable[_Group], wanted: set[int]) -> tuple[_Group, ...]:
    """The groups with only the wanted layers."""
    parts = ((group, tuple(layer for layer in group.layers if layer in wanted)) for group in groups)
    return tuple(replace(group, layers=layers) for group, layers in parts if layers)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layers of a rank that store KV, each in one group, and those that store states, each in one group.

    Layers that choose tokens by keys of their own have these in a group more, in the same slots. A pipeline stage has
    only its own layers, under their numbers in the model. A layer without attention has no KV group, and neither has
    one that reads the cache of another layer. A layer may have a KV group and a state group.
    """

    groups: tuple[KvGroup, ...]
    states: tuple[StateGroup, ...] = ()
    readers: tuple[tuple[int, int], ...] = ()  # a layer without a cache of its own, and the layer whose cache it reads

    def __post_init__(self) -> None:
        for content in KvContent:
            _check_layers(self.groups_of(content), content.value)
        _check_layers(self.states, "state")
        with_kv = {layer for group in self.groups_of(KvContent.KV) for layer in group.layers}
        for group in self.groups:
            if not with_kv.issuperset(group.layers):
                raise ValueError(f"layers with {group.content.value} need KV too; layers with KV: {sorted(with_kv)}")
        for reader, source in self.readers:
            if reader in with_kv or source not in with_kv:
                raise ValueError(
                    f"layer {reader} cannot read the KV of layer {source}; layers with KV: {sorted(with_kv)}"
                )

    @classmethod
    def uniform(cls, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> KvLayout:
        """Keys and values of the same heads in every layer."""
        return cls((KvGroup(tuple(range(num_layers)), num_heads, head_dim, head_dim, dtype),))

    @classmethod
    def latents(
        cls, layers: tuple[int, ...], sizes: tuple[int, int], kv_dtype: str | None, dtype: torch.dtype
    ) -> KvLayout:
        """Latents and key parts of these ``sizes``, which are computed in ``dtype``: see ``ops/kv_cache.py``."""
        rank, rope = sizes
        if not layers:
            return cls(())
        if kv_dtype is None:
            return cls((KvGroup(layers, 1, rank + rope, 0, dtype),))
        codes, _ = kv_storage(kv_dtype, dtype)
        key_parts = KvGroup(layers, 1, rope, 0, dtype, content=KvContent.KEY_PARTS)
        return cls((KvGroup(layers, 1, rank, 0, codes, torch.float32), key_parts))

    def of_layers(self, layers: Iterable[int]) -> KvLayout:
        """Only these layers."""
        wanted = set(layers)
        readers = tuple(pair for pair in self.readers if pair[0] in wanted)
        return KvLayout(_parts(self.groups, wanted), _parts(self.states, wanted), readers)

    def groups_of(self, content: KvContent) -> tuple[KvGroup, ...]:
        return tuple(group for group in self.groups if group.content == content)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups_of(KvContent.KV))

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_state_row(self) -> int:
        """What a row takes in all layers; 0: no layer has a state."""
        return sum(group.bytes_per_row for group in self.states)

    @property
    def windowed_bytes_per_token(self) -> int:
        """In the layers with a window."""
        return sum(group.bytes_per_token for group in self.groups if group.window is not None)

    @property
    def window(self) -> int | None:
        """The largest one; None: no layer has a window."""
        return max((group.window for group in self.groups if group.window is not None), default=None)

    def group_of(self, layer_num: int) -> KvGroup | None:
        """The group of the cache that a layer reads."""
        source = dict(self.readers).get(layer_num, layer_num)
        return next((group for group in self.groups_of(KvContent.KV) if source in group.layers), None)
