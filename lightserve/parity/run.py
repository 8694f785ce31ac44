"""Runs a comparison, and decides whether the engines agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightserve.errors import ModelFilesError, OptionError
from lightserve.offline.llm import LLM
from lightserve.parity import ours
from lightserve.parity.compare import (
    LIMITS,
    QUANTIZED,
    Limits,
    LogitDifference,
    combined,
    compare_logits,
    first_difference,
)
from lightserve.parity.reference import Reference

WINDOW = 512  # tokens of a text that are one prompt


@dataclass(frozen=True, slots=True)
class PromptResult:
    name: str  # of the prompt
    prompt_tokens: int
    new_tokens: int
    logits: LogitDifference
    text_differs_at: int | None  # the first new token that differs
    is_tie: bool = False  # there, the reference's two best tokens are as close as the logits differ

    @property
    def has_same_text(self) -> bool:
        return self.text_differs_at is None or self.is_tie


@dataclass(frozen=True, slots=True)
class TextResult:
    tokens: int
    ours: float  # perplexities
    theirs: float

    @property
    def change(self) -> float:
        return self.ours / self.theirs - 1


@dataclass(frozen=True, slots=True)
class Parity:
    prompts: list[PromptResult]
    text: TextResult | None
    limits: Limits

    @property
    def all_prompts(self) -> LogitDifference:
        return combined([prompt.logits for prompt in self.prompts])

    def differences(self) -> list[str]:
        """What is more than rounding; empty: the engines agree."""
        logits, limits = self.all_prompts, self.limits
        reasons = []
        if not logits.relative <= limits.relative:
            reasons.append(
                f"a logit differs by {logits.relative:.2g} of the largest one, the limit is {limits.relative:g}"
            )
        if not logits.kl <= limits.kl:
            reasons.append(f"the mean KL divergence is {logits.kl:.2g}, the limit is {limits.kl:g}")
        texts = sum(not prompt.has_same_text for prompt in self.prompts)
        if texts and limits is not QUANTIZED:
            reasons.append(f"{texts} of {len(self.prompts)} greedy texts differ, and not by a tie")
        if self.text is not None and not abs(self.text.change) <= limits.perplexity:
            reasons.append(f"the perplexity differs by {self.text.change:+.2%}, the limit is {limits.perplexity:.2%}")
        return reasons


def limits_of(llm: LLM) -> Limits:
    args = llm.worker.model.args
    is_rounded = args.config.quantization is not None or args.kv_dtype is not None
    return QUANTIZED if is_rounded else LIMITS[args.dtype]


def compare(
    llm: LLM, reference: Reference, prompts: Sequence[str | list[int]], new_tokens: int, text: str = ""
) -> Parity:
    """The greedy text of all prompts and the perplexity of ``text`` first: the logits need the KV pool."""
    all_ids = [_checked_ids(llm, prompt, new_tokens) for prompt in prompts]
    expected = [reference.greedy_ids(ids, new_tokens) for ids in all_ids]
    computed = ours.greedy_ids(llm, all_ids, new_tokens)
    perplexities = _perplexities(llm, reference, text) if text else None
    results = [
        _compare_prompt(llm, reference, str(prompt), (ids, our, their))
        for prompt, ids, our, their in zip(prompts, all_ids, computed, expected, strict=True)
    ]
    return Parity(results, perplexities, limits_of(llm))


def _checked_ids(llm: LLM, prompt: str | list[int], new_tokens: int) -> list[int]:
    ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    longest = llm.worker.longest_request - new_tokens
    if not 0 < len(ids) <= longest:
        raise OptionError(
            f"a prompt has {len(ids)} tokens; 1 to {longest} are possible beside --max_new_tokens {new_tokens}"
        )
    return ids


def _compare_prompt(
    llm: LLM, reference: Reference, name: str, texts: tuple[list[int], list[int], list[int]]
) -> PromptResult:
    """Logits of the prompt and of the reference's text behind it."""
    ids, our_text, their_text = texts
    theirs = reference.logits([*ids, *their_text])[:-1]
    logits = ours.logits_of(llm.worker.model, [*ids, *their_text], len(their_text))
    if logits.shape[1] != theirs.shape[1]:
        raise ModelFilesError(f"logits of {logits.shape[1]} tokens, but transformers has {theirs.shape[1]}")
    difference = compare_logits(logits, theirs)
    differs_at = first_difference(our_text, their_text)
    is_tie = False
    if differs_at is not None:
        best = theirs[len(ids) - 1 + differs_at].topk(2).values
        is_tie = limits_of(llm).holds(difference) and float(best[0] - best[1]) <= 2 * difference.max_diff
    return PromptResult(name, len(ids), len(their_text), difference, differs_at, is_tie)


def _perplexities(llm: LLM, reference: Reference, text: str) -> TextResult:
    ids = llm.tokenizer.encode(text)
    window = min(WINDOW, llm.worker.longest_request - 1)
    windows = [piece for start in range(0, len(ids), window) if len(piece := ids[start : start + window]) > 1]
    if not windows:
        raise OptionError("--text: the file has fewer than two tokens; use a longer text")
    tokens = sum(len(piece) - 1 for piece in windows)
    return TextResult(tokens, ours.perplexity(llm, windows), reference.perplexity(windows))
