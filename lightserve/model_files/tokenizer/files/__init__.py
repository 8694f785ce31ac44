"""The files of a Hugging Face folder that contain a vocabulary, if it has no ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.tokenizer.files import sentencepiece, tiktoken, vocab_merges
from lightserve.model_files.tokenizer.files.base import TokenizerFile
from lightserve.model_files.tokenizer.files.sentencepiece import SentencePieceFile
from lightserve.model_files.tokenizer.files.settings import CONFIG, TokenizerSettings, read_settings
from lightserve.model_files.tokenizer.files.tekken import TekkenFile
from lightserve.model_files.tokenizer.files.tiktoken import TiktokenFile, is_tiktoken
from lightserve.model_files.tokenizer.files.vocab_merges import VocabMergesFile
from lightserve.utils.extras import install_command

__all__ = ["OwnCodeError", "TokenizerFile", "find_vocabulary", "open_tokenizer_file"]

# the first one that exists is read
NAMES = ("tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json")


def find_vocabulary(folder: Path) -> Path | None:
    """The file with the vocabulary of a folder without ``tokenizer.json``."""
    return next((path for name in NAMES for path in sorted(folder.glob(name)) if path.is_file()), None)


def open_tokenizer_file(folder: Path) -> TokenizerFile:
    settings = read_settings(folder)
    path = find_vocabulary(folder)
    if path is None:
        if settings.has_remote_code:
            raise _remote_code(settings)
        raise ModelFilesError(f"{folder}: no tokenizer.json and none of {', '.join(NAMES)}; download one of them")
    if path.name == "tekken.json":
        return TekkenFile(path, settings)
    if path.name == "vocab.json":
        _check_class(path, settings, vocab_merges.CLASSES)
        return VocabMergesFile(path, settings)
    if path.suffix == ".tiktoken" or is_tiktoken(path):
        _check_class(path, settings, tiktoken.FAMILIES)
        return TiktokenFile(path, settings)
    _check_class(path, settings, sentencepiece.FAMILIES)
    return SentencePieceFile(path, settings)


def _check_class(path: Path, settings: TokenizerSettings, known: Mapping[str, Any]) -> None:
    """A class may do more than its vocabulary says. So only known ones are read without their code."""
    if settings.class_name in known:
        return
    if settings.has_remote_code:
        raise _remote_code(settings)
    raise ModelFilesError(
        f"{settings.folder / CONFIG}: tokenizer_class {settings.class_name!r} is not supported with {path.name}; "
        f"supported: {', '.join(name for name in known if name)}; or add a tokenizer.json"
    )


class OwnCodeError(ModelFilesError):
    """Only the Python code of the folder can read its tokenizer."""


def _remote_code(settings: TokenizerSettings) -> OwnCodeError:
    name = settings.class_name or "its tokenizer class"
    return OwnCodeError(
        f"{settings.folder}: {name} is Python code in this folder; read the code, then set --trust_remote_code and "
        f"run: {install_command('hf')}"
    )
