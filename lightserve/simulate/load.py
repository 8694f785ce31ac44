"""The requests that clients send to a simulated server, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import NO_INT32, Int32Array, int32s

VOCAB_SIZE = 32_000
FIRST_ID = 2  # smallest id in prompts: the simulated model generates the ids below
URGENT = -1  # priority of urgent requests; the others have 0

Lengths = npt.NDArray[np.int64]
SampleLengths = Callable[[np.random.Generator, int], Lengths]


class SimulatedRequest(NamedTuple):
    prompt_ids: Int32Array
    output_len: int  # the model returns EOS after so many tokens
    priority: int


@dataclass(frozen=True, slots=True)
class Load:
    """``count`` requests: ``rate`` a second at random times, or one after another from ``streams`` clients."""

    prompt_len: SampleLengths
    output_len: SampleLengths
    count: int = 1000
    rate: float | None = None
    streams: int = 64  # used without a rate
    max_new_tokens: int = 2048  # limit of every request; outputs are shorter
    ends_by_length: bool = False  # a request's own limit is its output; else the model ends it
    num_prefixes: int = 0  # system prompts, all equally likely
    prefix_len: int = 0
    urgent: float = 0.0  # share of the requests that are urgent
    turns: int = 1  # of a session: a prompt is that of the last turn, an answer, and tokens of its own
    think_s: float = 0.0  # from one turn to the next, on average; half of it at least
    seed: int = 0

    def requests(self) -> Iterator[SimulatedRequest]:
        """Generated one by one, to save memory. Two sessions share at most a system prompt."""
        rng = np.random.default_rng(self.seed)
        text = rng.integers(FIRST_ID, VOCAB_SIZE, 1 << 17).astype(np.int32)
        prefixes: list[Int32Array] = [
            rng.integers(FIRST_ID, VOCAB_SIZE, self.prefix_len).astype(np.int32) for _ in range(self.num_prefixes)
        ]
        prefixes = prefixes or [NO_INT32]
        rows = zip(
            self.prompt_len(rng, self.count).tolist(),
            np.minimum(self.output_len(rng, self.count), self.max_new_tokens).tolist(),
            rng.integers(0, len(text) // 2, self.count).tolist(),
            rng.integers(0, len(prefixes), self.count).tolist(),
            (rng.random(self.count) < self.urgent).tolist(),
            strict=True,
        )
        sessions = self._sessions()[0].tolist()
        histories: dict[int, tuple[int, Int32Array]] = {}  # by session: turns left, tokens so far
        for number, (prompt_len, output_len, at, prefix, is_urgent) in enumerate(rows):
            suffix = text[at : at + prompt_len - 1]
            left, before = histories.pop(sessions[number], (self.turns, prefixes[prefix]))
            prompt_ids = np.concatenate((before, int32s([VOCAB_SIZE + number]), suffix))
            if left > 1:
                answer = text[-output_len:]  # not the tokens that the model generates: a client edits or cuts them
                histories[sessions[number]] = left - 1, np.concatenate((prompt_ids, answer))
            yield SimulatedRequest(prompt_ids, output_len, URGENT if is_urgent else 0)

    def arrivals(self) -> Iterator[float]:
        """Arrival times. With streams, only those of the first request of each stream."""
        if self.rate is None:
            return itertools.repeat(0.0, min(self.streams, self.count))
        times: Iterator[float] = iter(self._sessions()[1].tolist())
        return times

    def _sessions(self) -> tuple[Lengths, npt.NDArray[np.float64]]:
        """The session and the arrival time of every request, in the order of time."""
        rng = np.random.default_rng(self.seed + 1)
        count = -(-self.count // self.turns)
        begins_s = np.cumsum(rng.exponential(self.turns / (self.rate or 1.0), count))
        if self.turns == 1:
            return np.arange(count), begins_s
        gaps_s = self.think_s * (0.5 + rng.exponential(0.5, (count, self.turns)))
        gaps_s[:, 0] = begins_s
        times_s = np.cumsum(gaps_s, axis=1).ravel()
        order = np.argsort(times_s)[: self.count]
        return order // self.turns, times_s[order]


def fixed(length: int) -> SampleLengths:
    return partial(_fixed, length)


def lognormal(median: float, sigma: float, most: int) -> SampleLengths:
    return partial(_lognormal, median, sigma, most)


def mixed(common: SampleLengths, rare: SampleLengths, share: float) -> SampleLengths:
    """``share`` of the lengths are sampled from ``rare``."""
    return partial(_mixed, common, rare, share)


def _fixed(length: int, rng: np.random.Generator, count: int) -> Lengths:
    return np.full(count, length)


def _lognormal(median: float, sigma: float, most: int, rng: np.random.Generator, count: int) -> Lengths:
    return np.clip(rng.lognormal(np.log(median), sigma, count), 1, most).astype(np.int64)


def _mixed(common: SampleLengths, rare: SampleLengths, share: float, rng: np.random.Generator, count: int) -> Lengths:
    return np.where(rng.random(count) < share, rare(rng, count), common(rng, count))


CHAT_PROMPT = lognormal(90, 1.3, 4000)  # like ShareGPT: 200 tokens on average
CHAT_OUTPUT = lognormal(120, 1.0, 2000)  # 195 on average
LOADS = {
    "sharegpt": Load(CHAT_PROMPT, CHAT_OUTPUT),
    "fixed": Load(fixed(1024), fixed(256), max_new_tokens=256),
    "long": Load(mixed(CHAT_PROMPT, lognormal(12_000, 0.4, 30_000), 0.05), CHAT_OUTPUT),
    "shared": Load(CHAT_PROMPT, lognormal(60, 0.8, 500), num_prefixes=64, prefix_len=2048),
    "sessions": Load(CHAT_PROMPT, CHAT_OUTPUT, turns=6, think_s=20.0),
}
