"""A draft model: a smaller model with the vocabulary of the served one, which drafts without reading its hidden states.

It computes the tokens of each step one place late, as draft heads do: at position p it reads the token at p + 1. So one
pass over a step both brings its KV up to date and drafts the first token, and the first token of a prompt is not read.
Its KV is in the slots of the model's tokens, in layers whose numbers follow those of the model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import (
    HiddenStates,
    KvContent,
    KvGroup,
    ModelArgs,
    ModelInput,
    TpPartBaseModel,
)
from lightserve.common.checkpoint.reader import open_checkpoint, tensor_metadata
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.parallel import RankGroup
from lightserve.config import WorkerConfig
from lightserve.errors import OptionError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.source import ModelSource
from lightserve.models.registry import get_model_class
from lightserve.models.served_config import read_served_config
from lightserve.worker.speculation.heads.head import AutoregressiveHead, SampledAt, SampleLocal


class DraftMemory(MemoryManager):
    """The KV of the draft model: layers of the served model's memory, which may be allocated again at any time."""

    def __init__(self, draft: TpPartBaseModel, target: TpPartBaseModel) -> None:
        super().__init__(1, draft.kv_layout, draft.device)  # nothing reads these tensors
        self._target = target
        self._first = target.config.num_layers

    def layer(self, layer_num: int) -> Tensor:
        return self._target.mem_manager.layer(self._first + layer_num)

    def scales(self, layer_num: int) -> Tensor | None:
        return self._target.mem_manager.scales(self._first + layer_num)

    def key_parts(self, layer_num: int) -> Tensor | None:
        return self._target.mem_manager.key_parts(self._first + layer_num)


class DraftModelHead(AutoregressiveHead):
    def __init__(self, model: TpPartBaseModel, files: ModelSource, has_weights: bool) -> None:
        """Loads it."""
        super().__init__(model)
        config = read_draft_config(files, model.req_manager.max_len)
        args = ModelArgs(
            config=config,
            dtype=model.args.dtype,
            stored_dtype=model.args.stored_dtype,
            device=model.device,
            parallel=replace(model.args.parallel, pp=RankGroup()),  # all its layers are in the last stage
            checkpoint=open_checkpoint(files) if has_weights else None,
            max_total_token_num=1,
            max_reqs=1,
            max_req_total_len=model.req_manager.max_len,
            tensor_metadata=tensor_metadata(files) if has_weights else (),
            kv_dtype=model.args.kv_dtype,
            packed_input_bits=model.args.packed_input_bits,
            source=files,
        )
        self.draft = get_model_class(config.model_type)(args)
        layout = self.draft.kv_layout
        if layout.states or layout.readers or layout.groups_of(KvContent.INDEX_KEYS) or not self.draft.has_kv:
            raise _error(
                files, f"{config.model_type} models cannot draft: they keep more than keys and values per layer"
            )
        self.draft.mem_manager = DraftMemory(self.draft, model)

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """In the pool of all tokens: drafts have slots there."""
        first = self.model.config.num_layers
        return tuple(
            replace(group, layers=tuple(first + layer for layer in group.layers), window=None)
            for group in self.draft.kv_layout.groups
        )

    def model_states(self, hidden: HiddenStates, final: Tensor) -> Tensor:
        return final

    def hidden(self, states: Tensor) -> Tensor:
        return states

    def forward(self, hidden: Tensor, step: ModelInput) -> Tensor:
        """The states after the last norm; ``hidden`` is not read.

        It has not seen images: it reads their placeholders, each at its position in the sequence.
        """
        text_only = replace(step, kv_groups=(), states=None, images=None, rotary_positions=None)
        return self.draft.final_states(self.draft.hidden_states(text_only))

    def normed(self, output: Tensor) -> Tensor:
        return output

    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        return normed

    def sample(self, normed: Tensor, at: SampledAt, sample_local: SampleLocal) -> Tensor:
        """Its rows of padding may be more or fewer than those of the model."""
        logits, vocab = self.logits(normed), self.model.config.vocab_size
        if logits.shape[1] < vocab:
            missing = logits.new_full((len(logits), vocab - logits.shape[1]), float("-inf"))
            logits = torch.cat((logits, missing), dim=1)
        return ops.sample(logits[:, :vocab].contiguous(), at.temperatures, at.seeds, at.positions)

    def logits(self, normed: Tensor) -> Tensor:
        return self.draft.gather_logits(self.draft.logits_of(normed))


def read_draft_config(files: ModelSource, max_len: int) -> ModelConfig:
    config = read_served_config(files, WorkerConfig(model_impl="lightserve"))
    if max_len > config.longest_position:
        problem = f"it takes {config.longest_position:,} tokens, and a request may have {max_len:,}"
        raise _error(files, f"{problem}; lower --max_req_total_len")
    return config


def _error(files: ModelSource, problem: str) -> OptionError:
    return OptionError(f"speculative_config: the draft model {files.path}: {problem}")
