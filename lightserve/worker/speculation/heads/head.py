"""What computes drafts: a layer that reads the hidden states of a model, or a smaller model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import (
    CheckpointTensor,
    HiddenStates,
    InferStateInfo,
    KvGroup,
    LayerSpec,
    ModelInput,
    NormWeight,
    TpPartBaseModel,
    TransformerLayerInfer,
    TransformerLayerWeight,
    VocabWeight,
    Weight,
)
from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.common.basemodel.layer_weights.weight import WeightGroup
from lightserve.common.basemodel.rotary import rotary_tables


class SampledAt(NamedTuple):
    """Of each row, as ops.sample takes them."""

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor


SampleLocal = Callable[[Tensor, SampledAt], Tensor]


class HeadWeight(LayerWeight):
    """The weights of the head and of its layers."""

    norm: NormWeight  # of what the layers compute, before logits
    embedding: VocabWeight  # absent: that of the model is read

    def without_embedding(self) -> LayerWeight:
        return SomeWeights([member for member in self._members() if member is not self.embedding])

    def only_embedding(self) -> LayerWeight:
        return SomeWeights([self.embedding])


class SomeWeights(LayerWeight):
    """Some of the weights of a layer, to be loaded alone."""

    def __init__(self, members: Sequence[Weight | WeightGroup]) -> None:
        self._some = members

    def _members(self) -> Sequence[Weight | WeightGroup]:
        return self._some


class OneLayerWeight(HeadWeight):
    layer: TransformerLayerWeight


class DraftHead(ABC):
    """It has a KV cache of its own, in layers under the numbers that follow those of the model's layers."""

    reads_embeddings: ClassVar[bool] = False  # of the token after each, which may stand for an image

    def __init__(self, model: TpPartBaseModel) -> None:
        self.model = model
        self.aux_layers: tuple[int, ...] = ()  # see TpPartBaseModel.keep_states_after

    @staticmethod
    @abstractmethod
    def scratch_slots(num_drafts: int) -> int:
        """Slots of a request for positions that the model has not computed yet."""

    @abstractmethod
    def kv_groups(self) -> tuple[KvGroup, ...]: ...

    @abstractmethod
    def model_states(self, hidden: HiddenStates, final: Tensor) -> Tensor:
        """What it reads of the model, ``[tokens, width]``. ``final``: the hidden states after the last norm."""

    @abstractmethod
    def hidden(self, states: Tensor) -> Tensor:
        """The hidden states that it computes with, from ``model_states``."""

    @abstractmethod
    def normed(self, output: Tensor) -> Tensor:
        """What logits are computed from, of what it has computed."""

    @abstractmethod
    def sample(self, normed: Tensor, at: SampledAt, sample_local: SampleLocal) -> Tensor:
        """A draft of each row, with the noise of its position. The same on all ranks.

        ``sample_local`` samples from logits of this rank's tokens.
        """


class AutoregressiveHead(DraftHead):
    """Drafts one token after the other.

    At position p it reads the hidden state of the model there, and the token at p + 1. What it computes is the logits
    of the token at p + 2. Where the model has not computed a position yet, it reads its own output.
    """

    @staticmethod
    def scratch_slots(num_drafts: int) -> int:
        """The first draft comes from the last token that is computed."""
        return num_drafts - 1

    @abstractmethod
    def forward(self, hidden: Tensor, step: ModelInput) -> Tensor:
        """Compute all tokens of a step; ``step.input_ids`` are the tokens after them. Returns ``[tokens, hidden]``."""

    @abstractmethod
    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        """The hidden states for the next position: ``output`` before the norm, or ``normed`` behind it."""


class ParallelHead(DraftHead):
    """Drafts all tokens at once: a block of the token that was sampled last, and a mask token for each draft.

    Its keys and values of tokens that the model has computed are made of the model's hidden states alone. A mask token
    stands at the position of its draft, and all of the block see each other.
    """

    mask_token_id: int

    @staticmethod
    def scratch_slots(num_drafts: int) -> int:
        return 1 + num_drafts

    @abstractmethod
    def write_context(self, hidden: Tensor, step: ModelInput) -> None:
        """Keys and values of all tokens of a step."""

    @abstractmethod
    def block(self, step: ModelInput) -> Tensor:
        """Compute the blocks of some requests. Returns ``[tokens, hidden]``."""


class LayerHead(DraftHead):
    """Layers that were trained to read the hidden states of the model."""

    weights: HeadWeight
    needs_embedding = False  # it has a copy of the model's: the last stage of a pipeline has none

    @property
    @abstractmethod
    def specs(self) -> tuple[LayerSpec, ...]:
        """Of its layers."""

    @abstractmethod
    def new_weights(self, device: torch.device) -> HeadWeight: ...

    @abstractmethod
    def checkpoint(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        """The tensors of the head, among others that it does not read. Without the copy of the model's embedding."""

    @abstractmethod
    def reads(self, name: str) -> bool:
        """Whether ``checkpoint`` returns a tensor of this name."""

    def check_values(self) -> None:
        """Raises a CheckpointError for weights that cannot be computed with."""

    @property
    @abstractmethod
    def embedding_name(self) -> str:
        """Of the embedding, as ``weights`` declare it."""

    def embedding_of(self, tensors: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """What the copy of the model's embedding is loaded from. ``tensors``: of the model."""
        name = self.embedding_name
        return (tensor._replace(name=name) for tensor in tensors if self.is_embedding_of_model(tensor.name))

    def is_embedding_of_model(self, name: str) -> bool:
        model = self.model
        return model.own_name(name) == f"{model.spec.names.embedding}.weight"

    def normed(self, output: Tensor) -> Tensor:
        return self.weights.norm.norm(output)

    def finish_dummy(self) -> None:
        """Correct random weights that are no numbers to compute with."""

    def init_tables(self) -> None:
        """Create what each step reads: angles of positions that the model does not have."""
        tables = rotary_tables(self.specs, self.model.req_manager.max_len)
        missing = {key: table for key, table in tables.items() if key not in self.model.rotary_tables}
        self._rotary_tables = {
            key: (cos.to(self.model.device), sin.to(self.model.device)) for key, (cos, sin) in missing.items()
        }

    def _state(self, step: ModelInput) -> InferStateInfo:
        """Positions of tokens of images have the first axis alone, unless the angles are those of the model."""
        model = self.model
        state = model.infer_state_class(step, model.mem_manager)
        state.groups = model.args.parallel.dp
        state.init_some_extra_state(model, step.input_ids)
        positions = step.position_ids if step.rotary_positions is None else step.rotary_positions
        if step.images is not None and model.rotary_axes is not None:
            positions = step.images.positions[0]
        for key, (cos, sin) in self._rotary_tables.items():
            state.rotary_angles[key] = ops.RotaryAngles(cos.index_select(0, positions), sin.index_select(0, positions))
        state.use_pool_of(self.specs[0].layer_num)
        return state


def lacks_embedding(model: TpPartBaseModel) -> bool:
    """The last stage of a pipeline does."""
    return not hasattr(model.pre_post_weight, "embedding")


def with_images(embedded: Tensor, step: ModelInput) -> Tensor:
    """Embeddings of the tokens after those of a step. A head of another width than the model reads no images."""
    images = step.images
    if images is None or images.vectors.shape[-1] != embedded.shape[-1]:
        return embedded
    return images.replace_next_embeddings(embedded)


class OneLayerHead(LayerHead, AutoregressiveHead):
    spec: LayerSpec
    weights: OneLayerWeight
    layer: TransformerLayerInfer[Any, Any]
    reads_embeddings = True

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (self.spec,)

    @abstractmethod
    def layer_input(self, hidden: Tensor, token_ids: Tensor, state: InferStateInfo) -> Tensor:
        """May set the residual of ``state``."""

    def forward(self, hidden: Tensor, step: ModelInput) -> Tensor:
        """Returns the sum of residual and output."""
        state = self._state(step)
        x = self.layer_input(hidden, step.input_ids, state)
        forward = self.layer.context_forward if step.is_prefill else self.layer.token_forward
        out = forward(x, state, self.weights.layer)
        assert state.residual is not None
        return state.residual + out
