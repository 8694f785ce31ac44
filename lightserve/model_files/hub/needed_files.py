"""Which files of a repository the server reads. Other formats of the same weights are not downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import shard_names as indexed_names
from lightserve.model_files.gguf.shards import is_later_shard, shard_names
from lightserve.model_files.hub.listing import HubFile, Listing
from lightserve.model_files.hub.name import HubName
from lightserve.model_files.pooling.sentence_transformers import (
    DENSE_WEIGHTS,
    FILES as SENTENCE_TRANSFORMERS_FILES,
)
from lightserve.model_files.quantization.files import FILES as QUANTIZATION_FILES
from lightserve.utils.progress import format_bytes

SAFETENSORS = ("model.safetensors.index.json", "model.safetensors", "model*.safetensors")
PYTORCH = ("pytorch_model.bin.index.json", "pytorch_model.bin")
SETTINGS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    *QUANTIZATION_FILES,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    *SENTENCE_TRANSFORMERS_FILES,
)
REMOTE_CODE = "*.py"
SHOWN = 12  # files in an error


def settings_files(listing: Listing, trusts_code: bool) -> list[HubFile]:
    """Config, tokenizer, chat templates, and the index of the weights."""
    patterns = (*SETTINGS, SAFETENSORS[0] if _matching(listing, SAFETENSORS) else PYTORCH[0])
    return _matching(listing, (*patterns, REMOTE_CODE) if trusts_code else patterns)


def weight_files(name: HubName, listing: Listing, folder: Path) -> list[HubFile]:
    """The same choice as ``find_weight_files`` makes in a folder. ``folder`` has the index, if there is one."""
    for index, *files in (SAFETENSORS, PYTORCH):
        if index in listing.files:
            shards = [_listed(name, listing, shard) for shard in indexed_names(folder / index)]
            return shards + _matching(listing, DENSE_WEIGHTS)
        for pattern in files:
            if matches := _matching(listing, [pattern]):
                return matches + _matching(listing, DENSE_WEIGHTS)
    raise ModelFilesError(
        f"{name}: has no weights (model*.safetensors or pytorch_model*.bin); it has {_shown(listing.files)}"
    )


def gguf_files(name: HubName, listing: Listing) -> list[HubFile]:
    """The GGUF files of one model, the first first; []: the repository is a folder with a config and weights."""
    if name.file is not None:
        return _shards(name, listing, name.file)
    if "config.json" in listing.files and _matching(listing, (*SAFETENSORS, *PYTORCH)):
        return []
    ggufs = sorted(path for path in listing.files if path.endswith(".gguf") and "mmproj" not in path)
    files = [listing.files[path] for path in ggufs if not is_later_shard(path)]
    if len(files) == 1:
        return _shards(name, listing, files[0].path)
    if files:
        shown = _shown(f"{file.path} ({format_bytes(file.size)})" for file in files)
        raise ModelFilesError(
            f"{name}: has several GGUF files; name one, such as {name}:{files[0].path}; it has {shown}"
        )
    if "config.json" not in listing.files:
        raise ModelFilesError(f"{name}: has no config.json and no .gguf file; it has {_shown(listing.files)}")
    return []


def _shards(name: HubName, listing: Listing, path: str) -> list[HubFile]:
    """The file, or all files of a model that is split into several."""
    return [_listed(name, listing, shard) for shard in shard_names(path)]


def _listed(name: HubName, listing: Listing, path: str) -> HubFile:
    if path in listing.files:
        return listing.files[path]
    similar = [name for name in listing.files if name.endswith(Path(path).suffix)]
    raise ModelFilesError(f"{name}: has no file {path}; it has {_shown(similar or listing.files)}")


def _matching(listing: Listing, patterns: Iterable[str]) -> list[HubFile]:
    """A pattern without a slash matches at the root only, not in folders such as ``original/``."""
    patterns = list(patterns)
    return [
        file
        for path, file in listing.files.items()
        if any(fnmatchcase(path, pattern) and path.count("/") == pattern.count("/") for pattern in patterns)
    ]


def _shown(paths: Iterable[str]) -> str:
    names = sorted(paths)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
