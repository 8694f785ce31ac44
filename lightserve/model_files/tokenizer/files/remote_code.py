"""A tokenizer class that is Python code in the model's folder, run by transformers' ``AutoTokenizer``.

transformers imports torch wherever it is installed. The HTTP and detokenization processes must stay without it, so it
is hidden from transformers while the tokenizer loads, unless the process has imported it already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.utils.extras import install_command


def load_remote_code(folder: Path) -> tuple[Any, SpecialTokens]:
    """The backend of the folder's tokenizer (of the tokenizers library, or with its methods), and its roles."""
    with without_torch(), _errors_in_one_line(folder):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        backend = getattr(tokenizer, "backend_tokenizer", None) or PythonTokenizer(tokenizer)
        roles = (getattr(tokenizer, f"{role}_token", None) for role in SpecialTokens._fields)
        return backend, SpecialTokens(*(None if token is None else str(token) for token in roles))


@contextmanager
def without_torch() -> Iterator[None]:
    """Let transformers believe that there is no torch, unless the process has it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python marks a module that must not be imported
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
    try:
        yield
    finally:
        del sys.modules["torch"]


@contextmanager
def _errors_in_one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = {"transformers": f"run: {install_command('hf')}", "torch": "a tokenizer must not import it"}
        missing = (error.name or "").partition(".")[0]
        raise ModelFilesError(
            f"{folder}: its tokenizer needs the package {missing}; {remedy.get(missing, f'install {missing}')}"
        ) from error
    except Exception as error:  # the folder's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelFilesError(f"{folder}: its tokenizer's Python code fails ({reason}); correct it") from error


class _Encoding(NamedTuple):
    ids: list[int]


class PythonTokenizer:
    """A tokenizer in Python, with the methods of the tokenizers library that the server uses."""

    decoder = None  # its decode method is all there is

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size: int = len(tokenizer)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return {str(token): token_id for token, token_id in self._tokenizer.get_vocab().items()}

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return self._size

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        added: dict[int, AddedToken] = self._tokenizer.added_tokens_decoder
        return added

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[_Encoding]:
        return [_Encoding(list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))) for text in texts]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[_Encoding]:
        raise InvalidRequestError("this model's tokenizer is Python code, which does not tell the offsets of tokens")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self._size]
        return str(
            self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._size:
            return None
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token.decode(errors="replace") if isinstance(token, bytes) else str(token)

    def token_to_id(self, token: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        is_known = isinstance(token_id, int) and self.id_to_token(token_id) == token
        return token_id if is_known else None

    def to_str(self) -> str:
        raise ValueError("it is Python code")

    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Its own code decides which tokens are special."""

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...
