"""The same model in transformers and float32, as a reference."""

from __future__ import annotations

from typing import Any

import torch

from lightserve.model_files.source import GgufSource, ModelSource
from lightserve.model_files.transformers_config import runs_own_code


def load_transformers(source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM  # takes seconds to import, and only this needs it
    from transformers.utils import logging

    logging.disable_progress_bar()

    if isinstance(source, GgufSource):
        folder, file = source.path.parent, source.path.name
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    trusts_code = runs_own_code(source)
    return AutoModelForCausalLM.from_pretrained(
        source.path, dtype=torch.float32, trust_remote_code=trusts_code, local_files_only=True
    ).eval()
