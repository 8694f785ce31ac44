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
    __slots__ = (
        "_completions",
        "_ends",
        "_eos_ids",
        "_min_new_tokens",
        "allowed_ids",
        "bias",
        "bias_ids",
        "cuts",
        "has_grammar",
        "is_special",
    )

    def __init__(self, sampling: SamplingParams, eos_ids: tuple[int, ...]) -> None:
        bias = {**sampling.logit_bias, **{word[0]: -np.inf for word in sampling.bad_words_ids if len(word) == 1}}
        self.allowed_ids = np.array(sampling.allowed_token_ids or (), dtype=np.int64)  # empty: all
        self.bias_ids = np.array(list(bias), dtype=np.int64)  # each once
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self.has_grammar = sampling.grammar is not None
        self._min_new_tokens = sampling.min_new_tokens
        self._ends = [*eos_ids, *sampling.stop_token_ids]
        self._eos_ids = eos_ids if sampling.ignore_eos else ()
        self._completions = _completions(sampling)
        self.cuts = None if sampling.is_greedy else _cuts(sampling)  # None: not drawn
        self.is_special = bool(  # temperature and logits do not say it all
            self.allowed_ids.size
            or self.bias_ids.size
            or self.has_grammar
            or self.depend_on_place
            or sampling.has_penalty
            or self.cuts not in (None, Cuts.NONE)
        )

    @property
    def depend_on_place(self) -> bool:
        """Whether ``forbidden_after`` can ever forbid anything."""
        return self.depend_on_tokens or (self._min_new_tokens > 0 and not self.has_grammar)

    @property
    def depend_on_tokens(self) -> bool:
        """Whether what it forbids depends on which tokens came before, and not on their number alone."""
        return bool(self._completions)

    def forbidden_after(self, token_ids: list[int], output_len: int) -> list[int]:
        """What may not follow ``token_ids``: an end that is too early, the last token of a bad word."""
        candidates = self._completions.get(token_ids[-1], ())
        forbidden = [last for head, last in candidates if token_ids[-len(head) :] == head]
        is_too_early = output_len < self._min_new_tokens and not self.has_grammar
        return self._ends + forbidden if is_too_early else forbidden

    def permits(self, token_id: int, token_ids: list[int]) -> bool:
        """Whether it may follow ``token_ids``. Only a row of which nothing was left has a token that may not."""
        if self.allowed_ids.size and token_id not in self.allowed_ids:
            return False
        is_banned = np.isneginf(self.bias[self.bias_ids == token_id]).any()
        return not is_banned and token_id not in self.forbidden_after(token_ids, self._min_new_tokens)

    def unwanted_ends(self, output_len: int) -> tuple[int, ...]:
        """What may not end an answer that a grammar would let end, unless it allows nothing else."""
        return tuple(self._ends) if output_len < self._min_new_tokens else self._eos_ids


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
