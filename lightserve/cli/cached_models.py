"""The models that lie on this machine: in the Hugging Face cache, and the default model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lightserve.model_files.hub.default_model import DEFAULT_MODEL, user_cache
from lightserve.models.registry import supported_models

PREFIX = "models--"


@dataclass(frozen=True)
class CachedModel:
    name: str
    size: int  # bytes
    model_type: str | None  # None: no config.json, as in a repository of GGUF files
    ggufs: tuple[str, ...]
    is_complete: bool  # False: a download was interrupted

    @property
    def remark(self) -> str:
        """What keeps it from being served; "": nothing."""
        if not self.is_complete:
            return "download incomplete"
        if self.model_type is None:
            return "" if self.ggufs else "no config.json and no .gguf file"
        return "" if self.model_type in supported_models() else f"{self.model_type} is not supported"


def models_in(cache: Path) -> list[CachedModel]:
    folders = sorted(cache.glob(f"{PREFIX}*")) if cache.is_dir() else []
    return [_read(folder) for folder in folders if any(folder.glob("snapshots/*"))]


def _read(folder: Path) -> CachedModel:
    files = [path for path in folder.glob("snapshots/*/*") if path.is_file()]
    blobs = {path.resolve() for path in folder.glob("snapshots/**/*") if path.is_file()}  # snapshots share blobs
    config = next((path for path in files if path.name == "config.json"), None)
    return CachedModel(
        name=folder.name.removeprefix(PREFIX).replace("--", "/"),
        size=sum(blob.stat().st_size for blob in blobs),
        model_type=None if config is None else _model_type(config),
        ggufs=tuple(sorted(path.name for path in files if path.suffix == ".gguf")),
        is_complete=not any(folder.glob("blobs/*.incomplete")),
    )


def _model_type(config: Path) -> str:
    try:
        return str(json.loads(config.read_text())["model_type"])[:100]
    except (OSError, ValueError, LookupError, TypeError):
        return "an unreadable config.json"


def default_model_file() -> Path:
    """Where the default model is, or will be."""
    return user_cache() / "lightserve" / "models" / DEFAULT_MODEL.name / Path(DEFAULT_MODEL.member).name
