"""The prompts of a load test: random words, shared prefixes, ShareGPT conversations, or lines of a file.

No prompt is sent twice, neither in a run nor in a sweep, as far as a file has enough of them: a prefix cache would
answer the second one, and the figures would be those of the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightserve.model_files.tokenizer.tokenizer import Tokenizer

DATASETS = ("random", "prefix", "sharegpt", "jsonl")
CHARS_PER_TOKEN = 4.0  # of English text, where no tokenizer counts
SHAREGPT_MIN_TOKENS = 4  # the limits of vLLM's benchmark
SHAREGPT_MAX_INPUT = 1024
SHAREGPT_MAX_TOTAL = 2048
# Common words. With a space before it, each is one token in SmolLM2's vocabulary, as a test checks, and in most others.
# Where one is not, the server's usage shows it.
_TEXT = """
the of and to in is was for that on with as by at from are this be or have an not were which but one all they their
time two more when other can out up who new its only some into first then could over after also may most these year
made where many work before well good part people long even because those same through day life any must does such
very still world own see men much right while here home each use high water both state off too under last might great
old back left place hand end school found side course head house form small large war early best light face called
power open number order line given city law need name white point group fact different set study show body least
room week often sure kind door church turn free behind local force important road black age table interest late whole
"""
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks for. ``fields`` go into its body."""

    output_len: int
    text: str = ""
    input_len: int = 0  # tokens, for servers that send no usage; without a tokenizer an estimate
    messages: Sequence[dict[str, Any]] = ()
    fields: dict[str, Any] = field(default_factory=dict)


class Dataset(Protocol):
    def take(self, count: int, subset: int) -> list[Prompt]:
        """``count`` prompts. Different subsets have different prompts; the same subset has the same ones."""
        ...

    def repeats(self, count: int) -> int:
        """How many of ``count`` prompts would be sent before."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts. ``range_ratio`` r: uniform between (1 - r) and (1 + r) times the length."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def sample(self, rng: np.random.Generator, length: int) -> int:
        spread = int(length * self.range_ratio)
        return max(1, int(rng.integers(length - spread, length + spread + 1)))


class RandomDataset:
    """Random words. With ``prefix_len``, prompts begin with one of ``num_prefixes`` shared texts."""

    def __init__(self, lengths: Lengths, seed: int, tokenizer: Tokenizer | None = None) -> None:
        self._lengths = lengths
        self._seed = seed
        self._tokenizer = tokenizer

    def take(self, count: int, subset: int) -> list[Prompt]:
        rng = np.random.default_rng([self._seed, subset])
        lengths = self._lengths
        prefixes = [self._text(rng, lengths.prefix_len) for _ in range(lengths.num_prefixes)]
        prompts = []
        for i in range(count):
            own_len, output_len = lengths.sample(rng, lengths.input_len), lengths.sample(rng, lengths.output_len)
            text = prefixes[i % len(prefixes)] + self._text(rng, own_len)
            prompts.append(Prompt(output_len, text, lengths.prefix_len + own_len))
        return prompts

    def repeats(self, count: int) -> int:
        return 0

    def _text(self, rng: np.random.Generator, tokens: int) -> str:
        words = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), tokens))
        text = f" {words}" if tokens else ""
        if self._tokenizer is None:
            return text
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokenizer.decode(ids[:tokens])


class FileDataset:
    """Prompts of a file in random order; each part continues where the last one ended."""

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(prompts))
        self._prompts = [prompts[i] for i in order]
        self._begin: dict[int, int] = {}
        self._taken = 0

    def take(self, count: int, subset: int) -> list[Prompt]:
        begin = self._begin.setdefault(subset, self._taken)
        self._taken = max(self._taken, begin + count)
        return [self._prompts[i % len(self._prompts)] for i in range(begin, begin + count)]

    def repeats(self, count: int) -> int:
        return max(0, count - len(self._prompts))


def read_sharegpt(path: Path, output_len: int | None, tokenizer: Tokenizer | None) -> list[Prompt]:
    """The first question of each conversation, and as many tokens as its answer has, or ``output_len``."""
    try:
        conversations = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ValueError(
            f"{path} must be a JSON list of conversations, as ShareGPT_V3_unfiltered_cleaned_split.json is"
        )
    prompts = list(_sharegpt_prompts(conversations, output_len, tokenizer))
    if not prompts:
        raise ValueError(f"{path} has no conversation with a question and an answer of usual length")
    return prompts


def _sharegpt_prompts(
    conversations: list[Any], output_len: int | None, tokenizer: Tokenizer | None
) -> Iterator[Prompt]:
    for conversation in conversations:
        turns: list[dict[str, str]] = conversation.get("conversations", []) if isinstance(conversation, dict) else []
        if len(turns) < 2:
            continue
        question, answer = turns[0].get("value", ""), turns[1].get("value", "")
        input_len = _count(question, tokenizer)
        wanted = output_len or _count(answer, tokenizer)
        is_usual = SHAREGPT_MIN_TOKENS <= input_len <= SHAREGPT_MAX_INPUT and wanted >= SHAREGPT_MIN_TOKENS
        if is_usual and input_len + wanted <= SHAREGPT_MAX_TOTAL:
            yield Prompt(wanted, question, input_len)


def _count(text: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        return round(len(text) / CHARS_PER_TOKEN)
    return len(tokenizer.encode(text, add_special_tokens=False))


def read_jsonl(path: Path, output_len: int) -> list[Prompt]:
    """One request a line: ``prompt`` or ``messages``, and other fields of its body. ``max_tokens``: its length."""
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            prompts.append(_jsonl_prompt(line, f"{path}:{number}", output_len))
    if not prompts:
        raise ValueError(f"{path} has no lines")
    return prompts


def _jsonl_prompt(line: str, source: str, output_len: int) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{source}: no JSON: {error}") from error
    row = row.get("body", row) if isinstance(row, dict) else row  # OpenAI's batch files
    if not isinstance(row, dict) or not (row.get("prompt") or row.get("messages")):
        raise ValueError(f'{source}: a line must be an object with "prompt" or "messages"')
    fields = {name: value for name, value in row.items() if name not in ("prompt", "messages", "max_tokens", "stream")}
    wanted = row.get("max_tokens", output_len)
    if not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"{source}: max_tokens must be a positive integer, not {wanted!r}")
    text, messages = row.get("prompt", ""), row.get("messages", ())
    input_len = _count(text or "".join(str(message) for message in messages), None)
    return Prompt(wanted, text, input_len, messages, fields)
