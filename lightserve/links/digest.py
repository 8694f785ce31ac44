"""What gateway and engines must have in common, as short texts that both can compare.

A gateway has no weights. So there are two: one of what decides about token ids, and one of what decides about tokens.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from lightserve.config import ServerConfig
from lightserve.model_files.config.digest import config_digest
from lightserve.model_files.lora.paths import adapter_files
from lightserve.model_files.source import ModelSource

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
SAMPLE_BYTES = 1 << 20  # of each end of a file of weights: to read all of it takes as long as to load it
NUMERIC_OPTIONS = ("load_format", "data_type", "kv_dtype", "quantization", "model_type")


def model_digest(source: ModelSource, max_image_tokens: int | None = None) -> str:
    """Of config and tokenizer, and of the limit on tokens of an image, if the operator has set one."""
    digest = blake2b(config_digest(source.hf_config()).encode(), digest_size=8)
    if max_image_tokens is not None:
        digest.update(f"{max_image_tokens} tokens of an image".encode())
    if source.path.is_file():  # GGUF: the tokenizer is in the same file
        digest.update(_sample(source.path))
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            digest.update(name.encode() + (source.path / name).read_bytes())
    return digest.hexdigest()


def weights_digest(source: ModelSource, config: ServerConfig) -> str:
    """Of the weights' files, by their sizes and a sample, and of the options that change what is computed."""
    worker = config.worker
    options = {name: getattr(worker, name) for name in NUMERIC_OPTIONS} | {"null_worker": config.launch.null_worker}
    digest = blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8)
    has_weights = worker.load_format == "auto" and not config.launch.null_worker
    files = source.weight_files() if has_weights else []
    if worker.quantization_config is not None:
        files = [*files, Path(worker.quantization_config)]
    if worker.merge_lora is not None:
        files = [*files, *adapter_files(Path(worker.merge_lora))]
    for path in files:
        digest.update(path.name.encode() + _sample(path))
    return digest.hexdigest()


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(SAMPLE_BYTES)
        file.seek(max(size - SAMPLE_BYTES, 0))
        return f" {size} ".encode() + begin + file.read(SAMPLE_BYTES)
