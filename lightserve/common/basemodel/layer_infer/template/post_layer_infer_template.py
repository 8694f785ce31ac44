from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.basemodel.layer_infer.base_layer_infer import OuterWeight, PostLayerInfer, State


class PostLayerInferTpl(PostLayerInfer[OuterWeight, State]):
    """The final norm and the head, for the rows that need logits."""

    def context_forward(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> Tensor:
        return self.logits(input, infer_state, layer_weight, infer_state.logit_rows())

    def token_forward(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> Tensor:
        return self.logits(input, infer_state, layer_weight, infer_state.logit_rows())

    def logits(self, input: Tensor, infer_state: State, layer_weight: OuterWeight, rows: Tensor | None) -> Tensor:
        return self.logits_of(self.final_states(input, infer_state, layer_weight, rows), layer_weight)

    def logits_of(self, states: Tensor, layer_weight: OuterWeight) -> Tensor:
        return self._scale_logits(layer_weight.lm_head.local_logits(states))

    def final_states(self, input: Tensor, infer_state: State, layer_weight: OuterWeight, rows: Tensor | None) -> Tensor:
        residual = infer_state.residual
        if rows is not None:
            input = input[rows]
            residual = None if residual is None else residual[rows]
        return input if residual is None else self._final_norm(input, residual, layer_weight)

    def _final_norm(self, input: Tensor, residual: Tensor, layer_weight: OuterWeight) -> Tensor:
        assert layer_weight.final_norm is not None
        return layer_weight.final_norm.add_norm(input, residual)

    def _scale_logits(self, logits: Tensor) -> Tensor:
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits = torch.tanh(logits / self.spec.logit_softcap) * self.spec.logit_softcap
        return logits
