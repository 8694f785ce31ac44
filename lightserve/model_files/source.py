"""Where a model's files are and what they say about it, before any tensor is read."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files import fetch
from lightserve.model_files.folder import eos_ids_of, find_weight_files, read_chat_template, read_json
from lightserve.model_files.gguf_config import config_from_gguf, eos_ids_from_gguf
from lightserve.model_files.gguf_header import GgufHeader, read_gguf_header


@dataclass(frozen=True)
class ModelSource(ABC):
    name: str  # what clients call the model unless told otherwise
    path: Path  # the folder or the .gguf file

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The model's ``config.json``, found or derived."""

    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, sorted."""

    @abstractmethod
    def chat_template(self) -> str | None:
        """The Jinja text of the default chat template."""

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that hold tensors, checked to be there and whole."""


@dataclass(frozen=True)
class FolderSource(ModelSource):
    """A folder as ``save_pretrained`` writes it."""

    def hf_config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    def eos_token_ids(self) -> tuple[int, ...]:
        ids = eos_ids_of(self.path / "config.json") | eos_ids_of(self.path / "generation_config.json")
        return tuple(sorted(ids))

    def chat_template(self) -> str | None:
        return read_chat_template(self.path)

    def weight_files(self) -> list[Path]:
        return find_weight_files(self.path)


@dataclass(frozen=True)
class GgufSource(ModelSource):
    """One GGUF file, which carries config and tokenizer in its metadata."""

    header: GgufHeader

    def hf_config(self) -> dict[str, Any]:
        with _expecting_nonsense(self.path):
            return config_from_gguf(self.header)

    def eos_token_ids(self) -> tuple[int, ...]:
        with _expecting_nonsense(self.path):
            return eos_ids_from_gguf(self.header)

    def chat_template(self) -> str | None:
        template = self.header.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ModelFilesError(f"{self.path}: metadata tokenizer.chat_template is no text; fetch it again")
        return template

    def weight_files(self) -> list[Path]:
        return [self.path]


def resolve(model_dir: str | None, *, needs_weights: bool = True) -> ModelSource:
    """The model behind ``--model_dir``: a folder, a ``.gguf`` file or a name in the HF cache; None is the default.

    A folder without weights will do where they are to be made up.
    """
    source = _find(model_dir)
    if needs_weights:
        source.weight_files()
    return source


def _find(model_dir: str | None) -> ModelSource:
    if model_dir is None:
        return _gguf_source(fetch.default_model(), fetch.DEFAULT_MODEL.name)
    try:
        path = Path(model_dir).expanduser()
        if path.is_dir():
            return _folder_source(path, path.resolve().name)
        if path.is_file():
            return _gguf_source(path, path.stem)
    except (OSError, RuntimeError) as error:  # a name that is too long; a home that nobody has
        reason = getattr(error, "strerror", None) or error
        raise ModelFilesError(f"{model_dir[:200]}: cannot be looked at ({reason}); check --model_dir") from error
    return _cached_source(model_dir)


def _gguf_source(path: Path, name: str) -> GgufSource:
    source = GgufSource(name, path, read_gguf_header(path))
    source.hf_config()  # a model nobody can run is refused here, not after the servers have started
    return source


@contextmanager
def _expecting_nonsense(path: Path) -> Iterator[None]:
    """Any metadata of a damaged file may be of any type."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelFilesError(f"{path}: its metadata makes no sense ({error}); fetch it again") from error


def _folder_source(folder: Path, name: str) -> ModelSource:
    if (folder / "config.json").is_file():
        source = FolderSource(name, folder)
        source.hf_config()
        return source
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf_source(ggufs[0], name)
    if ggufs:
        listed = ", ".join(path.name for path in ggufs)
        raise ModelFilesError(f"{folder}: holds several GGUF files ({listed}); give one of them as --model_dir")
    raise ModelFilesError(f"{folder}: no config.json and no .gguf file in it; give a folder that holds a whole model")


def _cached_source(name: str) -> ModelSource:
    """A snapshot that ``hf download`` or transformers left behind; nothing is fetched."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelFilesError(f"{name}: no such folder or .gguf file; check the path given as --model_dir")
    repository = _hub_cache() / f"models--{name.replace('/', '--')}"
    snapshot = _snapshot(repository)
    if snapshot is None:
        raise ModelFilesError(
            f"{name}: neither a folder, a .gguf file nor a model in the HF cache (tried {Path(name).absolute()} and "
            f"{repository}); fetch it with `hf download {name}` or give a path as --model_dir"
        )
    return _folder_source(snapshot, name)


def _snapshot(repository: Path) -> Path | None:
    head = repository / "refs" / "main"
    if head.is_file():
        snapshot = repository / "snapshots" / head.read_text().strip()
        return snapshot if snapshot.is_dir() else None
    snapshots = sorted(repository.glob("snapshots/*"))
    return snapshots[0] if len(snapshots) == 1 else None


def _hub_cache() -> Path:
    """Hugging Face's own rule, so that the model is found where their tools put it."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return fetch.user_cache() / "huggingface" / "hub"
