"""The token ids of texts and pairs of texts, as a pooling model wants them."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.errors import InvalidRequestError
from lightserve.model_files.pooling.config import PoolingConfig
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

# Qwen3-Reranker's, from its model card
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANK_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PoolingTexts:
    def __init__(self, config: PoolingConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._num_ending = _num_ending(tokenizer)

    def encode(self, text: str, prompt_name: str | None = None) -> list[int]:
        """A text behind the prompt of this name, or behind the model's default prompt."""
        return self._tokenizer.encode(self._prompt(prompt_name) + text)

    def encode_pair(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """A query and a document that the model reads together.

        In models with token types, the ids of the second text are higher by the size of the vocabulary.
        """
        if self.config.answers is not None:
            body = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            return self._tokenizer.encode(RERANK_PREFIX + body + RERANK_SUFFIX, add_special_tokens=False)
        if instruction is not None:
            raise InvalidRequestError("instruction: only a model that answers yes or no reads it", "instruction")
        ids, types = self._tokenizer.encode_pair(query, document)
        if self.config.type_vocab_size < 2:
            return ids
        return [token_id + kind * self._vocab_size for token_id, kind in zip(ids, types, strict=True)]

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


def _num_ending(tokenizer: Tokenizer) -> int:
    """How many special tokens follow the text."""
    ids = tokenizer.encode("a")
    count = 0
    while count < len(ids) and ids[-1 - count] in tokenizer.special_ids:
        count += 1
    return count
