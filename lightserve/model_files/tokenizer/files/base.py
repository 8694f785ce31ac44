"""The interface of the readers: one for each kind of file that contains a vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from lightserve.errors import ModelFilesError
from lightserve.model_files.tokenizer.files.settings import CONFIG, TokenizerSettings
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens, set_surrounding_tokens

# more ids than any vocabulary; a larger one is an error, and would take memory
MAX_ID = 2**24


class TokenizerFile(ABC):
    """A vocabulary file and its settings. Reading is fast; ``build`` takes up to seconds."""

    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        self.path = path
        self.settings = settings
        self.added = self._added()
        too_large = [token_id for token_id in self.added if token_id > MAX_ID]
        if too_large:
            raise ModelFilesError(f"{self.config_path}: added token id {too_large[0]} is too large; download it again")

    @property
    def config_path(self) -> Path:
        return self.path.parent / CONFIG

    @property
    @abstractmethod
    def special(self) -> SpecialTokens:
        """The tokens with a role."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of a token as a config file writes it."""

    def build(self) -> Tokenizer:
        backend = self._checked_backend()
        for token_id, token in self.added.items():
            self._check_added(backend, token_id, token)
        backend.add_tokens(list(self.added.values()))
        before, after = self._surrounding()
        for text in (*before, *after):
            if backend.token_to_id(text) is None:
                raise ModelFilesError(
                    f"{self.config_path}: every text has the token {text!r}, which {self.path.name} does not contain; "
                    "download both files again"
                )
        set_surrounding_tokens(backend, before, after)
        return backend

    def _checked_backend(self) -> Tokenizer:
        try:
            return self._backend()
        except ModelFilesError:
            raise
        except Exception as error:  # tokenizers raises only Exception
            reason = " ".join(str(error).split())[:200]
            raise ModelFilesError(f"{self.path}: no tokenizer can be built from it ({reason})") from error

    def _added(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before the rest is split, by id."""
        return self.settings.added

    def _roles(self, usual: Iterable[str | None]) -> SpecialTokens:
        """The tokens with a role that the config files name, and ``usual`` ones for the other roles."""
        roles = zip(self.settings.roles, SpecialTokens(*usual), strict=True)
        return SpecialTokens(*(named or token for named, token in roles))

    @cached_property
    def _id_of_added(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self.added.items()}

    def _bos_and_eos(self, *, adds_bos: bool) -> tuple[list[str], list[str]]:
        """The tokens before and after each text by the flags of the config. ``adds_bos``: if it has no flag for it."""
        bos = [self.special.bos] if self.settings.flag("add_bos_token", adds_bos) else []
        eos = [self.special.eos] if self.settings.flag("add_eos_token", False) else []
        return present(bos), present(eos)

    @abstractmethod
    def _backend(self) -> Tokenizer:
        """The tokenizer, with the added tokens in its vocabulary."""

    @abstractmethod
    def _surrounding(self) -> tuple[list[str], list[str]]:
        """The tokens before and after each text."""

    def _check_added(self, backend: Tokenizer, token_id: int, token: AddedToken) -> None:
        backend_id = backend.token_to_id(token.content)
        if backend_id != token_id:
            raise ModelFilesError(
                f"{self.config_path}: added token {token.content!r} has id {token_id}, but {self.path.name} gives it "
                f"{backend_id}; download both files again"
            )


def present(tokens: Iterable[str | None]) -> list[str]:
    return [token for token in tokens if token is not None]
