"""Log probabilities in OpenAI's two shapes, a token at a time: a whole answer's are its tokens' joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from lightserve.io_struct import StrOut
from lightserve.model_files.tokenizer import Tokenizer
from lightserve.prompt_logprobs import PromptToken

Logprobs = dict[str, Any]  # every value a list, but for ``refusal``
LogprobsOf = Callable[[StrOut], Logprobs]  # of one token of one choice, called in order

NEVER = -9999.0  # JSON has no -inf; vLLM's number
COLUMNS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")  # of a completion's


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
        return {"token": _shown(data, ""), "logprob": finite(logprob), "bytes": list(data)}

    def of(out: StrOut) -> Logprobs:
        chosen = entry(out.token.id, _known(out.token.logprob))
        top = [entry(token_id, logprob) for token_id, logprob in (out.token.top_logprobs or ())[:k]]
        return {"content": [{**chosen, "top_logprobs": top}], "refusal": None}

    return of


class CompletionLogprobs:
    """Also says where in the text each token begins; a token inside a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, k: int, skips_special: bool = True, offset: int = 0) -> None:
        """``offset``: characters of the text before the first token."""
        self._token_bytes = tokenizer.decoder.token_bytes
        self._k = k
        self._special = tokenizer.special_ids
        self._skipped = tokenizer.special_ids if skips_special else frozenset()
        self._offset = offset  # characters that the tokens so far have completed
        self._begun = b""  # of the next one

    def __call__(self, out: StrOut) -> Logprobs:
        parts = self._parts(out.token.id, _known(out.token.logprob), out.token.top_logprobs or ())
        if out.token.id not in self._skipped:
            self._advance(self._token_bytes(out.token.id))
        return {name: [part] for name, part in zip(COLUMNS, parts, strict=True)}

    def of_prompt(self, tokens: Iterable[PromptToken], echo: str) -> Logprobs:
        """Of a prompt that is shown as ``echo``; of its first token nothing is known."""
        whole: Logprobs = {name: [] for name in COLUMNS}
        for token_id, logprob, _, top in tokens:
            for name, part in zip(COLUMNS, self._parts(token_id, logprob, top), strict=True):
                whole[name].append(part)
            self._advance(self._shown_bytes(token_id, echo))
        return whole

    def _parts(self, token_id: int, logprob: float | None, top: Iterable[tuple[int, float]]) -> tuple[Any, ...]:
        """What is told of one token, in the order of COLUMNS."""
        text = self._text(token_id)
        if logprob is None:
            return self._offset, None, text, None
        shown = {self._text(other): finite(value) for other, value in islice(top, self._k)}
        shown[text] = finite(logprob)  # OpenAI counts the chosen one besides
        return self._offset, shown[text], text, shown

    def _shown_bytes(self, token_id: int, echo: str) -> bytes:
        """What the echo shows of a token: it may leave out special ones, and the space that a prompt begins with."""
        data = self._token_bytes(token_id)
        if token_id in self._special:
            return data if echo.startswith(data.decode(errors="replace"), self._offset) else b""
        is_added = self._offset == 0 and data.startswith(b" ") and not echo.startswith(" ")
        return data[1:] if is_added else data

    def _text(self, token_id: int) -> str:
        return _shown(self._token_bytes(token_id), "bytes:")

    def _advance(self, data: bytes) -> None:
        text, self._begun = _split_at_last_character(self._begun + data)
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


def finite(logprob: float) -> float:
    return max(logprob, NEVER)
