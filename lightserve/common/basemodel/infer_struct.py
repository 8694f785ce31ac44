"""The input of a step, and the state that the layers share while they compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightserve.common.basemodel.expert_rows import ExpertRows, expert_rows
from lightserve.common.basemodel.routed_experts import RoutedExperts
from lightserve.common.basemodel.spec import QueryScale
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.ops import AttnBatch, LoraRows, RotaryAngles, StateBatch
from lightserve.common.parallel import RankGroup

if TYPE_CHECKING:
    from lightserve.common.basemodel.basemodel import TpPartBaseModel


class LogitRows(Enum):
    LAST = "last"  # the last token of each request
    ALL = "all"  # every token of the step


@dataclass(frozen=True, slots=True)
class KvGroupInput:
    """Where the tokens of a step are in the pool of a KV group."""

    mem_index: Tensor  # [tokens] int32: cache slots the step fills
    attn: AttnBatch


@dataclass(frozen=True, slots=True)
class StepImages:
    """The tokens of images in a step."""

    vector_row: Tensor  # [tokens] int32, of ``vectors``; negative: the token is not of an image
    vectors: Tensor  # [n, vectors, hidden]: the embedding, and what is added behind the first layers; n is not 0
    positions: Tensor  # [3, tokens] int32: of all tokens of the step, by axis of the rotary positions
    next_row: Tensor  # [tokens] int32: ``vector_row`` of the token after each, as a draft head needs it

    def replace_embeddings(self, x: Tensor) -> Tensor:
        """The embeddings of images replace those of the tokens that stand for them."""
        return self._replaced(x, self.vector_row)

    def replace_next_embeddings(self, x: Tensor) -> Tensor:
        """``replace_embeddings`` in those of the tokens after those of the step."""
        return self._replaced(x, self.next_row)

    def _replaced(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.where((rows >= 0)[:, None], self._vectors(0, rows, x), x)

    def add(self, x: Tensor, layer_num: int) -> Tensor:
        """DeepStack: the encoder has vectors of its layers for the tokens of images behind the first layers here."""
        if layer_num + 1 >= self.vectors.shape[1]:
            return x
        vectors = self._vectors(layer_num + 1, self.vector_row, x)
        return torch.where((self.vector_row >= 0)[:, None], x + vectors, x)

    def _vectors(self, number: int, rows: Tensor, x: Tensor) -> Tensor:
        """A vector of each token; those of text mean nothing."""
        return self.vectors[:, number].index_select(0, rows.clamp(min=0)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step of a batch, as the worker hands it to the model. Prefill rows and decode rows may mix."""

    input_ids: Tensor  # [tokens] int64
    position_ids: Tensor  # [tokens] int32
    mem_index: Tensor  # [tokens] int32: cache slots the step fills
    attn: AttnBatch
    is_prefill: bool  # False: exactly one token per request
    logit_rows: LogitRows | Tensor = LogitRows.LAST  # which tokens get logits; or their rows, [n] int64
    kv_groups: tuple[KvGroupInput, ...] = ()  # those with pools; empty: all layers have the same slots
    lora: LoraRows | None = None  # None: no row uses an adapter
    states: StateBatch | None = None  # the rows of recurrent layers; None: no layer has a state
    group_tokens: tuple[int, ...] = ()  # of the step of each attention group; empty: all have the same
    rotary_positions: Tensor | None = None  # [tokens] int32, if they differ from position_ids: after images
    images: StepImages | None = None  # None: no row computes tokens of images, or before them


class Observer(Protocol):
    """Receives the intermediate values of a forward pass; see hooks.py for their names."""

    def observe(self, name: str, value: Any) -> None: ...


