"""What the grammars of a step's requests allow: worked out while the model computes the logits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.worker.infer_batch import InferReq
from lightserve.worker.sampling.grammar import Grammars
from lightserve.worker.sampling.plan import Constrained


class StepMasks:
    """The masks of one step; who asks for them waits."""

    def __init__(self, constrained: Constrained, find: Callable[[], Tensor], device: torch.device) -> None:
        """``find`` gives the masks, on the host."""
        self._constrained = constrained
        self._find = find
        self._device = device
        self._bitmask: Tensor | None = None

    @property
    def has_special(self) -> bool:
        """Whether any is of a request whose token the step itself does not choose."""
        return len(self._constrained.special_rows) > 0

    def for_choosing(self, rows: int) -> ops.TokenMasks:
        """Of the first rows of ``rows``, the rest being padding."""
        b_mask = self._constrained.b_mask
        if len(b_mask) < rows:
            b_mask = torch.cat((b_mask, b_mask.new_full((rows - len(b_mask),), -1)))
        return ops.TokenMasks(b_mask, self._on_device())

    def apply(self, special_logits: Tensor) -> None:
        """To the logits of a step's special requests."""
        rows = self._constrained.special_rows
        ops.mask_logits(special_logits, rows, self._on_device()[: len(rows)])

    def _on_device(self) -> Tensor:
        if self._bitmask is None:
            self._bitmask = self._find().to(self._device, non_blocking=True)
        return self._bitmask


class MaskMaker:
    """Makes the masks of one step after the other."""

    def __init__(self, grammars: Grammars, device: torch.device, launches_async: bool) -> None:
        """``launches_async``: a launch returns before the work is done. Else masks have a thread of their own.

        To hand them from thread to thread costs more than what it saves where the asking thread would wait anyway.
        """
        self._grammars = grammars
        self._device = device
        self._thread = None if launches_async else ThreadPoolExecutor(1, "masks")

    def begin(self, constrained: Constrained, learn_tokens: Callable[[], object]) -> StepMasks:
        """``learn_tokens`` waits until the host knows the tokens of the steps before; it may not be called."""
        make = partial(self._make, constrained.reqs, learn_tokens)
        find = make if self._thread is None else self._thread.submit(make).result
        return StepMasks(constrained, find, self._device)

    def _make(self, reqs: list[InferReq], learn_tokens: Callable[[], object]) -> Tensor:
        if any(req.obeys_grammar and req.is_due and not req.is_known for req in reqs):
            learn_tokens()
        return self._grammars.masks(
            [req.grammar if req.is_due else None for req in reqs],
            [req.rules.unwanted_ends(req.output_len) for req in reqs],
        )
