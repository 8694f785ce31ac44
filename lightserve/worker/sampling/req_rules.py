"""The rules of one request's sampling parameters, prepared once for all of its steps."""

from __future__ import annotations

import math
from collections import defaultdict
from enum import IntEnum

import numpy as np

from lightserve.messages.int_arrays import Int32Array
from lightserve.messages.params import SamplingParams, StoppingParams

MAX_DECAY = 1e20  # end tokens are raised by at most this many times their logit; a temperature may divide it by 1e-5
BadWordEnds = dict[int, list[tuple[list[int], int]]]


class Filters(IntEnum):
    """How a row that is sampled at random is filtered. In this order, the rows of either filter are adjacent."""

    TYPICAL = 0
    BOTH = 1
    TOP = 2  # top-k, top-p or min-p
    NONE = 3


class ReqRules:
    __slots__ = (
        "_bad_word_ends",
        "_ends",
        "_ends_by_grammar",
        "_eos_ids",
        "_length_decay",
        "_min_new_tokens",
        "_ngrams",
        "allowed_ids",
        "bias",
        "bias_ids",
        "filters",
        "first_ids",
        "has_grammar",
        "needs_sampler",
    )

    def __init__(self, sampling: SamplingParams, stopping: StoppingParams, eos_ids: tuple[int, ...]) -> None:
        bias = {**sampling.logit_bias, **{word[0]: -np.inf for word in sampling.bad_words_ids if len(word) == 1}}
        self.allowed_ids = np.array(sampling.allowed_token_ids or (), dtype=np.int64)  # empty: all
        self.first_ids = np.array(sampling.first_allowed_token_ids or (), dtype=np.int64)  # of the first token
        self.bias_ids = np.array(list(bias), dtype=np.int64)  # each once
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self.has_grammar = sampling.grammar is not None
        self._ends_by_grammar = sampling.grammar is not None and sampling.grammar.kind != "prefix"
        self._min_new_tokens = stopping.min_new_tokens
        self._ends = [*eos_ids, *stopping.stop_token_ids]
        self._eos_ids = eos_ids if stopping.ignore_eos else ()
        self._bad_word_ends = _bad_word_ends(sampling)
        self._ngrams = NgramBans(sampling.no_repeat_ngram_size) if sampling.no_repeat_ngram_size else None
        self._length_decay = None if stopping.ignore_eos else sampling.exponential_decay_length_penalty
        self.filters = None if sampling.is_greedy else _filters(sampling)  # None: greedy
        self.needs_sampler = bool(  # other rules than temperature and grammar: the step itself cannot sample it
            self.allowed_ids.size
            or self.first_ids.size
            or self.bias_ids.size
            or sampling.thinking is not None
            or self.may_forbid
            or self.has_length_decay
            or sampling.has_penalty
            or sampling.watermark
            or self.filters not in (None, Filters.NONE)
            or (sampling.processed_logprobs and sampling.logprobs is not None)
        )

    @property
    def may_forbid(self) -> bool:
        """Whether ``forbidden_after`` can ever return a token."""
        return self.forbid_by_tokens or (self._min_new_tokens > 0 and not self._ends_by_grammar)

    @property
    def forbid_by_tokens(self) -> bool:
        """Whether ``forbidden_after`` depends on the tokens so far, and not only on their number."""
        return bool(self._bad_word_ends) or self._ngrams is not None

    @property
    def has_length_decay(self) -> bool:
        return self._length_decay is not None

    def length_decay_at(self, output_len: int) -> float:
        """The logits of end tokens are raised by this many times their absolute value."""
        start, factor = self._length_decay or (0, 1.0)
        late = max(output_len - start, 0)
        return min(math.expm1(min(late * math.log(factor), 100.0)), MAX_DECAY)

    def forbidden_after(self, token_ids: Int32Array, output_len: int) -> list[int]:
        """The tokens that may not follow: early ends, and the last token of a bad word or of a repeated n-gram."""
        candidates = self._bad_word_ends.get(int(token_ids[-1]), ())
        forbidden = [last for head, last in candidates if np.array_equal(token_ids[-len(head) :], head)]
        if self._ngrams is not None:
            forbidden += self._ngrams.banned_after(token_ids)
        is_too_early = output_len < self._min_new_tokens and not self._ends_by_grammar
        return self._ends + forbidden if is_too_early else forbidden

    def forget_after(self, length: int) -> None:
        """The last call of ``forbidden_after`` had drafts after so many tokens."""
        if self._ngrams is not None:
            self._ngrams.forget_after(length)

    def permits(self, token_id: int, token_ids: Int32Array) -> bool:
        """Whether ``token_id`` may follow ``token_ids``, the last of which is output. Early ends are permitted."""
        if not self.needs_sampler:
            return True
        if self.allowed_ids.size and token_id not in self.allowed_ids:
            return False
        is_banned = np.isneginf(self.bias[self.bias_ids == token_id]).any()
        return not is_banned and token_id not in self.forbidden_after(token_ids, self._min_new_tokens)

    def unwanted_ends(self, output_len: int) -> tuple[int, ...]:
        """End tokens that are forbidden although the grammar allows them, unless it allows no other token."""
        return tuple(self._ends) if output_len < self._min_new_tokens else self._eos_ids


class NgramBans:
    """The tokens that would complete an n-gram that a request has already, as transformers bans them.

    The tokens so far are kept in an array that grows with them: a step searches 100,000 in 0.1 ms.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ids = np.empty(0, dtype=np.int32)
        self._len = 0

    def banned_after(self, token_ids: Int32Array) -> list[int]:
        """``token_ids``: those of the previous call, and more."""
        self._read(token_ids)
        ids, head = self._ids[: self._len], self._size - 1
        if len(ids) < self._size:
            return []
        if head == 0:
            return _unique(ids)
        starts = np.flatnonzero(ids[head - 1 : -1] == ids[-1])  # n-grams whose head may be the last tokens
        for back in range(2, head + 1):
            starts = starts[ids[starts + head - back] == ids[-back]]
        return _unique(ids[starts + head])

    def forget_after(self, length: int) -> None:
        """The tokens after so many may be others in the next call."""
        self._len = min(self._len, length)

    def _read(self, token_ids: Int32Array) -> None:
        if len(token_ids) > len(self._ids):
            grown = np.empty(2 * len(token_ids), dtype=np.int32)
            grown[: self._len] = self._ids[: self._len]
            self._ids = grown
        self._ids[self._len : len(token_ids)] = token_ids[self._len :]
        self._len = len(token_ids)


def _unique(ids: np.ndarray) -> list[int]:
    unique: list[int] = np.unique(ids).tolist()
    return unique


def _bad_word_ends(sampling: SamplingParams) -> BadWordEnds:
    """Bad words of several tokens, each as its head and its last token.

    The key is the last token of the head, so that a step compares only the few words that may be complete.
    """
    ends: BadWordEnds = defaultdict(list)
    for *head, last in sampling.bad_words_ids:
        if head:
            ends[head[-1]].append((head, last))
    return ends


def _filters(sampling: SamplingParams) -> Filters:
    has_top = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if sampling.typical_p < 1:
        return Filters.BOTH if has_top else Filters.TYPICAL
    return Filters.TOP if has_top else Filters.NONE
