"""``tekken.json`` of Mistral: ranks of byte tokens behind the special tokens, and the regular expression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json
from lightserve.model_files.tokenizer.files.base import TokenizerFile
from lightserve.model_files.tokenizer.files.byte_pairs import byte_level_backend
from lightserve.model_files.tokenizer.files.ranks import check_ranks, decode_base64
from lightserve.model_files.tokenizer.files.settings import TokenizerSettings
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

# of files up to version 7, which do not list them
_OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class TekkenFile(TokenizerFile):
    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        content = read_json(path)
        try:
            self._split, self._special = str(content["config"]["pattern"]), _special(content)
            self._ranks = _ranks(content, len(self._special))
        except (LookupError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ModelFilesError(
                f"{path}: not readable as a tekken tokenizer ({reason}); download it again"
            ) from error
        super().__init__(path, settings)

    @property
    def special(self) -> SpecialTokens:
        usual = SpecialTokens("<s>", "</s>", "<unk>", "<pad>")
        return self._roles(token if token in self._special else None for token in usual)

    def id_of(self, token: str) -> int | None:
        if token in self._special:
            return self._special.index(token)
        rank = self._ranks.get(token.encode())
        return None if rank is None else rank + len(self._special)

    def _added(self) -> dict[int, AddedToken]:
        special = {i: AddedToken(text, normalized=False, special=True) for i, text in enumerate(self._special)}
        return dict(sorted((self.settings.added | special).items()))

    def _backend(self) -> Tokenizer:
        shift = len(self._special)
        ids = {token: rank + shift for token, rank in self._ranks.items()}
        return byte_level_backend(ids, {i: token.content for i, token in self.added.items()}, self._split)

    def _surrounding(self) -> tuple[list[str], list[str]]:
        return self._bos_and_eos(adds_bos=True)


def _special(content: dict[str, Any]) -> list[str]:
    """The special tokens by id, with names for those that have none."""
    listed = content.get("special_tokens")
    tokens = (
        dict(enumerate(_OLD_SPECIAL))
        if listed is None
        else {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    )
    count = int(content["config"].get("default_num_special_tokens", len(tokens)))
    if sorted(tokens) != list(range(len(tokens))) or len(tokens) > count:
        raise ValueError(f"its {len(tokens)} special tokens do not have the ids from 0 to {count - 1}")
    return [tokens.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _ranks(content: dict[str, Any], num_special: int) -> dict[bytes, int]:
    """The first ``default_vocab_size`` tokens: a file may contain more than the model has."""
    size = content["config"].get("default_vocab_size")
    entries = content["vocab"] if size is None else content["vocab"][: int(size) - num_special]
    ranks = {decode_base64(entry["token_bytes"]): int(entry["rank"]) for entry in entries}
    check_ranks(ranks)
    return ranks
