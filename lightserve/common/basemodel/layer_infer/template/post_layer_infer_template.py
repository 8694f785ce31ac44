from __future__ import annotations

from torch import Tensor

from lightserve.common.basemodel.layer_infer.base_layer_infer import OuterWeight, PostLayerInfer, State


class PostLayerInferTpl(PostLayerInfer[OuterWeight, State]):
    """The final norm and the head, for the rows whose logits are wanted."""

    def context_forward(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> Tensor:
        assert infer_state.residual is not None
        if infer_state.step.all_logits:
            return self.token_forward(input, infer_state, layer_weight)
        self._show_logits(input, infer_state, layer_weight)
        last = infer_state.last_rows()
        return self._logits(input[last], infer_state.residual[last], layer_weight)

    def token_forward(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> Tensor:
        assert infer_state.residual is not None
        self._show_logits(input, infer_state, layer_weight)
        return self._logits(input, infer_state.residual, layer_weight)

    def _show_logits(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> None:
        residual, watch_logits = infer_state.residual, infer_state.step.watch_logits
        if watch_logits is not None and residual is not None:
            watch_logits(lambda rows: self._logits(input[rows], residual[rows], layer_weight))

    def _logits(self, input: Tensor, residual: Tensor, layer_weight: OuterWeight) -> Tensor:
        x = self._final_norm(input, residual, layer_weight)
        return layer_weight.lm_head.logits(x)

    def _final_norm(self, input: Tensor, residual: Tensor, layer_weight: OuterWeight) -> Tensor:
        return layer_weight.final_norm.add_norm(input, residual)
