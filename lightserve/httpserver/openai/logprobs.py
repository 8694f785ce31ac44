"""Log probabilities of output and prompt, token by token, in OpenAI's two formats and in vLLM's.

concatenated() joins the output's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import orjson

from lightserve.httpserver.http.body import JsonObject
from lightserve.messages.output import StrOut
from lightserve.messages.step import PromptLogprobs
from lightserve.model_files.tokenizer.decoding.base import Decoder
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.logprobs import MIN_LOGPROB, PromptToken, finite_logprob, unpack_prompt_logprobs

T = TypeVar("T")
Logprobs = dict[str, Any]  # every value is a list, except ``refusal``
TokenLogprobs = Callable[[StrOut], Logprobs]  # of one token of one choice; called in order

CACHED_TOKENS = 1 << 15  # of which text and JSON are kept: a few hundred bytes each
COLUMNS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")  # of a completion


def concatenated(parts: Iterable[Logprobs]) -> Logprobs | None:
    """The logprobs of several tokens as one object; None: there are none."""
    whole: Logprobs | None = None
    for logprobs in parts:
        if whole is None:
            whole = {name: value and list(value) for name, value in logprobs.items()}
            continue
        for name, value in logprobs.items():
            if value is not None:
                whole[name] += value
    return whole


def chat_logprobs(tokenizer: Tokenizer, k: int, shows_ids: bool = False) -> TokenLogprobs:
    """``shows_ids``: a token is shown by its id (return_tokens_as_token_ids). The entries of ``content`` are JSON."""
    around = _around_logprobs(tokenizer.decoder, shows_ids)

    def of_token(out: StrOut) -> Logprobs:
        token = out.token
        top = token.top_logprobs[:k] if token.top_logprobs else []
        sampled, *numbers = _numbers([token.logprob, *[logprob for _, logprob in top]])
        before, after = around[token.id]
        parts = [before, sampled, after, b',"top_logprobs":[']
        for (token_id, _), number in zip(top, numbers, strict=True):
            before, after = around[token_id]
            parts += (before, number, after, b"},")
        if top:
            parts[-1] = b"}"
        parts.append(b"]}")
        return {"content": [orjson.Fragment(b"".join(parts))], "refusal": None}

    return of_token


def _numbers(logprobs: list[float | None]) -> list[bytes]:
    """As JSON. To write several at once takes less time."""
    finite = [logprob if logprob is not None and logprob > MIN_LOGPROB else MIN_LOGPROB for logprob in logprobs]
    return orjson.dumps(finite)[1:-1].split(b",")


class _OfTokens(dict[int, T]):
    """What is the same for a token every time."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> T:
        if len(self) >= CACHED_TOKENS:
            self.clear()
        value = self[token_id] = self._make(token_id)
        return value


@lru_cache(2)
def _around_logprobs(decoder: Decoder, shows_ids: bool) -> _OfTokens[tuple[bytes, bytes]]:
    """The JSON of a token of a chat before and after its logprob, without the last brace."""

    def parts(token_id: int) -> tuple[bytes, bytes]:
        data = decoder.token_bytes(token_id)
        text = _id_text(token_id) if shows_ids else _as_text(data, "")
        return b'{"token":%b,"logprob":' % orjson.dumps(text), b',"bytes":' + orjson.dumps(list(data))

    return _OfTokens(parts)


@lru_cache(2)
def _completion_texts(decoder: Decoder, shows_ids: bool) -> _OfTokens[str]:
    return _OfTokens(_id_text if shows_ids else lambda token_id: _as_text(decoder.token_bytes(token_id), "bytes:"))


