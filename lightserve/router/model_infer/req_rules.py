"""What a request's sampling parameters come to, laid out once for all of its steps."""

from __future__ import annotations

from collections import defaultdict
from enum import IntEnum

import numpy as np

from lightserve.io_struct import SamplingParams

Completions = dict[int, list[tuple[list[int], int]]]


class Cuts(IntEnum):
    """What is cut from a drawn row; in this order the rows of either cut are neighbours."""

    TYPICAL = 0
    BOTH = 1
    TOP = 2  # top-k, top-p or min-p
    NONE = 3


class ReqRules:
    __slots__ = ("_completions", "_ends", "_min_new_tokens", "allowed_ids", "bias", "bias_ids", "cuts", "is_plain")

    def __init__(self, sampling: SamplingParams, eos_ids: tuple[int, ...]) -> None:
        bias = {**sampling.logit_bias, **{word[0]: -np.inf for word in sampling.bad_words_ids if len(word) == 1}}
        self.allowed_ids = np.array(sampling.allowed_token_ids or (), dtype=np.int64)  # empty: all
        self.bias_ids = np.array(list(bias), dtype=np.int64)  # each once
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self._min_new_tokens = sampling.min_new_tokens
        self._ends = [*eos_ids, *sampling.stop_token_ids]
        self._completions = _completions(sampling)
        self.cuts = None if sampling.is_greedy else _cuts(sampling)  # None: not drawn
        self.is_plain = not (
            self.allowed_ids.size
            or self.bias_ids.size
            or self.depend_on_place
            or sampling.has_penalty
            or sampling.logprobs is not None
        )

    @property
    def depend_on_place(self) -> bool:
        """Whether ``forbidden_after`` can ever forbid anything."""
        return bool(self._completions) or self._min_new_tokens > 0

    def forbidden_after(self, token_ids: list[int], output_len: int) -> list[int]:
        """What may not follow ``token_ids``: an end that is too early, the last token of a bad word."""
        candidates = self._completions.get(token_ids[-1], ())
        forbidden = [last for head, last in candidates if token_ids[-len(head) :] == head]
        return self._ends + forbidden if output_len < self._min_new_tokens else forbidden


def _completions(sampling: SamplingParams) -> Completions:
    """Bad words of several tokens, each as its head and its last token.

    They are found by the last token of the head, so that a step compares only those few that may be complete.
    """
    found: Completions = defaultdict(list)
    for *head, last in sampling.bad_words_ids:
        if head:
            found[head[-1]].append((head, last))
    return found


def _cuts(sampling: SamplingParams) -> Cuts:
    is_cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if sampling.typical_p < 1:
        return Cuts.BOTH if is_cut else Cuts.TYPICAL
    return Cuts.TOP if is_cut else Cuts.NONE
