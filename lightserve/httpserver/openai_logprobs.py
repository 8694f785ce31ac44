"""Log probabilities in OpenAI's two shapes, a token at a time: a whole answer's are its tokens' joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from lightserve.io_struct import StrOut
from lightserve.model_files.tokenizer import Tokenizer

Logprobs = dict[str, Any]  # every value a list, but for ``refusal``
LogprobsOf = Callable[[StrOut], Logprobs]  # of one token of one choice, called in order

NEVER = -9999.0  # JSON has no -inf; vLLM's number


def joined(parts: Iterable[Logprobs]) -> Logprobs | None:
    """The logprobs of an answer from those of its tokens; None where there are none."""
    whole: Logprobs | None = None
    for part in parts:
        if whole is None:
            whole = {name: value and list(value) for name, value in part.items()}
            continue
        for name, value in part.items():
            if value is not None:
                whole[name] += value
    return whole


def chat_logprobs(tokenizer: Tokenizer, k: int) -> LogprobsOf:
    token_bytes = tokenizer.decoder.token_bytes

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": _shown(data, ""), "logprob": _finite(logprob), "bytes": list(data)}

    def of(out: StrOut) -> Logprobs:
        chosen = entry(out.token_id, _known(out.logprob))
        top = [entry(token_id, logprob) for token_id, logprob in (out.top or ())[:k]]
        return {"content": [{**chosen, "top_logprobs": top}], "refusal": None}

    return of


class CompletionLogprobs:
    """Also says where in the text each token begins; a token inside a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, k: int, skips_special: bool) -> None:
        self._token_bytes = tokenizer.decoder.token_bytes
        self._k = k
        self._skipped = tokenizer.special_ids if skips_special else frozenset()
        self._offset = 0  # characters that the tokens so far have completed
        self._begun = b""  # of the next one

    def __call__(self, out: StrOut) -> Logprobs:
        token, logprob = self._text(out.token_id), _finite(_known(out.logprob))
        top = {self._text(token_id): _finite(value) for token_id, value in (out.top or ())[: self._k]}
        top[token] = logprob  # OpenAI counts the chosen one besides
        offset = self._offset
        self._advance(out.token_id)
        return {"text_offset": [offset], "token_logprobs": [logprob], "tokens": [token], "top_logprobs": [top]}

    def _text(self, token_id: int) -> str:
        return _shown(self._token_bytes(token_id), "bytes:")

    def _advance(self, token_id: int) -> None:
        if token_id in self._skipped:
            return
        text, self._begun = _split_at_last_character(self._begun + self._token_bytes(token_id))
        self._offset += len(text)


def _split_at_last_character(data: bytes) -> tuple[str, bytes]:
    """The text that is complete, and the beginning of a character after it."""
    for n_begun in range(min(3, len(data)) + 1):
        head = data[: len(data) - n_begun]
        try:
            return head.decode(), data[len(head) :]
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace"), b""


def _shown(data: bytes, prefix: str) -> str:
    """The token as a string; one that is no text is spelled out as OpenAI does, so that two of them differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _known(logprob: float | None) -> float:
    return -math.inf if logprob is None else logprob


def _finite(logprob: float) -> float:
    return max(logprob, NEVER)
