"""The tokenizer of a Hugging Face folder: ``tokenizer.json`` with the changes of ``tokenizer_config.json``.

A folder without ``tokenizer.json`` has its vocabulary in another file: see ``files/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import CHATML_END, has_chatml_format, read_json_if_exists
from lightserve.model_files.tokenizer.files import OwnCodeError, find_vocabulary, open_tokenizer_file
from lightserve.model_files.tokenizer.files.remote_code import load_remote_code
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens, special_token_texts
from lightserve.model_files.tokenizer.surrounding_flags import follow_flags


def has_vocabulary(folder: Path) -> bool:
    return any(folder.glob("tokenizer*")) or find_vocabulary(folder) is not None


class FolderTokenizer(NamedTuple):
    backend: tokenizers.Tokenizer
    special: SpecialTokens
    note: str = ""  # for the log


def tokenizer_from_folder(folder: Path, trusts_code: bool = False) -> FolderTokenizer:
    """``trusts_code``: whether Python code of the folder may run if nothing else can read its tokenizer."""
    path = folder / "tokenizer.json"
    loaded = _from_json(path) if path.is_file() else _from_vocabulary(folder, trusts_code)
    _mark_special(loaded.backend, loaded.special)
    loaded.backend.no_truncation()
    loaded.backend.no_padding()
    return loaded


def end_ids_without_json(folder: Path) -> set[int]:
    """The end tokens of a folder without ``tokenizer.json``. The tokenizer itself is not built."""
    try:
        file = open_tokenizer_file(folder)
    except OwnCodeError:
        return set()
    texts = [file.special.eos, CHATML_END if has_chatml_format(folder) else None]
    ids = [file.id_of(text) for text in texts if text is not None]
    return {token_id for token_id in ids if token_id is not None}


def _from_vocabulary(folder: Path, trusts_code: bool) -> FolderTokenizer:
    try:
        file = open_tokenizer_file(folder)
    except OwnCodeError:
        if trusts_code:
            return FolderTokenizer(*load_remote_code(folder))
        raise
    return FolderTokenizer(file.build(), file.special)


def _from_json(path: Path) -> FolderTokenizer:
    """tokenizer.json decides which tokens surround a text, except in folders for some classes of transformers 4."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises only Exception
        raise ModelFilesError(f"{path}: not readable as a tokenizer ({error}); download it again") from error
    config = read_json_if_exists(path.parent / "tokenizer_config.json")
    _add_missing(backend, config.get("added_tokens_decoder", {}), path.parent)
    special = special_token_texts(path.parent)
    return FolderTokenizer(backend, special, follow_flags(backend, special, path.parent, config))


def _add_missing(backend: tokenizers.Tokenizer, entries: dict[str, dict[str, Any]], folder: Path) -> None:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id, entry in sorted((int(key), entry) for key, entry in entries.items()):
        content = entry["content"]
        if backend.token_to_id(content) is not None:
            continue
        backend.add_tokens([tokenizers.AddedToken(content, **{flag: entry[flag] for flag in flags if flag in entry})])
        if backend.token_to_id(content) != token_id:
            raise ModelFilesError(
                f"{folder / 'tokenizer_config.json'}: added token {content!r} has id {token_id}, but its id after "
                f"tokenizer.json is {backend.token_to_id(content)}; download both files again"
            )


def _mark_special(backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
    """A token with a role (bos, eos, ...) is special even if tokenizer.json does not say so."""
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    in_vocabulary = [token for token in special if token is not None and backend.token_to_id(token) is not None]
    backend.add_special_tokens([token for token in in_vocabulary if token not in known])
