"""The token ids of texts and pairs of texts, as a pooling model wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files.pooling.config import PoolingConfig
from lightserve.model_files.pooling.late_interaction import PLAIN, LateInteraction
from lightserve.model_files.pooling.score_templates import QWEN3_RERANKER, PairPrompts
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

InputType = Literal["query", "document"]


class PoolingTexts:
    def __init__(self, config: PoolingConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._num_ending = _num_ending(tokenizer)
        template = config.template or (QWEN3_RERANKER if config.answers is not None else None)
        self._prompts = None if template is None else PairPrompts(template)

    def encode(self, text: str, prompt_name: str | None = None) -> list[int]:
        """A text behind the prompt of this name, or behind the model's default prompt."""
        return self._tokenizer.encode(self._prompt(prompt_name) + text)

    def encode_pair(
        self, query: str, document: str, instruction: str | None = None, limit: int | None = None
    ) -> list[int]:
        """A query and a document that the model reads together, in at most ``limit`` tokens.

        In models with token types, the ids of the second text are higher by the size of the vocabulary.
        """
        if self._prompts is not None:
            return self._encode_question(self._prompts, query, document, instruction, limit)
        if instruction is not None:
            raise InvalidRequestError("instruction: only a model with a score template reads it", "instruction")
        pair = self._tokenizer.encode_pair(query, document)
        ids = list(pair.ids)
        if self.config.type_vocab_size > 1:
            ids = [token_id + kind * self._vocab_size for token_id, kind in zip(ids, pair.types, strict=True)]
        if limit is None or len(ids) <= limit:
            return ids
        return [ids[position] for position in tokens_to_keep(pair.texts, limit)]

    def _encode_question(
        self, prompts: PairPrompts, query: str, document: str, instruction: str | None, limit: int | None
    ) -> list[int]:
        """Whether the document answers the query. A truncated prompt still ends where the answer begins."""
        prompt, spans = prompts.of(instruction).render(query, document)
        adds_special = prompts.template.adds_special_tokens
        ids = self._tokenizer.encode(prompt, add_special_tokens=adds_special)
        if limit is None or len(ids) <= limit:
            return ids
        tokens = self._tokenizer.encode_with_offsets(prompt, add_special_tokens=adds_special)
        texts = [_text_of(start, stop, spans) for _, start, stop in tokens]
        return [ids[position] for position in tokens_to_keep(texts, limit)]

    def encode_for_tokens(self, text: str, input_type: InputType, limit: int | None = None) -> list[int]:
        """A query or a document of late interaction, in at most ``limit`` tokens."""
        late, is_query = self._late, input_type == "query"
        prefix = late.query_prefix if is_query else late.document_prefix
        ids = self._tokenizer.encode(text)
        if limit is not None:
            ids = self.truncate(ids, limit - 1 if prefix else limit)
        if prefix:
            ids[1:1] = [_id_of(self._tokenizer, prefix)]
        length = late.query_length if limit is None else min(late.query_length, limit)
        if is_query and late.expands_queries and len(ids) < length:
            ids += [mask_id_of(self._tokenizer)] * (length - len(ids))
        return ids

    def have_vectors(self, ids: Sequence[int], input_type: InputType) -> npt.NDArray[np.bool_]:
        """Which tokens of a text have a vector."""
        skipped = () if input_type == "query" else self._late.skipped
        skipped_ids = [token_id for word in skipped if (token_id := self._tokenizer.token_to_id(word)) is not None]
        return ~np.isin(np.array(ids), skipped_ids)

    @property
    def _late(self) -> LateInteraction:
        return self.config.late or PLAIN

    def truncate(self, ids: Sequence[int], limit: int) -> list[int]:
        """The first tokens, and the special tokens that end every text."""
        if len(ids) <= limit:
            return list(ids)
        ending = min(self._num_ending, limit)
        return [*ids[: limit - ending], *ids[len(ids) - ending :]]

    def _prompt(self, name: str | None) -> str:
        prompts = self.config.prompts
        if name is None:
            default = self.config.default_prompt
            return "" if default is None else prompts[default]
        if name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidRequestError(f"prompt_name {name[:100]!r}: the model has {known}", "prompt_name")
        return prompts[name]


def _id_of(tokenizer: Tokenizer, prefix: str) -> int:
    token_id = tokenizer.token_to_id(prefix)
    if token_id is None:
        raise ModelFilesError(f"the tokenizer has no token {prefix!r}, which begins queries or documents")
    return token_id


def mask_id_of(tokenizer: Tokenizer) -> int:
    if tokenizer.mask_id is None:
        raise ModelFilesError("the tokenizer has no mask token, which expands queries")
    return tokenizer.mask_id


def _text_of(start: int, stop: int, spans: Sequence[tuple[int, int]]) -> int | None:
    """Which of the spans a token is of. One with a character outside is of none."""
    inside = (index for index, (first, end) in enumerate(spans) if first <= start < stop <= end)
    return next(inside, None)


def _num_ending(tokenizer: Tokenizer) -> int:
    """How many special tokens follow the text."""
    ids = tokenizer.encode("a")
    count = 0
    while count < len(ids) and ids[-1 - count] in tokenizer.special_ids:
        count += 1
    return count


def tokens_to_keep(texts: Sequence[int | None], limit: int) -> list[int]:
    """Positions of the tokens that stay. ``texts``: for each token, the text (0 or 1) that it belongs to.

    Tokens of neither text stay: special tokens, and the words of a prompt around both.
    """
    lengths = texts.count(0), texts.count(1)
    room = limit - (len(texts) - sum(lengths))
    if room < 2:  # one token of each
        raise InvalidRequestError(
            f"{len(texts) - sum(lengths)} tokens surround the query and the document; with a limit of {limit}, "
            "none is left for them; set a larger truncate_prompt_tokens"
        )
    left = list(longest_first(*lengths, room))
    positions = []
    for position, text in enumerate(texts):
        if text is None:
            positions.append(position)
        elif left[text] > 0:
            left[text] -= 1
            positions.append(position)
    return positions


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay if the longer one is cut first, as the tokenizers library reckons it."""
    if first > second:
        second, first = longest_first(second, first, room)
    elif first + second > room:
        first = min(first, room // 2)
        second = room - first
    return first, second
