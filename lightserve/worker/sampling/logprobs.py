"""Log-probabilities of sampled tokens and of prompts, for the requests that want them.

They come from the unmodified logits, before rules, temperature and filters, unless a request wants those after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import AsyncCopy, copy_to_host, to_device
from lightserve.messages.int_arrays import Int32Array
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import PromptLogprobs

PIECE = 2**25  # logits at once: 134 MB in float32, and still enough rows for a matmul that the weights do not dominate

LogitsOf = Callable[[Tensor], Tensor]  # [rows] int64 of the step's tokens -> [rows, vocab]
GatherLogits = Callable[[Tensor], Tensor]  # [rows, tokens of a rank] -> [rows, vocab]
TopLogprobs = tuple[float | None, list[tuple[int, float]] | None]  # of the sampled token, and the most likely tokens
NO_LOGPROBS: TopLogprobs = (None, None)
RankedLogprobs = tuple[Tensor, ...]  # logprobs, ranks, top ids, their logprobs, those of candidates: see PromptLogprobs
NO_CANDIDATE = -1


class SampledLogprobs:
    """The logprobs of a step's sampled tokens, on their way to the host.

    ``counts`` has, by row, how many of the most likely tokens a request wants. Other rows get nothing. ``logits`` has
    the rows in their order.
    """

    def __init__(self, tokens: Tensor, logits: Tensor, counts: dict[int, int]) -> None:
        self._counts = counts
        rows = to_device(np.array(list(counts), dtype=np.int64), logits.device)
        logprobs = logits.float().log_softmax(-1)
        sampled = logprobs.gather(1, tokens[rows, None].clamp(min=0))[:, 0]
        values, token_ids = logprobs.topk(min(max(counts.values()), logprobs.shape[1]))
        self._to_host = copy_to_host(sampled, values, token_ids)

    def by_row(self) -> dict[int, TopLogprobs]:
        """Wait for them."""
        sampled, values, token_ids = (tensor.tolist() for tensor in self._to_host.tensors())
        tops = [
            list(zip(ids[:count], row[:count], strict=True))
            for ids, row, count in zip(token_ids, values, self._counts.values(), strict=True)
        ]
        return dict(zip(self._counts, zip(sampled, tops, strict=True), strict=True))


class StepPromptLogprobs:
    """The logprobs of prompt tokens that a step computes: of ``targets``, the tokens that follow ``rows``."""

    def __init__(
        self,
        rows: Sequence[int],
        targets: Sequence[int],
        k: int,
        device: torch.device,
        candidates: Int32Array,
    ) -> None:
        """``candidates``: of each row, ``[rows, count]``."""
        self._candidates = to_device(candidates, device)
        self._rows = to_device(np.array(rows, dtype=np.int64), device)
        self._targets = to_device(np.array(targets, dtype=np.int64), device)
        self._k = k
        self._to_host: AsyncCopy | None = None

    def compute(self, logits_of: LogitsOf, vocab: int) -> None:
        """Called while the step runs. Never more than a piece of the logits exists at once."""
        count = max(PIECE // vocab, 1)
        k = min(self._k, vocab)
        pieces = [
            ranked_logprobs(logits_of(rows), targets, k, candidates)
            for rows, targets, candidates in zip(
                *(column.split(count) for column in (self._rows, self._targets, self._candidates)),  # type: ignore[no-untyped-call]
                strict=True,
            )
        ]
        self._to_host = copy_to_host(*(torch.cat(column) for column in zip(*pieces, strict=True)))

    def arrays(self) -> list[np.ndarray]:
        """Wait for them."""
        assert self._to_host is not None
        return [tensor.numpy() for tensor in self._to_host.tensors()]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The tokens of one prompt whose logprobs a step computes."""

    step: StepPromptLogprobs
    rows: slice


def ranked_logprobs(logits: Tensor, targets: Tensor, k: int, candidates: Tensor | None = None) -> RankedLogprobs:
    """No bit of a row depends on the other rows: log_softmax keeps that, logsumexp does not."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    ranks = (logits > logits.gather(1, targets[:, None])).sum(-1, dtype=torch.int32) + 1
    ids = logits.topk(k).indices
    columns = logprobs.gather(1, targets[:, None])[:, 0], ranks, ids.int(), logprobs.gather(1, ids)
    if candidates is None:
        return columns
    scores = logprobs.gather(1, candidates.long().clamp(min=0))
    return *columns, scores.masked_fill(candidates == NO_CANDIDATE, -torch.inf)


def join_chunks(chunks: Sequence[PromptChunk], sampling: SamplingParams) -> PromptLogprobs:
    """The logprobs of a whole prompt. A step may have computed more columns than this request wants."""
    k, wanted = sampling.prompt_logprobs or 0, sampling.prompt_candidates
    widths = k, k, 0 if wanted is None else wanted.count
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    for chunk in chunks:
        logprobs, ranks, *tables = (array[chunk.rows] for array in chunk.step.arrays())
        cut = [table[:, :width] for table, width in zip(tables, widths, strict=True)]
        for column, array in zip(columns, (logprobs, ranks, *cut), strict=True):
            column.append(array)
    return PromptLogprobs(*(b"".join(array.tobytes() for array in column) for column in columns))
