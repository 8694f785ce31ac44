"""How likely the tokens of prompts are, for the requests that ask. Never more than a piece of the logits is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import ToHost, to_device
from lightserve.io_struct import PromptLogprobs

PIECE = 2**25  # logits at once: 134 MB in float32, and still enough rows for a matmul that the weights do not dominate

LogitsOf = Callable[[Tensor], Tensor]  # [rows] int64 of the step's tokens -> [rows, vocab]
Scores = tuple[Tensor, Tensor, Tensor, Tensor]  # logprobs, ranks, top ids and their logprobs, as in PromptLogprobs


class StepScores:
    """What a step tells of prompts: for each of ``rows`` how likely ``targets``, the tokens that follow, were."""

    def __init__(self, rows: Sequence[int], targets: Sequence[int], k: int, device: torch.device) -> None:
        self._rows = to_device(np.array(rows, dtype=np.int64), device)
        self._targets = to_device(np.array(targets, dtype=np.int64), device)
        self._k = k
        self._to_host: ToHost | None = None

    def compute(self, logits_of: LogitsOf, vocab: int) -> None:
        """While the step runs; the results are on their way to the host then."""
        count = max(PIECE // vocab, 1)
        k = min(self._k, vocab)
        pieces = [
            scores_of(logits_of(rows), targets, k)
            for rows, targets in zip(self._rows.split(count), self._targets.split(count), strict=True)  # type: ignore[no-untyped-call]
        ]
        self._to_host = ToHost(*(torch.cat(column) for column in zip(*pieces, strict=True)))

    def arrays(self) -> list[np.ndarray]:
        """Waits for them."""
        assert self._to_host is not None
        return [tensor.numpy() for tensor in self._to_host.tensors()]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Those tokens of a prompt that one step tells of."""

    scores: StepScores
    rows: slice


def scores_of(logits: Tensor, targets: Tensor, k: int) -> Scores:
    """No bit depends on the other rows: of log_softmax that holds, of logsumexp it does not."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    ranks = (logits > logits.gather(1, targets[:, None])).sum(-1, dtype=torch.int32) + 1
    ids = logits.topk(k).indices
    return logprobs.gather(1, targets[:, None])[:, 0], ranks, ids.int(), logprobs.gather(1, ids)


def joined(parts: Sequence[PromptPart], k: int) -> PromptLogprobs:
    """The whole prompt's. Of the likeliest tokens a step may have told more than this request's ``k``."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for part in parts:
        logprobs, ranks, top_ids, top_logprobs = (array[part.rows] for array in part.scores.arrays())
        for column, array in zip(columns, (logprobs, ranks, top_ids[:, :k], top_logprobs[:, :k]), strict=True):
            column.append(array)
    return PromptLogprobs(*(b"".join(array.tobytes() for array in column) for column in columns))
