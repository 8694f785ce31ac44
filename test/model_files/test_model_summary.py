"""What the headers of a model's files tell."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from lightserve.model_files.model_summary import UNKNOWN, read_details
from lightserve.model_files.source import resolve

CONFIG = {"model_type": "llama", "hidden_size": 8}


def write_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "X"}))
    return folder


def test_a_folder_tells_its_size_and_data_type(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4, 8, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.float32)}
    save_file(tensors, write_folder(tmp_path) / "model.safetensors")

    details = read_details(resolve(str(tmp_path)))

    assert (details.file_format, details.architecture, details.data_type) == ("safetensors", "llama", "BF16")
    assert details.parameter_count == 35
    assert details.size_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert details.tokenizer_config == {"tokenizer_class": "X"}


def test_a_folder_without_weights_has_details_too(tmp_path: Path) -> None:
    details = read_details(resolve(str(write_folder(tmp_path)), needs_weights=False))

    assert (details.data_type, details.parameter_count, details.size_bytes) == (UNKNOWN, None, 0)
    assert details.modified_s > 0


def test_a_gguf_file_tells_the_same() -> None:
    details = read_details(resolve(None))

    assert (details.file_format, details.architecture) == ("gguf", "llama")
    assert details.parameter_count is not None
    assert 100e6 < details.parameter_count < 200e6
    assert details.data_type == "Q4_1"
