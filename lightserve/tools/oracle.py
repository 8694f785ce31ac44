"""The same model in transformers and float32, as a reference."""

from __future__ import annotations

from typing import Any

import torch

from lightserve.model_files.source import GgufSource, ModelSource


def load_transformers(source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM  # takes seconds to import, and only this needs it

    if isinstance(source, GgufSource):
        folder, file = source.path.parent, source.path.name
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
