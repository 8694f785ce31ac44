from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightserve.common.checkpoint.reader import CheckpointTensor, open_checkpoint, total_bytes
from lightserve.errors import CheckpointError
from lightserve.model_files import ModelSource, resolve
from test.model_files.files import tiny_model


def save_as_bin(folder: Path, content: Any) -> ModelSource:
    """A folder whose safetensors file was replaced by ``content`` in PyTorch's own format."""
    tiny_model("llama").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return resolve(str(folder))


def assert_same(found: list[CheckpointTensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(entry.name for entry in found) == sorted(expected)
    for name, tensor, _ in found:
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_one_safetensors_file_gives_the_models_tensors(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))

    found = list(open_checkpoint(source))

    assert_same(found, model.state_dict())
    assert {entry.file for entry in found} == {str(tmp_path / "model.safetensors")}
    assert total_bytes(source) == sum(entry.tensor.nbytes for entry in found)


def test_a_tied_head_comes_once_as_the_embedding(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    expected = dict(model.state_dict())
    del expected["lm_head.weight"]

    assert_same(list(open_checkpoint(resolve(str(tmp_path)))), expected)


def test_shards_are_streamed_one_after_the_other(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    source = resolve(str(tmp_path))

    found = list(open_checkpoint(source))

    assert_same(found, model.state_dict())
    files = [entry.file for entry in found]
    assert files == sorted(files)
    assert len(set(files)) > 1
    assert total_bytes(source) == sum(entry.tensor.nbytes for entry in found)


def test_a_shard_is_closed_before_the_next_is_opened(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")

    for _, _, file in open_checkpoint(resolve(str(tmp_path))):
        assert mapped_files(tmp_path) <= {file}


def test_a_bin_file_gives_the_models_tensors(tmp_path: Path) -> None:
    expected = dict(tiny_model("llama").state_dict())
    source = save_as_bin(tmp_path, expected)

    assert_same(list(open_checkpoint(source)), expected)
    assert total_bytes(source) == (tmp_path / "pytorch_model.bin").stat().st_size


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_tensor_is_a_view_of_the_mapped_file(suffix: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    if suffix == "bin":
        source = save_as_bin(tmp_path, dict(model.state_dict()))
    else:
        model.save_pretrained(tmp_path)
        source = resolve(str(tmp_path))

    for name, tensor, file in open_checkpoint(source):
        assert any(start <= tensor.data_ptr() < end for start, end in mappings(file)), name


class Payload:
    """Content of a hostile file: unpickling it would call ``os.mkdir``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_bin_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    source = save_as_bin(tmp_path / "model", {"weight": Payload(tmp_path / "owned")})

    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: not loadable with weights_only") as caught:
        list(open_checkpoint(source))

    assert "\n" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [torch.zeros(1), {"weight": 3}], ids=["a tensor", "a number"])
def test_a_bin_file_without_a_dict_of_tensors_is_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: .*convert it"):
        list(open_checkpoint(save_as_bin(tmp_path, content)))


def test_a_truncated_bin_file_is_refused(tmp_path: Path) -> None:
    source = save_as_bin(tmp_path, dict(tiny_model("llama").state_dict()))
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])

    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: not loadable"):
        list(open_checkpoint(source))


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"weight": torch.zeros(2), "other": torch.zeros(2)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"weight": "a.safetensors", "other": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match=r"b.safetensors: tensor weight is also in .*a.safetensors"):
        list(open_checkpoint(resolve(str(tmp_path))))


def mappings(file: str) -> list[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    spans = [fields[0].split("-") for fields in lines]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def mapped_files(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if str(folder) in line}
