"""Finds a model's files, and reads what they say about the model before any tensor is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.text_part import with_text_config
from lightserve.model_files.folder import find_weight_files, read_chat_templates, read_json, read_json_if_exists
from lightserve.model_files.gguf.config import chat_templates_from_gguf, config_from_gguf, generation_config_from_gguf
from lightserve.model_files.gguf.header import GgufHeader, read_gguf_header
from lightserve.model_files.gguf.packing import quantization_table
from lightserve.model_files.gguf.shards import is_later_shard, model_stem
from lightserve.model_files.pooling import PoolingConfig, read_pooling
from lightserve.model_files.quantization.files import with_quantization_files
from lightserve.model_files.template.built_in import built_in_templates
from lightserve.model_files.tokenizer.eos_tokens import eos_tokens_of_folder, eos_tokens_of_gguf

if TYPE_CHECKING:
    from lightserve.model_files.hub import HubModel


@dataclass(frozen=True)
class ModelSource(ABC):
    name: str  # the model's name for clients, unless --model_name is set
    path: Path  # the folder or the .gguf file
    trusts_code: bool = field(default=False, kw_only=True)  # whether Python code of the folder may run

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The model's ``config.json``, read from a file or derived from GGUF metadata."""

    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token id that ends a generation, sorted."""

    @abstractmethod
    def chat_templates(self) -> dict[str, str]:
        """The Jinja text of each chat template by its name, such as ``default`` or ``tool_use``."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """The model's ``generation_config.json``, or the same fields from GGUF metadata."""

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that contain tensors. Raises ModelFilesError if one is missing or truncated."""

    def fetch_weights(self) -> None:  # noqa: B027  # only a model of the hub has something to do
        """Download the weights that are missing."""


@dataclass(frozen=True)
class FolderSource(ModelSource):
    """A folder as ``save_pretrained`` writes it."""

    def hf_config(self) -> dict[str, Any]:
        return with_text_config(with_quantization_files(self.path, read_json(self.path / "config.json")))

    def eos_token_ids(self) -> tuple[int, ...]:
        with _damaged_metadata(self.path):
            return eos_tokens_of_folder(self.path)

    def chat_templates(self) -> dict[str, str]:
        return read_chat_templates(self.path) or built_in_templates(self.hf_config())

    def generation_config(self) -> dict[str, Any]:
        return read_json_if_exists(self.path / "generation_config.json")

    def weight_files(self) -> list[Path]:
        return find_weight_files(self.path)


@dataclass(frozen=True)
class HubSource(FolderSource):
    """A folder in the Hugging Face cache. Its weights are downloaded when they are needed."""

    hub: HubModel

    def fetch_weights(self) -> None:
        self.hub.fetch_weights()


@dataclass(frozen=True)
class GgufSource(ModelSource):
    """A GGUF file, with config and tokenizer in its metadata; ``path`` is the first of several."""

    header: GgufHeader
    is_packed: bool = field(default=False, kw_only=True)  # linears keep their blocks; False: all are expanded

    def hf_config(self) -> dict[str, Any]:
        with _damaged_metadata(self.path):
            config = config_from_gguf(self.header)
            table = quantization_table(self.header) if self.is_packed else None
        return config if table is None else {**config, "quantization_config": table}

    def eos_token_ids(self) -> tuple[int, ...]:
        with _damaged_metadata(self.path):
            return eos_tokens_of_gguf(self.header)

    def chat_templates(self) -> dict[str, str]:
        return chat_templates_from_gguf(self.header)

    def generation_config(self) -> dict[str, Any]:
        from lightserve.model_files.hub import default_model as fetch

        with _damaged_metadata(self.path):
            return {**fetch.shipped_generation_config(self.path), **generation_config_from_gguf(self.header)}

    def weight_files(self) -> list[Path]:
        return self.header.paths


def resolve(model_dir: str | None, *, needs_weights: bool = True, trusts_code: bool = False) -> ModelSource:
    """The model of ``--model_dir``: a folder, a ``.gguf`` file or a name on the hub; None: the default.

    A folder needs no weights if ``needs_weights`` is False; a name's weights are then not downloaded.
    ``trusts_code`` is ``--trust_remote_code``.
    """
    source = replace(_find(model_dir, trusts_code), trusts_code=trusts_code)
    if needs_weights:
        require_weights(source)
    return source


def require_weights(source: ModelSource) -> None:
    """Download weights that are missing, and check that all files are there."""
    source.fetch_weights()
    source.weight_files()


def stored_as(source: ModelSource, quantization: str | None, packed_by_default: bool) -> ModelSource:
    """The model with the blocks of its GGUF file packed or expanded, as ``--quantization`` says."""
    if isinstance(source, GgufSource):
        is_packed = quantization == "gguf" or (quantization is None and packed_by_default)
        return replace(source, is_packed=is_packed)
    if quantization == "gguf":
        raise ModelFilesError(f"{source.path}: --quantization gguf needs a .gguf file; leave it out")
    return source


def pooling_of(
    source: ModelSource,
    model_type: str | None = None,
    task: str | None = None,
    pooling: str | None = None,
    score_template: str | None = None,
) -> PoolingConfig | None:
    """What the model computes instead of text, from its files and the operator's flags; None: it generates text."""
    hf = source.hf_config()
    hf = {**hf, "model_type": model_type} if model_type else hf
    return read_pooling(hf, source.path if source.path.is_dir() else None, task, pooling, score_template)


