"""What a compiler of grammars knows of a tokenizer, and what the process that compiles reports: see process.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from lightserve.errors import InvalidRequestError

if TYPE_CHECKING:  # a process that only compiles needs no tokenizers
    from lightserve.model_files.tokenizer.tokenizer import Tokenizer

STARTED = b"\1"  # a process has taken the grammar


class GrammarVocabulary(msgspec.Struct, frozen=True):
    tokenizer: str  # as JSON, in Hugging Face's format
    size: int  # at least the model's
    eos_ids: tuple[int, ...]  # any of them may end a complete output
    added_tokens: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int = 0, eos_ids: tuple[int, ...] = ()) -> GrammarVocabulary:
        """``vocab_size`` is the model's. Without ``eos_ids`` it is the tokenizer's end token that ends an output.

        InvalidRequestError if the tokenizer is Python code: its vocabulary cannot be written down.
        """
        default = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        size = max(vocab_size, tokenizer.vocab_size)
        try:
            return cls(tokenizer.to_json(), size, eos_ids or default, tokenizer.added_tokens)
        except ValueError as error:
            raise not_possible(error) from error


def not_possible(error: ValueError) -> InvalidRequestError:
    return InvalidRequestError(f"structured output is not possible with this model's tokenizer: {error}")


class GrammarReport(msgspec.Struct, frozen=True):
    error: str = ""  # why the grammar cannot be used; "": it can
    memory_mib: int = 1  # that it takes when it is compiled
