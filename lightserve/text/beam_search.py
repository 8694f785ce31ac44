"""Beam search on top of an engine that generates single tokens. Scores, ends and stopping follow transformers.

In each step the engine generates one token for every beam and returns the top logprobs. The prefix of a beam is in the
engine's prefix cache: a step computes one token a beam, and beams share the KV of common prefixes without a copy.

llm.py imports this module too: it needs neither torch nor a web framework.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightserve.errors import InvalidRequestError
from lightserve.messages.params import INT32_MAX, FinishReason, GenerationParams

MAX_CANDIDATES = 20  # top logprobs that the engine returns for a token
MAX_LENGTH_PENALTY = 10.0  # INT32_MAX ** 10 is far from overflowing

Candidates = Sequence[tuple[int, float]]  # the most likely next tokens and their logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """As in transformers: the score of a sequence is logprob / length ** length_penalty, end token included."""

    num_beams: int = 4
    n: int = 1  # sequences to return, the best first
    max_new_tokens: int = 16
    length_penalty: float = 1.0  # above 0 favours long sequences, below 0 short ones
    early_stopping: bool | Literal["never"] = False  # True: stop at num_beams ends; "never": when none can improve
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # they end a beam like the model's end tokens

    def __post_init__(self) -> None:
        _check_int("num_beams", self.num_beams, MAX_CANDIDATES)
        _check_int("n", self.n, self.num_beams)
        _check_int("max_new_tokens", self.max_new_tokens, INT32_MAX)
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            wanted = f"-{MAX_LENGTH_PENALTY}..{MAX_LENGTH_PENALTY}"
            raise InvalidRequestError(
                f"length_penalty must be in {wanted}, found {self.length_penalty}", "length_penalty"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            message = f'early_stopping must be true, false or "never", found {self.early_stopping!r:.100}'
            raise InvalidRequestError(message, "early_stopping")


@dataclass(frozen=True, slots=True)
class BeamResult:
    token_ids: list[int]  # including the end token, if there is one
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    logprob: float  # of all its tokens
    parent: int = 0  # index of the beam that it continues, in the step before


class BeamSearch:
    """The search for one prompt. Until it is done: generate a token for each of ``beams``, then call ``advance``."""

    def __init__(self, params: BeamParams, eos_ids: Sequence[int], room: int = INT32_MAX) -> None:
        """``room``: tokens that the context has left."""
        self.params = params
        self.is_done = False
        self._ends = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self._max_len = min(params.max_new_tokens, room)
        self._running = [_Beam((), 0.0)]  # the most likely first
        self._finished: list[BeamResult] = []  # the best first, num_beams at most
        if self.num_candidates > MAX_CANDIDATES:
            most = max(MAX_CANDIDATES - len(self._ends), 0)
            raise InvalidRequestError(f"num_beams: at most {most} with {len(self._ends)} end tokens", "num_beams")

    @property
    def beams(self) -> list[tuple[int, ...]]:
        """The sequences to continue, without the prompt."""
        return [beam.token_ids for beam in self._running]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def extensions(self) -> list[tuple[int, int]]:
        """The same after the first step: which of the last ``beams`` each of them continues, and by which token."""
        return [(beam.parent, beam.token_ids[-1]) for beam in self._running]

    @property
    def num_candidates(self) -> int:
        """Top tokens needed for a beam: num_beams of them must not end it."""
        return self.params.num_beams + len(self._ends)

    def best(self) -> list[BeamResult]:
        """The ``n`` best sequences; fewer only where the vocabulary has fewer tokens than there are beams."""
        return self._finished[: self.params.n]

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Extend by one token. ``candidates`` has num_candidates top tokens for each of ``beams``."""
        num_beams = self.params.num_beams
        ranked = self._ranked(candidates)
        is_last = len(ranked[0].token_ids) == self._max_len
        # an end below the num_beams most likely is dropped: lower ranks only replace ended beams
        self._finish([beam for beam in ranked[:num_beams] if is_last or self._has_ended(beam)])
        continuing = [] if is_last else [beam for beam in ranked if not self._has_ended(beam)]
        self._running = continuing[:num_beams]
        self.is_done = not self._running or self._is_settled(self._running[0])

    def _ranked(self, candidates: Sequence[Candidates]) -> list[_Beam]:
        """All continuations that can matter, the most likely first."""
        running = self._running
        pairs = enumerate(zip(running, candidates, strict=True))
        continued = [(beam.logprob + logprob, at, token) for at, (beam, top) in pairs for token, logprob in top]
        continued.sort(key=lambda continuation: continuation[0], reverse=True)
        needed = self.params.num_beams * (1 + len(self._ends))  # every beam may end with each of the end tokens
        return [_Beam((*running[at].token_ids, token), logprob, at) for logprob, at, token in continued[:needed]]

    def _has_ended(self, beam: _Beam) -> bool:
        return beam.token_ids[-1] in self._ends

    def _finish(self, beams: list[_Beam]) -> None:
        for beam in beams:
            reason = FinishReason.STOP if self._has_ended(beam) else FinishReason.LENGTH
            score = self._score(beam.logprob, len(beam.token_ids))
            self._finished.append(BeamResult(list(beam.token_ids), score, reason))
        self._finished.sort(key=lambda result: result.score, reverse=True)
        del self._finished[self.params.num_beams :]

    def _is_settled(self, best: _Beam) -> bool:
        """Whether the running beams cannot change the result, by the rule of early_stopping."""
        params = self.params
        if len(self._finished) < params.num_beams:
            return False
        if params.early_stopping is True or params.num_beams == 1:  # one beam is a greedy search
            return True
        is_long_best = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_len if is_long_best else len(best.token_ids)
        return self._score(best.logprob, length) <= self._finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self.params.length_penalty)


class BeamBatch:
    """The searches of several prompts, which advance together."""

    def __init__(self, prompts: Sequence[list[int]], searches: Sequence[BeamSearch]) -> None:
        self._searches = list(zip(prompts, searches, strict=True))
        self.is_at_start = True
        self.extensions: list[tuple[int, int]] = []  # for each of ``sequences``: index of the one before it, its token

    @property
    def params(self) -> GenerationParams:
        """The parameters of a step's requests."""
        wanted = max(search.num_candidates for _, search in self._searches)
        return GenerationParams.of(max_new_tokens=1, temperature=0, logprobs=wanted)

    def sequences(self) -> list[list[int]]:
        """The sequences that need one token each; empty when all searches are done."""
        return [[*prompt, *beam] for prompt, search in self._unfinished() for beam in search.beams]

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """``candidates`` of each of ``sequences``."""
        self.is_at_start, self.extensions = False, []
        begin = 0
        for _, search in self._unfinished():
            end = begin + search.num_running
            search.advance(candidates[begin:end])
            if not search.is_done:
                self.extensions += [(begin + at, token) for at, token in search.extensions]
            begin = end

    def best(self) -> list[list[BeamResult]]:
        """For each prompt."""
        return [search.best() for _, search in self._searches]

    def _unfinished(self) -> list[tuple[list[int], BeamSearch]]:
        return [(prompt, search) for prompt, search in self._searches if not search.is_done]


def _check_int(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidRequestError(f"{name} must be an integer in 1..{most}, found {value!r:.100}", name)