def _find(model_dir: str | None, trusts_code: bool) -> ModelSource:
    if model_dir is None:
        from lightserve.model_files.hub import default_model as fetch  # here: a folder needs no client of the hub

        return _gguf_source(fetch.default_model(), fetch.DEFAULT_MODEL.name)
    try:
        path = Path(model_dir).expanduser()
        if path.is_dir():
            return _folder_source(path, path.resolve().name)
        if path.is_file():
            return _gguf_source(path, model_stem(path.name))
    except (OSError, RuntimeError) as error:  # a name that is too long, or ~user without such a user
        reason = getattr(error, "strerror", None) or error
        raise ModelFilesError(f"{model_dir[:200]}: cannot be opened ({reason}); check --model_dir") from error
    return _hub_source(model_dir, trusts_code)


def _gguf_source(path: Path, name: str) -> GgufSource:
    header = read_gguf_header(path)
    source = GgufSource(name, header.path, header)
    source.hf_config()  # refuses an unsupported model here, not after the processes have started
    return source


@contextmanager
def _damaged_metadata(path: Path) -> Iterator[None]:
    """In a damaged file, any field may have any type: report that as ModelFilesError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelFilesError(f"{path}: its metadata is damaged ({error}); download it again") from error


def _folder_source(folder: Path, name: str) -> ModelSource:
    if (folder / "config.json").is_file():
        source = FolderSource(name, folder)
        source.hf_config()
        return source
    ggufs = sorted(path for path in folder.glob("*.gguf") if not is_later_shard(path.name))
    if len(ggufs) == 1:
        return _gguf_source(ggufs[0], name)
    if ggufs:
        listed = ", ".join(path.name for path in ggufs)
        raise ModelFilesError(f"{folder}: several GGUF files ({listed}); set --model_dir to one of them")
    raise ModelFilesError(f"{folder}: no config.json and no .gguf file in it; set --model_dir to a model's folder")


def _hub_source(text: str, trusts_code: bool) -> ModelSource:
    from lightserve.model_files.hub import open_model, parse_hub_name

    name = parse_hub_name(text)
    if name is None:
        raise ModelFilesError(f"{text}: no such folder or .gguf file; check the path in --model_dir")
    model = open_model(name, trusts_code)
    if model.path.is_file():
        return _gguf_source(model.path, name.label)
    if not (model.path / "config.json").is_file():
        return _folder_source(model.path, name.label)
    source = HubSource(name.label, model.path, model)
    source.hf_config()
    return source
