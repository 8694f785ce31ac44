"""The two halves of a model of transformers: its layers, and the head that computes logits from hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Head:
    """Runs the layers without the head, and the head without the layers.

    The head may be more than a linear: a scale, a softcap. So the whole model runs for the logits of given hidden
    states, with the result of its layers replaced.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        base = model.base_model  # the model itself, if its class names a part that it does not have
        self.decoder = model.model if base is model else base
        self._forward = self.decoder.forward
        self._output_class: Any = None  # what the layers return

    def decode(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The hidden states of all tokens after the final norm, ``[tokens, hidden]``."""
        out = self._forward(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention_mask=None,
            use_cache=False,
            return_dict=True,
        )
        self._output_class = type(out)
        states: Tensor = out.last_hidden_state[0]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """``[rows, vocab]`` of hidden states ``[rows, hidden]``."""
        self.decoder.forward = lambda *_, **__: self._output_class(last_hidden_state=states[None])
        try:
            ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self.decoder.forward = self._forward
        return logits