class CompletionLogprobs:
    """With the text offset of each token; a token inside a character has the offset of the character."""

    def __init__(
        self, tokenizer: Tokenizer, k: int, skips_special: bool = True, offset: int = 0, shows_ids: bool = False
    ) -> None:
        """``offset``: characters before the first token. ``shows_ids``: see chat_logprobs."""
        self._texts = _completion_texts(tokenizer.decoder, shows_ids)
        self._token_bytes = tokenizer.decoder.token_bytes
        self._k = k
        self._special = tokenizer.special_ids
        self._skipped = tokenizer.special_ids if skips_special else frozenset()
        self._offset = offset  # characters that are complete so far
        self._incomplete = b""  # bytes of the next character

    def __call__(self, out: StrOut) -> Logprobs:
        parts = self._parts(out.token.id, _or_minus_inf(out.token.logprob), out.token.top_logprobs or ())
        if out.token.id not in self._skipped:
            self._advance(self._token_bytes(out.token.id))
        return {name: [value] for name, value in zip(COLUMNS, parts, strict=True)}

    def of_prompt(self, tokens: Iterable[PromptToken], echo: str) -> Logprobs:
        """Of a prompt whose text is ``echo``; its first token has no logprob."""
        whole: Logprobs = {name: [] for name in COLUMNS}
        for token_id, logprob, _, top in tokens:
            for name, value in zip(COLUMNS, self._parts(token_id, logprob, top), strict=True):
                whole[name].append(value)
            self._advance(self._shown_bytes(token_id, echo))
        return whole

    def _parts(self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> tuple[Any, ...]:
        """The values of one token, in the order of COLUMNS."""
        text = self._texts[token_id]
        if logprob is None:
            return self._offset, None, text, None
        first = logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
        shown = {text: first}  # OpenAI adds the sampled token to the alternatives; vLLM writes it first
        for alternative_id, value in top[: self._k]:
            finite = value if value > MIN_LOGPROB else MIN_LOGPROB  # max() takes 0.2 us longer
            shown.setdefault(self._texts[alternative_id], finite)
        return self._offset, first, text, shown

    def _shown_bytes(self, token_id: int, echo: str) -> bytes:
        """The bytes of a token in the echo, which may leave out special tokens and the first space of a prompt."""
        data = self._token_bytes(token_id)
        if token_id in self._special:
            return data if echo.startswith(data.decode(errors="replace"), self._offset) else b""
        is_left_out = self._offset == 0 and data.startswith(b" ") and not echo.startswith(" ")
        return data[1:] if is_left_out else data

    def _advance(self, data: bytes) -> None:
        text, self._incomplete = _split_at_last_character(self._incomplete + data)
        self._offset += len(text)


def _split_at_last_character(data: bytes) -> tuple[str, bytes]:
    """The complete text, and the first bytes of a character after it."""
    for n_incomplete in range(min(3, len(data)) + 1):
        head = data[: len(data) - n_incomplete]
        try:
            return head.decode(), data[len(head) :]
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace"), b""


def _as_text(data: bytes, prefix: str) -> str:
    """The token as a string; bytes that are not text are escaped as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _or_minus_inf(logprob: float | None) -> float:
    return -math.inf if logprob is None else logprob


@dataclass(frozen=True, slots=True)
class PromptLogprobsWriter:
    """Writes the logprobs of one prompt. ``packed`` comes with the first output token."""

    tokenizer: Tokenizer
    prompt_ids: list[int]
    echo: str = ""
    field_k: int | None = None  # alternatives in vLLM's field prompt_logprobs; None: not requested
    echo_k: int | None = None  # alternatives in the logprobs of an echoed prompt; None: not requested
    shows_ids: bool = False  # in the logprobs of an echoed prompt: see chat_logprobs
    placeholder: int | None = None  # what stands for a token of an image, which the model does not predict

    def field(self, packed: PromptLogprobs | None) -> list[JsonObject | None] | None:
        """vLLM's field: for each token but the first, the logprobs of the token and its alternatives by their ids.

        Tokens of images have none.
        """
        if self.field_k is None:
            return None
        return [self._entry(token, self.field_k) for token in unpack_prompt_logprobs(self.prompt_ids, packed)]

    def echoed(self, packed: PromptLogprobs | None) -> Logprobs | None:
        """OpenAI's logprobs of the echo, which precede the logprobs of the output."""
        if self.echo_k is None:
            return None
        return CompletionLogprobs(self.tokenizer, self.echo_k, shows_ids=self.shows_ids).of_prompt(
            unpack_prompt_logprobs(self.prompt_ids, packed), self.echo
        )

    def _entry(self, token: PromptToken, k: int) -> JsonObject | None:
        if token.logprob is None or token.token_id == self.placeholder:
            return None
        ranked = {token.token_id: (token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top[:k], start=1):
            ranked.setdefault(token_id, (logprob, rank))
        text_of = self.tokenizer.decoder.token_text
        return {
            str(token_id): {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": text_of(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }
