"""A stage of a pipeline: some layers of a model, and the hidden states that it receives and sends.

The first stage embeds the tokens and the last one computes the logits. Every stage runs every step, in the same order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.common.basemodel.layer_infer.base_layer_infer import PreLayerInfer
from lightserve.common.basemodel.layer_weights.layer_weight import PreAndPostLayerWeight
from lightserve.common.basemodel.spec import LayerSpec, ModelSpec
from lightserve.common.parallel import RankGroup


def layers_of_stage(num_layers: int, pp: RankGroup) -> range:
    """Stages have equal numbers of layers, or the first ones one more: the last one also has the head."""
    each, more = divmod(num_layers, pp.size)
    begin = pp.rank * each + min(pp.rank, more)
    return range(begin, begin + each + (pp.rank < more))


class HiddenStateLink:
    """Receives the hidden states of a step from the stage before, and sends them to the stage behind.

    Every tensor-parallel rank exchanges them with the rank of the same number there.
    """

    def __init__(self, pp: RankGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._pp = pp
        self._dtype = dtype
        self._device = device
        self._sending: deque[list[tuple[dist.Work, Tensor]]] = deque()  # of each step, the oldest first
        self.received_s: tuple[float, float] | None = None  # when the host began and ended to wait for the last ones

    def receive(self, shape: Sequence[int]) -> Tensor:
        begin_s = time.monotonic()
        states = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        self._pp.receive_from_previous(states)
        self.received_s = begin_s, time.monotonic()
        return states

    def receive_into(self, more: Tensor) -> None:
        """What the stage before sent behind the hidden states."""
        self._pp.receive_from_previous(more)

    def send(self, *tensors: Tensor) -> None:
        """The hidden states of a step, and what else it brings. This stage can begin the next one: it does not wait."""
        self.wait_sent(self._pp.size - 1)  # the router has no more steps in flight
        works = ((self._pp.send_to_next(tensor), tensor) for tensor in tensors)
        self._sending.append([(work, tensor) for work, tensor in works if work is not None])

    def wait_sent(self, left: int = 0) -> None:
        """Wait until at most ``left`` steps are still being sent. A process group must not end before."""
        while len(self._sending) > left:
            for work, _ in self._sending.popleft():
                work.wait()


class ReceivePreLayerInfer(PreLayerInfer[PreAndPostLayerWeight, InferStateInfo]):
    """Takes the place of the embedding in all stages but the first."""

    def __init__(self, spec: ModelSpec, tp: RankGroup, link: HiddenStateLink, num_states: int) -> None:
        """``num_states``: 2 if the stage before sends a residual, else 1."""
        super().__init__(spec, tp)
        self._link = link
        self._num_states = num_states
        self.aux_layers: tuple[int, ...] = ()  # after which the stages before kept states: see ``keep_states_after``

    def context_forward(
        self, input: Tensor, infer_state: InferStateInfo, layer_weight: PreAndPostLayerWeight
    ) -> Tensor:
        count = self._num_states + len(self.aux_layers)
        states = self._link.receive((count, len(input), self.spec.config.hidden_size))
        infer_state.residual = states[1] if self._num_states > 1 else None
        infer_state.aux.update(zip(self.aux_layers, states[self._num_states :], strict=True))
        if infer_state.routed_experts is not None:
            infer_state.routed_experts.receive(infer_state.cache_slots, self._link)
        return states[0]

    def token_forward(self, input: Tensor, infer_state: InferStateInfo, layer_weight: PreAndPostLayerWeight) -> Tensor:
        return self.context_forward(input, infer_state, layer_weight)


def states_after(layers: Sequence[LayerSpec]) -> int:
    """How many tensors pass to the layer after these: what they add, and the residual, unless all norms come last."""
    return 1 if all(spec.is_post_norm for spec in layers) else 2
