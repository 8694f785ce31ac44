"""How the config and the tensors of a GGUF file become those of a transformers model. There is no torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from lightserve.model_files.gguf.header import GgufHeader

# llama.cpp's name: that of transformers, or several that share the rows
Names = dict[str, str | tuple[str, ...]]


class RowOrder(Enum):
    """In which order llama.cpp's converter writes the rows of a tensor, if not in that of transformers."""

    ROTARY_PAIRS = auto()  # in each head, the two halves of the rotary dimensions alternate
    QKV_BLOCKS = auto()  # all rows of q, then of k, then of v, instead of q, k and v of each KV head
    TRANSPOSED = auto()  # [out, in] instead of [in, out]
    # the first value head of every key head, then the second of every one, instead of all value heads of a key head
    TILED_VALUES = auto()
    TILED_LAST_VALUES = auto()  # the same, behind the rows of all queries and keys
    TILED_VALUE_COLUMNS = auto()  # the same for columns


class Form(Enum):
    """What llama.cpp's converter makes of a small tensor of a recurrent layer."""

    RATES = auto()  # -exp(A_log), perhaps with a dimension of 1 more
    RATES_4D = auto()  # the same of a tensor [1, 1, heads, 1]
    FLAT = auto()  # other dimensions
    CONV = auto()  # [channels, width], perhaps with dimensions of 1 elsewhere, instead of [channels, 1, width]


class Join(Enum):
    """How tensors that llama.cpp's converter splits become one tensor again."""

    ROWS = auto()  # one below the other
    EXPERT_ROWS = auto()  # one below the other in every expert
    LATENT = auto()  # the transposed rows of k and the rows of v of every head
    ALTERNATING = auto()  # rows of every expert alternate; a matrix is transposed
    KEY_HEADS = auto()  # of q, k and v in blocks, and of z: the rows of every key head


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    name: str  # in transformers, with .weight or .bias
    parts: tuple[str, ...]  # in llama.cpp, with .weight or .bias
    how: Join = Join.ROWS


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    model_type: str  # in transformers and in models/registry.py
    model_class: str
    config_fields: Callable[[GgufHeader], dict[str, Any]]
    layers: str  # the prefix of a layer's tensors in transformers, without its number
    # llama.cpp's name, without blk.N and .weight: the name in transformers. * stands for a number along the first
    # dimension, such as that of an expert, where llama.cpp has one tensor for all of them. Several names: the rows are
    # divided equally among them. A name with .weight or .bias replaces the whole name.
    tensors: Names
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)  # by llama.cpp's name
    forms: Mapping[str, Form] = field(default_factory=dict)  # by llama.cpp's name
    joined: tuple[JoinedTensor, ...] = ()
    expanded: frozenset[str] = frozenset()  # linears that never stay packed: the model changes their values
    copies: frozenset[str] = frozenset()  # tensors that repeat another one and are not loaded
    has_norms_plus_one: bool = False  # norms hold 1 + weight, where transformers has the weight
    options: frozenset[str] = frozenset()  # the keys of gguf_fields.OPTIONS that config_fields reads
    # whether it is this one, where several architectures have one name in GGUF files; the first that applies is taken
    applies: Callable[[GgufHeader], bool] = lambda header: True

    @property
    def has_experts(self) -> bool:
        return "ffn_down_exps" in self.tensors or "ffn_down_exps.weight" in self.tensors
