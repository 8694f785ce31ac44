"""The masks of a step: the tokens that the grammars of its requests allow.

They are computed while the model computes the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import to_device
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.grammar import GrammarManager, ReqGrammar


@dataclass(frozen=True, slots=True)
class ConstrainedBatch:
    """The requests of a batch that have a grammar.

    Masks are in the order of ``reqs``. The requests that Sampler samples come first.
    """

    reqs: list[InferReq]
    b_mask: Tensor  # [batch] int32: the mask with which the step itself samples the row; -1: none
    sampler_rows: Tensor  # [requests] int32, rows among the requests that Sampler samples

    @classmethod
    def of(cls, batch: list[InferReq], device: torch.device) -> ConstrainedBatch | None:
        sampler_reqs = [(row, req) for row, req in enumerate(req for req in batch if req.rules.needs_sampler)]
        sampler_reqs = [(row, req) for row, req in sampler_reqs if req.rules.has_grammar]
        plain = [row for row, req in enumerate(batch) if req.rules.has_grammar and not req.rules.needs_sampler]
        if not (plain or sampler_reqs):
            return None
        b_mask = np.full(len(batch), -1, dtype=np.int32)
        b_mask[plain] = len(sampler_reqs) + np.arange(len(plain))
        return cls(
            reqs=[req for _, req in sampler_reqs] + [batch[row] for row in plain],
            b_mask=to_device(b_mask, device),
            sampler_rows=to_device(np.array([row for row, _ in sampler_reqs], dtype=np.int32), device),
        )


class StepMasks:
    """The masks of one step. Reading them waits until they are made."""

    def __init__(self, constrained: ConstrainedBatch, get: Callable[[], Tensor], device: torch.device) -> None:
        """``get`` returns the masks, on the host."""
        self._constrained = constrained
        self._get = get
        self._device = device
        self._bitmask: Tensor | None = None

    @property
    def has_sampler_rows(self) -> bool:
        """Whether a request that the step itself does not sample has a mask."""
        return len(self._constrained.sampler_rows) > 0

    def for_step(self, rows: int) -> ops.TokenMasks:
        """The masks with which the step samples. It has ``rows`` rows, the last of them padding."""
        b_mask = self._constrained.b_mask
        if len(b_mask) < rows:
            b_mask = torch.cat((b_mask, b_mask.new_full((rows - len(b_mask),), -1)))
        return ops.TokenMasks(b_mask, self._on_device())

    def apply(self, sampler_logits: Tensor) -> None:
        """Apply them to the logits of the requests that Sampler samples."""
        rows = self._constrained.sampler_rows
        ops.mask_logits(sampler_logits, rows, self._on_device()[: len(rows)])

    def _on_device(self) -> Tensor:
        if self._bitmask is None:
            self._bitmask = self._get().to(self._device, non_blocking=True)
        return self._bitmask


class GrammarMaskBuilder:
    """Builds the grammar masks of steps, one step after the other."""

    def __init__(self, grammars: GrammarManager, device: torch.device, launches_async: bool) -> None:
        """``launches_async``: a launch returns before the device has computed the step.

        If so, the launching thread computes the masks meanwhile: it would only wait for the device. If not, masks get
        their own thread.
        """
        self._grammars = grammars
        self._device = device
        self._thread = None if launches_async else ThreadPoolExecutor(1, "masks")

    def build(self, constrained: ConstrainedBatch | None, wait_for_tokens: Callable[[], None]) -> StepMasks | None:
        """The masks of the next step; None if no grammar constrains a token of this step.

        ``wait_for_tokens`` applies the tokens of all steps in flight. It is called only if a grammar needs them. If
        launches are asynchronous, it is called after the launch of the step, when the masks are read.
        """
        if constrained is None or not any(req.is_constrained for req in constrained.reqs):
            return None
        if self._thread is None:
            return StepMasks(constrained, partial(self._make, constrained.reqs, wait_for_tokens), self._device)
        inputs = _inputs(constrained.reqs, wait_for_tokens)
        return StepMasks(constrained, self._thread.submit(self._grammars.masks, *inputs).result, self._device)

    def _make(self, reqs: list[InferReq], wait_for_tokens: Callable[[], None]) -> Tensor:
        return self._grammars.masks(*_inputs(reqs, wait_for_tokens))


def _inputs(
    reqs: list[InferReq], wait_for_tokens: Callable[[], None]
) -> tuple[list[ReqGrammar | None], list[tuple[int, ...]]]:
    """The grammars of the requests that sample a token, and the end tokens that are forbidden."""
    if any(req.is_constrained and req.is_fully_computed and req.has_token_in_flight for req in reqs):
        wait_for_tokens()
    grammars = [req.grammar if req.is_fully_computed else None for req in reqs]
    return grammars, [req.rules.unwanted_ends(req.output_len) for req in reqs]
