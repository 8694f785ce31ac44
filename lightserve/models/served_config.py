"""The config of a model as this server runs it: by its own classes, or by those of transformers."""

from __future__ import annotations

from typing import Protocol

from lightserve.errors import ModelFilesError, UnsupportedModelTypeError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.source import ModelSource
from lightserve.model_files.transformers_config import has_class, has_code, is_installed, read_transformers_config
from lightserve.models.registry import read_model_config
from lightserve.utils.extras import install_command


class ModelFlags(Protocol):
    """The flags of ``WorkerConfig`` that choose how a model is read."""

    @property
    def model_type(self) -> str | None: ...

    @property
    def model_impl(self) -> str: ...

    @property
    def quantization(self) -> str | None: ...

    @property
    def quantization_config(self) -> str | None: ...


def read_served_config(source: ModelSource, flags: ModelFlags) -> ModelConfig:
    """``model_impl`` auto: transformers runs a model that has no class here, if it can."""
    if flags.model_impl == "transformers":
        return read_transformers_config(source)
    hf = source.hf_config()
    try:
        return read_model_config(hf, flags.model_type, flags.quantization, flags.quantization_config)
    except UnsupportedModelTypeError as error:
        if flags.model_impl == "lightserve" or flags.model_type is not None:
            raise
        if not has_class(hf, source.trusts_code):
            raise UnsupportedModelTypeError(f"{error}{_hint(source)}") from error
        try:
            return read_transformers_config(source)
        except ModelFilesError as reason:
            raise UnsupportedModelTypeError(f"{error}; {reason}") from reason


def _hint(source: ModelSource) -> str:
    if not is_installed():
        return f"; transformers may run it, slowly: {install_command('hf')}"
    if has_code(source.hf_config()):
        return "; the folder has its Python code: read it, then set --trust_remote_code to run it by transformers"
    return ""
