"""transformers, for a comparison: its greedy text and its logits, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightserve.errors import LightserveError, ModelFilesError
from lightserve.model_files.source import ModelSource
from lightserve.tools.oracle import load_transformers


class Reference:
    def __init__(self, source: ModelSource, device: torch.device) -> None:
        try:
            self._model: Any = load_transformers(source).to(device)
        except LightserveError:
            raise
        except Exception as error:  # transformers and the folder's code may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelFilesError(f"{source.path}: transformers cannot load it to compare with ({reason})") from error
        self._device = device

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of every token, ``[tokens, vocab]``."""
        logits: Tensor = self._model(self._tensor(ids)).logits[0]
        return logits.float().cpu()

    @torch.inference_mode()
    def greedy_ids(self, ids: Sequence[int], new_tokens: int) -> list[int]:
        tensor = self._tensor(ids)
        out = self._model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=new_tokens,
            min_new_tokens=None,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        new_ids: list[int] = out[0, len(ids) :].tolist()
        return new_ids

    def perplexity(self, windows: Sequence[list[int]]) -> float:
        """Of all tokens but the first of each window."""
        losses = [cross_entropy(self.logits(ids)[:-1], torch.tensor(ids[1:]), reduction="sum") for ids in windows]
        return math.exp(float(sum(losses)) / sum(len(ids) - 1 for ids in windows))

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self._device)
