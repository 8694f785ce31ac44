"""What a step hands to the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.ops import AttnBatch

if TYPE_CHECKING:
    from lightserve.common.basemodel.basemodel import TpPartBaseModel

LogitsOf = Callable[[Tensor], Tensor]  # [rows] int64 of the step's tokens -> [rows, vocab]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step of a batch, as the worker hands it to the model. Prefill rows and decode rows may mix."""

    input_ids: Tensor  # [tokens] int64
    position_ids: Tensor  # [tokens] int32
    mem_index: Tensor  # [tokens] int32: cache slots the step fills
    attn: AttnBatch
    is_prefill: bool  # False: exactly one token a request
    all_logits: bool = False  # of every token, not only of each request's last
    watch_logits: Callable[[LogitsOf], None] | None = None  # may ask for those of any tokens, a few at a time


class InferStateInfo:
    """What the layers of a step share. A model that shares more subclasses it and fills init_some_extra_state."""

    def __init__(self, step: ModelInput, mem_manager: MemoryManager) -> None:
        self.step = step
        self.attn = step.attn
        self.mem_manager = mem_manager
        self.position_ids = step.position_ids
        self.alibi_slopes: Tensor | None = None
        self.residual: Tensor | None = None  # the hidden state; layers return what is to be added to it

    def init_some_extra_state(self, model: TpPartBaseModel, input_ids: Tensor) -> None:
        """Fill what the layers share beyond the step itself, once a step. A subclass adds its own."""
        self.alibi_slopes = model.alibi_slopes

    def last_rows(self) -> Tensor:
        """The row of each request's last token."""
        attn = self.attn
        return (attn.b_start_loc + attn.b_seq_len - attn.b_ready_cache_len - 1).long()
