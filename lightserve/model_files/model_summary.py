"""Facts about a model for people and clients: its size, its data type, its tokenizer's settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json_if_exists
from lightserve.model_files.safetensors_header import read_header
from lightserve.model_files.source import GgufSource, ModelSource

UNKNOWN = "unknown"
GGUF_TOKENIZER = "PreTrainedTokenizerFast"  # the class that transformers makes of a GGUF file's tokenizer


@dataclass(frozen=True, slots=True)
class ModelDetails:
    file_format: str  # gguf or safetensors
    data_type: str  # of most weights: BF16, Q8_0, ...
    parameter_count: int | None  # None: there are no weights, or in files without a header
    size_bytes: int  # of the weight files
    modified_s: float  # since the epoch
    hf_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.hf_config.get("multimodal_type") or self.hf_config.get("model_type") or UNKNOWN)


def read_details(source: ModelSource) -> ModelDetails:
    """Read from headers only. A model without weights (--load_format dummy) has details too."""
    files = _weight_files(source)
    counts: Counter[str] = Counter()
    for data_type, count in _tensors(source, files):
        counts[data_type] += count
    return ModelDetails(
        file_format="gguf" if isinstance(source, GgufSource) else "safetensors",
        data_type=counts.most_common(1)[0][0] if counts else UNKNOWN,
        parameter_count=counts.total() or None,
        size_bytes=sum(path.stat().st_size for path in files),
        modified_s=max((path.stat().st_mtime for path in (*files, source.path)), default=0.0),
        hf_config=source.hf_config(),
        tokenizer_config=_tokenizer_config(source),
    )


def _weight_files(source: ModelSource) -> list[Path]:
    try:
        return source.weight_files()
    except ModelFilesError:
        return []


def _tensors(source: ModelSource, files: Iterable[Path]) -> Iterator[tuple[str, int]]:
    """Data type and number of values of each tensor."""
    if isinstance(source, GgufSource):
        for entry in source.header.tensors.values():
            yield entry.encoding.name, math.prod(entry.shape)
        return
    for path in files:
        if path.suffix == ".safetensors":
            for tensor in read_header(path).values():
                yield tensor.dtype, math.prod(tensor.shape)


def _tokenizer_config(source: ModelSource) -> dict[str, Any]:
    if isinstance(source, GgufSource):
        return {"tokenizer_class": GGUF_TOKENIZER}
    return read_json_if_exists(source.path / "tokenizer_config.json")
