"""What the JSON files beside a vocabulary say about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json_if_exists
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens, special_token_texts

CONFIG = "tokenizer_config.json"
NO_ROLES = SpecialTokens()
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerSettings:
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    model_type: str = ""  # of config.json
    roles: SpecialTokens = NO_ROLES
    added: dict[int, AddedToken] = field(default_factory=dict)  # by id, sorted

    @property
    def class_name(self) -> str:
        """The tokenizer class of transformers or of the folder's own code, without ``Fast``; "": not named."""
        return str(self.config.get("tokenizer_class") or "").removesuffix("Fast")

    @property
    def has_remote_code(self) -> bool:
        """Whether the folder brings a Python class for its tokenizer."""
        auto_map = self.config.get("auto_map")
        return isinstance(auto_map, dict) and "AutoTokenizer" in auto_map

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFilesError(f"{self.folder / CONFIG}: {name} is {value!r}, not true or false; correct it")
        return value


def read_settings(folder: Path) -> TokenizerSettings:
    config = read_json_if_exists(folder / CONFIG)
    roles = special_token_texts(folder)
    special = {token for token in roles if token is not None} | set(_additional(folder, config))
    added = dict(_from_added_tokens(folder, special)) | dict(_from_config(folder, config, special))
    model_type = str(read_json_if_exists(folder / "config.json").get("model_type", ""))
    return TokenizerSettings(folder, config, model_type, roles, dict(sorted(added.items())))


def _additional(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """Special tokens without a role."""
    for source in (read_json_if_exists(folder / "special_tokens_map.json"), config):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            for token in source.get(name) or ():
                yield str(token["content"] if isinstance(token, dict) else token)


def _from_added_tokens(folder: Path, special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    path = folder / "added_tokens.json"
    for content, token_id in read_json_if_exists(path).items():
        if not isinstance(token_id, int) or token_id < 0:
            raise ModelFilesError(f"{path}: the id of {content!r} is {token_id!r}; download it again")
        is_special = content in special
        yield token_id, AddedToken(content, normalized=not is_special, special=is_special)


def _from_config(folder: Path, config: dict[str, Any], special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        if not (str(key).isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise ModelFilesError(
                f"{folder / CONFIG}: added_tokens_decoder has the entry {str(key)[:50]!r}, which is not an id with a "
                "content; download it again"
            )
        flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
        flags["special"] = flags.get("special", False) or entry["content"] in special
        yield int(key), AddedToken(entry["content"], **flags)