class InferStateInfo:
    """What the layers of a step share. A model that shares more subclasses it and fills init_some_extra_state."""

    def __init__(self, step: ModelInput, mem_manager: MemoryManager) -> None:
        self.step = step
        self.attn = step.attn
        self.mem_manager = mem_manager
        self.position_ids = step.position_ids
        self.residual: Tensor | None = None  # the hidden states; a layer returns what the next norm adds to them
        self.observer: Observer | None = None
        self.groups = RankGroup()  # attention groups, each with a step of its own
        self.routed_experts: RoutedExperts | None = None  # by KV slot; None: they are not kept
        self.rotary_angles: dict[str, RotaryAngles] = {}  # by `rotary_key`
        self.output_gate: Tensor | None = None  # of the attention being computed, [tokens, heads * gate_dim]
        self.aux: dict[int, Tensor] = {}  # hidden states by the layers before them: see ``keep_states_after``
        self.query_scales: dict[QueryScale, Tensor] = {}  # of every token, [tokens, 1, 1]
        if len(step.kv_groups) != len(mem_manager.group_sizes):
            raise ValueError(
                f"{len(mem_manager.group_sizes)} KV groups have pools of their own, but the step has slots in "
                f"{len(step.kv_groups)}"
            )
        if mem_manager.layout.states and step.states is None:
            raise ValueError("the model has recurrent layers, but the step does not say which rows their states are in")
        self._all_tokens = step
        self._group_steps = [replace(step, mem_index=group.mem_index, attn=group.attn) for group in step.kv_groups]

    def use_pool_of(self, layer_num: int) -> None:
        """Let ``step`` and ``attn`` name slots of the pool that holds the KV of this layer."""
        if self._group_steps:
            pool = self.mem_manager.pool_of(layer_num)
            self.step = self._all_tokens if pool is None else self._group_steps[pool]
            self.attn = self.step.attn

    def init_some_extra_state(self, model: TpPartBaseModel, input_ids: Tensor) -> None:
        """Fill what the layers share beyond the step itself, once per step. A subclass adds its own."""
        if self.step.images is not None and model.rotary_axes is not None:
            pairs = self.step.images.positions.long().T[:, model.rotary_axes]  # [tokens, pairs]: the position of each
            for key, (cos, sin) in model.rotary_tables.items():
                self.rotary_angles[key] = RotaryAngles(cos.gather(0, pairs), sin.gather(0, pairs))
        else:
            positions = self.position_ids if self.step.rotary_positions is None else self.step.rotary_positions
            for key, (cos, sin) in model.rotary_tables.items():
                self.rotary_angles[key] = RotaryAngles(cos.index_select(0, positions), sin.index_select(0, positions))
        for scale, table in model.query_scale_tables.items():
            self.query_scales[scale] = table.index_select(0, self.position_ids)[:, None, None]

    @property
    def cache_slots(self) -> Tensor:
        """``[tokens]``: that the step fills, in the pool of all tokens."""
        return self._all_tokens.mem_index

    @cached_property
    def is_padding(self) -> Tensor:
        """``[tokens]``: rows that only fill up the batch of a captured graph."""
        return self.cache_slots == self.mem_manager.padding_slot

    @cached_property
    def expert_rows(self) -> ExpertRows:
        """For layers with experts."""
        rows = expert_rows(self.is_padding, self.groups, self.step.group_tokens)
        if self.routed_experts is None:
            return rows
        return replace(rows, writer=self.routed_experts.writer(self.cache_slots, rows.first_row))

    @property
    def may_fuse_norms(self) -> bool:
        """Whether a layer may skip the value between a norm and the linear behind it.

        The first norm of a step starts the residual, and an observer receives every value.
        """
        return self.residual is not None and self.observer is None

    def logit_rows(self) -> Tensor | None:
        """The rows that the step wants logits of; None: all rows."""
        rows = self.step.logit_rows
        if isinstance(rows, Tensor):
            return rows
        if rows is LogitRows.ALL or not self.step.is_prefill:
            return None
        attn = self.attn
        return (attn.b_start_loc + attn.b_seq_len - attn.b_ready_cache_len - 1).long()
