"""Loads a model as transformers does, from the safetensors files of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightserve.common.basemodel import ModelArgs
from lightserve.errors import LightserveError, ModelFilesError
from lightserve.model_files.source import FolderSource, ModelSource
from lightserve.model_files.transformers_config import HAS_STATE, NO_INTERFACE, read_auto_config, runs_own_code

SHOWN = 3  # of missing tensors


def load(args: ModelArgs) -> Any:
    """The model of transformers, ready to compute. Raises ModelFilesError if it is of a kind that cannot be served."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = _checked_source(args.source)
    config = read_auto_config(source)
    trusts_code = runs_own_code(source)
    if args.checkpoint is None:
        model = AutoModelForCausalLM.from_config(config, dtype=args.dtype, trust_remote_code=trusts_code)
        _check_class(type(model))
    else:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=args.dtype,
            trust_remote_code=trusts_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        _check_class(type(model))
        _check_complete(source, info)
    return model.to(args.device).eval().requires_grad_(False)


def _checked_source(source: ModelSource | None) -> FolderSource:
    if not isinstance(source, FolderSource):
        path = "the model" if source is None else source.path
        raise ModelFilesError(f"{path}: --model_impl transformers needs a folder with safetensors files")
    return source


def _check_class(model_class: Any) -> None:
    if model_class._is_stateful:
        raise ModelFilesError(HAS_STATE)
    if not model_class._supports_attention_backend:
        raise ModelFilesError(NO_INTERFACE)


def _check_complete(source: ModelSource, info: dict[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelFilesError(
            f"{source.path}: {len(missing)} tensors of the model are missing ({', '.join(missing[:SHOWN])}); "
            "download the weights again"
        )


@contextmanager
def errors_in_one_line(name: str) -> Iterator[None]:
    """What transformers and the code of a model raise, as ModelFilesError."""
    try:
        yield
    except LightserveError as error:
        raise ModelFilesError(f"{name} cannot be run by transformers here: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the modules may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelFilesError(f"{name} cannot be run by transformers here: {reason}") from error
