"""What a request's sampling parameters come to, laid out once for all of its steps."""

from __future__ import annotations

import math
from collections import defaultdict
from enum import IntEnum

import numpy as np

from lightserve.io_struct import SamplingParams, StoppingParams
from lightserve.worker.sampling.ngrams import NgramBans

MAX_DECAY = 1e20  # what an end token is raised by at most, in times its logit; a temperature may divide that by 1e-5
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
        "_decay",
        "_ends",
        "_ends_by_grammar",
        "_eos_ids",
        "_min_new_tokens",
        "_ngrams",
        "allowed_ids",
        "bias",
        "bias_ids",
        "cuts",
        "first_ids",
        "has_grammar",
        "is_special",
    )

    def __init__(self, sampling: SamplingParams, stopping: StoppingParams, eos_ids: tuple[int, ...]) -> None:
        bias = {**sampling.logit_bias, **{word[0]: -np.inf for word in sampling.bad_words_ids if len(word) == 1}}
        self.allowed_ids = np.array(sampling.allowed_token_ids or (), dtype=np.int64)  # empty: all
        self.first_ids = np.array(sampling.first_allowed_token_ids or (), dtype=np.int64)  # likewise, at the beginning
        self.bias_ids = np.array(list(bias), dtype=np.int64)  # each once
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self.has_grammar = sampling.grammar is not None
        self._ends_by_grammar = sampling.grammar is not None and sampling.grammar.kind != "prefix"
        self._min_new_tokens = stopping.min_new_tokens
        self._ends = [*eos_ids, *stopping.stop_token_ids]
        self._eos_ids = eos_ids if stopping.ignore_eos else ()
        self._completions = _completions(sampling)
        self._ngrams = NgramBans(sampling.no_repeat_ngram_size) if sampling.no_repeat_ngram_size else None
        self._decay = None if stopping.ignore_eos else sampling.exponential_decay_length_penalty
        self.cuts = None if sampling.is_greedy else _cuts(sampling)  # None: not drawn
        self.is_special = bool(  # temperature, logits and a grammar do not say it all
            self.allowed_ids.size
            or self.first_ids.size
            or self.bias_ids.size
            or sampling.thinking is not None
            or self.depend_on_place
            or self.has_decay
            or sampling.has_penalty
            or sampling.watermark
            or self.cuts not in (None, Cuts.NONE)
        )

    @property
    def depend_on_place(self) -> bool:
        """Whether ``forbidden_after`` can ever forbid anything."""
        return self.depend_on_tokens or (self._min_new_tokens > 0 and not self._ends_by_grammar)

    @property
    def depend_on_tokens(self) -> bool:
        """Whether what it forbids depends on which tokens came before, and not on their number alone."""
        return bool(self._completions) or self._ngrams is not None

    @property
    def has_decay(self) -> bool:
        return self._decay is not None

    def decay_at(self, output_len: int) -> float:
        """Times their absolute value that the logits of end tokens are raised by."""
        start, factor = self._decay or (0, 1.0)
        late = max(output_len - start, 0)
        return min(math.expm1(min(late * math.log(factor), 100.0)), MAX_DECAY)

    def forbidden_after(self, token_ids: list[int], output_len: int) -> list[int]:
        """What may not follow ``token_ids``: an end too early, the last token of a bad word or of a repeated run."""
        candidates = self._completions.get(token_ids[-1], ())
        forbidden = [last for head, last in candidates if token_ids[-len(head) :] == head]
        if self._ngrams is not None:
            forbidden += self._ngrams.banned_after(token_ids)
        is_too_early = output_len < self._min_new_tokens and not self._ends_by_grammar
        return self._ends + forbidden if is_too_early else forbidden

    def permits(self, token_id: int, token_ids: list[int], is_first: bool) -> bool:
        """Whether it may follow ``token_ids``. Only a row of which nothing was left has a token that may not."""
        if not self.is_special:
            return True
        limits = (self.allowed_ids, self.first_ids if is_first else self.allowed_ids)
        if any(ids.size and token_id not in ids for ids in limits):
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
